"""Back-pressure: puts wait while the queue holds as many unconsumed samples as its capacity."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from persisting_torch.errors import WaitTimeout
from persisting_torch.queue.waiting import News

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine

LONGEST_WAIT_SECONDS = 600.0


class Room:
    """The wait of one put for room in its queue."""

    def __init__(self, engine: Engine, partition: str) -> None:
        self._engine = engine
        self._partition = partition
        self._news = News(engine.hub, engine.ledger)
        self._deadline = time.monotonic() + LONGEST_WAIT_SECONDS

    def wait(self) -> None:
        """Return when there may be room. Raises WaitTimeout 600 s after the wait began."""
        if not self._news.wait(self._deadline):
            raise self._timeout()

    async def wait_async(self) -> None:
        """The same without holding up the event loop."""
        if not await self._news.wait_async(self._deadline):
            raise self._timeout()

    def _timeout(self) -> WaitTimeout:
        engine = self._engine
        return WaitTimeout(
            f"waited {LONGEST_WAIT_SECONDS:g} s to put into {engine.place.queue}/{self._partition}:"
            f" it holds {unconsumed(engine)} unconsumed samples and its capacity is"
            f" {engine.capacity}. Check the trainers that should consume them, or raise capacity."
        )


def has_room(engine: Engine) -> bool:
    """Whether the queue, waiting samples included, holds fewer unconsumed than its capacity."""
    return engine.capacity is None or unconsumed(engine) < engine.capacity


def unconsumed(engine: Engine) -> int:
    """Samples that some task has not taken yet; in a partition without tasks, all of them."""
    with engine.ledger.reading() as tx:
        engine.books.refresh(tx)
        total = engine.intake.buffer.samples
        for partition in engine.books.partitions.values():
            present = partition.present
            tasks = [t for t in engine.books.tasks.values() if t.partition == partition.id]
            total += max((len(present - task.taken) for task in tasks), default=len(present))
        return total
