"""Fields that samples got after they were put: an append-only dataset beside the rows.

Each append holds `_index` and the fields that arrived. The newest value of a field wins; row ids
rise in commit order, so the newest is the one with the largest row id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from persisting_torch.queue.books import Books
from persisting_torch.queue.buffer import INDEX_COLUMN, Chunk, Names, field_patterns, group_columns
from persisting_torch.queue.fields import Schema
from persisting_torch.queue.runs import Int64s
from persisting_torch.queue.storage import RowStore


@dataclass
class LateBatch:
    """One put of late fields: a table, and (names, indexes) in the order of its rows."""

    table: pa.Table
    arrivals: list[tuple[Names, Int64s]]


class LateFields:
    """Which samples have late values of which fields, and those values."""

    def __init__(self, store: RowStore, books: Books) -> None:
        self.store = store
        self._books = books
        self._newest: dict[str, Int64s] = {}
        self._followed = 0

    def follow(self) -> None:
        """Enter what the books have seen arrive. Expects the ledger's lock to be held."""
        for _, names, first_row, count in self._books.late_seen[self._followed :]:
            rows = np.arange(first_row, first_row + count, dtype=np.int64)
            indexes = self.store.read(rows, [INDEX_COLUMN])[INDEX_COLUMN].to_numpy()
            for name in names:
                self._enter(name, indexes, rows)
            self._followed += 1

    def _enter(self, name: str, indexes: Int64s, rows: Int64s) -> None:
        newest = self._newest.get(name, np.empty(0, dtype=np.int64))
        size = int(indexes.max()) + 1
        if size > len(newest):
            grown = np.full(max(size, 2 * len(newest)), -1, dtype=np.int64)
            grown[: len(newest)] = newest
            newest = self._newest[name] = grown
        np.maximum.at(newest, indexes, rows)

    def holds(self, name: str) -> bool:
        """Whether any sample has a late value of this field."""
        return name in self._newest

    def compose(self, chunk: Chunk, indexes: Int64s, schema: Schema) -> LateBatch:
        """The table to append for these samples; those with the same fields stand together."""
        columns, names = group_columns([chunk], schema)
        patterns = field_patterns(names)
        order = [at for _, at in patterns if at is not None]
        fields = [pa.field(INDEX_COLUMN, pa.int64(), nullable=False)]
        fields += [schema.arrow_field(column) for column in columns]
        table = pa.Table.from_arrays(
            [pa.array(indexes), *columns.values()], schema=pa.schema(fields)
        )
        return LateBatch(
            table=table.take(pa.array(np.concatenate(order))) if order else table,
            arrivals=[(fields, indexes if at is None else indexes[at]) for fields, at in patterns],
        )

    def overlay(
        self, table: pa.Table, indexes: Int64s, schema: Schema, names: list[str]
    ) -> pa.Table:
        """The table with late values in place of what its rows hold for these fields.

        Row i of the table belongs to the sample with the i-th index.
        """
        for name in names:
            if name in self._newest:
                table = self._overlay_field(table, indexes, schema, name)
        return table

    def _overlay_field(
        self, table: pa.Table, indexes: Int64s, schema: Schema, name: str
    ) -> pa.Table:
        newest = self._newest[name]
        rows = np.where(indexes < len(newest), newest[np.minimum(indexes, len(newest) - 1)], -1)
        late = np.flatnonzero(rows >= 0)
        if not len(late):
            return table
        columns = [variant.column for variant in schema.fields[name].variants]
        values = self.store.read(rows[late], columns)
        for column in columns:
            old = _column(table, column, schema)
            if column in values.column_names:
                both = pa.chunked_array([*old.chunks, *values[column].chunks], type=old.type)
                source = np.arange(len(indexes))
                source[late] = len(indexes) + np.arange(len(late))
                taken = both.combine_chunks().take(pa.array(source))
            else:
                absent = np.zeros(len(indexes), dtype=bool)
                absent[late] = True
                taken = old.combine_chunks().take(pa.array(np.arange(len(indexes)), mask=absent))
            table = _with_column(table, column, taken, schema)
        return table


def _column(table: pa.Table, column: str, schema: Schema) -> pa.ChunkedArray:
    if column in table.column_names:
        return table[column]
    kind = schema.arrow_field(column).type
    return pa.chunked_array([pa.nulls(len(table), kind)], type=kind)


def _with_column(table: pa.Table, column: str, values: pa.Array, schema: Schema) -> pa.Table:
    field = schema.arrow_field(column)
    if column in table.column_names:
        return table.set_column(table.column_names.index(column), field, values)
    return table.append_column(field, values)
