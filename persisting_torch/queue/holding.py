"""A queue in an object store, held by one process at a time.

All handles of the process share one hold: it owns the queue, has its ledger (see kept.py), and is
given back with the last handle.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from persisting_torch.errors import BucketUnavailable, StaleOwner
from persisting_torch.queue.kept import Kept, KeptLedger, explained
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.locks import ThreadLock
from persisting_torch.queue.ownership import (
    BEAT_SECONDS,
    Owner,
    Ownership,
    Watch,
    belongs_to_cluster,
    read_owner,
)
from persisting_torch.queue.place import Place
from persisting_torch.queue.storage import RowStore
from persisting_torch.queue.threads import Background, at_once

LOOK_SECONDS = 0.25
END_SECONDS = 60.0


class Hold:
    """What this process has of a queue of which it is the owner."""

    kept: Kept | None = None

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
        self.upkeep_lock = ThreadLock(f"upkeep of queue {place.queue!r}")
        self._ends = threading.Lock()
        self._ends.acquire()
        with explained(place):
            self.ownership, died = _take(place)
        self._beating = Background(self._beat)
        places = [place.of_bucket(number) for number in range(place.num_buckets)]
        self.rows = [self._store(own.data) for own in places]
        self.late = [self._store(own.late) for own in places]
        try:
            with explained(place):
                died |= _evict(places[1:])
                self.kept = Kept(place, self.ownership.owner.epoch)
                if died:
                    # What former owners still have under way must not land among the new rows.
                    at_once([store.fence for store in (*self.rows, *self.late)])
        except BaseException:
            self.end()
            raise

    def _store(self, path: str) -> RowStore:
        store = RowStore(path, files=self.place.files, alone=True)
        store.guard = self.ownership.check
        return store

    def _beat(self) -> None:
        """Say every second that this process lives."""
        while not self._ends.acquire(timeout=BEAT_SECONDS):
            try:
                self.ownership.beat()
            except StaleOwner as error:
                self.lose(error)
                return
            except OSError:
                continue  # `check` says so to those who would use the queue meanwhile

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
        if self._ends.locked():
            self._ends.release()
        self._beating.join(END_SECONDS)
        if self.kept is not None:
            self.kept.end()
        with suppress(OSError):  # else they find out by themselves, a few seconds later
            self.ownership.give_up()


def _take(place: Place) -> tuple[Ownership, bool]:
    """Ownership, and whether the owner before died instead of giving up."""
    name = f"{socket.gethostname()}:{os.getpid()}"
    while True:
        dead = _await_death(place)
        taken = Ownership.take(place.bucket, dead.epoch, uuid.uuid4().hex, name, "", place.files)
        if taken is not None:
            return taken, bool(dead.incarnation)


def _evict(buckets: list[Place]) -> bool:
    """Make sure that no node owns these any more; whether one died instead of giving up."""
    died: list[Place] = []

    def evict(own: Place) -> None:
        while (dead := _await_death(own)).incarnation:
            died.append(own)
            taken = Ownership.take(own.bucket, dead.epoch, uuid.uuid4().hex, "", "", own.files)
            if taken is not None:
                taken.give_up()

    at_once([partial(evict, own) for own in buckets])
    return bool(died)


def _await_death(place: Place) -> Owner:
    """The last owner, once it may be replaced. Raises BucketUnavailable while it lives."""
    watch = Watch(place.bucket, place.files)
    while (dead := watch.dead()) is None:
        if watch.moves:
            owner = read_owner(place.bucket, place.files)
            if owner is not None and owner.address:
                raise belongs_to_cluster(place, owner)
            raise BucketUnavailable(
                f"queue {place.queue!r} at {place.root} is open in process"
                f" {owner.node if owner else '?'}; in an object store one process at a time has"
                " a queue. Close it there, or share it by a cluster."
            )
        time.sleep(LOOK_SECONDS)
    return dead


class HeldLedger(KeptLedger):
    """A handle's connection to the ledger of a hold."""

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        assert hold.kept is not None
        super().__init__(hold.kept)
        hold.ledgers.append(self)
        self.lost = hold.lost

    def check_open(self) -> None:
        super().check_open()
        self.hold.check()

    @contextmanager
    def _alone(self) -> Iterator[sqlite3.Connection]:
        with self.hold.losing(), super()._alone() as connection:
            yield connection

    def settle(self) -> None:
        with self.hold.losing():
            super().settle()

    def _let_go(self) -> None:
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
