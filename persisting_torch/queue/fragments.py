"""Where the rows of one version of a Lance dataset lie: fragments by stable row id."""

from __future__ import annotations

from dataclasses import dataclass

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance.fragment import FragmentMetadata, LanceFragment, RowIdSequence

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Positions:
    """Where in a fragment its row ids lie; as unchangeable as the fragment's id."""

    first: int
    last: int
    count: int
    ids: Int64s | None  # ascending; None when they are first, first + 1, ..., last
    offsets: Int64s | None  # physical offset of ids[i]; None when it is i

    @staticmethod
    def of(metadata: FragmentMetadata) -> Positions:
        assert metadata.row_id_meta is not None, "the dataset was made without stable row ids"
        sequence = RowIdSequence.from_inline_metadata(metadata.row_id_meta)
        ids = sequence.to_pyarrow().to_numpy().astype(np.int64)
        offsets = None
        if len(ids) > 1 and not (np.diff(ids) > 0).all():
            offsets = np.argsort(ids)
            ids = ids[offsets]
        first, last, count = int(ids[0]), int(ids[-1]), len(ids)
        contiguous = offsets is None and last - first + 1 == count
        return Positions(first, last, count, None if contiguous else ids, offsets)

    def find(self, rows: Int64s) -> tuple[Int64s, Bools]:
        """Physical offsets of row ids from first to last, and which of them are here at all."""
        if self.ids is None:
            return rows - self.first, np.ones(len(rows), dtype=bool)
        at = np.searchsorted(self.ids, rows)
        return (at if self.offsets is None else self.offsets[at]), self.ids[at] == rows

    def in_order(self) -> Int64s:
        """Row ids by physical offset."""
        if self.ids is None:
            return np.arange(self.first, self.last + 1, dtype=np.int64)
        if self.offsets is None:
            return self.ids
        ids = np.empty_like(self.ids)
        ids[self.offsets] = self.ids
        return ids


@dataclass(frozen=True, slots=True)
class Fragment:
    """One fragment as a version of the dataset has it."""

    id: int
    metadata: FragmentMetadata
    positions: Positions
    live: Bools | None  # by physical offset; None when no row is deleted
    files: tuple[str, ...]
    bytes: int  # of its data files

    @property
    def state(self) -> tuple[tuple[str, ...], str | None]:
        """What changes when something is done to the fragment."""
        deletions = self.metadata.deletion_file
        return self.files, None if deletions is None else deletions.json()

    def row_ids(self) -> Int64s:
        """Ids of the rows that are not deleted, by physical offset."""
        ids = self.positions.in_order()
        return ids if self.live is None else ids[self.live]

    def field_ids(self) -> set[int]:
        """Fields that have values on disk; any other is null in all of its rows."""
        return {field for file in self.metadata.files for field in file.fields}


