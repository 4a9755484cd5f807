"""Producers by name: nobody waits for one that is gone, and others get the work that it left.

A producer is a `with` block of a process. It is registered in the ledger and beats there; what it
claims is leased to it (see `leases`). Whoever waits, claims in vain, or registers looks at the
others, and gives back the leases of those that have died.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pyroaring import BitMap64

from persisting_torch.errors import PersistingError, ProducerFailed, StaleOwner
from persisting_torch.queue import leases
from persisting_torch.queue.again import again
from persisting_torch.queue.claims import give_back
from persisting_torch.queue.host import born, processes
from persisting_torch.queue.registry import (
    SILENT_SECONDS,
    Fates,
    Registered,
    forget_old,
    registered,
)
from persisting_torch.queue.runs import Int64s
from persisting_torch.queue.sets import set_of
from persisting_torch.queue.waiting import Hub

if TYPE_CHECKING:
    from persisting_torch.queue.parts import Puts

CHECK_SECONDS = 1.0
ROUND_SECONDS = 5.0
LOCK_SECONDS = 1.0
GRACE_SECONDS = 300.0

_entered: ContextVar[tuple[Producer, ...]] = ContextVar("producers", default=())


@dataclass(eq=False)
class Producer:
    """A producer of this process, and what it has claimed and not finished, by task."""

    name: str
    essential: bool
    queue: str
    started: float = 0.0  # when it was entered last: anew each time it was held to be dead
    entered: set[float] = field(default_factory=set)
    held: dict[int, BitMap64] = field(default_factory=dict)
    lost: BitMap64 = field(default_factory=BitMap64)
    rival: str = ""
    ended: bool = False

    def lease(self, tx: sqlite3.Connection, task: int, members: BitMap64) -> None:
        """Enter samples that a task is about to take as its unfinished work."""
        if self.ended:
            return
        self.beat(tx)
        if self.rival:
            raise StaleOwner(
                f"producer {self.name!r} of queue {self.queue!r} is {self.rival} by now, which"
                " registered under this name while this process did not answer. Claim outside of"
                " this producer block, or begin one with another name."
            )
        leases.lease(tx, task, self.name, members)

    def hold(self, task: int, members: BitMap64) -> None:
        """Know of a lease, now that it is committed."""
        if not self.ended:
            self.held.setdefault(task, BitMap64()).update(members)
            self.lost -= members

    def beat(self, tx: sqlite3.Connection) -> None:
        """Say that it lives. Where it was held to be dead meanwhile, its leases are lost."""
        if self.ended or lives(tx, self.name, self.started):
            return
        self.lose()
        found = tx.execute(
            "SELECT started, pid FROM producers WHERE name = ?", (self.name,)
        ).fetchone()
        if found is not None and found[0] not in self.entered:
            self.rival = f"process {found[1]}"
        else:
            self.register(tx)

    def register(self, tx: sqlite3.Connection) -> None:
        """Enter it as alive, in a way that tells this apart from each time before."""
        self.started = max(time.time(), self.started + 1e-3)
        self.entered.add(self.started)
        tx.execute(
            "INSERT OR REPLACE INTO producers VALUES (?, ?, ?, ?, ?, ?, 'alive', NULL, ?)",
            (
                self.name,
                processes(),
                os.getpid(),
                self.started,
                born(os.getpid()),
                time.time(),
                int(self.essential),
            ),
        )

    def lose(self) -> None:
        """Know that what it has not finished is no longer its own."""
        self.lost |= self.unfinished
        self.held.clear()

    @property
    def unfinished(self) -> BitMap64:
        return BitMap64().union(*self.held.values())

    def forget(self, members: BitMap64, task: int | None = None) -> None:
        """Know that these samples are done (for one task, or all)."""
        for number, held in self.held.items():
            if task in (None, number):
                held -= members

    def refuse(self, members: BitMap64) -> StaleOwner:
        """The error of a put into samples whose leases are lost."""
        return StaleOwner(
            f"producer {self.name!r} of queue {self.queue!r} no longer holds samples"
            f" {list(members)[:10]}: it failed, or did not answer for too long, and its unfinished"
            " claims were returned to the others. Nothing of this put was written. Leave these"
            " samples out, and claim anew."
        )


def lives(tx: sqlite3.Connection, name: str, started: float) -> bool:
    """Whether nobody has held the producer to be dead since it was entered. Says that it lives."""
    beat = tx.execute(
        "UPDATE producers SET beat = ? WHERE name = ? AND started = ? AND state = 'alive'",
        (time.time(), name, started),
    )
    return beat.rowcount > 0


class Work(NamedTuple):
    """Samples that a producer had claimed, and `started` as it had then been entered."""

    producer: Producer
    members: BitMap64
    started: float

    def is_its_own(self, tx: sqlite3.Connection) -> bool:
        """Whether nobody has held it to be dead since, or its block has ended well.

        That it lives again is not enough: it may have beaten since, and what it had is lost.
        """
        done = "SELECT 1 FROM producers WHERE name = ? AND started = ? AND state = 'done'"
        return (
            lives(tx, self.producer.name, self.started)
            or tx.execute(done, (self.producer.name, self.started)).fetchone() is not None
        )

    def refused(self) -> StaleOwner:
        """The error of a put of it; all that the producer then had is lost."""
        if self.started == self.producer.started:
            self.producer.lose()
        return self.producer.refuse(self.members)


@dataclass(frozen=True)
class Finishing:
    """Work that producers of this process finish with one commit of fields."""

    parts: Sequence[Work] = ()

    def check(self, tx: sqlite3.Connection) -> None:
        """Raise StaleOwner if one was held to be dead meanwhile. The commit lock is held."""
        for work in self.parts:
            if not work.is_its_own(tx):
                raise work.refused()

    def done(self) -> None:
        """Know that the commit has been made."""
        for work in self.parts:
            work.producer.forget(work.members)


class Producers:
    """The producers of one handle of a queue, and its view of all the others."""

    def __init__(self, committer: Puts, hub: Hub) -> None:
        self._committer = committer
        self._ledger = committer.ledger
        self._books = committer.books
        self._hub = hub
        self._queue = committer.ledger.place.queue
        self._running: list[Producer] = []
        self._ended: list[Producer] = []
        self._fates = Fates()
        self.since = time.time()
        """When the run began that this process is part of."""
        self._looked = time.monotonic()

    # The producers of this process

    @contextmanager
    def block(self, name: str, essential: bool, flush: Callable[[], None]) -> Iterator[None]:
        """A producer while the block runs; its end, or its exception, is entered and raised."""
        producer = Producer(name, essential, self._queue)
        self._register(producer)
        before = _entered.get()
        _entered.set((*before, producer))
        try:
            yield
            flush()
        except BaseException as error:
            self._end(producer, error)
            raise
        else:
            self._end(producer, None)
        finally:
            _entered.set(before)
            self._running.remove(producer)
            self._committer.writer = self._running[-1].name if self._running else ""
            self._hub.notify()

    @again
    def _register(self, producer: Producer) -> None:
        self.look()
        with self._settled() as tx:
            for other in registered(tx):
                if other.name == producer.name and other.lives:
                    raise PersistingError(
                        f"producer {other.name!r} of queue {self._queue!r} is {other} already,"
                        " which lives. Give this one a name of its own, or end that one first."
                    )
            give_back(tx, self._books, [producer.name])
            producer.register(tx)
            forget_old(tx)
        self._running.append(producer)
        self._committer.writer = producer.name

    @again
    def _end(self, producer: Producer, error: BaseException | None) -> None:
        with self._settled() as tx:
            producer.beat(tx)
            if not producer.rival:
                if error is None:
                    leases.finish_all(tx, producer.name)
                else:
                    give_back(tx, self._books, [producer.name])
                    producer.lose()
                tx.execute(
                    "UPDATE producers SET state = ?, cause = ? WHERE name = ?",
                    (
                        "done" if error is None else "failed",
                        None if error is None else f"{type(error).__name__}: {error}",
                        producer.name,
                    ),
                )
            producer.ended = True
        if producer.lost:
            self._ended = [ended for ended in self._ended if ended.name != producer.name]
            self._ended.append(producer)

    @contextmanager
    def _settled(self) -> Iterator[sqlite3.Connection]:
        """A transaction while no commit is under way that may finish somebody's work."""
        with self._committer.lock:
            self._committer.recover()
            with self._ledger.transaction() as tx:
                self._books.refresh(tx)
                yield tx

    def current(self) -> Producer | None:
        """The producer whose block this thread or task is in, else the only one of this handle."""
        for producer in reversed(_entered.get()):
            if producer in self._running:
                return producer
        return self._running[0] if len(self._running) == 1 else None

    @again
    def beat(self) -> None:
        """Say that the producers of this process are alive."""
        if self._running:
            with self._ledger.transaction() as tx:
                for producer in self._running:
                    if not producer.rival:
                        producer.beat(tx)

    def finishing(self, indexes: Int64s) -> Finishing:
        """What a put of fields into these samples finishes.

        Raises StaleOwner if this process has lost the lease of one of them.
        """
        if not self._running and not self._ended:
            return Finishing()
        with self._ledger.lock:
            members = set_of(indexes)
            for producer in (*self._running, *self._ended):
                if producer.lost & members:
                    raise producer.refuse(producer.lost & members)
            parts = [Work(one, one.unfinished & members, one.started) for one in self._running]
            return Finishing([work for work in parts if work.members])

    def claimed(self, indexes: Sequence[int]) -> None:
        """Know that these samples were taken anew by this process."""
        if any(producer.lost for producer in (*self._running, *self._ended)):
            with self._ledger.lock:
                for producer in (*self._running, *self._ended):
                    producer.lost -= set_of(indexes)

    def marked(self, task: str, partition: str, indexes: Sequence[int]) -> None:
        """Know that the task has no more work with these samples."""
        with self._ledger.lock:
            known = self._books.tasks.get((task, partition))
            for producer in self._running:
                producer.forget(set_of(indexes), None if known is None else known.id)

    # All producers

    def look(self) -> list[tuple[Registered, str | None]]:
        """Every producer and how it has ended; the dead are entered, their claims given back."""
        self._looked = time.monotonic()
        with self._ledger.reading() as tx:
            found = [(one, self._fates.fate(one)) for one in registered(tx)]
        dead = [(one, fate) for one, fate in found if fate and one.state == "alive"]
        if dead and self._ledger.place.writable:
            self._bury(dead)
        return found

    def _bury(self, dead: list[tuple[Registered, str]]) -> None:
        """Unless a commit is under way: whoever looks next does it then."""
        if not self._committer.lock.acquire(LOCK_SECONDS):
            return
        try:
            with self._settled() as tx:
                buried = []
                for one, fate in dead:
                    entered = tx.execute(
                        "UPDATE producers SET state = 'failed', cause = ?"
                        " WHERE name = ? AND started = ? AND beat = ? AND state = 'alive'",
                        (fate.removeprefix("failed: "), one.name, one.started, one.beat),
                    )
                    if entered.rowcount:
                        buried.append(one.name)
                give_back(tx, self._books, buried)
        finally:
            self._committer.lock.release()
        self._hub.notify()

    def reclaim(self, every: float = CHECK_SECONDS) -> bool:
        """Look whether somebody who had claimed has died, if nobody did for `every` seconds."""
        if time.monotonic() - self._looked < every:
            return False
        with self._ledger.reading() as tx:
            holders = leases.holders(tx)
        self._looked = time.monotonic()
        return bool(holders) and any(
            fate and one.state == "alive" and one.name in holders for one, fate in self.look()
        )

    def check(self) -> None:
        """Raise ProducerFailed if an essential one has failed, or one has and none is left.

        A run that begins when all producers have ended gives them five minutes to come back.
        """
        failed, living = [], 0
        for one, fate in self.look():
            if fate is None:
                living += one.state == "alive"
            elif not self._is_old(one):
                failed.append((one, fate))
        essential = [each for each in failed if each[0].essential]
        if not essential and (living or not failed):
            return
        told = "; ".join(f"{one.name} {fate}" for one, fate in essential or failed)
        what = "an essential producer" if essential else "no producer"
        raise ProducerFailed(
            f"{what} of queue {self._queue!r} is {'gone' if essential else 'left'}: {told}."
            " Start it again under the same name, or seal the partition to go on without it."
        )

    def _is_old(self, one: Registered) -> bool:
        now = time.time()
        return one.beat < self.since - SILENT_SECONDS and now < self.since + GRACE_SECONDS


class Vigil:
    """One waiter's eye on the producers: a check each second, whatever news comes."""

    def __init__(self, producers: Producers) -> None:
        self._producers = producers
        self.due = time.monotonic() + CHECK_SECONDS

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.due

    def watch(self) -> bool:
        """Check the producers if it is time, and say whether it was. Raises ProducerFailed."""
        if not self.is_due:
            return False
        self._producers.check()
        self.due = time.monotonic() + CHECK_SECONDS
        return True

    def begin(self) -> None:
        """What was waited for has come; a new wait begins."""
        self.due = time.monotonic() + CHECK_SECONDS
