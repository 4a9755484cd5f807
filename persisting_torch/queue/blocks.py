"""Blocks read and kept: each row of a block is handed out in place at most once."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import pyarrow as pa
from lance.file import LanceFileReader, LanceFileSession

from persisting_torch.queue.layout import BlockKey, Layout, Part
from persisting_torch.queue.threads import threads

CACHE_BYTES = 64 << 20
OPEN_FILES = 32
SHARED_BYTES = 128 << 10


class Block:
    """The rows of a block, and which of them were not handed out yet."""

    __slots__ = ("fresh", "left", "table")

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.fresh = np.ones(table.num_rows, dtype=bool)
        self.left = table.num_rows


class Coming:
    """A block that one thread reads and others may wait for. No signal leaves them waiting."""

    __slots__ = ("_block", "_error", "_reading", "done")

    def __init__(self) -> None:
        self.done = False
        self._block: Block | None = None
        self._error: Exception | None = None
        self._reading = threading.Lock()
        self._reading.acquire()

    def settle(self, block: Block | None, error: Exception | None = None) -> None:
        """Say how it went; neither block nor error, where a signal broke the reading off."""
        if not self.done:
            self._block, self._error, self.done = block, error, True
            self._reading.release()

    def result(self) -> Block | None:
        """The block; None if its reading was broken off. Raises what went wrong."""
        if not self.done:
            with self._reading:
                pass
        if self._error is not None:
            raise self._error
        return self._block


class BlockCache:
    """Blocks by key, the least recently used forgotten first. Thread safe.

    Who is handed rows in place may write into them, so nobody else is given these rows from the
    same memory: they are read again. A block of which every row was handed out is forgotten.
    """

    def __init__(self, folder: str, options: dict[str, str] | None = None) -> None:
        self._session = LanceFileSession(folder, storage_options=options)
        self._files: OrderedDict[tuple[str, tuple[str, ...]], list[LanceFileReader]] = OrderedDict()
        self._blocks: OrderedDict[BlockKey, Coming] = OrderedDict()
        self._sizes: dict[BlockKey, int] = {}
        self._lock = threading.Lock()

    def holds(self, part: Part) -> bool:
        """Whether the rows are here or on their way, and none of them was handed out."""
        with self._lock:
            future = self._blocks.get(part.key)
            if future is None:
                return False
            block = future.result() if future.done else None
            return not future.done or (block is not None and bool(block.fresh[part.at].all()))

    def hand_out(self, layout: Layout, part: Part) -> list[pa.Table]:
        """The rows in place, one slice for each run of them."""
        while True:
            future, block = self._get(layout, part.slot, part.key)
            with self._lock:
                if not block.fresh[part.at].all():
                    self._forget(part.key, future)
                    continue
                block.fresh[part.at] = False
                block.left -= part.count
                if not block.left:
                    self._forget(part.key, future)
            return [block.table.slice(start, stop - start) for start, stop in part.runs()]

    def block(self, key: BlockKey) -> Block | None:
        """A block that is here and has rows left to hand out."""
        with self._lock:
            future = self._blocks.get(key)
            return future.result() if future is not None and future.done else None

    def hand_out_of(self, block: Block, key: BlockKey, start: int, stop: int) -> pa.Table | None:
        """Rows start to stop - 1 of a block in place; None if one of them was handed out."""
        with self._lock:
            fresh = block.fresh[start:stop]
            if not fresh.all():
                return None
            fresh[:] = False
            block.left -= stop - start
            future = self._blocks.get(key)
            # A block that was forgotten may be on its way anew, and needs the lock to arrive.
            if not block.left and future and future.done and future.result() is block:
                self._forget(key, future)
        return block.table.slice(start, stop - start)

    def copy(self, layout: Layout, part: Part) -> pa.Table:
        """A copy of the rows, in the order asked for."""
        while True:
            future, block = self._get(layout, part.slot, part.key)
            copied = block.table.take(pa.array(part.at))
            with self._lock:
                if block.fresh[part.at].all():
                    return copied
                self._forget(part.key, future)

    def fetch(self, layout: Layout, slot: int, key: BlockKey) -> None:
        """Have a block read in the background, unless it is here."""
        with self._lock:
            if key in self._blocks:
                return
            future = self._blocks[key] = Coming()
            try:
                threads().submit(self._fill, layout, slot, key, future)
            except RuntimeError:  # the interpreter is shutting down
                self._forget(key, future)
            except BaseException:
                self._forget(key, future)
                future.settle(None)
                raise

    def _get(self, layout: Layout, slot: int, key: BlockKey) -> tuple[Coming, Block]:
        while True:
            future, block = self._try_to_get(layout, slot, key)
            if block is not None:
                return future, block
            with self._lock:
                self._forget(key, future)

    def _try_to_get(self, layout: Layout, slot: int, key: BlockKey) -> tuple[Coming, Block | None]:
        mine = Coming()
        try:
            with self._lock:
                future = self._blocks.setdefault(key, mine)
                self._blocks.move_to_end(key)
            if future is mine:
                self._fill(layout, slot, key, mine)
        except BaseException:
            mine.settle(None)
            raise
        return future, future.result()

    def _fill(self, layout: Layout, slot: int, key: BlockKey, future: Coming) -> None:
        try:
            block = Block(self._load(layout, slot, key))
        except Exception as error:
            with self._lock:
                self._forget(key, future)
            future.settle(None, error)
            return
        with self._lock:
            self._sizes[key] = block.table.nbytes
            held = sum(self._sizes.values())
            for other in list(self._blocks):
                if held <= CACHE_BYTES or other == key:
                    break
                if other in self._sizes:
                    held -= self._sizes[other]
                    self._forget(other, self._blocks[other])
        future.settle(block)

    def _forget(self, key: BlockKey, future: Coming) -> None:
        if self._blocks.get(key) is future:
            del self._blocks[key]
            self._sizes.pop(key, None)

    def _load(self, layout: Layout, slot: int, key: BlockKey) -> pa.Table:
        """Physical rows of a fragment from its data files, each column in one chunk."""
        table, columns = layout.table, {}
        for file in table.fragment(slot).metadata.files:
            names = [name for name in layout.columns if table.field_ids[name] in file.fields]
            if names:
                read = self._read_file(str(file.path), tuple(names), key.start, key.rows)
                columns.update({name: read[name] for name in names})
        arrays = [
            _own(columns[field.name]) if field.name in columns else pa.nulls(key.rows, field.type)
            for field in layout.schema
        ]
        return pa.Table.from_arrays(arrays, schema=layout.schema).combine_chunks()

    def _read_file(self, path: str, names: tuple[str, ...], start: int, rows: int) -> pa.Table:
        with self._lock:  # an open file is out of the cache while in use: it serves one thread
            idle = self._files.get((path, names), [])
            reader = idle.pop() if idle else None
        if reader is None:
            reader = self._session.open_reader(path, list(names))
        table = reader.read_range(start, rows, batch_size=rows).to_table()
        with self._lock:
            self._files.setdefault((path, names), []).append(reader)
            self._files.move_to_end((path, names))
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        return table


def _own(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column that shares no memory with the file's tail, which Lance keeps for later readers."""
    if column.nbytes > SHARED_BYTES:
        return column
    return pa.chunked_array([pa.concat_arrays([chunk]) for chunk in column.chunks], column.type)
