"""Rows of one Lance dataset: appended in commit order, read by stable row id.

Lance gives the rows of every commit the next row ids, 0, 1, 2, ..., and an id keeps its row through
deletes, compaction and cleanup. All commits are made under one lock, which callers hold; reads need
none. A handle of a version never changes: refresh puts a newer one in its place.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance import LanceOperation
from lance.fragment import FragmentMetadata, LanceFragment, write_fragments

from persisting_torch.queue.files import LOCAL, Files, sync
from persisting_torch.queue.fragments import FragmentTable
from persisting_torch.queue.pieces import in_pieces
from persisting_torch.queue.reading import Reader
from persisting_torch.queue.threads import at_once

FILE_FORMAT: Final = "2.0"  # scans uncompressed tensors faster than later ones
FRAGMENT_BYTES = 8 << 20
FILES_AT_ONCE = 4
# Written at a time, and a page of the file: larger ones can take many times as long on ext4, where
# the page cache has to grow for them. To read over several pages costs a copy, some 15 % more time.
PIECE_BYTES = 512 << 10
METADATA_BYTES = 4 << 20
READ_ATTEMPTS = 3
NEXT_ROW_ID = 14  # field number in the manifest's protobuf message


@dataclass(slots=True)
class Snapshot:
    """A handle of one version, and what has been found out about it."""

    dataset: lance.LanceDataset
    version: int
    rows: int | None = None


class RowStore:
    """Rows of one Lance dataset, appended in commit order and read by stable row id.

    A store belongs to the process that made it. Its methods may be called from any thread; append
    and delete only while holding the lock under which all processes commit to this dataset.
    """

    def __init__(
        self, path: str, *, fsync: bool = False, files: Files = LOCAL, alone: bool = False
    ) -> None:
        """Opens nothing; the dataset may not exist yet.

        With fsync, what append and delete committed is on the disk when they return. `alone`: all
        commits are made through this store, so there are no newer versions to look for.
        """
        self.path = path
        self.fsync = fsync
        self.files = files
        self._alone = alone
        self._looked = False
        self._snapshot: Snapshot | None = None
        self._tables: FragmentTable | None = None  # of the newest version that was read
        self._lock = threading.RLock()
        self.guard: Callable[[], None] = lambda: None
        """Called between the look at the newest version and a commit that builds on it."""

    def exists(self) -> bool:
        """Whether the dataset has been created, by whichever process."""
        return self._snapshot is not None or self.refresh() > 0

    @property
    def version(self) -> int:
        """Version of the handle; 0 while there is no dataset."""
        return 0 if self._snapshot is None else self._snapshot.version

    def refresh(self) -> int:
        """Move to the newest version and return it; cheap when nothing changed."""
        with self._lock:
            if self._alone and self._looked:
                return self.version
            self._looked = True
            if self._snapshot is None:
                if self.versions:
                    self._install(self._open())
            elif self._snapshot.dataset.latest_version != self._snapshot.version:
                self._install(_newest(self._snapshot.dataset))
            return self.version

    def append(self, table: pa.Table) -> None:
        """Append the rows in one commit; they get the next row ids, in the order of the table.

        Creates the dataset if need be, and columns that it lacks. A nullable column of the dataset
        may be missing from the table. The caller holds the commit lock.
        """
        self.refresh()
        if self._snapshot is None:
            self._create(table.schema)
        if table.num_rows == 0:
            return
        self.add_columns(table.schema)
        self.append_written(self._write_table(table))

    def stage(self, table: pa.Table) -> list[FragmentMetadata] | None:
        """Write the rows to files that no version has yet, for whoever commits to append them.

        None if the dataset is not there yet, or lacks a column; nothing is written then. Needs no
        lock.
        """
        asked = set(table.column_names)
        if not asked <= self._columns():
            self.refresh()
        return self._write_table(table) if asked <= self._columns() else None

    def knows(self, fragments: Sequence[FragmentMetadata]) -> bool:
        """Whether what others have written is seen here, and its columns are the dataset's."""
        self.refresh()
        if self._snapshot is None:
            return False
        schema: Any = self._snapshot.dataset.lance_schema
        known = set(_field_ids(schema.fields()))
        return all(set(file.fields) <= known for part in fragments for file in part.files) and all(
            self.files.exists(os.path.join(self.path, name)) for name in data_files(fragments)
        )

    def _columns(self) -> set[str]:
        return set() if self._snapshot is None else set(self._snapshot.dataset.schema.names)

    def _write_table(self, table: pa.Table) -> list[FragmentMetadata]:
        table = _without_empty_columns(table)
        rows = _rows_per_file(table)
        files = [table.slice(first, rows) for first in range(0, len(table), rows)]
        written: list[list[FragmentMetadata]] = [[] for _ in files]

        def write(number: int) -> None:
            written[number] = self.write(in_pieces(files[number], PIECE_BYTES), rows)

        for first in range(0, len(files), FILES_AT_ONCE):
            some = range(first, min(first + FILES_AT_ONCE, len(files)))
            at_once([partial(write, number) for number in some])
        return [part for parts in written for part in parts]

    def write(
        self, data: pa.Table | pa.RecordBatchReader, rows_per_file: int
    ) -> list[FragmentMetadata]:
        """Write rows to files that no version has yet. Needs no lock."""
        snapshot = self._snapshot
        assert snapshot is not None
        written: list[FragmentMetadata] = write_fragments(
            data, snapshot.dataset, mode="append", max_rows_per_file=rows_per_file
        )
        return written

    def append_written(self, fragments: list[FragmentMetadata]) -> None:
        """Append what was written, in one commit. The caller holds the commit lock."""
        self.refresh()
        snapshot, rows = self._snapshot, self.rows
        assert snapshot is not None
        self.commit(snapshot.dataset, LanceOperation.Append(fragments), data_files(fragments))
        assert self._snapshot is not None
        if self._snapshot.version == snapshot.version + 1:
            self._snapshot.rows = rows + sum(part.physical_rows for part in fragments)

    def fence(self) -> None:
        """Let all commits fail that others prepared before now, whoever they are and whenever.

        Appends, rewrites and deletes are incompatible with a newer version that restores one.
        """
        if self.refresh():
            assert self._snapshot is not None
            newest = copy.copy(self._snapshot.dataset)
            newest.restore()
            self._install(newest, committed=True)

    @property
    def rows(self) -> int:
        """Row ids given so far, those of deleted rows included: the next append starts here."""
        snapshot = self._snapshot
        if snapshot is None:
            return 0
        if snapshot.rows is None:
            snapshot.rows = _next_row_id(snapshot.dataset._ds.serialized_manifest())
        return snapshot.rows

    def read(self, rows: npt.NDArray[np.int64], columns: Sequence[str]) -> pa.Table:
        """The columns of the rows with these row ids, in this order; ids may repeat.

        A column that the dataset lacks is absent from the answer. Nobody else is given the memory
        of the answer, so it may be written to. Raises KeyError naming row ids that do not exist.
        """
        wanted = np.ascontiguousarray(rows, dtype=np.int64)
        attempt = 0
        while True:
            attempt += 1
            version = self.version or self.refresh()
            try:
                return self._read(wanted, columns)
            except (KeyError, OSError, ValueError) as error:
                # The rows may be newer than the handle, or its files compacted and cleaned away.
                stale = isinstance(error, KeyError) or "Not found" in str(error)
                if not stale or attempt == READ_ATTEMPTS or self.refresh() == version:
                    raise

    def delete(self, rows: npt.NDArray[np.int64]) -> int:
        """Delete the rows with these ids, in one commit; ids that are not there are ignored.

        The ids are never given again. The caller holds the commit lock. Returns about how many
        bytes of files will be free once old versions and deleted rows are cleaned away.
        """
        if self.refresh() == 0:
            return 0
        table, ids = self.table(), np.unique(np.asarray(rows, dtype=np.int64))
        slots, _ = table.locate(ids)
        changed: list[FragmentMetadata] = []
        removed: list[int] = []
        freed = 0
        for slot in np.unique(slots[slots >= 0]).tolist():
            doomed = ids[slots == slot]
            handle = LanceFragment(table.dataset, table.ids[slot])
            fragment = table.fragment(slot)
            whole = len(doomed) == fragment.positions.count
            freed += fragment.bytes * len(doomed) // fragment.positions.count
            left = None if whole else handle.delete(_predicate(doomed))
            if left is None:
                removed.append(handle.fragment_id)
            else:
                changed.append(left)
        if changed or removed:
            operation = LanceOperation.Delete(changed, removed, "_rowid in (...)")
            files = [part.deletion_file.path(part.id) for part in changed if part.deletion_file]
            self.commit(table.dataset, operation, files)
        return freed

    def dataset(self) -> lance.LanceDataset:
        """A handle of the newest version. Raises FileNotFoundError if there is no dataset."""
        return self.table().dataset

    def table(self) -> FragmentTable:
        """Where the rows of the newest version lie. Raises FileNotFoundError."""
        if self.refresh() == 0:
            raise FileNotFoundError(f"there is no Lance dataset at {self.path}")
        return self._table()

    @cached_property
    def _reader(self) -> Reader:
        return Reader(os.path.join(self.path, "data"), self.files.options)

    @property
    def fragments(self) -> int:
        """Number of fragments at this version."""
        return 0 if self._snapshot is None else int(self._snapshot.dataset._ds.count_fragments())

    @property
    def versions(self) -> int:
        """Number of versions on disk."""
        names = self.files.names(os.path.join(self.path, "_versions"))
        return sum(name.endswith(".manifest") for name in names)

    def commit(
        self,
        dataset: lance.LanceDataset,
        operation: LanceOperation.BaseOperation,
        files: Sequence[str],
    ) -> None:
        """Commit an operation prepared on this version and move to the new one.

        `files` are what was written for it, relative to the dataset. The caller holds the commit
        lock. Raises lance.commit.CommitConflictError where somebody committed without it.
        """
        if self.fsync:
            self._sync(*files, *{os.path.dirname(file) for file in files})
        self.guard()
        fresh = lance.LanceDataset.commit(dataset, operation, read_version=dataset.version)
        self._install(fresh, committed=True)

    def _read(self, rows: npt.NDArray[np.int64], columns: Sequence[str]) -> pa.Table:
        if self._snapshot is not None:
            return self._reader.read(self._table(), rows, columns)
        if len(rows):
            raise KeyError(f"there is no Lance dataset at {self.path}, and so no row {rows[0]}")
        return pa.table({})

    def _table(self) -> FragmentTable:
        with self._lock:
            assert self._snapshot is not None
            if self._tables is None or self._tables.version != self._snapshot.version:
                self._tables = FragmentTable(self._snapshot.dataset, self._tables)
            return self._tables

    def _create(self, schema: pa.Schema) -> None:
        lance.write_dataset(
            schema.empty_table(),
            self.path,
            mode="create",
            enable_stable_row_ids=True,
            data_storage_version=FILE_FORMAT,
            storage_options=self.files.options,
        )
        if self.fsync:
            self._sync("", "..")
        self._install(self._open(), committed=True)

    def _open(self) -> lance.LanceDataset:
        # Lance would keep something of every version that there ever was, up to a gigabyte.
        return lance.dataset(
            self.path,
            metadata_cache_size_bytes=METADATA_BYTES,
            storage_options=self.files.options,
        )

    def discard(self, files: Sequence[str]) -> None:
        """Delete files that were written in vain; they are relative to the dataset."""
        self.files.remove([os.path.join(self.path, file) for file in files])

    def add_columns(self, schema: pa.Schema) -> None:
        """Add the columns that the dataset lacks, empty. The caller holds the commit lock."""
        self.refresh()
        assert self._snapshot is not None
        present = self._columns()
        lacking = [field.with_nullable(True) for field in schema if field.name not in present]
        if lacking:
            dataset = copy.copy(self._snapshot.dataset)
            dataset.add_columns(pa.schema(lacking))
            self._install(dataset, committed=True)

    def _install(self, dataset: lance.LanceDataset, committed: bool = False) -> None:
        version = int(dataset.version)
        if committed and self.fsync:
            transactions = os.listdir(os.path.join(self.path, "_transactions"))
            self._sync(
                *(
                    os.path.join("_transactions", name)
                    for name in transactions
                    if name.startswith(f"{version - 1}-")
                ),
                "_transactions",
                os.path.join("_versions", f"{2**64 - 1 - version}.manifest"),
                "_versions",
            )
        with self._lock:
            if version > self.version:
                self._snapshot = Snapshot(dataset, version)

    def _sync(self, *names: str) -> None:
        """Bring files and directories of the dataset to the disk."""
        for name in names:
            sync(os.path.join(self.path, name))


