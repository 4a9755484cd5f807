"""Sets and lists of global indexes as the ledger stores them: `first`, `count`, `members`.

`members` is NULL when the indexes are first, first + 1, ... first + count - 1. Otherwise a set is a
serialised 64-bit roaring bitmap (the portable format of CRoaring), and a list, whose order matters,
is little-endian int64 values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from pyroaring import BitMap64

Packed = tuple[int, int, "bytes | None"]


def pack_set(members: BitMap64) -> Packed:
    """A set as its three columns."""
    count = len(members)
    if not count:
        return 0, 0, None
    first = members.min()
    if members.max() - first + 1 == count:
        return first, count, None
    return first, count, members.serialize()


def unpack_set(first: int, count: int, members: bytes | None) -> BitMap64:
    if members is not None:
        return BitMap64.deserialize(members)
    found = BitMap64()
    found.add_range(first, first + count)
    return found


def pack_list(indexes: Sequence[int]) -> Packed:
    """An ordered list as its three columns."""
    count = len(indexes)
    if not count:
        return 0, 0, None
    first = int(indexes[0])
    if isinstance(indexes, range) and indexes.step == 1:
        return first, count, None
    values = np.asarray(indexes, dtype="<i8")
    if (np.diff(values) == 1).all():
        return first, count, None
    return first, count, values.tobytes()


def unpack_list(first: int, count: int, members: bytes | None) -> list[int]:
    if members is None:
        return list(range(first, first + count))
    values: list[int] = np.frombuffer(members, dtype="<i8").tolist()
    return values


def set_of(indexes: Iterable[int]) -> BitMap64:
    """A bitmap of indexes; a range costs the same whatever its length."""
    if isinstance(indexes, range) and indexes.step == 1 and len(indexes):
        found = BitMap64()
        found.add_range(indexes.start, indexes.stop)
        return found
    return BitMap64(indexes.tolist() if isinstance(indexes, np.ndarray) else indexes)


def solid_ranges(members: BitMap64) -> list[tuple[int, int]]:
    """A set as ranges of consecutive numbers, each (first, last + 1), rising."""
    if members and members.max() - members.min() + 1 == len(members):
        return [(members.min(), members.max() + 1)]
    values = np.array(members.to_array(), dtype=np.int64)
    return [(int(part[0]), int(part[-1]) + 1) for part in _split_at_gaps(values) if len(part)]


def runs_of(indexes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[tuple[int, int]]:
    """Indexes in their order as (first, count) of consecutive ones."""
    return [(int(part[0]), len(part)) for part in _split_at_gaps(indexes) if len(part)]


def _split_at_gaps(
    values: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return np.split(values, np.flatnonzero(np.diff(values) != 1) + 1)
