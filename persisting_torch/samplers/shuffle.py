"""A random order that can be had again."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Sequence
from typing import Any

from persisting_torch.samplers.base import BaseSampler


class ShuffleSampler(BaseSampler):
    """Draws samples at random, without replacement; what there is, where that is fewer.

    A draw follows from `seed`, the partition, the `dp_rank` and the `batch_index`: the same four
    and the same ready samples give the same batch, in any process and on any machine. Where no
    `batch_index` is given, what is ready stands in for it, so that successive draws differ.

    `window` bounds how far from the front a draw reaches: it takes from the `window` oldest ready
    samples (from the `batch_size` oldest, if those are more), and samples that arrive behind the
    window leave it unchanged. None reaches over all that is ready.

    Raises ValueError where `window` is not positive.

    >>> ShuffleSampler(seed=7).sample(range(100, 200), 3, batch_index=0)
    ([125, 188, 161], [125, 188, 161])
    """

    def __init__(self, seed: int, window: int | None = None) -> None:
        super().__init__()
        if window is not None and window <= 0:
            raise ValueError(
                f"window must be positive, got {window}."
                " Give the number of oldest samples to draw from, or None for all."
            )
        self.seed = operator.index(seed)
        self.window = window

    def sample(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        *args: Any,
        partition_id: str = "",
        dp_rank: int | None = None,
        batch_index: int | None = None,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """`batch_size` indexes in random order, to read and to consume.

        Raises ValueError for a negative `batch_size`.
        """
        if batch_size < 0:
            raise ValueError(f"batch_size must not be negative, got {batch_size}.")
        reach = len(ready_indexes)
        if self.window is not None:
            reach = min(reach, max(self.window, batch_size))
        if reach == 0:
            return [], []
        if batch_index is None:
            occasion = [len(ready_indexes), ready_indexes[0], ready_indexes[reach - 1]]
        else:
            occasion = [batch_index]
        draw = random.Random(self._seed_of(partition_id, dp_rank, occasion))
        positions = draw.sample(range(reach), min(batch_size, reach))
        sampled = [ready_indexes[position] for position in positions]
        return sampled, sampled.copy()

    def _seed_of(self, partition_id: str, dp_rank: int | None, occasion: list[int]) -> int:
        """A seed that is the same in every process (Python's own hash of a string is not)."""
        rank = None if dp_rank is None else operator.index(dp_rank)
        numbers = [operator.index(number) for number in occasion]
        text = repr((self.seed, partition_id, rank, numbers))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")
