"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from persisting_torch.samplers.base import BaseSampler


class SequentialSampler(BaseSampler):
    """Gives the samples at the front, in order, each once; what there is, where that is fewer.

    >>> SequentialSampler().sample([10, 11, 12], 2)
    ([10, 11], [10, 11])
    """

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """The first `batch_size` indexes in the order given, to read and to consume.

        A negative `batch_size` leaves out that many at the end, as a list's slice does.
        """
        sampled = list(ready_indexes[:batch_size])
        return sampled, sampled.copy()
