"""One batch for all the ranks that train on the same data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from persisting_torch.samplers.base import BaseSampler


class RankAwareSampler(BaseSampler):
    """Gives every caller of one data-parallel rank the same batch.

    Tensor- and pipeline-parallel peers share a `dp_rank`. The first of them to ask for a batch
    index has the batch chosen from the front of what is ready; the others, and every replay, get
    that same batch until `clear_cache`. A batch is given whole or not at all.

    >>> sampler = RankAwareSampler()
    >>> where = dict(dp_rank=0, batch_index=0, task_name="train", partition_id="train_0")
    >>> sampler.sample([10, 11, 12], 2, **where)
    ([10, 11], [10, 11])
    >>> sampler.sample([12], 2, **where)
    ([10, 11], [10, 11])
    """

    def sample(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        dp_rank: int,
        batch_index: int,
        task_name: str,
        partition_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """The batch of (partition, task, dp_rank, batch_index), to read and to consume.

        Both lists are empty, and nothing is remembered, while fewer than `batch_size` are ready.
        Raises ValueError for a negative `dp_rank`.
        """
        if dp_rank < 0:
            raise ValueError(
                f"dp_rank must be greater than or equal to 0, got {dp_rank} for task {task_name!r}"
                f" of partition {partition_id!r}. Pass the data-parallel rank of the caller."
            )
        sampled = self._answers(partition_id, task_name, dp_rank).get(batch_index)
        if sampled is None:
            sampled = list(ready_indexes[:batch_size])
            if len(sampled) < batch_size:
                return [], []
            self._remember(partition_id, task_name, dp_rank, batch_index, sampled)
        return sampled.copy(), sampled.copy()
