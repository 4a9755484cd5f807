"""The indexes that a sampler may choose from: a list to the eye, a bitmap underneath."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, SupportsIndex, overload

import numpy as np
from pyroaring import BitMap64

# Stepping over an element of a bitmap costs about a sixtieth of looking one up by position.
# (The bitmap's own slices are of no use here: with long negative steps they are wrong.)
_WIDEST_STEP_TO_WALK = 64


class ReadyIndexes(Sequence[int]):
    """Global indexes in ascending order, read from a 64-bit roaring bitmap.

    Everything a list answers without being changed is answered the same way: length, positions,
    slices (as lists), iteration, membership, `index`, `count`, equality with a list, `sorted`,
    `np.asarray` (int64). Nothing is built row by row: the first n of ten million cost what the
    first n of a thousand do, and so does the element at a position.

    The view is frozen: whoever owns the bitmap leaves it alone while the view is in use.

    >>> ready = ReadyIndexes(BitMap64([3, 5, 8, 13]))
    >>> ready[1], ready[-2:], ready.first(3), 8 in ready
    (5, [8, 13], [3, 5, 8], True)
    """

    __slots__ = ("_bitmap", "_length")

    def __init__(self, bitmap: BitMap64) -> None:
        self._bitmap = bitmap
        self._length = len(bitmap)

    @property
    def members(self) -> BitMap64:
        """The bitmap underneath, for what bitmaps do better than lists; to be left as it is."""
        return self._bitmap

    def first(self, n: int) -> list[int]:
        """The n smallest indexes, or all of them where there are fewer."""
        return list(islice(self._bitmap, n))

    def without(self, others: BitMap64) -> ReadyIndexes:
        """The indexes that are not among others."""
        return ReadyIndexes(self._bitmap - others)

    def in_runs_of(self, length: int) -> ReadyIndexes:
        """The indexes that stand among at least `length` consecutive ready ones.

        Costs a pass over the bitmap's words, not over its elements.
        """
        members = self._bitmap
        for step in _doublings(length):
            members = members & members.shift(-step)  # in the end, the starts of such runs
        for step in _doublings(length):
            members = members | members.shift(step)
        return ReadyIndexes(members)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self._bitmap)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._bitmap)

    @overload
    def __getitem__(self, position: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: SupportsIndex | slice) -> int | list[int]:
        if isinstance(position, slice):
            return self._at(range(self._length)[position])
        place = operator.index(position)
        if not -self._length <= place < self._length:
            raise IndexError(f"position {place} is out of range: {self._length} indexes are ready")
        index: int = self._bitmap[place]
        return index

    def __contains__(self, value: object) -> bool:
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            return False
        return 0 <= number < 1 << 64 and number in self._bitmap

    def index(self, value: int, start: int = 0, stop: int | None = None) -> int:
        """The position of an index; ValueError where it is not among those searched."""
        if value in self:
            position = int(self._bitmap.rank(value)) - 1
            if position in range(self._length)[start:stop]:
                return position
        raise ValueError(f"{value!r} is not among the ready indexes that were searched")

    def count(self, value: int) -> int:
        """1 where the index is ready, else 0."""
        return int(value in self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ReadyIndexes):
            return bool(self._bitmap == other._bitmap)
        if isinstance(other, list):
            return self._length == len(other) and list(self) == other
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("ready indexes have no array to share; ask for a copy")
        return np.asarray(self._bitmap.to_array()).astype(dtype or np.int64)

    def __repr__(self) -> str:
        if not self._length:
            return "ReadyIndexes(empty)"
        return f"ReadyIndexes({self._length} from {self._bitmap.min()} to {self._bitmap.max()})"

    def _at(self, positions: range) -> list[int]:
        """The indexes at evenly spaced positions, all of them within bounds."""
        if not positions:
            return []
        if positions.step < 0:
            return self._at(positions[::-1])[::-1]
        if positions.step > _WIDEST_STEP_TO_WALK:
            return [self._bitmap[position] for position in positions]
        ahead = self._bitmap.iter_equal_or_larger(self._bitmap[positions[0]])
        return list(islice(ahead, 0, positions[-1] - positions[0] + 1, positions.step))


def _doublings(length: int) -> Iterator[int]:
    """Steps that grow a reach of 1 to `length`, none longer than the reach before it."""
    reach = 1
    while reach < length:
        step = min(reach, length - reach)
        yield step
        reach += step
