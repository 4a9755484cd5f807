"""How fragments are cut into blocks of some megabytes, each read in one call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from persisting_torch.queue.fragments import FragmentTable, Int64s

BLOCK_BYTES = 8 << 20
BLOCK_ROWS_MAX = 65_536

Run = tuple[int, int, int]  # slot in the fragment table, physical offset, count of rows


class BlockKey(NamedTuple):
    """Consecutive rows of one fragment, named by its data files, which never change."""

    files: tuple[str, ...]
    columns: tuple[str, ...]
    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a request that lie in one block."""

    slot: int
    key: BlockKey
    count: int
    at: Int64s | slice  # positions in the block
    where: Int64s | None = None  # positions in the request; None in a run of consecutive rows

    @property
    def rises(self) -> bool:
        """Whether each row lies behind the one before it."""
        return isinstance(self.at, slice) or bool((np.diff(self.at) > 0).all())

    def runs(self) -> list[tuple[int, int]]:
        """Stretches [start, stop) of consecutive positions in the block, in request order."""
        if isinstance(self.at, slice):
            return [(self.at.start, self.at.stop)]
        edges = [0, *(np.flatnonzero(np.diff(self.at) != 1) + 1).tolist(), self.count]
        return [(int(self.at[a]), int(self.at[b - 1]) + 1) for a, b in pairwise(edges)]


class Layout:
    """The blocks of one version for one choice of columns.

    Columns that the dataset lacks are left out.
    """

    def __init__(self, table: FragmentTable, columns: Sequence[str]) -> None:
        self.table = table
        self.asked = tuple(columns)
        self.columns = tuple(name for name in columns if name in table.field_ids)
        self.schema = pa.schema([table.schema.field(name) for name in self.columns])
        self._cuts: dict[int, tuple[int, int]] = {}

    def cut(self, slot: int) -> tuple[int, int]:
        """Rows in a block of this fragment, and bytes of a row by types and size of the files."""
        cut = self._cuts.get(slot)
        if cut is None:
            fragment = self.table.fragment(slot)
            count = fragment.positions.count
            widths = [self.table.width(name) for name in self.columns]
            row_bytes = sum(width or 0 for width in widths)
            if None in widths:
                stored = fragment.field_ids()
                fixed = sum(
                    self.table.width(name) or 0
                    for name, field_id in self.table.field_ids.items()
                    if field_id in stored
                )
                row_bytes += max(16, fragment.bytes // count - fixed)
            blocks = max(round(count * row_bytes / BLOCK_BYTES), count // BLOCK_ROWS_MAX, 1)
            cut = self._cuts[slot] = (math.ceil(count / blocks), row_bytes)
        return cut

    def bytes(self, slot: int, key: BlockKey) -> int:
        return key.rows * self.cut(slot)[1]

    def block(self, slot: int, number: int) -> BlockKey:
        """The n-th block of a fragment."""
        fragment, rows = self.table.fragment(slot), self.cut(slot)[0]
        start = number * rows
        rows = min(rows, fragment.positions.count - start)
        return BlockKey(fragment.files, self.columns, start, rows)

    def before(self, slot: int, key: BlockKey) -> BlockKey | None:
        """The block before this one; None at the beginning."""
        if key.start:
            return self.block(slot, (key.start - 1) // self.cut(slot)[0])
        if slot == 0:
            return None
        count = self.table.fragment(slot - 1).positions.count
        return self.block(slot - 1, (count - 1) // self.cut(slot - 1)[0])

    def after(self, slot: int, key: BlockKey) -> Iterator[tuple[int, BlockKey]]:
        """The blocks after this one, with their slots."""
        number = key.start // self.cut(slot)[0] + 1
        while slot < len(self.table):
            rows = self.cut(slot)[0]
            while number * rows < self.table.fragment(slot).positions.count:
                yield slot, self.block(slot, number)
                number += 1
            slot, number = slot + 1, 0

    def parts_of_run(self, run: Run) -> list[Part]:
        """Consecutive rows of one fragment, by blocks."""
        slot, offset, count = run
        parts, stop = [], offset + count
        while offset < stop:
            key = self.block(slot, offset // self.cut(slot)[0])
            start = offset - key.start
            part = min(stop - offset, key.rows - start)
            parts.append(Part(slot, key, part, slice(start, start + part)))
            offset += part
        return parts

    def run_as_block(self, run: Run) -> Part:
        """Consecutive rows of one fragment as a block of their own."""
        slot, offset, count = run
        key = BlockKey(self.table.fragment(slot).files, self.columns, offset, count)
        return Part(slot, key, count, slice(0, count))

    def parts(self, slots: Int64s, offsets: Int64s, touched: list[int]) -> list[Part]:
        """Any rows by blocks, in the order of row ids."""
        rows = np.ones(touched[-1] + 1, dtype=np.int64)
        rows[touched] = [self.cut(slot)[0] for slot in touched]
        codes = (slots << 32) | (offsets // rows[slots])
        order = np.argsort(codes, kind="stable")
        parts = []
        for where in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
            slot, offset = int(slots[where[0]]), int(offsets[where[0]])
            key = self.block(slot, offset // self.cut(slot)[0])
            parts.append(Part(slot, key, len(where), offsets[where] - key.start, where))
        return parts
