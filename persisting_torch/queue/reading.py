"""From stable row ids to Arrow tables, at the speed of a scan where rows lie together.

Rows that lie close together are cut from blocks: some 8 MB of one fragment, read in one call, kept
for the requests that follow, the next one fetched ahead. Long runs of rows are read as they are.
Rows far apart are picked out one by one by Lance.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from lance.file import LanceFileReader, LanceFileSession

from persisting_torch.queue.fragments import FragmentTable, Int64s

BLOCK_BYTES = 8 << 20
BLOCK_ROWS_MAX = 65_536
LONG_RUN_BYTES = BLOCK_BYTES // 2  # read as they are, in one chunk
CACHE_BYTES = 64 << 20
OPEN_FILES = 32
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


class BlockKey(NamedTuple):
    """Consecutive rows of one fragment, named by its data files, which never change."""

    files: tuple[str, ...]
    columns: tuple[str, ...]
    start: int
    rows: int


class Block:
    """The rows of a block, and which of them may still be handed out without a copy."""

    __slots__ = ("fresh", "left", "table")

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.fresh = np.ones(table.num_rows, dtype=bool)
        self.left = table.num_rows


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a request that lie in one block."""

    slot: int
    number: int  # of the block in its fragment
    key: BlockKey
    count: int
    at: Int64s | slice  # positions in the block
    where: Int64s | None = None  # positions in the request; None in a run of consecutive rows

    def runs(self) -> list[tuple[int, int]]:
        """Stretches [start, stop) of consecutive positions in the block, in request order."""
        if isinstance(self.at, slice):
            return [(self.at.start, self.at.stop)]
        edges = [0, *(np.flatnonzero(np.diff(self.at) != 1) + 1).tolist(), self.count]
        return [(int(self.at[a]), int(self.at[b - 1]) + 1) for a, b in pairwise(edges)]


