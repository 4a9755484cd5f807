"""What a sampler gives in training and drops, asked of the queue that it samples from."""

from __future__ import annotations

from typing import Any

from persisting_torch import Queue, WaitTimeout


def form(queue: Queue, k: int, sampler: Any, *, size: int, ranks: int, **asked: Any) -> Any:
    """The slices of global batch k; "waits" if there is none yet, None at the end."""
    asked = {"timeout": 0.0, **asked}
    try:
        batch = queue.engine.await_assignment(
            "fit", "default", k, batch_size=size, dp_size=ranks, sampler=sampler, **asked
        )
    except WaitTimeout:
        return "waits"
    return batch and [list(part) for part in batch.slices]


def dropped(queue: Queue, task: str = "t", partition: str = "default") -> dict[str, list[int]]:
    """The samples that a task has dropped, by reason."""
    queue.engine.books.follow()
    known = queue.engine.books.tasks[task, partition].dropped
    return {reason: list(members) for reason, members in known.items()}
