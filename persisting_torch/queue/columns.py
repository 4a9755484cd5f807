"""New values for some columns of fragments: a file beside the others, which takes these columns.

The rows stay where they are and keep their ids; the other columns are not read. A column that was
in an older file of the fragment is struck from it.
"""

from __future__ import annotations

import copy
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from lance import LanceOperation
from lance.commit import CommitConflictError
from lance.file import LanceFileSession
from lance.fragment import DataFile, FragmentMetadata

from persisting_torch.queue.fragments import Fragment, FragmentTable
from persisting_torch.queue.storage import FILE_FORMAT, RowStore

STRUCK = -2  # Lance's field id for a column of a file that counts no more


@dataclass(frozen=True, slots=True)
class NewColumns:
    """A fragment as it was, the file with its new columns, and all fields that this replaces."""

    fragment: Fragment
    file: DataFile | None  # None if all of the values are null
    fields: frozenset[int]

    @property
    def files(self) -> list[str]:
        """What was written, relative to the dataset."""
        return [] if self.file is None else [os.path.join("data", str(self.file.path))]


def _session(table: FragmentTable) -> LanceFileSession:
    dataset = table.dataset
    return LanceFileSession(
        os.path.join(dataset.uri, "data"), storage_options=dataset.initial_storage_options
    )


def read_columns(table: FragmentTable, fragment: Fragment, names: Iterable[str]) -> pa.Table:
    """Columns by physical row, deleted rows included; those that the fragment lacks are absent."""
    wanted = list(names)
    session = _session(table)
    found: dict[str, pa.ChunkedArray] = {}
    for file in fragment.metadata.files:
        here = [name for name in wanted if table.field_ids.get(name) in file.fields]
        if here:
            read = session.open_reader(str(file.path), here).read_all().to_table()
            found.update({name: read[name] for name in here})
    return pa.table(found)


def write_columns(
    table: FragmentTable, fragment: Fragment, columns: dict[str, pa.Array]
) -> NewColumns:
    """Write values for all physical rows of the fragment, deleted ones included. Needs no lock."""
    rows = fragment.metadata.physical_rows
    wrong = {name: len(values) for name, values in columns.items() if len(values) != rows}
    if wrong:
        raise RuntimeError(
            f"fragment {fragment.id} of {table.dataset.uri} has {rows} rows, but the new columns"
            f" have {wrong}. Nothing was committed; please report this."
        )
    fields = [field for field in table.dataset.lance_schema.fields() if field.name() in columns]
    ids = frozenset(number for field in fields for number in _ids(field))
    kept = {name: values for name, values in columns.items() if values.null_count < rows}
    if not kept:
        return NewColumns(fragment, None, ids)
    schema = pa.schema([table.schema.field(name) for name in kept])
    name = f"{uuid.uuid4().hex}.lance"
    session = _session(table)
    with session.open_writer(name, schema=schema, version=FILE_FORMAT) as writer:
        writer.write_batch(pa.Table.from_arrays(list(kept.values()), schema=schema))
    return NewColumns(fragment, DataFile.create(table.dataset, name), ids)


def replace_columns(store: RowStore, changes: Sequence[NewColumns]) -> bool:
    """Commit new columns in one commit; False if a fragment has other files than it had.

    The caller holds the commit lock.
    """
    table = store.table()
    now = {table.ids[slot]: slot for slot in range(len(table))}
    updated: list[FragmentMetadata] = []
    for change in changes:
        slot = now.get(change.fragment.id)
        if slot is None or table.fragment(slot).files != change.fragment.files:
            return False
        updated.append(_with(table.fragment(slot).metadata, change))
    operation = LanceOperation.Update(
        updated_fragments=updated,
        fields_modified=sorted(frozenset().union(*(change.fields for change in changes))),
        update_mode="rewrite_columns",
    )
    try:
        files = [file for change in changes for file in change.files]
        store.commit(table.dataset, operation, files)
    except CommitConflictError:
        return False  # somebody commits without the lock
    return True


def _with(metadata: FragmentMetadata, change: NewColumns) -> FragmentMetadata:
    fresh, files = copy.copy(metadata), []
    for file in metadata.files:
        left = [STRUCK if number in change.fields else number for number in file.fields]
        if any(number >= 0 for number in left):
            file = copy.copy(file)
            file.fields = left
            files.append(file)
    fresh.files = files if change.file is None else [*files, change.file]
    return fresh


def _ids(field: Any) -> list[int]:
    """Of a column and what lies within it, as of the elements of a list."""
    return [field.id(), *(number for child in field.children() for number in _ids(child))]