class Layout:
    """How the fragments of one version are cut into blocks for one choice of columns."""

    def __init__(self, table: FragmentTable, columns: Sequence[str]) -> None:
        self.table = table
        self.columns = tuple(name for name in columns if name in table.field_ids)
        self.schema = pa.schema([table.schema.field(name) for name in self.columns])
        self._widths = {field.name: _fixed_width(field.type) for field in table.schema}
        self._cuts: dict[int, tuple[int, int]] = {}

    def cut(self, slot: int) -> tuple[int, int]:
        """Rows of a block of this fragment, and their bytes as types and file sizes suggest."""
        cut = self._cuts.get(slot)
        if cut is None:
            fragment = self.table.fragment(slot)
            count = fragment.positions.count
            row_bytes = sum(self._widths[name] or 0 for name in self.columns)
            if any(self._widths[name] is None for name in self.columns):
                stored = fragment.field_ids()
                fixed = sum(
                    width or 0
                    for name, width in self._widths.items()
                    if self.table.field_ids[name] in stored
                )
                row_bytes += max(16, fragment.bytes // count - fixed)
            blocks = max(1, round(count * row_bytes / BLOCK_BYTES), -(-count // BLOCK_ROWS_MAX))
            rows = -(-count // blocks)
            cut = self._cuts[slot] = (rows, rows * row_bytes)
        return cut

    def key(self, slot: int, number: int) -> BlockKey:
        fragment, rows = self.table.fragment(slot), self.cut(slot)[0]
        start = number * rows
        return BlockKey(
            fragment.files, self.columns, start, min(rows, fragment.positions.count - start)
        )

    def next_to(self, slot: int, number: int, step: int) -> tuple[int, int] | None:
        """Slot and number of the block after (step 1) or before (step -1); None at the ends."""
        number += step
        if number < 0:
            slot -= 1
            return (slot, self._last(slot)) if slot >= 0 else None
        if number > self._last(slot):
            slot += 1
            return (slot, 0) if slot < len(self.table) else None
        return slot, number

    def parts_of_run(self, slot: int, offset: int, count: int) -> list[Part]:
        """Consecutive rows of one fragment, by blocks."""
        rows, parts, stop = self.cut(slot)[0], [], offset + count
        while offset < stop:
            key = self.key(slot, offset // rows)
            start = offset - key.start
            part = min(stop - offset, key.rows - start)
            parts.append(Part(slot, offset // rows, key, part, slice(start, start + part)))
            offset += part
        return parts

    def parts(self, slots: Int64s, offsets: Int64s, touched: list[int]) -> list[Part]:
        """Any rows by blocks, in the order of row ids."""
        rows = np.ones(touched[-1] + 1, dtype=np.int64)
        rows[touched] = [self.cut(slot)[0] for slot in touched]
        numbers = offsets // rows[slots]
        codes = (slots << 32) | numbers
        order = np.argsort(codes, kind="stable")
        parts = []
        for where in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
            slot, number = int(slots[where[0]]), int(numbers[where[0]])
            key = self.key(slot, number)
            parts.append(Part(slot, number, key, len(where), offsets[where] - key.start, where))
        return parts

    def _last(self, slot: int) -> int:
        return (self.table.fragment(slot).positions.count - 1) // self.cut(slot)[0]


class Reader:
    """Reads rows of one dataset through a cache of blocks and of open files. Thread safe."""

    def __init__(self, folder: str) -> None:
        self._session = LanceFileSession(folder)
        self._files: OrderedDict[tuple[str, tuple[str, ...]], LanceFileReader] = OrderedDict()
        self._blocks: OrderedDict[BlockKey, Future[Block]] = OrderedDict()
        self._sizes: dict[BlockKey, int] = {}
        self._history: deque[dict[BlockKey, int]] = deque(maxlen=HISTORY)
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._lock = threading.Lock()
        self._ahead: ThreadPoolExecutor | None = None

    def read(self, table: FragmentTable, rows: Int64s, columns: Sequence[str]) -> pa.Table:
        """The columns of the rows, in the order asked for. Raises UnknownRows."""
        layout = self._layout(table, tuple(columns))
        if not len(rows):
            return layout.schema.empty_table()
        runs = table.runs(rows)
        if runs is not None:
            if not layout.columns:
                return _without_columns(len(rows))
            return self._read_runs(layout, runs)
        slots, offsets = table.locate(rows)
        if slots.min() < 0:
            raise UnknownRows(table, rows)
        touched = np.unique(slots).tolist()
        if len(touched) <= FRAGMENTS_PER_REQUEST or not layout.columns:
            if any(
                live is not None and not live[offsets[slots == slot]].all()
                for slot in touched
                if (live := table.fragment(slot).live) is not None
            ):
                raise UnknownRows(table, rows)
            if not layout.columns:
                return _without_columns(len(rows))
            parts = layout.parts(slots, offsets, touched)
            if self._blocks_pay(layout, parts):
                return self._from_blocks(layout, parts)
        found = table.dataset._take_rows(pa.array(rows, pa.uint64()), columns=list(layout.columns))
        if found.num_rows != len(rows):
            raise UnknownRows(table, rows)
        return found

    def _layout(self, table: FragmentTable, columns: tuple[str, ...]) -> Layout:
        layout = self._layouts.get(columns)
        if layout is None or layout.table is not table:
            layout = self._layouts[columns] = Layout(table, columns)
        return layout

    def _read_runs(self, layout: Layout, runs: list[tuple[int, int, int]]) -> pa.Table:
        """Runs of consecutive rows: from blocks, or just as they are."""
        rows, size = layout.cut(runs[0][0])
        if sum(count for _, _, count in runs) * size < rows * LONG_RUN_BYTES:
            parts = [part for run in runs for part in layout.parts_of_run(*run)]
            if self._blocks_pay(layout, parts):
                return self._slices(layout, parts, [part.runs() for part in parts])
        tables = [self._load(layout, *run) for run in runs]
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables)

    def _blocks_pay(self, layout: Layout, parts: list[Part]) -> bool:
        """Whether each block is at hand, or densely asked for, or part of a stream.

        A stream: requests keep coming back to a few blocks or go on to the ones after them.
        """
        with self._lock:
            seen: dict[BlockKey, int] = {}
            for request in self._history:
                seen.update(request)
            asked = {part.key: layout.cut(part.slot)[1] for part in parts}
            self._history.append(asked)
            streaming = sum((seen | asked).values()) <= CACHE_BYTES // 2
            at_hand = {part.key for part in parts if self._is_at_hand(part)}
        for part in parts:
            if part.key in at_hand or part.count * DENSE_SHARE >= part.key.rows:
                continue
            if not streaming:
                return False
            before = layout.next_to(part.slot, part.number, -1)
            if part.key not in seen and (before is None or layout.key(*before) not in seen):
                return False
        return True

    def _is_at_hand(self, part: Part) -> bool:
        future = self._blocks.get(part.key)
        if future is None:
            return False
        return not future.done() or bool(future.result().fresh[part.at].all())

    def _from_blocks(self, layout: Layout, parts: list[Part]) -> pa.Table:
        """Rows in any order: slices where they rise in long runs, else copied together."""
        where = np.concatenate([part.where for part in parts])
        in_order = bool((np.diff(where) == 1).all())
        if in_order and all((np.diff(part.at) > 0).all() for part in parts):
            runs = [part.runs() for part in parts]
            if sum(map(len, runs)) <= len(where) // ROWS_PER_SLICE:
                return self._slices(layout, parts, runs)
        copies = [self._fresh(layout, part).table.take(pa.array(part.at)) for part in parts]
        copied = copies[0] if len(copies) == 1 else pa.concat_tables(copies).combine_chunks()
        if in_order:
            return copied
        back = np.empty_like(where)
        back[where] = np.arange(len(where))
        return copied.take(pa.array(back))

    def _slices(
        self, layout: Layout, parts: list[Part], runs: list[list[tuple[int, int]]]
    ) -> pa.Table:
        slices = []
        for part, stretches in zip(parts, runs, strict=True):
            block = self._claim(layout, part, stretches)
            slices += [block.table.slice(start, stop - start) for start, stop in stretches]
        self._look_ahead(layout, parts[-1])
        return slices[0] if len(slices) == 1 else pa.concat_tables(slices)

    def _fresh(self, layout: Layout, part: Part) -> Block:
        """The block, none of whose rows asked for were handed out before."""
        while True:
            future = self._block(layout, part.slot, part.number)
            block = future.result()
            with self._lock:
                if block.fresh[part.at].all():
                    return block
                self._forget(part.key, future)

    def _claim(self, layout: Layout, part: Part, runs: list[tuple[int, int]]) -> Block:
        """The block, with the runs marked as handed out."""
        while True:
            future = self._block(layout, part.slot, part.number)
            block = future.result()
            with self._lock:
                fresh = bool(block.fresh[part.at].all())
                if fresh:
                    for start, stop in runs:
                        block.fresh[start:stop] = False
                        block.left -= stop - start
                if not fresh or block.left == 0:
                    self._forget(part.key, future)
                if fresh:
                    return block

    def _block(self, layout: Layout, slot: int, number: int) -> Future[Block]:
        """The block at hand, or being read, or read now."""
        key = layout.key(slot, number)
        with self._lock:
            future = self._blocks.get(key)
            if future is not None:
                self._blocks.move_to_end(key)
                return future
            future = self._blocks[key] = Future()
        self._fill(layout, slot, key, future)
        return future

    def _fill(self, layout: Layout, slot: int, key: BlockKey, future: Future[Block]) -> None:
        try:
            block = Block(self._load(layout, slot, key.start, key.rows))
        except BaseException as error:
            with self._lock:
                self._forget(key, future)
            future.set_exception(error)
            return
        future.set_result(block)
        with self._lock:
            if self._blocks.get(key) is future:
                self._sizes[key] = block.table.nbytes
            while sum(self._sizes.values()) > CACHE_BYTES and len(self._sizes) > 1:
                oldest = next(other for other in self._blocks if other in self._sizes)
                self._forget(oldest, self._blocks[oldest])

    def _forget(self, key: BlockKey, future: Future[Block]) -> None:
        if self._blocks.get(key) is future:
            del self._blocks[key]
            self._sizes.pop(key, None)

    def _look_ahead(self, layout: Layout, part: Part) -> None:
        """Begin to read what comes after this block, if a stream leads there."""
        before = layout.next_to(part.slot, part.number, -1)
        sources = {part.key} if before is None else {part.key, layout.key(*before)}
        with self._lock:
            if not any(sources & request.keys() for request in list(self._history)[:-1]):
                return
        ahead, place = 0, layout.next_to(part.slot, part.number, 1)
        while place is not None and ahead < BLOCK_BYTES:
            ahead += layout.cut(place[0])[1]
            self._fetch(layout, *place)
            place = layout.next_to(*place, 1)

    def _fetch(self, layout: Layout, slot: int, number: int) -> None:
        """Read a block in the background, unless it is here."""
        key = layout.key(slot, number)
        with self._lock:
            if key in self._blocks:
                return
            future = self._blocks[key] = Future()
            if self._ahead is None:
                self._ahead = ThreadPoolExecutor(2, thread_name_prefix="persisting_torch-read")
            try:
                self._ahead.submit(self._fill, layout, slot, key, future)
            except RuntimeError:  # the interpreter is shutting down
                self._forget(key, future)

    def _load(self, layout: Layout, slot: int, start: int, rows: int) -> pa.Table:
        """Physical rows of a fragment, in one chunk per column, from its data files."""
        table, fragment = layout.table, layout.table.fragment(slot)
        columns: dict[str, pa.ChunkedArray] = {}
        for file in fragment.metadata.files:
            names = tuple(n for n in layout.columns if table.field_ids[n] in file.fields)
            if names:
                read = self._read_file(str(file.path), names, start, rows)
                columns.update(zip(names, read.select(names).columns, strict=True))
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(rows, field.type)
            for field in layout.schema
        ]
        return pa.Table.from_arrays(arrays, schema=layout.schema).combine_chunks()

    def _read_file(self, path: str, names: tuple[str, ...], start: int, rows: int) -> pa.Table:
        with self._lock:
            reader = self._files.pop((path, names), None)
        if reader is None:
            reader = self._session.open_reader(path, list(names))
        table = reader.read_range(start, rows, batch_size=rows).to_table()
        with self._lock:  # out of the cache while in use: it serves one caller at a time
            self._files[path, names] = reader
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        return table


def _without_columns(rows: int) -> pa.Table:
    return pa.table({"": pa.nulls(rows)}).select([])


def _fixed_width(type: pa.DataType) -> int | None:
    """Bytes of a value, None where values differ."""
    if pa.types.is_fixed_size_list(type):
        width = _fixed_width(type.value_type)
        return None if width is None else width * type.list_size
    if pa.types.is_boolean(type):
        return 1
    return type.byte_width if pa.types.is_primitive(type) else None
