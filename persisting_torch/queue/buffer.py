"""Samples that wait in memory for their flush, and the Arrow table that the flush writes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyroaring import BitMap64
from torch import Tensor

from persisting_torch.queue.encode import EncodedBatch, encode_rows, physical_columns
from persisting_torch.queue.fields import Schema
from persisting_torch.queue.sets import set_of, solid_ranges

INDEX_COLUMN = "_index"
PARTITION_COLUMN = "_partition"

Names = tuple[str, ...]
Arrivals = dict[tuple[str, Names], BitMap64]


@dataclass
class Chunk:
    """Samples of one partition with consecutive indexes, as records or as encoded columns."""

    partition: str
    first: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    batch: EncodedBatch | None = None
    keys: list[tuple[str, int, str | None]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows) if self.batch is None else self.batch.length

    @property
    def nbytes(self) -> int:
        """What its tensors hold in memory."""
        if self.batch is not None:
            return self.batch.nbytes
        values = (value for row in self.rows for value in row.values())
        return sum(value.nbytes for value in values if type(value) is Tensor)

    @property
    def field_names(self) -> Names:
        """The fields that were given, those without any value too."""
        if self.batch is None:
            return tuple(dict.fromkeys(name for row in self.rows for name in row))
        names = [column[0] for column in self.batch.columns]
        return tuple(dict.fromkeys([*names, *(name for name, _ in self.batch.empty)]))

    @property
    def indexes(self) -> range:
        return range(self.first, self.first + len(self))

    def without(self, arrived: BitMap64) -> list[Chunk]:
        """What is left of the chunk without some of its samples."""
        if not arrived:
            return [self]
        left = set_of(self.indexes) - arrived
        return [self._part(*bounds) for bounds in solid_ranges(left)]

    def _part(self, first: int, stop: int) -> Chunk:
        at = slice(first - self.first, stop - self.first)
        keys = [key for key in self.keys if first <= key[1] < stop]
        batch = None if self.batch is None else self.batch.part(at.start, at.stop)
        return Chunk(self.partition, first, self.rows[at], batch, keys)


class Buffer:
    """Chunks in the order in which they were put."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.samples = 0
        self.nbytes = 0
        self.oldest: float | None = None
        self._tail: Chunk | None = None
        self._tail_end = -1

    def append(self, partition: str, index: int, row: dict[str, Any]) -> bool:
        """Add a record to the newest chunk, if it follows there; whether it did."""
        tail = self._tail
        if tail is None or index != self._tail_end or partition != tail.partition:
            return False
        tail.rows.append(row)
        self._tail_end = index + 1
        self.samples += 1
        for value in row.values():
            if type(value) is Tensor:
                self.nbytes += value.nbytes
        return True

    def add(self, chunk: Chunk) -> None:
        """Add a chunk; records that follow it may join it."""
        self.chunks.append(chunk)
        self.samples += len(chunk)
        self.nbytes += chunk.nbytes
        if self.oldest is None:
            self.oldest = time.monotonic()
        self._tail = None if chunk.keys or chunk.batch is not None else chunk
        self._tail_end = chunk.first + len(chunk)

    def take(self) -> list[Chunk]:
        """All chunks; the buffer is empty afterwards."""
        chunks, self.chunks = self.chunks, []
        self.samples = self.nbytes = 0
        self.oldest = self._tail = None
        return chunks

    def put_back(self, chunks: list[Chunk]) -> None:
        """Chunks whose flush failed wait again, as they are, before those that came since."""
        for chunk in chunks:
            self.samples += len(chunk)
            self.nbytes += chunk.nbytes
        self.chunks[:0] = chunks
        self.oldest = time.monotonic()


@dataclass
class Composed:
    """What one flush writes: a table, and what the ledger has to say about its rows.

    runs are (first_index, count) in row order. arrivals maps (partition, names of the fields that
    arrived) to indexes. keys are (partition, key, index, tag).
    """

    table: pa.Table
    runs: list[tuple[int, int]]
    arrivals: Arrivals
    keys: list[tuple[str, str, int, str | None]]


