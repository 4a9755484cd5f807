"""What the owner of a queue's ledger does for all others: who writes next, and what was written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from persisting_torch.cluster.plane import waiting
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import PersistingError, StaleOwner, WaitTimeout
from persisting_torch.queue.files import LOCAL
from persisting_torch.queue.kept import Kept, KeptLedger
from persisting_torch.queue.ledger import Ledger, Sharing
from persisting_torch.queue.ownership import Ownership
from persisting_torch.queue.place import Place
from persisting_torch.queue.record import Log, Recorder, replay
from persisting_torch.queue.snapshots import content_of
from persisting_torch.queue.statements import decode, encode_changes
from persisting_torch.queue.takeover import open_taken_over, taken_over
from persisting_torch.queue.turns import Turns

LONGEST_WAIT_SECONDS = 2.0  # at a time; whoever has to wait longer asks again
NEWS_SECONDS = 0.002  # that whoever made a change has the answer before others hear of it
TURN_SECONDS = 30.0
REQUESTS_KEPT_SECONDS = 3600.0
TIDY_SECONDS = 60.0
CHUNK_BYTES = 1 << 20

Answer = tuple[Message, "pa.Table | None"]
Operation = Callable[[Message, "pa.Table | None"], Answer]


class LedgerService:
    """The ledger of a queue, for its replicas. Any number of threads may call its operations.

    Whoever calls them makes sure, before and after, that this process owns the ledger: see Node.
    """

    def __init__(self, ledger: Ledger, ownership: Ownership) -> None:
        self.ledger = ledger
        self.log = Log()
        self.turns = Turns(f"the ledger of {ledger.place.root}")
        self.alone = Turns(f"the files of {ledger.place.root}")
        self._last_turns = ExitStack()
        self._tidy_due = time.monotonic()
        ledger.share(Sharing(ownership.owner.epoch, self.log, self.turns, ownership.check))
        self.operations: Mapping[str, Operation] = {
            "snapshot": self._snapshot,
            "follow": self._follow,
            "begin": self._begin,
            "beat": self._beat,
            "commit": self._commit,
            "abort": self._abort,
            "settled": self._settled,
            "hold": self._hold,
            "hold_on": self._hold_on,
            "release": self._release,
        }

    @staticmethod
    def open(place: Place, ownership: Ownership, *, fsync: bool = False) -> LedgerService:
        """Open the ledger as its owner, whom no earlier one can get in the way of any more.

        Raises BucketUnavailable while processes have the queue open as a local one.
        """
        if place.files is LOCAL:
            return LedgerService(open_taken_over(place, ownership, fsync=fsync), ownership)
        epoch = ownership.owner.epoch
        return LedgerService(taken_over(KeptLedger(Kept(place, epoch)), epoch), ownership)

    def answer(self, request: Message, table: pa.Table | None) -> Answer:
        """The answer to a request. Raises PersistingError if it is for something else."""
        operation = self.operations.get(request.header["op"])
        if operation is None:
            raise PersistingError(
                f"the owner of {self.ledger.place.bucket} does not know"
                f" {request.header['op']!r}: it runs another release. Give all nodes the same."
            )
        return operation(request, table)

    def settle(self, limit: float, *, anyway: bool) -> bool:
        """See Service."""
        if not self.have_alone(limit) and not anyway:
            return False
        self.have_turn(limit)  # or whoever has it tries again elsewhere
        return True

    def have_alone(self, limit: float) -> bool:
        """Whether nobody has the queue alone from now on, and none will get that here."""
        return self._take_last(self.alone, limit)

    def have_turn(self, limit: float) -> bool:
        """Whether nobody has the turn to write from now on, and none will get it here."""
        return self._take_last(self.turns, limit)

    def _take_last(self, turns: Turns, limit: float) -> bool:
        try:
            self._last_turns.enter_context(turns.held(None, limit))
        except WaitTimeout:
            return False
        return True

    def close(self) -> None:
        """End; all who wait for news, or for a turn, ask the next owner."""
        self.ledger.close()
        for turns in (self.turns, self.alone):
            turns.end()
        self.log.end()
        self._last_turns.close()

    def abandon(self) -> None:
        """Let go of a ledger that belongs to another owner by now."""
        self.close()

    # Following

    def _snapshot(self, request: Message, table: pa.Table | None) -> Answer:
        with self.ledger.reading() as tx:
            content = content_of(tx)
            told = {"log": self.log.id, "number": self.log.last}
        chunks = [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
        return Message(told), pa.table({"content": pa.array(chunks, pa.binary())})

    def _follow(self, request: Message, table: pa.Table | None) -> Answer:
        header = request.header
        if header["wait"]:
            wait = min(header["wait"], LONGEST_WAIT_SECONDS)
            with waiting():
                self.log.wait(header["log"], header["number"], wait)
                time.sleep(NEWS_SECONDS)
        return self._changes(header), None

    def _changes(self, header: dict[str, Any]) -> Message:
        """What the sender does not know yet; None if it has to begin with a snapshot."""
        changes = self.log.since(header["log"], header["number"])
        told, blobs = encode_changes(changes)
        return Message({"log": header["log"], "changes": told}, blobs)

    # Writing

    def _begin(self, request: Message, table: pa.Table | None) -> Answer:
        """The turn to write, and the news; without news if the turn is still to come."""
        try:
            with waiting():
                self.turns.take(request.header["token"], LONGEST_WAIT_SECONDS)
        except WaitTimeout:
            return Message({"wait": True}), None
        except StaleOwner:
            return Message({"over": True}), None
        return self._changes(request.header), None

    def _beat(self, request: Message, table: pa.Table | None) -> Answer:
        self.turns.beat(request.header["token"])
        return Message({}), None

    def _commit(self, request: Message, table: pa.Table | None) -> Answer:
        header = request.header
        if header.get("at") and not self._came_first(header["token"], *header["at"]):
            return Message({"late": True}), None
        statements = decode(header["statements"], list(request.attached))
        with self.ledger.lock:
            with self.ledger.transaction(header["token"]) as tx:
                assert isinstance(tx, Recorder)
                replay(tx, statements)
                now = time.time()
                tx.execute_untold("INSERT INTO requests VALUES (?, ?)", (header["token"], now))
                # Its sender has had the answer to the one before.
                tx.execute_untold("DELETE FROM requests WHERE id = ?", (header["before"],))
                if time.monotonic() > self._tidy_due:
                    self._tidy_due = time.monotonic() + TIDY_SECONDS
                    tx.execute_untold(
                        "DELETE FROM requests WHERE at < ?", (now - REQUESTS_KEPT_SECONDS,)
                    )
            return Message({"number": self.log.last}), None

    def _came_first(self, token: str, log: str, number: int) -> bool:
        """Whether nobody has written since this change; the token has the turn then."""
        try:
            self.turns.take(token, 0.0)
        except WaitTimeout:
            first = False
        else:
            first = self.log.since(log, number) == []
        if not first:
            self.turns.give(token)
        return first

    def _abort(self, request: Message, table: pa.Table | None) -> Answer:
        self.turns.give(request.header["token"])
        return Message({}), None

    def _settled(self, request: Message, table: pa.Table | None) -> Answer:
        """Whether a commit was carried out, by this owner or one before; if not, it never will."""
        token = request.header["token"]
        self.turns.give(token)
        with self.turns.held(None, TURN_SECONDS), self.ledger.reading() as tx:
            found = tx.execute("SELECT 1 FROM requests WHERE id = ?", (token,)).fetchone()
        return Message({"settled": found is not None}), None

    # Being alone among all processes

    def _hold(self, request: Message, table: pa.Table | None) -> Answer:
        try:
            with waiting():
                self.alone.take(request.header["token"], LONGEST_WAIT_SECONDS)
        except WaitTimeout:
            return Message({"wait": True}), None
        except StaleOwner:
            return Message({"over": True}), None
        return Message({}), None

    def _hold_on(self, request: Message, table: pa.Table | None) -> Answer:
        self.alone.beat(request.header["token"])
        return Message({}), None

    def _release(self, request: Message, table: pa.Table | None) -> Answer:
        self.alone.give(request.header["token"])
        return Message({}), None
