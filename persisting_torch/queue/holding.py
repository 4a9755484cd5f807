"""A queue in an object store, held by one process at a time.

All handles of the process share one hold: it owns the queue, has the ledger in a private folder,
and is given back with the last handle. Every change of the ledger is in the store before it is
committed here, so the folder may be lost at any time.
"""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from persisting_torch.errors import BucketUnavailable, PersistingError, StaleOwner
from persisting_torch.queue.journal import LOGGED, Journal
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.locks import ThreadLock
from persisting_torch.queue.ownership import BEAT_SECONDS, Ownership, Watch, read_owner
from persisting_torch.queue.place import Place
from persisting_torch.queue.record import Recorder, replay
from persisting_torch.queue.snapshots import content_of
from persisting_torch.queue.storage import RowStore
from persisting_torch.queue.threads import Background

LOOK_SECONDS = 0.25
END_SECONDS = 60.0


class Hold:
    """What this process has of a queue of which it is the owner."""

    def __init__(self, place: Place) -> None:
        """Become the owner.

        Raises BucketUnavailable naming the process that is the owner, while that lives. One that
        died is replaced once it has stood still for TAKEOVER_SECONDS.
        """
        self.place = place
        self.handles = 0
        self.ledgers: list[Ledger] = []
        self.lost: StaleOwner | None = None
        self.commit_lock = ThreadLock(f"the rows of queue {place.queue!r}")
        self.writing = threading.RLock()  # one transaction at a time, of whichever handle
        self.upkeep_lock = ThreadLock(f"upkeep of queue {place.queue!r}")
        self.rows = RowStore(place.data, files=place.files, alone=True)
        self.late = RowStore(place.late, files=place.files, alone=True)
        self._ends = threading.Lock()
        self._ends.acquire()
        self._snapshots: Background | None = None
        # Not a TemporaryDirectory, which a fork of this process would remove.
        self._folder = tempfile.mkdtemp(prefix="persisting_torch-")
        self.path = os.path.join(self._folder, "ledger.sqlite")
        try:
            self.ownership, died = _take(place)
            self.rows.guard = self.late.guard = self.ownership.check
            self._beating = Background(self._beat)
            try:
                self._open(died)
            except BaseException:
                self._give_up()
                raise
        except OSError as error:
            shutil.rmtree(self._folder)
            raise PersistingError(
                f"queue {place.queue!r} cannot be opened at {place.root}: {error}. Check that its"
                " objects may be read, written, listed and deleted."
            ) from error
        except BaseException:
            shutil.rmtree(self._folder)
            raise

    def _open(self, died: bool) -> None:
        place = self.place
        self.journal = Journal(place.files, place.ledger, self.ownership.owner.epoch)
        found = self.journal.load(self.path)
        if not found and place.files.exists(place.data):
            raise PersistingError(
                f"queue {place.queue!r}: {place.ledger} holds no ledger, though there are rows."
                " Restore the objects under it from a copy."
            )
        Ledger(place, recorded=True, path=self.path).close()  # makes or converts its tables
        with self._connected() as connection:
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, 0)", (LOGGED,))
        self._snapshot()
        if died:
            # What the former owner still has under way must not land among the new rows.
            self.rows.fence()
            self.late.fence()

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self.path, isolation_level=None)
        try:
            yield connection
        finally:
            connection.close()

    def _snapshot(self) -> None:
        with self._connected() as connection:
            connection.execute("BEGIN")
            query = "SELECT value FROM meta WHERE key = ?"
            (number,) = connection.execute(query, (LOGGED,)).fetchone()
            content = content_of(connection)
        self.journal.snapshot(content, number)

    def _beat(self) -> None:
        """Say every second that this process lives, and keep the log in the store short."""
        while not self._ends.acquire(timeout=BEAT_SECONDS):
            try:
                self.ownership.beat()
            except StaleOwner as error:
                self.lose(error)
                return
            except OSError:
                continue  # `check` says so to those who would use the queue meanwhile
            idle = self._snapshots is None or not self._snapshots.is_alive()
            if idle and self.handles and self.journal.snapshot_due():
                self._snapshots = Background(self._snapshot_later)

    def _snapshot_later(self) -> None:
        try:
            self._snapshot()
        except OSError:
            return  # it is due again at the next beat

    def check(self) -> None:
        """Raise StaleOwner where another process has the queue by now.

        Raises BucketUnavailable where that cannot be found out.
        """
        with self.losing():
            self.ownership.check()

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Where it turns out in the block that there is another owner, remember that."""
        try:
            yield
        except StaleOwner as error:
            self.lose(error)
            raise

    def lose(self, error: StaleOwner) -> None:
        """Refuse all further use, for the reason given."""
        self.lost = self.lost or error
        for ledger in self.ledgers:
            ledger.lost = self.lost

    def end(self) -> None:
        """Let others have the queue."""
        self._give_up()
        shutil.rmtree(self._folder)

    def _give_up(self) -> None:
        if self._ends.locked():
            self._ends.release()
        self._beating.join(END_SECONDS)
        if self._snapshots is not None:
            self._snapshots.join(END_SECONDS)
        with suppress(OSError):  # else they find out by themselves, a few seconds later
            self.ownership.give_up()


def _take(place: Place) -> tuple[Ownership, bool]:
    """Ownership, and whether the owner before died instead of giving up."""
    watch = Watch(place.bucket, place.files)
    name = f"{socket.gethostname()}:{os.getpid()}"
    while True:
        dead = watch.dead()
        if dead is not None:
            taken = Ownership.take(
                place.bucket, dead.epoch, uuid.uuid4().hex, name, "", place.files
            )
            if taken is not None:
                return taken, bool(dead.incarnation)
        elif watch.moves:
            owner = read_owner(place.bucket, place.files)
            raise BucketUnavailable(
                f"queue {place.queue!r} at {place.root} is open in process"
                f" {owner.node if owner else '?'}; in an object store one process at a time has"
                " a queue. Close it there."
            )
        else:
            time.sleep(LOOK_SECONDS)


class HeldLedger(Ledger):
    """A handle's connection to the ledger of a hold."""

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        super().__init__(hold.place, recorded=True, path=hold.path)
        hold.ledgers.append(self)
        self.lost = hold.lost

    def check_open(self) -> None:
        super().check_open()
        self.hold.check()

    @contextmanager
    def transaction(
        self, turn: str | None = None, *, hurry: bool = False
    ) -> Iterator[sqlite3.Connection]:
        """See Ledger; it is in the store before it is durable here."""
        with self.lock, self.hold.writing:
            self.check_open()
            self._settle()
            recorder = self._recorder()
            recorder.taken = []
            try:
                with self._alone() as connection:
                    yield connection
            finally:
                recorder.taken = None
            self._done()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """See Ledger."""
        with self.lock:
            if self.hold.journal.attempt is not None and not self.connection.in_transaction:
                with self.hold.writing:
                    self.check_open()
                    self._settle()
            with super().reading() as connection:
                yield connection

    def _recorder(self) -> Recorder:
        assert isinstance(self.connection, Recorder)
        return self.connection

    def _keep(self) -> None:
        recorder = self._recorder()
        statements, recorder.taken = recorder.taken, None
        if statements:
            journal = self.hold.journal
            with self.hold.losing():
                journal.put(statements)
            self._note(journal.number + 1)

    def _note(self, number: int) -> None:
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (LOGGED, number))

    def _done(self) -> None:
        if self.hold.journal.attempt is not None:
            self.hold.journal.done()

    def _settle(self) -> None:
        """Bring here what a transaction that was broken off has brought into the store."""
        journal = self.hold.journal
        if journal.attempt is not None:
            with self.hold.losing():
                statements = journal.settle()
            with self._alone() as connection:
                replay(connection, statements)
                self._note(journal.number + 1)
            journal.done()

    def close(self) -> None:
        super().close()
        if self in self.hold.ledgers:
            self.hold.ledgers.remove(self)
            give_back(self.hold)


def hold_of(place: Place) -> Hold:
    """This process's hold of a queue, for one more handle of it: see Hold."""
    with _lock:
        hold = _holds.get(place.root)
        if hold is None or hold.lost is not None:
            hold = _holds[place.root] = Hold(place)
        hold.handles += 1
        return hold


def give_back(hold: Hold) -> None:
    """A handle needs its hold no longer."""
    with _lock:
        hold.handles -= 1
        if hold.handles:
            return
        if _holds.get(hold.place.root) is hold:
            del _holds[hold.place.root]
        hold.end()


_holds: dict[str, Hold] = {}
_lock = threading.Lock()
