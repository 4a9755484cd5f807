"""The ledger: one SQLite file beside the rows that knows everything about them but their values.

Which indexes were given, where each row stands, which fields have arrived, who took what. Every
change is one transaction, durable when it returns, and atomic for all processes.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import quote

from persisting_torch.errors import (
    FormatError,
    PersistingError,
    QueueClosed,
    StaleOwner,
    WaitTimeout,
)
from persisting_torch.queue.again import again
from persisting_torch.queue.host import boot, born
from persisting_torch.queue.place import FORMAT, Place, raise_format
from persisting_torch.queue.record import Log, Mark, Recorder
from persisting_torch.queue.tables import AS_FORMAT_2, FROM_1_TO_2, LEDGER_FORMAT, TABLES
from persisting_torch.queue.turns import Turns

BUSY_SECONDS = 60.0
LARGEST_JOURNAL = 8 << 20  # bytes; somebody who reads for long may let it grow until that ends


@dataclass(frozen=True)
class Sharing:
    """How the owner of a ledger lets others write it: whose turn it is, and what was written."""

    epoch: int
    log: Log
    turns: Turns
    check: Callable[[], None]
    """Raises StaleOwner where this process is not the owner any more."""


class Ledger:
    """One process's connection to the ledger of a bucket; its methods are thread-safe.

    `fsync=True` makes each commit survive a loss of power, not only the death of the process.
    On a network file system the journal is a rollback journal, since WAL needs shared memory.
    """

    def __init__(
        self,
        place: Place,
        *,
        fsync: bool = False,
        recorded: bool = False,
        path: str | None = None,
        patience: float = BUSY_SECONDS,
    ) -> None:
        """`path`: the SQLite file, where it is not the place's. `patience`: with others' locks."""
        self.place = place
        self.path = path or place.ledger
        self.fsync = fsync
        self._patience = patience
        self._kind = Recorder if recorded else sqlite3.Connection
        self.closed = False
        self.lost: StaleOwner | None = None
        self.epoch: int | None = None  # of ownership by a cluster, as of when it was opened
        self.lock = threading.RLock()
        self._watch_lock = threading.Lock()
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self.file = os.stat(self.path).st_ino if os.path.exists(self.path) else None
        """Which file it was when it was opened; None for a new one."""
        self.connection = self._connect()
        try:
            self._watcher = self._connect()
        except BaseException:
            self.connection.close()
            raise
        self._open_transaction = False
        self._sharing: Sharing | None = None

    # Opening

    def _connect(self) -> sqlite3.Connection:
        try:
            return self._connect_to_write() if self.place.writable else self._connect_to_read()
        except sqlite3.OperationalError as error:
            if "no such" in str(error) or os.path.isdir(self.place.ledger):
                raise self._damage(error) from error
            raise self._failure(error) from error
        except sqlite3.DatabaseError as error:
            raise self._damage(error) from error
        except OSError as error:
            raise PersistingError(
                f"queue {self.place.queue!r}: {error.filename} cannot be read:"
                f" {error.strerror}. Open it as a user who may."
            ) from error

    def _damage(self, what: object) -> FormatError:
        return FormatError(
            f"queue {self.place.queue!r}: {self.place.ledger} is not its ledger ({what})."
            " Restore it from a copy."
        )

    def _connect_to_write(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path,
            timeout=self._patience,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
            factory=self._kind,
        )
        try:
            journal = "TRUNCATE" if self.place.network else "WAL"
            connection.execute(f"PRAGMA journal_mode = {journal}")
            connection.execute(f"PRAGMA journal_size_limit = {LARGEST_JOURNAL}")
            full = self.fsync or self.place.network
            connection.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
            self._make_tables(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _make_tables(self, connection: sqlite3.Connection) -> None:
        if not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            if self.place.files.exists(self.place.data):
                raise self._damage("it is empty, though there are rows")
            connection.executescript(f"BEGIN IMMEDIATE;{TABLES}COMMIT;")
        if self._check_format(connection) < LEDGER_FORMAT:
            refuse_older_releases(connection, self.place)
            connection.executescript(f"BEGIN IMMEDIATE;{FROM_1_TO_2}COMMIT;")
        if self.place.format < FORMAT:
            raise_format(self.place)

    def _check_format(self, connection: sqlite3.Connection) -> int:
        found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        if found is None:
            raise self._damage("it does not say its format")
        if found[0] > LEDGER_FORMAT:
            raise FormatError(
                f"queue {self.place.queue!r}: the ledger {self.place.ledger} has format {found[0]};"
                f" this version of persisting_torch reads up to format {LEDGER_FORMAT}."
                " Upgrade persisting_torch."
            )
        return int(found[0])

    def _connect_to_read(self) -> sqlite3.Connection:
        """The ledger of a queue that this process may not write.

        SQLite reads a WAL database only where its shared memory file is there or can be made; where
        it cannot, a private copy is read instead, as of now.
        """
        if not os.path.exists(self.place.ledger):
            raise FormatError(
                f"queue {self.place.queue!r} is read-only for this process and has no ledger at"
                f" {self.place.ledger} yet. Open it once where it can be written."
            )
        if self._copy is None:
            live = sqlite3.connect(
                f"file:{quote(self.place.ledger)}?mode=ro",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                return self._as_of_now(live)
            except sqlite3.OperationalError:
                live.close()
            self._copy = tempfile.TemporaryDirectory(prefix="persisting_torch-")
            for ending in ("", "-wal"):
                if os.path.exists(self.place.ledger + ending):
                    shutil.copyfile(
                        self.place.ledger + ending, f"{self._copy.name}/ledger.sqlite{ending}"
                    )
        connection = sqlite3.connect(
            f"{self._copy.name}/ledger.sqlite", isolation_level=None, check_same_thread=False
        )
        return self._as_of_now(connection)

    def _as_of_now(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        """A connection that may not write, on which an older ledger looks like a new one."""
        if self._check_format(connection) < LEDGER_FORMAT:
            connection.executescript(AS_FORMAT_2)
        return connection

    def be_patient(self) -> None:
        """From now on wait for others' locks as long as anybody."""
        self._patience = BUSY_SECONDS
        for connection in (self.connection, self._watcher):
            connection.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000:.0f}")

    def check_open(self) -> None:
        """Raise QueueClosed if the queue was closed, StaleOwner if another host has taken it."""
        if self.closed:
            self.refuse_closed()
        if self.lost is not None:
            raise self.lost

    def refuse_closed(self) -> NoReturn:
        raise QueueClosed(
            f"queue {self.place.queue!r} was closed. Open it again with"
            f" Queue({self.place.queue!r}, ...)."
        )

    def catch_up(self) -> None:
        """Know of all that was committed before this call, by whomever: here that is always so."""

    def expect(self, mark: Mark) -> None:
        """Know of all up to there before anything is read: here that is always so."""

    def meet(self) -> None:
        """Know of what is expected: here that is always so."""

    def close(self) -> None:
        with self.lock, self._watch_lock:
            self.closed = True
            self.connection.close()
            self._watcher.close()
            if self._copy is not None:
                self._copy.cleanup()

    # Transactions

    def share(self, sharing: Sharing) -> None:
        """From now on others write and follow this ledger through this process, which owns it.

        It has to be one whose changes are recorded.
        """
        with self.lock:
            self._sharing = sharing

    @contextmanager
    def transaction(
        self, turn: str | None = None, *, hurry: bool = False
    ) -> Iterator[sqlite3.Connection]:
        """All or nothing, alone among all processes; durable when the block ends.

        Of a shared ledger, `turn` names the turn to write that the caller has. `hurry`: the block
        may be run again (see `again`), so a replica need not wait for its turn before it.

        Raises WaitTimeout if another process keeps the ledger locked, PersistingError if it cannot
        be written, StaleOwner if it is shared and has another owner by now.
        """
        sharing = self._sharing
        if sharing is None:
            with self._alone() as connection:
                yield connection
            return
        with sharing.turns.held(turn, BUSY_SECONDS), self.lock, sharing.log.entry() as change:
            sharing.check()
            with self._alone() as connection:
                assert isinstance(connection, Recorder)
                self._refuse_another_epoch(connection, sharing.epoch)
                try:
                    connection.taken = change
                    yield connection
                finally:
                    connection.taken = None

    def _refuse_another_epoch(self, tx: sqlite3.Connection, epoch: int) -> None:
        (now,) = tx.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
        if now != epoch:
            raise StaleOwner(
                f"{self.place.bucket} has the owner of epoch {now} by now; the one of epoch"
                f" {epoch} may not write any more. Ask the new owner."
            )

    @contextmanager
    def _alone(self) -> Iterator[sqlite3.Connection]:
        with self.lock:
            self.check_open()
            assert not self._open_transaction, "a ledger transaction inside another"
            try:
                self._open_transaction = True
                self.connection.execute("BEGIN IMMEDIATE")
                yield self.connection
                self._keep()
                self.connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                raise self._failure(error) from error
            finally:
                self._open_transaction = False
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")

    def _keep(self) -> None:
        """Called before a commit: here there is nothing to do, SQLite makes it durable."""

    def _failure(self, error: sqlite3.OperationalError) -> PersistingError:
        where = f"the ledger of queue {self.place.queue!r} ({self.place.ledger})"
        if "locked" in str(error):
            return WaitTimeout(
                f"waited {self._patience:g} s to write {where}: another process keeps it locked."
                " See which one with `fuser`."
            )
        done = "written" if self.place.writable else "read"
        return PersistingError(
            f"{where} cannot be {done}: {error}. Make room or access and try again."
        )

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Several reads of one state of the ledger."""
        with self.lock:
            self.check_open()
            if self.connection.in_transaction:
                yield self.connection
                return
            try:
                self.connection.execute("BEGIN")
                yield self.connection
            finally:
                if self.connection.in_transaction:
                    self.connection.execute("COMMIT")

    def glancing(self) -> AbstractContextManager[sqlite3.Connection]:
        """Likewise, of a state that may lack what is expected: who reads it waits for nothing."""
        return self.reading()

    def others_version(self) -> int:
        """A value that differs once another connection has changed the ledger."""
        with self.lock:
            self.check_open()
            return int(self.connection.execute("PRAGMA data_version").fetchone()[0])

    def own_changes(self) -> int:
        """How many rows this connection has changed."""
        with self.lock:
            return self.connection.total_changes

    def version(self) -> tuple[int, int]:
        """A value that differs once any process has changed the ledger since it was last asked."""
        with self.lock:
            self.check_open()
            others = self.connection.execute("PRAGMA data_version").fetchone()[0]
            return others, self.connection.total_changes

    def watch(self) -> int:
        """The same for waiting: cheap, and never held up by this process's own transactions."""
        with self._watch_lock:
            self.check_open()
            return int(self._watcher.execute("PRAGMA data_version").fetchone()[0])

    # Indexes

    @again
    def reserve(self, count: int) -> int:
        """The first of `count` new global indexes, which no one else will get."""
        with self.transaction(hurry=True) as tx:
            return self.reserve_in(tx, count)

    @staticmethod
    def reserve_in(tx: sqlite3.Connection, count: int) -> int:
        end: int = tx.execute(
            "UPDATE meta SET value = value + ? WHERE key = 'next_index' RETURNING value", (count,)
        ).fetchone()[0]
        return end - count

    @again
    def give_back(self, first: int, end: int) -> None:
        """Return the unused end of a reservation if nobody has reserved since."""
        with self.transaction() as tx:
            tx.execute(
                "UPDATE meta SET value = ? WHERE key = 'next_index' AND value = ?", (first, end)
            )


def refuse_older_releases(connection: sqlite3.Connection, place: Place) -> None:
    """Raise FormatError if a live process has a queue of an older format open.

    That process runs an older release, which would not understand the new format.
    """
    for pid, boot_id, name in connection.execute(
        "SELECT pid, boot, name FROM leases WHERE expires >= ?", (time.time(),)
    ):
        if boot_id != boot() or born(pid):
            raise FormatError(
                f"queue {place.queue!r} at {place.root} has an older format, and process {pid} on"
                f" {name} has it open with the release that wrote it. Close it there; the next"
                " opening converts it."
            )
