"""Where samples stand: runs of consecutive global indexes in consecutive rows of `data.lance`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from persisting_torch.queue.sets import solid_ranges

Int64s = NDArray[np.int64]

FEWEST_RECENT = 64
FEW_INDEXES = 1 << 16  # cheaper one by one than run by run


class Runs:
    """The map between global indexes and row ids.

    A run is (first_index, count, first_row). Most runs lie in sorted arrays; the newest in a short
    list that is merged into them when it has grown, so that entering one stays cheap.
    """

    def __init__(self) -> None:
        self._settled = _Table(np.empty((0, 3), dtype=np.int64))
        self._recent: dict[int, tuple[int, int]] = {}
        self._recent_table: _Table | None = None

    def add(self, first_index: int, count: int, first_row: int) -> None:
        """Enter a run, or a longer version of a known one."""
        if first_index not in self._recent and self._settled.lengthen(first_index, count):
            return
        self._recent[first_index] = (count, first_row)
        self._recent_table = None
        if len(self._recent) > max(FEWEST_RECENT, len(self._settled) // 64):
            merged = np.concatenate([self._settled.runs(), self._recent_runs()])
            self._settled = _Table(merged)
            self._recent.clear()

    def add_all(self, indexes: BitMap64, first_row: int) -> None:
        """Enter rising indexes whose rows follow one another."""
        for first, stop in solid_ranges(indexes):
            self.add(first, stop - first, first_row)
            first_row += stop - first

    def drop(self, gone: BitMap64, *, indexes: bool = False) -> None:
        """Forget runs all of whose rows are gone, or all of whose indexes are."""
        runs = np.concatenate([self._settled.runs(), self._recent_runs()])
        left = [
            not gone.contains_range(*((first, first + count) if indexes else (row, row + count)))
            for first, count, row in runs.tolist()
        ]
        if not all(left):
            self._settled = _Table(runs[np.array(left)])
            self._recent.clear()
            self._recent_table = None

    def indexes_below(self, end: int) -> BitMap64:
        """The indexes of all rows below `end`."""
        found = BitMap64()
        for table in (self._settled, self._newest()):
            for first, count, row in table.runs().tolist():
                if row < end:
                    found.add_range(first, first + min(count, end - row))
        return found

    def rows_of_set(self, indexes: BitMap64) -> BitMap64:
        """Row ids of a set of indexes, without those that no row holds."""
        found = BitMap64()
        if len(indexes) <= FEW_INDEXES:
            rows = self.rows_of(np.array(indexes.to_array(), dtype=np.int64))
            found.update(rows[rows >= 0].tolist())
            return found
        for table in (self._settled, self._newest()):
            for first, count, row in table.runs().tolist():
                own = BitMap64()
                own.add_range(first, first + count)
                found |= (own & indexes).shift(row - first)
        return found

    def _recent_runs(self) -> Int64s:
        runs = [(first, count, row) for first, (count, row) in self._recent.items()]
        return np.array(runs, dtype=np.int64).reshape(-1, 3)

    def _newest(self) -> _Table:
        if self._recent_table is None:
            self._recent_table = _Table(self._recent_runs())
        return self._recent_table

    def __len__(self) -> int:
        return len(self._settled) + len(self._recent)

    def rows_of(self, indexes: Sequence[int] | Int64s) -> Int64s:
        """Row ids of global indexes, in their order; -1 for an index that no row holds.

        Indexes and rows are int64 arrays of the same length.
        """
        wanted = np.asarray(indexes, dtype=np.int64)
        if len(self._recent) == 1 and not len(self._settled):
            [(first, (count, row))] = self._recent.items()
            if len(wanted) and wanted.min() >= first and wanted.max() < first + count:
                return wanted + (row - first)
        found = self._settled.rows_of(wanted)
        if self._recent:
            found = np.maximum(found, self._newest().rows_of(wanted))
        return found

    def indexes_of(self, rows: Int64s) -> Int64s:
        """Global indexes of row ids, in their order; -1 for a row that is in no run."""
        found = self._settled.indexes_of(rows)
        if self._recent:
            found = np.maximum(found, self._newest().indexes_of(rows))
        return found


class _Table:
    """Runs in arrays sorted by index, and the order that sorts them by row."""

    def __init__(self, runs: Int64s) -> None:
        runs = runs[np.argsort(runs[:, 0])]
        self.firsts = np.ascontiguousarray(runs[:, 0])
        self.counts = np.ascontiguousarray(runs[:, 1])
        self.rows = np.ascontiguousarray(runs[:, 2])
        self._by_row: tuple[Int64s, Int64s] | None = None

    def __len__(self) -> int:
        return len(self.firsts)

    def runs(self) -> Int64s:
        return np.stack([self.firsts, self.counts, self.rows], axis=1)

    def lengthen(self, first_index: int, count: int) -> bool:
        at = int(np.searchsorted(self.firsts, first_index))
        if at == len(self) or self.firsts[at] != first_index:
            return False
        self.counts[at] = count
        return True

    def rows_of(self, indexes: Int64s) -> Int64s:
        if not len(self):
            return np.full(len(indexes), -1, dtype=np.int64)
        at = np.searchsorted(self.firsts, indexes, side="right") - 1
        offset = indexes - self.firsts[at]
        inside = (at >= 0) & (offset < self.counts[at])
        return np.where(inside, self.rows[at] + offset, np.int64(-1))

    def indexes_of(self, rows: Int64s) -> Int64s:
        if not len(self):
            return np.full(len(rows), -1, dtype=np.int64)
        if self._by_row is None:
            order = np.argsort(self.rows)
            self._by_row = self.rows[order], order
        starts, order = self._by_row
        place = np.searchsorted(starts, rows, side="right") - 1
        at = order[place]
        offset = rows - self.rows[at]
        inside = (place >= 0) & (offset < self.counts[at])
        return np.where(inside, self.firsts[at] + offset, np.int64(-1))