class FragmentTable:
    """The fragments of one version in the order of their row ids.

    `before`, the table of an earlier version, saves reading again what cannot have changed.
    """

    def __init__(self, dataset: lance.LanceDataset, before: FragmentTable | None = None) -> None:
        self.dataset = dataset
        self.version = int(dataset.version)
        self.schema: pa.Schema = dataset.schema
        self.field_ids = {field.name(): field.id() for field in dataset.lance_schema.fields()}
        self._widths = {field.name: _fixed_width(field.type) for field in self.schema}
        known = {} if before is None else before.positions
        self.positions: dict[int, Positions] = {
            i: known.get(i) or Positions.of(LanceFragment(dataset, i).metadata)
            for i in dataset.fragment_ids()
        }
        self.ids = sorted(self.positions, key=lambda i: self.positions[i].first)
        ordered = [self.positions[i] for i in self.ids]
        self.firsts = np.array([p.first for p in ordered], dtype=np.int64)
        self.lasts = np.array([p.last for p in ordered], dtype=np.int64)
        self._fragments: dict[int, Fragment] = {}
        self._with_holes = np.array([p.ids is not None for p in ordered], dtype=bool)
        self._overlapping = bool((self.lasts[:-1] >= self.firsts[1:]).any())

    def __len__(self) -> int:
        return len(self.ids)

    def fragment(self, slot: int) -> Fragment:
        """The fragment at a place in the order of row ids."""
        fragment = self._fragments.get(slot)
        if fragment is None:
            handle = LanceFragment(self.dataset, self.ids[slot])
            positions = self._positions(slot)
            metadata, live = handle.metadata, None
            if metadata.deletion_file is not None:
                left = handle.scanner(columns=[], with_row_id=True).to_table()["_rowid"]
                live = np.zeros(positions.count, dtype=bool)
                live[positions.find(left.to_numpy().astype(np.int64))[0]] = True
            fragment = self._fragments[slot] = Fragment(
                id=self.ids[slot],
                metadata=metadata,
                positions=positions,
                live=live,
                files=tuple(str(file.path) for file in metadata.files),
                bytes=sum(file.file_size_bytes or 0 for file in metadata.files),
            )
        return fragment

    def width(self, column: str) -> int | None:
        """Bytes of a value of the column, None where values differ."""
        return self._widths[column]

    def locate(self, rows: Int64s) -> tuple[Int64s, Int64s]:
        """Slot and physical offset of each row id; slot -1 where no fragment has it.

        Rows that were deleted but not compacted away still have their place.
        """
        if self._overlapping or not len(self):
            return self._locate_in_each(rows)
        slots = np.searchsorted(self.firsts, rows, side="right") - 1
        slots[rows > self.lasts[slots]] = -1
        offsets = rows - self.firsts[slots]
        for slot in np.unique(slots[self._with_holes[slots]]).tolist():
            here = np.flatnonzero(slots == slot)
            if slot >= 0:
                offsets[here], found = self._positions(slot).find(rows[here])
                slots[here[~found]] = -1
        return slots, offsets

    def runs(self, rows: Int64s) -> list[tuple[int, int, int]] | None:
        """The rows as runs, if they are consecutive; else as for `consecutive`, None."""
        first, last = int(rows[0]), int(rows[-1])
        if last - first != len(rows) - 1 or not (np.diff(rows) == 1).all():
            return None
        return self.consecutive(first, last)

    def consecutive(self, first: int, last: int) -> list[tuple[int, int, int]] | None:
        """(slot, offset, count) of the row ids from first to last, as they lie on disk.

        None if some of them are not in the table or lie in a fragment that had rows deleted.
        """
        if self._overlapping:
            return None
        runs = []
        slot = int(np.searchsorted(self.firsts, first, side="right")) - 1
        while first <= last:
            if not 0 <= slot < len(self):
                return None
            positions = self._positions(slot)
            stop = min(last, positions.last)
            inside = positions.first <= first <= stop
            if not inside or positions.ids is not None or self.fragment(slot).live is not None:
                return None
            runs.append((slot, first - positions.first, stop - first + 1))
            first, slot = stop + 1, slot + 1
        return runs

    def missing(self, rows: Int64s) -> Int64s:
        """Those of the row ids that this version does not hold, deleted ones included."""
        slots, offsets = self.locate(rows)
        gone = slots < 0
        for slot in np.unique(slots[~gone]).tolist():
            live = self.fragment(slot).live
            if live is not None:
                here = np.flatnonzero(slots == slot)
                gone[here[~live[offsets[here]]]] = True
        return rows[gone]

    def _locate_in_each(self, rows: Int64s) -> tuple[Int64s, Int64s]:
        slots = np.full(len(rows), -1, dtype=np.int64)
        offsets = np.zeros(len(rows), dtype=np.int64)
        for slot in range(len(self)):
            here = np.flatnonzero((rows >= self.firsts[slot]) & (rows <= self.lasts[slot]))
            at, found = self._positions(slot).find(rows[here])
            slots[here[found]] = slot
            offsets[here[found]] = at[found]
        return slots, offsets

    def _positions(self, slot: int) -> Positions:
        return self.positions[self.ids[slot]]


def _fixed_width(type: pa.DataType) -> int | None:
    """Bytes of a value, None where values differ."""
    if pa.types.is_fixed_size_list(type):
        width = _fixed_width(type.value_type)
        return None if width is None else width * int(type.list_size)
    if pa.types.is_boolean(type):
        return 1
    return int(type.byte_width) if pa.types.is_primitive(type) else None
