"""Where the rows of a queue with several buckets lie: each in one bucket's dataset.

Rows have numbers in the order in which they were committed, whichever bucket they went to, so that
all that counts by rows is the same for one bucket and for many. A place says that `count` rows from
`first_row` on are the rows from `bucket_row` on of a bucket. In memory, and for late rows in the
ledger too, bucket and row are packed into one number.
"""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap64

from persisting_torch.queue.runs import Int64s, Runs

BUCKET_SHIFT = 40
ROW_MASK = (1 << BUCKET_SHIFT) - 1


def pack(bucket: int, row: int) -> int:
    """A row of a bucket as one number."""
    return bucket << BUCKET_SHIFT | row


class Places:
    """The map between row numbers of the queue and rows of its buckets.

    A queue of one bucket has no places: its rows are numbered as the bucket numbers them.
    """

    def __init__(self) -> None:
        self._runs = Runs()

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, first_row: int, count: int, bucket: int, bucket_row: int) -> None:
        """Enter a place, or a longer version of a known one."""
        self._runs.add(first_row, count, pack(bucket, bucket_row))

    def drop(self, gone: BitMap64) -> None:
        """Forget places all of whose rows are gone."""
        self._runs.drop(gone, indexes=True)

    def packed(self, rows: Int64s) -> Int64s:
        """Bucket and row of each row number, packed; -1 for one that has no place."""
        return self._runs.rows_of(rows) if len(self._runs) else rows

    def rows(self, packed: Int64s) -> Int64s:
        """Row numbers of packed rows; -1 for one that has no place."""
        return self._runs.indexes_of(packed) if len(self._runs) else packed

    def buckets(self, rows: Int64s) -> Int64s:
        """The bucket of each row number."""
        return self.packed(rows) >> BUCKET_SHIFT


def by_bucket(packed: Int64s) -> list[tuple[int, Int64s, Int64s]]:
    """(bucket, positions, rows in the bucket) of packed rows, for each bucket with part in them."""
    buckets = packed >> BUCKET_SHIFT
    if len(buckets) and (buckets == buckets[0]).all():
        return [(int(buckets[0]), np.arange(len(packed)), packed & ROW_MASK)]
    found = []
    for bucket in np.unique(buckets).tolist():
        at = np.flatnonzero(buckets == bucket)
        found.append((bucket, at, packed[at] & ROW_MASK))
    return found