def compose(chunks: Sequence[Chunk], schema: Schema) -> Composed:
    """The table and the bookkeeping of these chunks, one row a sample, in their order."""
    pieces: list[pa.Table] = []
    arrivals: Arrivals = {}
    for group in _groups(chunks):
        columns, names = group_columns(group, schema)
        _note_arrivals(arrivals, group, names)
        pieces.append(_piece(group, columns, schema))
    return Composed(
        table=pieces[0]
        if len(pieces) == 1
        else pa.concat_tables(pieces, promote_options="default"),
        runs=_runs(chunks),
        arrivals=arrivals,
        keys=[(c.partition, key, index, tag) for c in chunks for key, index, tag in c.keys],
    )


def group_columns(
    group: Sequence[Chunk], schema: Schema
) -> tuple[dict[str, pa.Array], dict[str, NDArray[np.bool_] | None]]:
    """Physical columns of a group, and for each field who has it (None: every sample)."""
    batch = group[0].batch
    if batch is None:
        columns = encode_rows([row for chunk in group for row in chunk.rows], schema)
    else:
        columns = physical_columns(batch, schema)
    names: dict[str, NDArray[np.bool_] | None] = {}
    for name, known in list(schema.fields.items()):
        arrays = [columns[v.column] for v in known.variants if v.column in columns]
        if any(array.null_count < len(array) for array in arrays):
            names[name] = _who_has(arrays)
    return columns, names


def _who_has(arrays: list[pa.Array]) -> NDArray[np.bool_] | None:
    if sum(len(array) - array.null_count for array in arrays) == len(arrays[0]):
        return None
    masks = [array.is_valid().to_numpy(zero_copy_only=False) for array in arrays]
    found: NDArray[np.bool_] = np.logical_or.reduce(masks)
    return found


def _groups(chunks: Iterable[Chunk]) -> list[list[Chunk]]:
    """Neighbouring chunks of records are encoded together; encoded batches stand alone."""
    groups: list[list[Chunk]] = []
    for chunk in chunks:
        if groups and chunk.batch is None and groups[-1][0].batch is None:
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def _runs(chunks: Iterable[Chunk]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and sum(runs[-1]) == chunk.first:
            runs[-1] = (runs[-1][0], runs[-1][1] + len(chunk))
        else:
            runs.append((chunk.first, len(chunk)))
    return runs


def field_patterns(
    names: dict[str, NDArray[np.bool_] | None],
) -> list[tuple[Names, NDArray[np.intp] | None]]:
    """Which samples have which fields: (names, positions), None standing for all."""
    everywhere = [name for name, mask in names.items() if mask is None]
    somewhere = [(name, mask) for name, mask in names.items() if mask is not None]
    if not somewhere:
        return [(tuple(sorted(everywhere)), None)]
    masks = np.stack([mask for _, mask in somewhere])
    patterns, which = np.unique(masks, axis=1, return_inverse=True)
    found: list[tuple[Names, NDArray[np.intp] | None]] = []
    for number in range(patterns.shape[1]):
        here = [name for (name, _), has in zip(somewhere, patterns[:, number], strict=True) if has]
        positions = np.flatnonzero(which.reshape(-1) == number)
        found.append((tuple(sorted(everywhere + here)), positions))
    return found


def _note_arrivals(
    arrivals: Arrivals, group: Sequence[Chunk], names: dict[str, NDArray[np.bool_] | None]
) -> None:
    """Samples with the same fields arrive together."""
    start = 0
    for chunk in group:
        stop = start + len(chunk)
        here = {name: None if mask is None else mask[start:stop] for name, mask in names.items()}
        for fields, positions in field_patterns(here):
            if positions is None:
                members = set_of(chunk.indexes)
            else:
                members = BitMap64((chunk.first + positions).tolist())
            arrivals.setdefault((chunk.partition, fields), BitMap64()).update(members)
        start = stop


def _piece(group: Sequence[Chunk], columns: dict[str, pa.Array], schema: Schema) -> pa.Table:
    indexes = [np.arange(c.first, c.first + len(c), dtype=np.int64) for c in group]
    partitions = [pa.repeat(pa.scalar(c.partition), len(c)) for c in group]
    fields = [
        pa.field(INDEX_COLUMN, pa.int64(), nullable=False),
        pa.field(PARTITION_COLUMN, pa.string(), nullable=False),
        *(schema.arrow_field(column) for column in columns),
    ]
    arrays = [
        pa.array(indexes[0] if len(indexes) == 1 else np.concatenate(indexes)),
        partitions[0] if len(partitions) == 1 else pa.concat_arrays(partitions),
        *columns.values(),
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))
