"""How deep a queue is for one consumer, at a cost that does not grow with its history."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine


@dataclass(frozen=True)
class Depth:
    """Counts of flushed samples of one partition, for one task.

    put: ever, cleared ones included.
    ready: not taken, with all the fields that the task asks for.
    untaken: not taken, whatever fields they lack.
    assigned: taken, and not yet consumed for good: read ahead, in training, or in batches that no
        checkpoint on disk counts yet. 0 for a task that claims by `get_meta`.
    dropped: let go untrained ever since, by reason: "stale", "late", ...
    """

    put: int = 0
    ready: int = 0
    untaken: int = 0
    assigned: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def lag(self) -> int:
        """Samples that are there and not consumed for good."""
        return self.untaken + self.assigned


class Gauge:
    """Measures the depth for a task that asks for `fields` (None: all that a sample has)."""

    def __init__(
        self, engine: Engine, task: str, partition: str, fields: Sequence[str] | None = None
    ) -> None:
        self.engine = engine
        self.task = task
        self.partition = partition
        self.fields = fields

    def read(self) -> Depth:
        """The depth as of now."""
        needed = self.engine.needed(self.fields)
        with self.engine.ledger.reading() as tx:
            books = self.engine.books
            books.refresh(tx)
            partition = books.partitions.get(self.partition)
            if partition is None:
                return Depth()
            task = books.tasks.get((self.task, self.partition))
            present = partition.present
            return Depth(
                put=len(partition.arrived),
                ready=len(books.view(self.task, self.partition, needed).available),
                untaken=len(present if task is None else present - task.taken),
                assigned=0 if task is None else _assigned(tx, task.id, task.cursor),
                dropped={} if task is None else {r: len(gone) for r, gone in task.dropped.items()},
            )


def _assigned(tx: sqlite3.Connection, task: int, cursor: int) -> int:
    """Samples in the task's global batches from the cursor on, without padding."""
    batches = tx.execute(
        "SELECT count, padding FROM assignments WHERE task = ? AND k >= ?", (task, cursor)
    )
    return sum(count - sum(json.loads(padding)) for count, padding in batches)
