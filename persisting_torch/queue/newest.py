"""Which late row holds the newest value of a field, for each sample that has one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

GROWTH = 8  # a level is at least so many times larger than the next


class Newest:
    """The largest row id entered for each global index.

    Its size is that of what was entered, whatever the indexes are. Entries lie in a few levels of
    sorted arrays, the largest first; a small one is merged into its neighbour once it has grown to
    a share of it, so that entering costs what is entered, a logarithmic number of times.
    """

    def __init__(self) -> None:
        self._levels: list[tuple[Int64s, Int64s]] = []

    def __len__(self) -> int:
        """Entries held; an index counts once for each level that has it."""
        return sum(len(indexes) for indexes, _ in self._levels)

    def enter(self, indexes: Int64s, rows: Int64s) -> None:
        """Row ids that hold values of these samples; they rise from entry to entry."""
        if not len(indexes):
            return
        self._levels.append(_last(indexes, rows))
        while len(self._levels) > 1 and len(self._levels[-2][0]) < GROWTH * len(
            self._levels[-1][0]
        ):
            self._merge(2)

    def find(self, indexes: Int64s) -> Int64s:
        """The newest row of each sample, in their order; -1 for a sample without one."""
        found = np.full(len(indexes), -1, dtype=np.int64)
        if not len(indexes):
            return found
        low, high = indexes.min(), indexes.max()
        for known, rows in self._levels:
            if known[-1] < low or high < known[0]:
                continue
            at = np.minimum(np.searchsorted(known, indexes), len(known) - 1)
            found = np.maximum(found, np.where(known[at] == indexes, rows[at], -1))
        return found

    def entries(self) -> tuple[Int64s, Int64s]:
        """All indexes, ascending, and the newest row of each."""
        if not self._levels:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        self._merge(len(self._levels))
        return self._levels[0]

    def keep(self, firsts: Int64s, ends: Int64s) -> None:
        """Forget rows outside of the ranges from firsts[i] to ends[i] - 1, which rise."""
        indexes, rows = self.entries()
        kept = covered(rows, firsts, ends)
        self._levels = [(indexes[kept], rows[kept])] if kept.any() else []

    def _merge(self, count: int) -> None:
        """Make one level of the last few."""
        last = self._levels[-count:]
        if count > 1:
            indexes, rows = (np.concatenate(parts) for parts in zip(*last, strict=True))
            self._levels[-count:] = [_last(indexes, rows)]


def covered(rows: Int64s, firsts: Int64s, ends: Int64s) -> Bools:
    """Which of the row ids lie in one of the ranges, which rise and do not overlap."""
    if not len(firsts):
        return np.zeros(len(rows), dtype=bool)
    at = np.searchsorted(firsts, rows, side="right") - 1
    inside: Bools = (at >= 0) & (rows < ends[at])
    return inside


def _last(indexes: Int64s, rows: Int64s) -> tuple[Int64s, Int64s]:
    """Sorted by index, with the last row of each; quick where sorted parts follow each other."""
    order = np.argsort(indexes, kind="stable")
    indexes, rows = indexes[order], rows[order]
    last = np.append(indexes[1:] != indexes[:-1], True)
    return indexes[last], rows[last]
