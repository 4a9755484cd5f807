"""Groups dealt to the ranks so that each has as many tokens to train on as the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from pyroaring import BitMap64

from persisting_torch.queue.ready import ReadyIndexes
from persisting_torch.samplers.aged import AgedReady
from persisting_torch.samplers.balance import (
    deal_evenly,
    deal_in_order,
    imbalance,
    swap_evenly,
)
from persisting_torch.samplers.grpo import GRPOGroupNSampler

if TYPE_CHECKING:
    from persisting_torch.queue.look import Look

log = logging.getLogger(__name__)

Slices = list[list[int]]


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Gives whole groups, dealt to the data-parallel ranks so that their token counts are even.

    In training, the groups of a global batch are those that GRPOGroupNSampler chooses, whose
    arguments it takes (with the default of one sample a group: the samples at the front). Every
    rank gets the same number of groups, and Karmarkar and Karp's differencing method decides
    which, by the sums of their samples' lengths, mended by swaps; where the order of the groups
    happens to be as even as that, they are dealt in order. `length_field` names the lengths: a
    field of numbers, or one of tensors, lists or text, whose own lengths count. The same samples
    are always dealt the same way.

    Called directly, it answers as TransferQueue's does: `sample` is asked by each rank, with
    `dp_rank` and `batch_index`, for the `batch_size` samples of its slice of the batch for
    `dp_size` ranks. The lengths are those that `partition.get_custom_meta(indexes)` tells under
    "total_lengths" for each index; without a `partition`, the batch is cut in order. With a
    `length_field` or `group_by` that goes for `get_meta` as well, but that the queue tells the
    lengths and keeps the slices for ranks that have not asked yet, in whatever process they are. In
    training `dp_size` is the dataset's.

    Raises ValueError where a number is out of its range.

    >>> sampler = SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)
    >>> [sampler.sample(range(8), 2, dp_rank=rank, batch_index=0)[0] for rank in range(2)]
    [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        n_samples_per_prompt: int = 1,
        dp_size: int = 1,
        *,
        length_field: str | None = None,
        group_by: str | None = None,
        min_samples: int | None = None,
        straggler_timeout: float | None = None,
    ) -> None:
        super().__init__(
            n_samples_per_prompt,
            group_by=group_by,
            min_samples=min_samples,
            straggler_timeout=straggler_timeout,
        )
        if dp_size <= 0:
            raise ValueError(
                f"dp_size must be positive, got {dp_size}. Give the number of data-parallel ranks."
            )
        self.dp_size = dp_size
        self.length_field = length_field
        self.looks = self.looks or length_field is not None
        self._balanced_cache: dict[tuple[str, str, Any], Slices] = {}

    def sample(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """The slice of rank `dp_rank` (default 0) of batch `batch_index` (default 0).

        The first call for a batch deals its slices to all ranks, and they stay until `clear_cache`.
        Both lists are empty while too few groups are complete, and for a rank from `dp_size` on.
        Raises ValueError where `batch_size * dp_size` is not a multiple of `n_samples_per_prompt`,
        AssertionError where the groups cannot be dealt in equal numbers.
        """
        if self.looks and kwargs.get("look") is not None:
            return self._sample_for_rank(ready_indexes, batch_size, **kwargs)
        dp_rank, batch_index = kwargs.get("dp_rank", 0), kwargs.get("batch_index", 0)
        place = (partition_id, task_name, batch_index)
        slices = self._balanced_cache.get(place)
        if slices is None:
            slices = self._form(ready_indexes, batch_size, kwargs.get("partition"))
            if not slices:
                return [], []
            self._balanced_cache[place] = slices
            for rank, part in enumerate(slices):
                self._remember(partition_id, task_name, rank, batch_index, (part, part.copy()))
        sampled = slices[dp_rank] if dp_rank < len(slices) else []
        return sampled.copy(), sampled.copy()

    def _sample_for_rank(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        *,
        look: Look,
        dp_rank: int | None = None,
        batch_index: int | None = None,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """A rank's slice, of a batch dealt before or now; the others' are noted in the queue."""
        if dp_rank is None and self.dp_size == 1:
            dp_rank = 0
        unnamed = batch_index is None and self.dp_size > 1
        if dp_rank is None or not 0 <= dp_rank < self.dp_size or unnamed:
            raise ValueError(
                f"SeqlenBalancedSampler deals batches to {self.dp_size} ranks, and was asked with"
                f" dp_rank {dp_rank} and batch_index {batch_index}. Give both to get_meta."
            )
        dealt: dict[str, list[list[int]]] = look.recall("slices") or {}
        place = str(batch_index)
        if place not in dealt:
            kept = BitMap64(at for slices in dealt.values() for part in slices for at in part)
            slices = self.deal(_without(ready_indexes, kept), batch_size, self.dp_size, look)
            if not slices:
                return [], []
            dealt[place] = slices
        sampled, dealt[place][dp_rank] = dealt[place][dp_rank], []
        if not any(dealt[place]):
            del dealt[place]
        look.note("slices", dealt or None)
        sampled = [at for at in sampled if at in ready_indexes]
        return sampled, sampled.copy()

    def _form(self, ready_indexes: Sequence[int], batch_size: int, partition: Any) -> Slices:
        groups = self._next_groups(ready_indexes, batch_size * self.dp_size, 1, None)
        if not groups:
            return []
        if partition is None:
            log.warning("no partition was given that tells lengths: the batch is cut in order")
            chosen = list(chain(*groups))
            return [
                [chosen[at] for at in part] for part in deal_in_order(len(chosen), self.dp_size)
            ]
        if len(groups) % self.dp_size:
            raise AssertionError(
                f"{len(groups)} groups cannot be dealt to {self.dp_size} ranks in equal numbers:"
                f" {len(groups)} % {self.dp_size} != 0. Ask for a batch_size that is a multiple of"
                f" n_samples_per_prompt {self.n_samples_per_prompt}."
            )
        told = partition.get_custom_meta(list(chain(*groups)))
        weights = [sum(told.get(at, {}).get("total_lengths", 1) for at in g) for g in groups]
        return _slices(groups, deal_evenly(weights, self.dp_size))

    def _share_out(self, groups: Slices, dp_size: int, look: Look | None) -> Slices:
        if look is None or self.length_field is None:
            raise ValueError(
                "SeqlenBalancedSampler does not know how long the samples are. Name a field in"
                " length_field: of numbers, or of the tensors themselves."
            )
        weights = _weights(groups, self.length_field, look)
        shares = min(
            deal_in_order(len(groups), dp_size),
            swap_evenly(weights, deal_evenly(weights, dp_size)),
            key=lambda shares: imbalance(weights, shares),
        )
        return _slices(groups, shares)

    def clear_cache(self, partition_id: str) -> None:
        """Forget every answer given for a partition."""
        super().clear_cache(partition_id)
        for place in [place for place in self._balanced_cache if place[0] == partition_id]:
            del self._balanced_cache[place]

    def save_checkpoint(self) -> dict[str, Any]:
        """The sampler's memory as it is now, for `load_checkpoint`."""
        slices = {place: [part.copy() for part in s] for place, s in self._balanced_cache.items()}
        return {**super().save_checkpoint(), "_balanced_cache": slices}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Take the place of the sampler whose `save_checkpoint` gave `state`."""
        super().load_checkpoint(state)
        self._balanced_cache = {
            place: [part.copy() for part in slices]
            for place, slices in state["_balanced_cache"].items()
        }


def _weights(groups: Slices, field: str, look: Look) -> list[float]:
    """How long the samples of each group are, together."""
    indexes = list(chain(*groups))
    numbers = look.values(field, indexes)
    if not isinstance(numbers, np.ndarray) or numbers.dtype == bool:
        numbers = look.lengths(field, indexes)
    bounds = np.cumsum([0, *(len(group) for group in groups[:-1])])
    weights: list[float] = np.add.reduceat(numbers, bounds).tolist()
    return weights


def _without(ready_indexes: Sequence[int], kept: BitMap64) -> Sequence[int]:
    if isinstance(ready_indexes, ReadyIndexes | AgedReady):
        return ready_indexes.without(kept)
    return [at for at in ready_indexes if at not in kept]


def _slices(groups: Slices, shares: Sequence[Sequence[int]]) -> Slices:
    return [list(chain(*(groups[at] for at in share))) for share in shares]
