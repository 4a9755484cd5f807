"""Back-pressure: puts wait while the queue holds more unconsumed samples than its capacity."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from persisting_torch.errors import WaitTimeout
from persisting_torch.queue.waiting import News

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine

LONGEST_WAIT_SECONDS = 600.0


def await_room(engine: Engine, capacity: int, partition: str) -> None:
    """Wait until the queue, waiting samples included, holds fewer unconsumed than `capacity`.

    Raises WaitTimeout after 600 s.
    """
    news = News(engine.hub, engine.ledger)
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    while unconsumed(engine) >= capacity:
        engine.flush()
        if unconsumed(engine) < capacity:
            return
        if not news.wait(deadline):
            raise WaitTimeout(
                f"waited {LONGEST_WAIT_SECONDS:g} s to put into {engine.place.queue}/{partition}:"
                f" it holds {unconsumed(engine)} unconsumed samples and its capacity is {capacity}."
                " Check the trainers that should consume them, or raise capacity."
            )


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
