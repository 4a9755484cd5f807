"""Back-pressure: puts wait, or are refused, while the consumers are too far behind.

The slowest task of a partition is behind by what it still has to take: of the samples that have
arrived the share `samples_per_insert`, less what it has taken, and never more than there are left.
Puts go on while all that, and what waits in memory, is less than `capacity`. It is the one-sided
form of Reverb's SampleToInsertRatio (arXiv:2102.04736): inserts wait, samples do not.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from persisting_torch.errors import QueueFull, WaitTimeout
from persisting_torch.queue.again import again
from persisting_torch.queue.books import Partition, Task
from persisting_torch.queue.waiting import News

if TYPE_CHECKING:
    from persisting_torch.queue.assignments import Order
    from persisting_torch.queue.engine import Engine

WhenFull = Literal["wait", "raise"]

TELL_SECONDS = 2.0
TOLD_SECONDS = 5.0


@dataclass(frozen=True)
class Pace:
    """How far the tasks may be behind the puts of one handle, and what puts do then; see Queue."""

    capacity: int | None = None
    samples_per_insert: float = 1.0
    when_full: WhenFull = "wait"
    put_timeout: float = 600.0

    def check(self, queue: str) -> None:
        """Raise ValueError for what makes no sense."""
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(
                f"queue {queue!r}: capacity must be at least 1 or None, got {self.capacity!r}."
            )
        if not 0 < self.samples_per_insert <= 1:
            raise ValueError(
                f"queue {queue!r}: samples_per_insert must be above 0 and at most 1, since a task"
                f" takes each sample once, got {self.samples_per_insert!r}."
            )
        if self.samples_per_insert != 1 and self.capacity is None:
            raise ValueError(
                f"queue {queue!r}: samples_per_insert={self.samples_per_insert!r} was given without"
                " capacity, the number of samples by which tasks may be behind. Give both."
            )
        if self.when_full not in ("wait", "raise"):
            raise ValueError(
                f"queue {queue!r}: when_full must be 'wait' or 'raise', got {self.when_full!r}."
            )
        if not self.put_timeout >= 0:
            raise ValueError(
                f"queue {queue!r}: put_timeout must be 0 or more seconds, got {self.put_timeout!r}."
            )


@dataclass(frozen=True)
class Lag:
    """By how many samples the slowest task of a partition is behind; None if it has no task."""

    partition: str
    task: str | None
    taken: int
    samples: float


def has_room(engine: Engine, partition: str) -> bool:
    """Whether a put may go on."""
    capacity = engine.pace.capacity
    if capacity is None:
        return True
    waiting = engine.pace.samples_per_insert * engine.writes.samples_waiting
    return waiting + sum(lag.samples for lag in lags(engine, partition)) < capacity


def lags(engine: Engine, partition: str) -> list[Lag]:
    """The lag in each partition that has a task, and in the one that is put into."""
    found = []
    with engine.ledger.reading() as tx:
        engine.books.refresh(tx)
        tasks: dict[int, list[Task | None]] = {}
        for task in engine.books.tasks.values():
            tasks.setdefault(task.partition, []).append(task)
        for where in engine.books.partitions.values():
            consumers = tasks.get(where.id) or ([None] if where.name == partition else [])
            if consumers:
                each = [_lag(engine.pace.samples_per_insert, where, task) for task in consumers]
                found.append(max(each, key=lambda lag: lag.samples))
    return found


def _lag(share: float, where: Partition, task: Task | None) -> Lag:
    left, taken = len(where.arrived) - len(where.cleared), 0
    if task is not None:
        taken = len(task.taken)
        left += task.taken.intersection_cardinality(where.cleared) - taken
    due = share * len(where.arrived) - taken
    name = None if task is None else task.name
    return Lag(where.name, name, taken, max(0.0, min(left, due)))


class Room:
    """The wait of one put for room in its queue."""

    def __init__(self, engine: Engine, partition: str) -> None:
        self._engine = engine
        self._partition = partition
        self._news: News | None = None
        self._began = self._moved = time.monotonic()
        self._taken: dict[tuple[str, str | None], int] = {}

    @property
    def waits(self) -> bool:
        """Whether the put has found the queue full."""
        return self._news is not None

    def is_there(self) -> bool:
        """Whether there is room now."""
        return has_room(self._engine, self._partition)

    @again
    def check(self) -> None:
        """Say that there was no room. Raises when no more time, or no put, is allowed.

        QueueFull where the handle wants that, WaitTimeout when its time is up, QueueSealed.
        """
        engine, now = self._engine, time.monotonic()
        if self._news is None:
            self._news = News(engine.hub, engine.ledger)
        engine.intake.check_partition(self._partition)
        behind = lags(engine, self._partition)
        taken = {(lag.partition, lag.task): lag.taken for lag in behind}
        if taken != self._taken:
            self._taken, self._moved = taken, now
        waited = now - self._began
        if engine.pace.when_full == "raise":
            raise QueueFull(f"queue {engine.place.queue!r} is full: {self._told(behind, 0)}")
        if waited >= engine.pace.put_timeout:
            raise WaitTimeout(
                f"waited {waited:.0f} s to put into {engine.place.queue}/{self._partition}:"
                f" {self._told(behind, now - self._moved)}"
            )
        if min(waited, now - engine.writes.told_full) >= TELL_SECONDS:
            engine.writes.told_full = now
            with engine.ledger.transaction() as tx:
                tx.execute("INSERT OR REPLACE INTO meta VALUES ('pacing', ?)", (self._note(),))

    def wait(self) -> None:
        """Return when there may be room."""
        assert self._news is not None
        self._news.wait(self._until())

    async def wait_async(self) -> None:
        """The same without holding up the event loop."""
        assert self._news is not None
        await self._news.wait_async(self._until())

    def _until(self) -> float:
        end = self._began + self._engine.pace.put_timeout
        return min(end, time.monotonic() + TELL_SECONDS / 2)

    def _note(self) -> str:
        pace = self._engine.pace
        return json.dumps(
            {
                "capacity": pace.capacity,
                "samples_per_insert": pace.samples_per_insert,
                "at": time.time(),
            }
        )

    def _told(self, behind: list[Lag], still: float) -> str:
        queue, pace = self._engine.place.queue, self._engine.pace
        share = pace.samples_per_insert
        ratio = "" if share == 1 else f", at {share:g} samples per insert"
        told = []
        for lag in behind:
            if lag.task is None:
                told.append(
                    f"no task has taken any of the {math.ceil(lag.samples)} samples of"
                    f" {queue}/{lag.partition} yet"
                )
            elif lag.samples:
                told.append(
                    f"task {lag.task!r} is {math.ceil(lag.samples)} samples of"
                    f" {queue}/{lag.partition} behind"
                )
        since = f" None was taken for {still:.0f} s." if still >= 1 else ""
        return (
            f"{'; '.join(told)}; the capacity is {pace.capacity}{ratio}.{since} Start or check the"
            " consumers, raise capacity, or mark_consumed what a task that nobody runs any more has"
            " left."
        )


def puts_wait(tx: sqlite3.Connection) -> Pace | None:
    """The pace of a put that waits for room now, in whatever process."""
    found = tx.execute("SELECT value FROM meta WHERE key = 'pacing'").fetchone()
    told = json.loads(found[0]) if found else None
    if told is None or time.time() - told["at"] > TOLD_SECONDS:
        return None
    return Pace(told["capacity"], told["samples_per_insert"])


def check_order(engine: Engine, order: Order) -> None:
    """Raise QueueFull if puts wait until the task has taken what it waits to get more of."""
    with engine.ledger.reading() as tx:
        pace = puts_wait(tx)
        engine.books.refresh(tx)
        where = engine.books.partitions.get(order.partition)
        if pace is None or pace.capacity is None or where is None:
            return
        task = engine.books.tasks.get((order.task, order.partition))
        behind = _lag(pace.samples_per_insert, where, task)
        left = _lag(1, where, task)
    if behind.samples >= pace.capacity and left.samples < order.size:
        raise QueueFull(
            f"task {order.task!r} asks for {order.size} {order.unit} of"
            f" {engine.place.queue}/{order.partition}, and puts wait since their capacity is"
            f" {pace.capacity}: neither can go on with the {left.samples:g} samples that there are."
            " Give the producers' Queue a larger capacity, a whole global batch and the groups that"
            " are not complete yet at least, or ask for smaller batches."
        )
