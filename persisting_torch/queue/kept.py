"""A ledger that an object store keeps: SQLite in a private folder, every change in the store first.

So the folder may be lost at any time, and with it the process: see journal.py.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from persisting_torch.errors import PersistingError
from persisting_torch.queue.journal import LOGGED, Journal
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.place import Place
from persisting_torch.queue.record import Recorder, replay
from persisting_torch.queue.snapshots import content_of
from persisting_torch.queue.threads import Background

END_SECONDS = 60.0


class Kept:
    """The ledger of a queue as the owner of an epoch has it, for its connections to share."""

    def __init__(self, place: Place, epoch: int) -> None:
        """Ends all earlier epochs. Raises PersistingError where the store is damaged or away."""
        self.place = place
        self.journal = Journal(place.files, place.ledger, epoch)
        self.writing = threading.RLock()  # one transaction at a time, of whichever connection
        self._snapshots: Background | None = None
        # Not a TemporaryDirectory, which a fork of this process would remove.
        self._folder = tempfile.mkdtemp(prefix="persisting_torch-")
        self.path = os.path.join(self._folder, "ledger.sqlite")
        try:
            with explained(place):
                self._open()
        except BaseException:
            shutil.rmtree(self._folder)
            raise

    def _open(self) -> None:
        place = self.place
        found = self.journal.load(self.path)
        if not found and place.files.exists(place.data):
            raise PersistingError(
                f"queue {place.queue!r}: {place.ledger} holds no ledger, though there are rows."
                " Restore the objects under it from a copy."
            )
        Ledger(place, recorded=True, path=self.path).close()  # makes or converts its tables
        with self.connected() as connection:
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, 0)", (LOGGED,))
        self.snapshot()

    @contextmanager
    def connected(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self.path, isolation_level=None)
        try:
            yield connection
        finally:
            connection.close()

    def snapshot(self) -> None:
        """Keep the ledger as it is now as a whole. Raises OSError."""
        with self.connected() as connection:
            connection.execute("BEGIN")
            number = logged(connection)
            content = content_of(connection)
        self.journal.snapshot(content, number)

    def tend(self) -> None:
        """Keep the log in the store short, without holding anybody up."""
        idle = self._snapshots is None or not self._snapshots.is_alive()
        if idle and self.journal.snapshot_due():
            self._snapshots = Background(self._snapshot_later)

    def _snapshot_later(self) -> None:
        try:
            while self.journal.snapshot_due():  # again, if much was written meanwhile
                self.snapshot()
        except OSError:
            return  # it is due again after the next change

    def end(self) -> None:
        """Let go of the folder; also where that was done before."""
        if self._snapshots is not None:
            self._snapshots.join(END_SECONDS)
        if os.path.exists(self._folder):
            shutil.rmtree(self._folder)


class KeptLedger(Ledger):
    """A connection to a ledger that a store keeps."""

    connection: Recorder

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        super().__init__(kept.place, recorded=True, path=kept.path)

    @contextmanager
    def _alone(self) -> Iterator[sqlite3.Connection]:
        """See Ledger; a transaction is in the store before it is durable here."""
        with self.lock, self.kept.writing:
            self.check_open()
            self.settle()
            self.connection.kept = []
            try:
                with super()._alone() as connection:
                    yield connection
            finally:
                self.connection.kept = None
            self._done()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """See Ledger."""
        with self.lock:
            if self.kept.journal.attempt is not None and not self.connection.in_transaction:
                with self.kept.writing:
                    self.check_open()
                    self.settle()
            with super().reading() as connection:
                yield connection

    def _keep(self) -> None:
        statements, self.connection.kept = self.connection.kept, None
        if statements:
            self.kept.journal.put(statements)
            self._note()

    def _note(self) -> None:
        number = self.kept.journal.number + 1
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (LOGGED, number))

    def _done(self) -> None:
        if self.kept.journal.attempt is not None:
            self.kept.journal.done()
            self.kept.tend()

    def settle(self) -> None:
        """Bring here what a transaction that was broken off has brought into the store.

        Those who follow the log of a shared ledger need not be told: it was begun anew when the
        transaction failed, and nobody gets to read the ledger before this.
        """
        journal = self.kept.journal
        if journal.attempt is None:
            return
        statements = journal.settle()
        if logged(self.connection) == journal.number:  # else only what comes after was broken off
            with super()._alone() as connection:
                replay(connection, statements)
                self._note()
        self._done()

    def close(self) -> None:
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        self.kept.end()


def logged(connection: sqlite3.Connection) -> int:
    """The number of the newest change that the ledger contains."""
    query = "SELECT value FROM meta WHERE key = ?"
    return int(connection.execute(query, (LOGGED,)).fetchone()[0])


@contextmanager
def explained(place: Place) -> Iterator[None]:
    """Say of a store that refuses which queue cannot be opened for that."""
    try:
        yield
    except OSError as error:
        raise PersistingError(
            f"queue {place.queue!r} cannot be opened at {place.root}: {error}. Check that its"
            " objects may be read, written, listed and deleted."
        ) from error
