"""Whole groups of samples, such as the responses to one prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from persisting_torch.queue.ready import ReadyIndexes
from persisting_torch.samplers.base import BaseSampler

# A batch is nearly always found within this many batch sizes of the front.
_FRONT = 4


class GRPOGroupNSampler(BaseSampler):
    """Gives only complete groups: n samples with consecutive indexes.

    Put the n responses to a prompt one after another, and the sampler keeps them together: a
    group with a response missing waits, and later groups that are complete go first. A batch is
    given whole or not at all. Given a `dp_rank`, the answer to (partition, task, dp_rank,
    batch_index) stays the same until `clear_cache`.

    Raises ValueError where `n_samples_per_prompt` is not positive.

    >>> GRPOGroupNSampler(n_samples_per_prompt=3).sample([0, 1, 3, 4, 5, 6, 7, 9, 10, 11], 6)
    ([3, 4, 5, 9, 10, 11], [3, 4, 5, 9, 10, 11])
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(
                f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}."
                " Give the number of responses that each prompt gets."
            )
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """The first complete groups, `batch_size` samples in all, to read and to consume.

        Keywords `dp_rank` and `batch_index` name the answer to remember or repeat. Both lists are
        empty while too few groups are complete. Raises ValueError where `batch_size` is not a
        multiple of `n_samples_per_prompt`.
        """
        dp_rank = kwargs.get("dp_rank")
        batch_index = kwargs.get("batch_index")
        if dp_rank is not None:
            answers = self._answers(partition_id, task_name, dp_rank)
            if batch_index in answers:
                sampled, consumed = answers[batch_index]
                return sampled.copy(), consumed.copy()
        if batch_size % self.n_samples_per_prompt:
            raise ValueError(
                f"batch_size {batch_size} must be a multiple of n_samples_per_prompt"
                f" {self.n_samples_per_prompt}, so that no group is torn apart."
            )
        sampled = self._complete_groups(ready_indexes, batch_size)
        if len(sampled) < batch_size:
            return [], []
        if dp_rank is not None:
            answer = (sampled, sampled.copy())
            self._remember(partition_id, task_name, dp_rank, batch_index, answer)
        return sampled.copy(), sampled.copy()

    def _complete_groups(self, ready_indexes: Sequence[int], batch_size: int) -> list[int]:
        """The samples of the first complete groups, in order: `batch_size` of them at most."""
        if len(ready_indexes) < batch_size:
            return []
        if not isinstance(ready_indexes, ReadyIndexes):
            return self._gather(sorted(ready_indexes), batch_size)
        front = ready_indexes.first(_FRONT * max(batch_size, 0))
        sampled = self._gather(front, batch_size)
        if len(sampled) < batch_size and len(front) < len(ready_indexes):
            sampled = self._gather(ready_indexes.in_runs_of(self.n_samples_per_prompt), batch_size)
        return sampled

    def _gather(self, ascending: Iterable[int], batch_size: int) -> list[int]:
        sampled: list[int] = []
        group: list[int] = []
        if batch_size <= 0:
            return sampled
        for index in ascending:
            if group and index != group[-1] + 1:
                group.clear()
            group.append(index)
            if len(group) == self.n_samples_per_prompt:
                sampled += group
                group.clear()
                if len(sampled) >= batch_size:
                    break
        return sampled
