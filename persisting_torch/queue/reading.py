"""From stable row ids to Arrow tables, at the speed of a scan where rows lie together.

Rows that lie close together are cut from blocks, which are kept for the requests that follow and,
where requests go on from one to the next, fetched ahead. Long runs of rows are blocks of their own.
Rows far apart are picked out one by one by Lance.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import pyarrow as pa

from persisting_torch.queue.blocks import CACHE_BYTES, Block, BlockCache
from persisting_torch.queue.fragments import FragmentTable, Int64s
from persisting_torch.queue.layout import BLOCK_BYTES, BlockKey, Layout, Part, Run

LONG_RUN_BYTES = BLOCK_BYTES // 2
AHEAD_BYTES = 2 * BLOCK_BYTES
DENSE_SHARE = 8  # a block is read for the sake of an eighth of its rows
FRAGMENTS_PER_REQUEST = 16  # in requests served by blocks
ROWS_PER_SLICE = 16  # shorter runs are copied together instead of handed out as chunks
HISTORY = 8  # requests remembered, to tell a stream from random access


class UnknownRows(KeyError):
    """Row ids that a version of the dataset does not hold."""

    def __init__(self, table: FragmentTable, rows: Int64s) -> None:
        missing = table.missing(rows)
        shown = ", ".join(map(str, missing[:10].tolist())) + (", ..." if len(missing) > 10 else "")
        super().__init__(
            f"{table.dataset.uri} at version {table.version} does not hold {len(missing)} of the"
            f" {len(rows)} row ids asked for: {shown}. They were deleted, or never appended."
        )


@dataclass(frozen=True, slots=True)
class Opened:
    """A block that a run was cut from, of rows `first` to `stop` - 1: the next run may be, too."""

    table: FragmentTable
    columns: tuple[str, ...]
    key: BlockKey
    block: Block
    first: int
    stop: int


class Reader:
    """Reads rows of one dataset, whichever way is the fastest. Thread safe."""

    def __init__(self, folder: str, options: dict[str, str] | None = None) -> None:
        self._cache = BlockCache(folder, options)
        self._layouts: tuple[FragmentTable | None, dict[tuple[str, ...], Layout]] = (None, {})
        self._recent: deque[dict[BlockKey, int]] = deque(maxlen=HISTORY)  # blocks, their bytes
        self._ends: deque[int] = deque(maxlen=HISTORY)  # row ids after the long runs
        self._led: BlockKey | None = None  # the block that was last read ahead from
        self._opened: Opened | None = None
        self._lock = threading.Lock()

    def read(self, table: FragmentTable, rows: Int64s, columns: Sequence[str]) -> pa.Table:
        """The columns of the rows, in the order asked for. Raises UnknownRows."""
        found = self._read_on(table, rows, tuple(columns))
        if found is not None:
            return found
        layout = self._layout(table, tuple(columns))
        if not len(rows):
            return layout.schema.empty_table()
        runs = table.runs(rows)
        if runs is not None and layout.columns:
            return self._read_runs(layout, runs, int(rows[0]), len(rows))
        slots, offsets = table.locate(rows)
        if slots.min() < 0:
            raise UnknownRows(table, rows)
        touched = np.unique(slots).tolist()
        if len(touched) <= FRAGMENTS_PER_REQUEST or not layout.columns:
            for slot in touched:
                live = table.fragment(slot).live
                if live is not None and not live[offsets[slots == slot]].all():
                    raise UnknownRows(table, rows)
            if not layout.columns:
                return pa.table({"": pa.nulls(len(rows))}).select([])
            parts = layout.parts(slots, offsets, touched)
            if self._blocks_pay(layout, parts):
                return self._read_parts(layout, parts)
        found = table.dataset._take_rows(pa.array(rows, pa.uint64()), columns=list(layout.columns))
        if found.num_rows != len(rows):
            raise UnknownRows(table, rows)
        return found

    def _read_on(
        self, table: FragmentTable, rows: Int64s, columns: tuple[str, ...]
    ) -> pa.Table | None:
        """Consecutive rows of the block that the last run was cut from, the short way."""
        opened = self._opened
        if opened is None or opened.table is not table or opened.columns != columns:
            return None
        first, stop = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (-1, -1)
        if first < opened.first or stop > opened.stop or stop - first != len(rows):
            return None
        if not (rows[1:] - rows[:-1] == 1).all():
            return None
        start = first - opened.first
        return self._cache.hand_out_of(opened.block, opened.key, start, start + len(rows))

    def _layout(self, table: FragmentTable, columns: tuple[str, ...]) -> Layout:
        of, layouts = self._layouts
        if of is not table:
            layouts = {}
            self._layouts = (table, layouts)
        layout = layouts.get(columns)
        if layout is None:
            layout = layouts[columns] = Layout(table, columns)
        return layout

    def _read_runs(self, layout: Layout, runs: list[Run], first: int, count: int) -> pa.Table:
        """Consecutive rows: from blocks, or as blocks of their own."""
        ahead: list[tuple[int, BlockKey]] = []
        if count * layout.cut(runs[0][0])[1] >= LONG_RUN_BYTES:
            parts = [layout.run_as_block(run) for run in runs]
            ahead = self._next_run(layout, first, count)
        else:
            parts = [part for run in runs for part in layout.parts_of_run(run)]
            if self._blocks_pay(layout, parts):
                ahead = self._next_blocks(layout, parts[-1])
            else:
                parts = [layout.run_as_block(run) for run in runs]
        found = self._hand_out(layout, parts, ahead)
        self._open(layout, parts, first)
        return found

    def _open(self, layout: Layout, parts: list[Part], first: int) -> None:
        """Remember the block of a run that lies in one, if it has rows left."""
        part = parts[0]
        block = self._cache.block(part.key) if len(parts) == 1 else None
        self._opened = None
        if block is not None and isinstance(part.at, slice):
            start = first - part.at.start
            self._opened = Opened(
                layout.table, layout.asked, part.key, block, start, start + part.key.rows
            )

    def _read_parts(self, layout: Layout, parts: list[Part]) -> pa.Table:
        """Rows in any order: in place where they rise in long runs, else copied together."""
        where = np.concatenate([part.where for part in parts])
        in_order = bool((np.diff(where) == 1).all())
        if in_order and all(part.rises for part in parts):
            runs = sum(len(part.runs()) for part in parts)
            if runs <= len(where) // ROWS_PER_SLICE:
                return self._hand_out(layout, parts, self._next_blocks(layout, parts[-1]))
        copies = [self._cache.copy(layout, part) for part in parts]
        copied = copies[0] if len(copies) == 1 else pa.concat_tables(copies).combine_chunks()
        if in_order:
            return copied
        back = np.empty_like(where)
        back[where] = np.arange(len(where))
        return copied.take(pa.array(back))

    def _hand_out(
        self, layout: Layout, parts: list[Part], ahead: list[tuple[int, BlockKey]]
    ) -> pa.Table:
        slices: list[pa.Table] = []
        for part, following in zip_longest(parts, parts[1:]):
            if following is not None:  # two blocks at a time are read in less time than in turn
                self._cache.fetch(layout, following.slot, following.key)
            slices += self._cache.hand_out(layout, part)
        for slot, key in ahead:
            self._cache.fetch(layout, slot, key)
        return slices[0] if len(slices) == 1 else pa.concat_tables(slices)

    def _blocks_pay(self, layout: Layout, parts: list[Part]) -> bool:
        """Whether each block is at hand, or densely asked for, or part of a stream.

        A stream: requests keep coming back to a few blocks or go on to the ones after them.
        """
        asked = {part.key: layout.bytes(part.slot, part.key) for part in parts}
        if all(self._cache.holds(part) for part in parts):
            with self._lock:
                self._recent.append(asked)
            return True
        with self._lock:
            seen = {key: size for request in self._recent for key, size in request.items()}
            self._recent.append(asked)
        few = sum((seen | asked).values()) <= CACHE_BYTES // 2
        return all(
            part.count * DENSE_SHARE >= part.key.rows
            or self._cache.holds(part)
            or (few and (part.key in seen or layout.before(part.slot, part.key) in seen))
            for part in parts
        )

    def _next_blocks(self, layout: Layout, part: Part) -> list[tuple[int, BlockKey]]:
        """What to read ahead after a block, if a stream led to it."""
        if part.key == self._led:
            return []
        sources = (part.key, layout.before(part.slot, part.key))
        with self._lock:
            earlier = list(self._recent)[:-1]
        ahead: list[tuple[int, BlockKey]] = []
        if any(source in request for request in earlier for source in sources):
            self._led, size = part.key, 0
            for slot, key in layout.after(part.slot, part.key):
                ahead.append((slot, key))
                size += layout.bytes(slot, key)
                if size >= AHEAD_BYTES:
                    break
        return ahead

    def _next_run(self, layout: Layout, first: int, count: int) -> list[tuple[int, BlockKey]]:
        """What to read ahead after a long run, if that one continued another."""
        after = first + count
        with self._lock:
            streaming = first in self._ends
            self._ends.append(after)
        size = count * layout.cut(0)[1]
        if not streaming or size > CACHE_BYTES // 2:
            return []
        ahead: list[tuple[int, BlockKey]] = []
        for start in range(after, after + count * max(1, AHEAD_BYTES // size), count):
            last = min(start + count - 1, int(layout.table.lasts[-1]))
            runs = layout.table.consecutive(start, last) or []
            ahead += [(part.slot, part.key) for part in map(layout.run_as_block, runs)]
        return ahead
