"""Whole groups of samples, such as the responses to one prompt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from pyroaring import BitMap64

from persisting_torch.queue.ready import ReadyIndexes
from persisting_torch.samplers.aged import AgedReady
from persisting_torch.samplers.base import BaseSampler
from persisting_torch.samplers.groups import Groups
from persisting_torch.samplers.memory import Memories

if TYPE_CHECKING:
    from persisting_torch.queue.look import Look

# A batch is nearly always found within this many batch sizes of the front.
_FRONT = 4

_LONGEST_RECHECK_SECONDS = 1.0
_SHORTEST_RECHECK_SECONDS = 0.02


class GRPOGroupNSampler(BaseSampler):
    """Gives only whole groups of n samples: those with one value of a field, or n in a row.

    With `group_by`, the samples that have the same value in that field (int, str, bytes, bool or
    float, or a tensor of no dimensions) are a group, however they arrived, and groups go in the
    order in which they became complete. Where a value has more than n samples, the first n are a
    group and the others begin the next one. Samples without a value are in no group.

    `min_samples` (default n) and `straggler_timeout` let an incomplete group go: one that has at
    least so many ready samples goes as it is, so many seconds after its first one was seen; seen by
    this sampler, so that a process that starts anew begins to count anew. Once the partition is
    sealed and no field is awaited any more, such groups go at once, and those with fewer samples
    are never given. What a group lacked when it went is noted in the queue: samples of that value
    that come later, up to that number, are late. They are dropped (reason "late" in the queue's
    books), and hold nothing up. After them, or after a complete group, the value begins a new
    group, so that a prompt may come again; but give each visit of a prompt a value of its own, if
    late samples of one visit shall not be taken for the first ones of the next.

    Without `group_by`, n samples with consecutive indexes are a group: put the n responses to a
    prompt one after another. A group with a response missing waits, and later groups that are
    complete go first.

    A batch is given whole or not at all. `batch_size` counts samples as if all groups were full:
    batch_size / n groups are a batch, for each data-parallel rank in training, and where incomplete
    ones are among them it is so much shorter. Given a `dp_rank`, the answer to (partition, task,
    dp_rank, batch_index) stays the same until `clear_cache`.

    Raises ValueError where `n_samples_per_prompt` or another number is out of its range.

    >>> GRPOGroupNSampler(n_samples_per_prompt=3).sample([0, 1, 3, 4, 5, 6, 7, 9, 10, 11], 6)
    ([3, 4, 5, 9, 10, 11], [3, 4, 5, 9, 10, 11])

    >>> import tempfile
    >>> from persisting_torch import Queue
    >>> queue = Queue("rollouts", tempfile.mkdtemp())
    >>> _ = queue.sync.put([{"prompt": prompt} for prompt in "abcab"])
    >>> sampler = GRPOGroupNSampler(2, group_by="prompt")
    >>> queue.sync.get_meta(["prompt"], 4, sampler=sampler).global_indexes
    [0, 3, 1, 4]
    """

    def __init__(
        self,
        n_samples_per_prompt: int = 1,
        *,
        group_by: str | None = None,
        min_samples: int | None = None,
        straggler_timeout: float | None = None,
    ) -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(
                f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}."
                " Give the number of responses that each prompt gets."
            )
        if group_by is None and (min_samples is not None or straggler_timeout is not None):
            raise ValueError(
                "min_samples and straggler_timeout are about groups by the value of a field. Name"
                " the field in group_by."
            )
        if min_samples is not None and not 1 <= min_samples <= n_samples_per_prompt:
            raise ValueError(
                f"min_samples must be from 1 to n_samples_per_prompt {n_samples_per_prompt},"
                f" got {min_samples}."
            )
        if straggler_timeout is not None and not straggler_timeout >= 0:
            raise ValueError(
                f"straggler_timeout must be None or seconds from 0, got {straggler_timeout}."
            )
        self.n_samples_per_prompt = n_samples_per_prompt
        self.group_by = group_by
        self.looks = group_by is not None
        patience = math.inf if straggler_timeout is None else straggler_timeout
        if straggler_timeout is not None:
            often = max(straggler_timeout / 4, _SHORTEST_RECHECK_SECONDS)
            self.recheck_seconds = min(often, _LONGEST_RECHECK_SECONDS)
        least = min_samples or n_samples_per_prompt
        self._memories: Memories[Groups] = Memories(
            partial(Groups, group_by or "", n_samples_per_prompt, least, patience)
        )

    def sample(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """The next groups, `batch_size` samples in all where none is short, to read and to consume.

        Keywords `dp_rank` and `batch_index` name the answer to remember or repeat. Both lists are
        empty while there are too few groups. Raises ValueError where `batch_size` is not a multiple
        of `n_samples_per_prompt`.
        """
        dp_rank = kwargs.get("dp_rank")
        batch_index = kwargs.get("batch_index")
        if dp_rank is not None:
            answers = self._answers(partition_id, task_name, dp_rank)
            if batch_index in answers:
                sampled, consumed = answers[batch_index]
                return sampled.copy(), consumed.copy()
        groups = self._next_groups(ready_indexes, batch_size, 1, kwargs.get("look"))
        if groups is None:
            return [], []
        sampled = list(chain(*groups))
        if dp_rank is not None:
            answer = (sampled, sampled.copy())
            self._remember(partition_id, task_name, dp_rank, batch_index, answer)
        return sampled.copy(), sampled.copy()

    def deal(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        dp_size: int,
        look: Look | None = None,
        **kwargs: Any,
    ) -> list[list[int]]:
        """The slices of one global batch: batch_size / n whole groups for each of `dp_size` ranks.

        [] while there are too few groups. Raises ValueError where `batch_size` is not a multiple of
        `n_samples_per_prompt`.
        """
        groups = self._next_groups(ready_indexes, batch_size, dp_size, look)
        return [] if groups is None else self._share_out(groups, dp_size, look)

    def let_go(
        self, indexes: BitMap64, ready_indexes: Sequence[int], look: Look, reason: str
    ) -> BitMap64:
        """Drop the whole groups of some ready samples; all that was dropped.

        Without `group_by`, an incomplete group stays, so that the others keep their places.
        """
        ready = _members_of(ready_indexes)
        if self.group_by is None:
            indexes = BitMap64(chain(*_groups_in_rows(ready, indexes, self.n_samples_per_prompt)))
            look.drop(indexes, reason)
            return indexes
        memory = self._memories.of(look)
        memory.follow(ready, look)
        groups = memory.groups_of(indexes - look.gone)
        for group in groups:
            memory.note(group, look)
        members = (indexes - look.gone) | BitMap64(at for group in groups for at in group.members)
        look.drop(members, reason)
        return members

    def what_is_missing(self) -> str:
        """How many groups are incomplete, and what the oldest of them has."""
        memory = self._memories.latest
        return "" if memory is None else memory.what_is_missing

    def _share_out(
        self, groups: list[list[int]], dp_size: int, look: Look | None
    ) -> list[list[int]]:
        """Equal numbers of groups for the ranks, in order."""
        each = len(groups) // dp_size
        return [list(chain(*islice(groups, r * each, r * each + each))) for r in range(dp_size)]

    def _next_groups(
        self, ready_indexes: Sequence[int], batch_size: int, ranks: int, look: Look | None
    ) -> list[list[int]] | None:
        """The groups of a batch for so many ranks; None while there are too few."""
        n = self.n_samples_per_prompt
        if batch_size % n:
            raise ValueError(
                f"batch_size {batch_size} must be a multiple of n_samples_per_prompt {n}, so that"
                " no group is torn apart."
            )
        count = max(0, batch_size // n * ranks)
        if self.group_by is not None:
            groups = self._next_by_value(ready_indexes, count, look)
        elif isinstance(ready_indexes, AgedReady):
            whole = _in_rows(ready_indexes.members, n)
            groups = list(
                islice(_groups_in_rows(whole, ready_indexes.oldest_first(whole), n), count)
            )
        else:
            found = self._complete_groups(ready_indexes, count * n)
            groups = [found[at : at + n] for at in range(0, len(found), n)]
        return groups if len(groups) == count else None

    def _next_by_value(
        self, ready_indexes: Sequence[int], count: int, look: Look | None
    ) -> list[list[int]]:
        if look is None:
            raise ValueError(
                f"group_by={self.group_by!r} needs to read samples, which only a queue allows. Give"
                " the sampler to get_meta, get_batch or a dataset."
            )
        memory = self._memories.of(look)
        if isinstance(ready_indexes, AgedReady):
            memory.follow(ready_indexes.members, look)
            aged = ready_indexes.oldest_first(memory.members_going)
            groups = list(islice(memory.groups_in(aged), count))
        else:
            memory.follow(_members_of(ready_indexes), look, count)
            groups = list(islice(memory.going, count))
        if len(groups) == count:
            for group in groups:
                memory.note(group, look)
        return [sorted(group.members) for group in groups]

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


def _members_of(ready_indexes: Sequence[int]) -> BitMap64:
    if isinstance(ready_indexes, ReadyIndexes | AgedReady):
        return ready_indexes.members
    return BitMap64(ready_indexes)


def _in_rows(ready: BitMap64, n: int) -> BitMap64:
    return ReadyIndexes(ready).in_runs_of(n).members


def _groups_in_rows(ready: BitMap64, indexes: Iterable[int], n: int) -> Iterator[list[int]]:
    """The complete groups of n consecutive ready indexes that these belong to, in their order."""
    whole = _in_rows(ready, n)
    starts = whole - whole.shift(1)
    met: set[int] = set()
    for index in indexes:
        if index not in whole:
            continue
        row = starts[starts.rank(index) - 1]
        first = row + (index - row) // n * n
        if first not in met:
            met.add(first)
            if whole.contains_range(first, first + n):
                yield list(range(first, first + n))
