"""A queue in an object store, looked at by a process that does not have it.

Whoever has it goes on meanwhile, and learns nothing of it: a private copy of the ledger is made of
the newest snapshot and the changes since, and follows when it is asked to.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from dataclasses import replace
from itertools import count

from persisting_torch.errors import PersistingError
from persisting_torch.queue.files import LOCAL
from persisting_torch.queue.journal import Journal, Position, statements_of
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.place import Place
from persisting_torch.queue.record import replay
from persisting_torch.queue.snapshots import restore


class Follower(Journal):
    """Reads the log of all owners into an SQLite database, and writes nothing into the store."""

    def __init__(self, place: Place, path: str) -> None:
        super().__init__(place.files, place.ledger, epoch=0)
        self._at: Position | None = None
        self._copy = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._copy.execute("PRAGMA journal_mode = WAL")

    def follow(self) -> None:
        """Let the copy be what all owners had committed when this was called."""
        while True:
            newest = self._newest()
            if newest is None:
                return
            try:
                self._follow(newest)
            except FileNotFoundError:
                if newest == self._newest():
                    raise
                continue  # the owner has made a new one and removed this one, or changes before it
            if newest == self._newest():
                return

    def _follow(self, newest: Position) -> None:
        if self._at is None or self._at < newest:
            restore(self._copy, self.files.read(self._snapshot_path(newest)))
            self._at = newest
        for epoch in count(self._at.epoch):
            # Whether another follows is known only once this one is closed.
            if not self._replay(epoch, self._at.number if epoch == self._at.epoch else 0):
                return

    def _replay(self, epoch: int, number: int) -> bool:
        """Take over what an epoch has committed after this change; whether it is closed."""
        there = set(self._numbers(epoch))
        while number + 1 in there:
            number += 1
            statements = statements_of(self.files.read(self._change_path(epoch, number)))
            if statements is None:
                return True
            self._copy.execute("BEGIN IMMEDIATE")
            replay(self._copy, statements)
            self._copy.execute("COMMIT")
            self._at = Position(epoch, number)
        return False

    def close(self) -> None:
        self._copy.close()


class CopiedLedger(Ledger):
    """The ledger as it was when the copy followed last: when it was opened, and by `catch_up`."""

    def __init__(self, place: Place) -> None:
        """Raises PersistingError where the store cannot be read, or has no ledger yet."""
        # Not a TemporaryDirectory, which a fork of this process would remove.
        self._folder = tempfile.mkdtemp(prefix="persisting_torch-")
        path = os.path.join(self._folder, "ledger.sqlite")
        self._follower = Follower(place, path)
        self.place = place
        try:
            self._follow()
            super().__init__(replace(place, writable=False), path=path)
        except BaseException:
            self._remove()
            raise

    def _connect_to_read(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        if not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            raise PersistingError(
                f"queue {self.place.queue!r} at {self.place.root} holds nothing yet."
                " Open it once to put into it."
            )
        return self._as_of_now(connection)

    def catch_up(self) -> None:
        """Know of all that was committed before this call, by whomever."""
        with self.lock:
            self.check_open()
            self._follow()

    def _follow(self) -> None:
        try:
            self._follower.follow()
        except OSError as error:
            raise PersistingError(
                f"queue {self.place.queue!r} cannot be read at {self.place.root}: {error}. Check"
                " the network, and that its objects may be read and listed."
            ) from error

    def close(self) -> None:
        super().close()
        self._remove()

    def _remove(self) -> None:
        self._follower.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def ledger_of(place: Place) -> Ledger:
    """The ledger of a queue that this process only looks at."""
    return Ledger(place) if place.files is LOCAL else CopiedLedger(place)
