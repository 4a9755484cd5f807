"""What a sampler is: the contract, and the memory of what each rank was given."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class BaseSampler(ABC):
    """Chooses the samples of a batch, and which of them no later batch shall see.

    A subclass defines `sample`. One that has to answer a rank's repeated question as it did the
    first time keeps its answers in `_states[partition_id][task_name][dp_rank][batch_index]`;
    `has_cached_result`, `clear_cache` and the two checkpoint methods look after them.

    A queue calls one sampler from one thread at a time. Where `looks` is True it gives the keyword
    `look`, through which the sampler reads values of samples, remembers things durably and drops
    samples (`persisting_torch.queue.Look`). Where `recheck_seconds` is a number, a waiting trainer
    asks again after so many seconds, though nothing new came. A sampler that cuts global batches
    for training itself, unevenly perhaps, has a method `deal(ready_indexes, batch_size, dp_size,
    **kwargs)`: `batch_size` samples for each of `dp_size` data-parallel ranks, answered as a list
    of slices, [] while there are not enough; `kwargs` are those of `sample`. Without it, `sample`
    chooses for all ranks and they get equal parts in its order. One whose samples belong together
    has a method `let_go(indexes, ready_indexes, look, reason)`, by which MaxStaleness lets it drop
    ready samples, and with them what could not be given without them; it answers with all of these.

    A sample without the fields named in `needs` is not ready. Where `counts` says something else
    than "samples" (such as "episodes"), that is what a batch size counts: `deal` gives so many to
    each rank, and `list_all(indexes, look)` tells which of these samples make up each one, for
    passes that consume nothing. A method `shape(batch, pad)` gives a dataset's batches their final
    form, before `transform`; it gets the fields named in `shaped_by` too.
    """

    looks: bool = False
    counts: str = "samples"
    needs: Sequence[str] = ()
    shaped_by: Sequence[str] = ()
    recheck_seconds: float | None = None

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Choose a batch.

        `ready_indexes` are the global indexes whose fields are all written and which the task has
        not consumed, ascending where they come from a queue. They may be a `ReadyIndexes` of many
        millions: read its front, slices or single positions rather than all of it.
        `batch_size` is the number of samples asked for. Whatever sampling arguments were given to
        `get_meta` arrive as keywords, among them `dp_rank`, `batch_index`, `task_name` and
        `partition_id`.

        Returns the indexes of the batch, in order, and the indexes to mark as consumed. Both empty
        means that no batch can be formed yet.
        """

    def what_is_missing(self) -> str:
        """What the sampler waits for, to be said when a wait was too long; "" for nothing."""
        return ""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        return self.sample(*args, **kwargs)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether `sample` would repeat an earlier answer instead of choosing anew.

        `sampling_config` holds the `dp_rank` and `batch_index` of the question; without a
        `dp_rank` nothing is ever repeated.
        """
        config = sampling_config or {}
        dp_rank = config.get("dp_rank")
        if dp_rank is None:
            return False
        return config.get("batch_index") in self._answers(partition_id, task_name, dp_rank)

    def clear_cache(self, partition_id: str) -> None:
        """Forget every answer given for a partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """The sampler's memory as it is now, for `load_checkpoint`.

        A subclass with more state than `_states` extends both methods.
        """
        return {"_states": copy.deepcopy(self._states)}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Take the place of the sampler whose `save_checkpoint` gave `state`."""
        self._states = copy.deepcopy(state["_states"])

    def _answers(self, partition_id: str, task_name: str, dp_rank: int) -> dict[Any, Any]:
        """What a rank was given, by batch index; a throw-away dict where that is nothing."""
        answers: dict[Any, Any] = (
            self._states.get(partition_id, {}).get(task_name, {}).get(dp_rank, {})
        )
        return answers

    def _remember(
        self, partition_id: str, task_name: str, dp_rank: int, batch_index: Any, answer: Any
    ) -> None:
        """Keep the answer to one rank's question about one batch."""
        tasks = self._states.setdefault(partition_id, {})
        tasks.setdefault(task_name, {}).setdefault(dp_rank, {})[batch_index] = answer
