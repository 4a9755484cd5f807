"""Ready samples in the order of their age."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, islice
from typing import SupportsIndex, overload

from pyroaring import BitMap64

from persisting_torch.queue.ready import ReadyIndexes


class AgedReady(Sequence[int]):
    """Global indexes, oldest first: those of the first layer in ascending order, and so on.

    `layers` may hold others than the `members`; members that no layer holds come last. Like a
    `ReadyIndexes` it is frozen, and nothing is built row by row.

    >>> list(AgedReady(BitMap64([1, 2, 3, 4]), [BitMap64([3, 9]), BitMap64([1, 4])]))
    [3, 1, 4, 2]
    """

    def __init__(self, members: BitMap64, layers: Sequence[BitMap64]) -> None:
        self.members = members
        self._layers = layers

    def oldest_first(self, chosen: BitMap64) -> Iterator[int]:
        """Those of the chosen that are members, oldest first."""
        left = chosen & self.members
        for layer in self._layers:
            if not left:
                return
            here = layer & left
            yield from here
            left = left - here
        yield from left

    def first(self, n: int) -> list[int]:
        """The n oldest, or all of them where there are fewer."""
        return list(islice(self, n))

    def without(self, others: BitMap64) -> AgedReady:
        """The indexes that are not among others."""
        return AgedReady(self.members - others, self._layers)

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[int]:
        return self.oldest_first(self.members)

    def __contains__(self, value: object) -> bool:
        return value in ReadyIndexes(self.members)

    @overload
    def __getitem__(self, position: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: SupportsIndex | slice) -> int | list[int]:
        if not isinstance(position, slice):
            return self._at(range(len(self))[position])
        places = range(len(self))[position]
        if places.step == 1:
            return list(islice(self, places.start, places.stop))
        return [self._at(place) for place in places]

    def _at(self, place: int) -> int:
        parts, ends = self._parts
        part = bisect_right(ends, place)
        index: int = parts[part][place - (ends[part - 1] if part else 0)]
        return index

    @cached_property
    def _parts(self) -> tuple[list[BitMap64], list[int]]:
        """The members of each layer and of none, and where each of these ends."""
        parts, left = [], self.members
        for layer in self._layers:
            parts.append(layer & left)
            left = left - layer
        parts.append(left)
        return parts, list(accumulate(map(len, parts)))
