"""Rows that are there, among those that are gone: by number, and from a row on.

The set of rows that are gone is a bitmap, of some bytes where they lie together. Nothing here costs
what the history costs: a place in it is found by counting.
"""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap64

from persisting_torch.queue.runs import Int64s


def nth_present(gone: BitMap64, number: int) -> int:
    """The row id of present row `number`, counted from 0, where no row after the last is gone."""
    if not gone:
        return number
    low, high = number, number + len(gone)
    while low < high:
        middle = (low + high) // 2
        if middle + 1 - gone.rank(middle) > number:
            high = middle
        else:
            low = middle + 1
    return low


def present_from(gone: BitMap64, row: int, end: int, most: int) -> Int64s:
    """Up to `most` row ids that are not gone, in order, from `row` to `end` - 1; int64."""
    found = [np.empty(0, dtype=np.int64)]
    while most > 0 and row < end:
        row = nth_present(gone, row - gone.rank(row - 1) if row else 0)
        stop = min(end, row + most)
        if row < stop:
            step = present_between(gone, row, stop)
            found.append(step)
            most -= len(step)
        row = stop
    return found[-1] if len(found) == 2 else np.concatenate(found)


def present_between(gone: BitMap64, start: int, stop: int) -> Int64s:
    """The row ids from `start` to `stop` - 1 that are not gone; int64."""
    rows = np.arange(start, stop, dtype=np.int64)
    if not gone or not gone.range_cardinality(start, stop):
        return rows
    inside = BitMap64()
    inside.add_range(start, stop)
    left = (inside - gone).to_array()
    return np.array(left, dtype=np.int64)