def data_files(fragments: Sequence[FragmentMetadata]) -> list[str]:
    """Where the data of fragments lies, relative to the dataset."""
    return [os.path.join("data", file.path) for part in fragments for file in part.files]


def _field_ids(fields: Iterable[Any]) -> Iterator[int]:
    """The ids of Lance's fields, and of those within them."""
    for field in fields:
        yield field.id()
        yield from _field_ids(field.children())


def _newest(dataset: lance.LanceDataset) -> lance.LanceDataset:
    # Lance cannot move a handle that other threads are reading through, so a copy is moved.
    newest: lance.LanceDataset = copy.copy(dataset)
    newest.checkout_latest()
    return newest


def _rows_per_file(table: pa.Table) -> int:
    rows: int = table.num_rows
    files: int = max(1, round(table.nbytes / FRAGMENT_BYTES))
    return -(-rows // files)


def _without_empty_columns(table: pa.Table) -> pa.Table:
    """Columns that are null throughout take no space when left out."""
    kept = [i for i, column in enumerate(table.columns) if column.null_count < table.num_rows]
    return table.select(kept or [0]) if len(kept) < table.num_columns else table


def _predicate(ids: npt.NDArray[np.int64]) -> str:
    if ids[-1] - ids[0] + 1 == len(ids):
        return f"_rowid >= {ids[0]} and _rowid <= {ids[-1]}"
    return f"_rowid in ({', '.join(map(str, ids.tolist()))})"


def _next_row_id(manifest: bytes) -> int:
    """The counter of row ids in a manifest, of which Lance's Python API tells nothing."""
    at = 0
    while at < len(manifest):
        tag, at = _varint(manifest, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, at = _varint(manifest, at)
            if number == NEXT_ROW_ID:
                return value
        elif wire_type == 2:
            length, at = _varint(manifest, at)
            at += length
        else:
            at += 8 if wire_type == 1 else 4
    return 0


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
