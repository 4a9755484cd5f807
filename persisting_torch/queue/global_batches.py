"""Global batches as an engine offers them: formed once, replayed, committed, counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from persisting_torch.queue.assignments import Assignment, Assignments, Last
from persisting_torch.queue.demand import Demand
from persisting_torch.queue.look import Sampler
from persisting_torch.queue.names import check_name
from persisting_torch.queue.options import check_batch_size
from persisting_torch.queue.patience import LONGEST_WAIT_SECONDS

if TYPE_CHECKING:
    from persisting_torch.queue.books import Books
    from persisting_torch.queue.engine import Engine
    from persisting_torch.queue.ledger import Ledger


class GlobalBatches:
    """The part of an engine that trainers use."""

    ledger: Ledger
    books: Books
    assignments: Assignments

    def check_open(self, *, writing: bool = False) -> None:
        """Raise unless the engine may be used (to write) now."""
        raise NotImplementedError

    def await_assignment(
        self,
        task: str,
        partition: str,
        k: int,
        *,
        batch_size: int,
        dp_size: int = 1,
        fields: Sequence[str] | None = None,
        sampler: Sampler | None = None,
        last: Last = "drop",
        timeout: float | None = None,
        stop: threading.Event | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> Assignment | None:
        """Global batch k of a task, formed once and answered identically ever after.

        None if the partition is sealed and has no batch k, or if `stop` was set meanwhile. Waits
        at most `timeout` seconds (None: 1800) and then raises WaitTimeout, which says what is
        missing; raises ProducerFailed once no producer is left that could provide it.
        """
        self.check_open(writing=True)
        check_batch_size(batch_size)
        check_name(task, "task_name")
        demand = Demand(
            cast("Engine", self),
            task,
            partition,
            fields,
            batch_size,
            dp_size,
            last,
            sampler,
            sampling or {},
        )
        return demand.wait(k, LONGEST_WAIT_SECONDS if timeout is None else timeout, stop)

    def recut(
        self, task: str, partition: str, k: int, *, batch_size: int, dp_size: int = 1
    ) -> None:
        """A run resumes at batch k: batches from k on that were formed for other sizes are undone.

        Their samples are available again, and batch k is the first of the new sizes. Nothing
        happens where the sizes are the same.
        """
        self.check_open(writing=True)
        check_batch_size(batch_size)
        Demand(
            cast("Engine", self), task, partition, None, batch_size, dp_size, "drop", None
        ).recut(k)

    def cursor(self, task: str, partition: str) -> int:
        """Global batches of the task below the cursor are consumed for good."""
        self.check_open()
        return self.assignments.cursor(task, partition)

    def commit_cursor(self, task: str, partition: str, k: int) -> None:
        """Global batches below k are consumed for good."""
        self.check_open(writing=True)
        self.assignments.commit_cursor(task, partition, k)

    def note_checkpoint(self, task: str, partition: str, path: str, k: int) -> None:
        """What is at this path (absolute, or a URL) may be resumed from batch k of the task.

        As long as it is there, retention keeps the batches from k on.
        """
        self.check_open(writing=True)
        self.assignments.note_checkpoint(task, partition, path, k)

    def books_of(self, task: str, partition: str) -> dict[str, int]:
        """How often each sample of the partition is in a committed global batch of the task.

        Counts of samples, cleared ones included: "put", "once", "twice" (or more), "never",
        and "dropped": let go untrained, by a sampler that says why in `stats()`.
        """
        self.check_open()
        cursor = self.assignments.cursor(task, partition)
        trained = [
            index
            for k, indexes in self.assignments.assigned(task, partition)
            if k < cursor
            for index in indexes
        ]
        with self.ledger.reading() as tx:
            self.books.refresh(tx)
            known = self.books.partitions.get(partition)
            put = 0 if known is None else len(known.arrived)
            consumer = self.books.tasks.get((task, partition))
            dropped = 0 if consumer is None else consumer.let_go
        trained += self.assignments.past(task, partition)
        counts = np.unique(np.array(trained, dtype=np.int64), return_counts=True)[1]
        return {
            "put": put,
            "once": int((counts == 1).sum()),
            "twice": int((counts > 1).sum()),
            "never": put - len(counts) - dropped,
            "dropped": dropped,
        }
