"""A copy of a queue's ledger in this process, and transactions on it that the owner decides.

The copy follows the owner's log of changes. A transaction asks the owner for the turn to write and
for what is new, runs here on the copy, and sends what it has written; the owner does the same to
the ledger on disk, and only then is it done here, too. So whatever reads and writes a ledger of
this machine does the same to one of the cluster.

The copy only ever holds what the owner has committed, and each owner's ledger holds all that the
owners before it have committed. So its sequence numbers never go back, whoever the owner is.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

from persisting_torch.cluster.head import Head, News
from persisting_torch.errors import BucketUnavailable, PersistingError, StaleOwner
from persisting_torch.queue.again import Interrupted
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.place import Place
from persisting_torch.queue.record import Change, Mark, Recorder, Statement, replay
from persisting_torch.queue.snapshots import restore
from persisting_torch.queue.threads import Background
from persisting_torch.queue.waiting import Hub

FOLLOW_SECONDS = 1.0
BEAT_SECONDS = 0.5
AGAIN_SECONDS = 0.1
CROWDED_SECONDS = 0.25
APART_SECONDS = 0.01

AT = """PRAGMA temp_store = MEMORY;
CREATE TEMP TABLE at (log TEXT NOT NULL, number INTEGER NOT NULL);
INSERT INTO temp.at VALUES ('', 0);"""


@dataclass(eq=False)
class Turn:
    """A transaction of this process, from when it asks for the turn to write."""

    token: str
    had: bool = False
    over: bool = False


class Replica(Ledger):
    """The ledger of a queue that another process (or another part of this one) owns."""

    connection: Recorder

    def __init__(self, place: Place, head: Head, hub: Hub) -> None:
        self.place = place
        self.fsync = False
        self.closed = False
        self.lost = None
        self.epoch = None
        self.lock = threading.RLock()
        self._head = head
        self._hub = hub
        self._news = 0
        self._replayed = 0
        self._turn: Turn | None = None
        self._known = ""
        self._crowded_until = 0.0
        self._due: dict[str, int] = {}
        self.connection = sqlite3.connect(
            ":memory:",
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
            factory=Recorder,
        )
        self.connection.executescript(AT)
        self._install(*head.snapshot())
        self._aborted: SimpleQueue[str | None] = SimpleQueue()
        self._follower = Background(self._follow)
        self._aborter = Background(self._abort)

    # Following

    def _position(self) -> tuple[str, int]:
        """The log that the copy follows, and the change in it up to which it has come.

        It is kept in the copy itself, so that nothing can come between a change and its number.
        """
        log, number = self.connection.execute("SELECT log, number FROM temp.at").fetchone()
        return log, number

    def _move(self, log: str, number: int) -> None:
        self.connection.execute_untold("UPDATE temp.at SET log = ?, number = ?", (log, number))

    def _install(self, log: str, number: int, content: bytes) -> None:
        """Become this snapshot, unless the copy has got further meanwhile."""
        with self.lock:
            at, reached = self._position()
            if self.closed or (at == log and reached >= number):
                return
            before = _sequences(self.connection)
            self._news += 1
            self._move("", 0)
            restore(self.connection, content)
            self._move(log, number)
            after = _sequences(self.connection)
            if any(after.get(table, -1) < last for table, last in before.items()):
                self.lost = StaleOwner(
                    f"the ledger of queue {self.place.queue!r} has lost changes that its owner had"
                    " confirmed, as a loss of power can do without fsync=True. Open it anew."
                )

    def _follow(self) -> None:
        while not self.closed and self.lost is None:
            turn = self._turn
            try:
                if turn is None or not turn.had:
                    with self.lock:
                        if self.closed:
                            return
                        log, number = self._position()
                    began = time.monotonic()
                    news = self._head.follow(log, number, FOLLOW_SECONDS)
                    self._take_in(news, unless_busy=True)
                    # Where much is going on, an answer for each change would cost the owner more
                    # than the changes do.
                    time.sleep(max(0.0, began + APART_SECONDS - time.monotonic()))
                else:
                    self._head.beat(turn.token)
                    time.sleep(BEAT_SECONDS)
            except (BucketUnavailable, StaleOwner):
                time.sleep(AGAIN_SECONDS)
            except Exception as error:
                if self.closed:
                    return
                self.lost = StaleOwner(
                    f"the copy of the ledger of queue {self.place.queue!r} cannot follow its owner"
                    f" any more: {error}. Open it anew."
                )
                if not isinstance(error, PersistingError):
                    raise
                return  # whoever uses it is told

    def _abort(self) -> None:
        """End turns that wrote nothing, which nobody has to wait for."""
        for token in iter(self._aborted.get, None):
            self._head.abort(token)

    def catch_up(self) -> None:
        """Know all that was committed before this call. Costs one request."""
        with self.lock:
            self.check_open()
            if self._turn is not None:
                return  # with the turn there is nothing to know
            position = self._position()
        self._take_in(self._head.follow(*position, 0.0))

    def mark(self) -> Mark:
        """Up to where in the owner's log all is known here."""
        with self.lock:
            self.check_open()
            return self._position()

    def expect(self, mark: Mark) -> None:
        """Know of all up to there before anything is read.

        The news mostly come by themselves until then; only who reads sooner has to ask for them.
        """
        log, number = mark
        with self.lock:
            self._due[log] = max(number, self._due.get(log, 0))

    def meet(self) -> None:
        with self.lock:
            if not self._due or self._turn is not None:
                return
            self.check_open()
            at, reached = self._position()
            if any(log != at or number > reached for log, number in self._due.items()):
                self._take_in(self._head.follow(at, reached, 0.0))
            self._due.clear()

    def _take_in(self, news: News, *, unless_busy: bool = False) -> None:
        """Enter what the owner tells of, as far as it is not known yet."""
        if unless_busy and self._turn is not None:
            return  # another thread may have the turn, which needs its beat
        snapshot = self._head.snapshot() if news[1] is None else None
        while not self.lock.acquire(timeout=BEAT_SECONDS):
            if unless_busy and self._turn is not None:
                return
        try:
            if self.closed or self._turn is not None:
                return
            before = self._news
            self._enter(news, snapshot)
            fresh = self._news != before
        finally:
            self.lock.release()
        if fresh:
            self._hub.notify()

    def _enter(self, news: News, snapshot: tuple[str, int, bytes] | None) -> None:
        log, changes = news
        if changes is None:
            self._install(*(snapshot or self._head.snapshot()))
        elif log == self._position()[0]:
            for change in changes:
                self._replay(log, change)

    def _replay(self, log: str, change: Change) -> None:
        if change.number != self._position()[1] + 1:
            return  # known already
        before = self.connection.total_changes
        # First, since who looks at this number without the lock has to take the lock for the rest.
        self._news += 1
        try:
            self.connection.execute("BEGIN")
            replay(self.connection, change.statements)
            self._move(log, change.number)
            self.connection.commit()
        finally:
            self.connection.rollback()
            self._replayed += self.connection.total_changes - before

    # Transactions

    @contextmanager
    def transaction(
        self, turn: str | None = None, *, hurry: bool = False
    ) -> Iterator[sqlite3.Connection]:
        """As Ledger's; durable at the owner when the block ends.

        Costs two requests, or one if nothing is written. In a hurry it costs one: the block sees
        what is known here, and Interrupted is raised if somebody else has written meanwhile; for a
        while after that turns are taken all the same.

        Raises BucketUnavailable if the owner is gone and nobody has taken its place in time,
        WaitTimeout if there is no turn for too long: nothing was written then, unless the message
        says that this is not known.
        """
        with self.lock:
            self.check_open()
            self._clear_up(self._turn)
            hurry = hurry and time.monotonic() > self._crowded_until
            if hurry:  # else the turn brings the news
                self.meet()
            connection, own = self.connection, Turn(uuid.uuid4().hex)
            position = self._position()
            try:
                self._turn = own
                if hurry:
                    own.over = True  # there is none to give back
                else:
                    while (news := self._head.begin(own.token, *position)) is None:
                        own.token = uuid.uuid4().hex
                    own.had = True
                    self._enter(news, None)
                    self.check_open()
                connection.execute("BEGIN")
                statements: list[Statement] = []
                connection.taken = statements
                yield connection
                assert self._turn is own, "a ledger transaction inside another"
                connection.taken = None
                if statements:
                    at = position if hurry else None
                    number = self._head.commit(own.token, statements, self._known, at)
                    own.over = True
                    self._conclude(own.token, number)
                elif hurry and self._head.follow(*position, 0.0)[1] != []:
                    raise Interrupted("what this transaction saw is not the newest any more.")
            except Interrupted:
                self._crowded_until = time.monotonic() + CROWDED_SECONDS
                raise
            finally:
                self._clear_up(own)

    def _clear_up(self, turn: Turn | None) -> None:
        """Leave nothing of a transaction but what was committed, with nobody waiting for its end.

        A signal may break off even this; then the next transaction does the rest.
        """
        if turn is None or turn is not self._turn:
            return
        self.connection.taken = None
        self.connection.rollback()
        if not turn.over:
            self._aborted.put(turn.token)
        self._turn = None

    def _conclude(self, token: str, number: int | None) -> None:
        """Do here what the owner has done."""
        log, before = self._position()
        if number == before + 1:
            self._move(log, number)
        else:
            self._move("", 0)  # what came of it is known, but not where the log is by now
        self.connection.commit()
        self._known = token

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self.lock:
            self.check_open()
            self.meet()
            yield self.connection

    @contextmanager
    def glancing(self) -> Iterator[sqlite3.Connection]:
        with self.lock:
            self.check_open()
            yield self.connection

    # What has changed

    def others_version(self) -> int:
        with self.lock:
            self.check_open()
            return self._news

    def own_changes(self) -> int:
        with self.lock:
            return self.connection.total_changes - self._replayed

    def version(self) -> tuple[int, int]:
        with self.lock:
            return self.others_version(), self.own_changes()

    def watch(self) -> int:
        self.check_open()
        return self._news

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.connection.close()
        self._aborted.put(None)


def _sequences(connection: sqlite3.Connection) -> dict[str, int]:
    """How far the numbers of each table have come that never go back."""
    if not connection.execute("SELECT 1 FROM main.sqlite_master LIMIT 1").fetchone():
        return {}
    return dict(connection.execute("SELECT name, seq FROM main.sqlite_sequence").fetchall())
