"""Fields that samples got after they were put: an append-only dataset beside the rows.

Each append holds `_index` and the fields that arrived. The newest value of a field wins; row ids
rise in commit order, so the newest is the one with the largest row id. Upkeep folds the values into
the rows and takes them away here; the ledger says which late rows still count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from persisting_torch.errors import PersistingError
from persisting_torch.queue.books import LateRun
from persisting_torch.queue.buffer import INDEX_COLUMN, Chunk, Names, field_patterns, group_columns
from persisting_torch.queue.fields import Schema
from persisting_torch.queue.newest import Newest
from persisting_torch.queue.runs import Int64s
from persisting_torch.queue.stores import Store

WRITTEN_KEPT = 64

S = TypeVar("S", bound=Store)


@dataclass
class LateBatch:
    """One put of late fields: a table, and (names, indexes) in the order of its rows."""

    table: pa.Table
    arrivals: list[tuple[Names, Int64s]]


@dataclass
class Overlay:
    """Late rows that hold the newest values of some fields, for some of the samples asked for."""

    names: list[str]
    at: Int64s  # positions of these samples among those asked for
    rows: Int64s
    whole: bool  # whether these are all that were asked for, in their order


class LateBooks(Protocol):
    """What the books say of late fields."""

    @property
    def schema(self) -> Schema: ...

    @property
    def folds(self) -> int: ...

    @property
    def folded_version(self) -> int: ...

    @property
    def last_late(self) -> int: ...

    @property
    def late(self) -> dict[int, LateRun]: ...

    def follow(self) -> None: ...

    def catch_up(self) -> None: ...


class LateFields(Generic[S]):
    """Which samples have late values of which fields, and those values.

    A read looks up its late rows first, and reads `data.lance` after that: what is looked up as
    folded is in every later version.
    """

    def __init__(self, store: S, rows: Store, books: LateBooks) -> None:
        self.store = store
        self._rows = rows
        self._books = books
        self._newest: dict[str, Newest] = {}
        self._written: OrderedDict[int, Int64s] = OrderedDict()
        self._entered = 0
        self.folds = 0

    # Following the ledger. These methods expect its lock to be held.

    def follow(self) -> None:
        """Enter what the books have seen arrive, and forget what they have seen folded."""
        while self._books.folds != self.folds or self._books.last_late > self._entered:
            if self._books.folds != self.folds:
                self._forget_folded()
            for run in [run for seq, run in self._books.late.items() if seq > self._entered]:
                indexes = self._indexes_of(run)
                if indexes is None:
                    break
                for name in run.names:
                    self._newest.setdefault(name, Newest()).enter(indexes, run.rows())
                self._entered = run.seq
            else:
                self._entered = max(self._entered, self._books.last_late)

    def _indexes_of(self, run: LateRun) -> Int64s | None:
        """The samples of a run's rows; None if it was folded before they could be read."""
        written = self._written.pop(run.first_row, None)
        if written is not None and len(written) == run.count:
            return written
        try:
            table = self.store.read(run.rows(), [INDEX_COLUMN])
        except KeyError:
            self._books.catch_up()
            if self._books.folds == self.folds:
                raise
            return None
        indexes: Int64s = table[INDEX_COLUMN].to_numpy()
        return indexes

    def _forget_folded(self) -> None:
        self._rows.refresh()
        if self._rows.version < self._books.folded_version:
            raise PersistingError(
                f"queue {self._books.schema.queue!r}: late fields were folded into version"
                f" {self._books.folded_version} of {self._rows.path}, but its newest version is"
                f" {self._rows.version}. Restore the whole folder from one copy."
            )
        firsts, ends = ranges(list(self._books.late.values()))
        for newest in self._newest.values():
            newest.keep(firsts, ends)
        self._newest = {name: newest for name, newest in self._newest.items() if len(newest)}
        self.folds = self._books.folds

    def remember(self, first_row: int, arrivals: Sequence[tuple[Names, Int64s]]) -> None:
        """The samples of late rows that this process has written, which spares reading them."""
        if first_row < 0:
            return  # they lie in several places
        for _, indexes in arrivals:
            self._written[first_row] = indexes
            first_row += len(indexes)
        while len(self._written) > WRITTEN_KEPT:
            self._written.popitem(last=False)

    def find(self, indexes: Int64s, names: Sequence[str]) -> list[Overlay]:
        """The late values of these fields; fields with the same late rows stand together."""
        found: list[Overlay] = []
        for name in names:
            newest = self._newest.get(name)
            if newest is None:
                continue
            rows = newest.find(indexes)
            at = np.flatnonzero(rows >= 0)
            if not len(at):
                continue
            rows = rows[at]
            for part in found:
                if np.array_equal(part.rows, rows):
                    part.names.append(name)
                    break
            else:
                found.append(Overlay([name], at, rows, whole=len(at) == len(indexes)))
        return found

    def entries(self) -> dict[str, tuple[Int64s, Int64s]]:
        """For each field the samples that have late values, ascending, and their newest rows."""
        return {name: newest.entries() for name, newest in self._newest.items()}

    # Values

    def overlay(self, table: pa.Table, found: Sequence[Overlay], schema: Schema) -> pa.Table:
        """The table with these late values in place of what its rows hold for the fields.

        The table need not have the columns of fields whose overlay is whole. Raises KeyError if a
        late row is gone, since it was folded.
        """
        for part in found:
            columns = [v.column for name in part.names for v in schema.fields[name].variants]
            values = self.store.read(part.rows, columns)
            for column in columns:
                table = _overlay_column(table, column, values, part, schema)
        return table

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


def ranges(runs: Sequence[LateRun]) -> tuple[Int64s, Int64s]:
    """First row ids of the runs, and those after their last, both rising."""
    pairs = sorted((run.first_row, run.first_row + run.count) for run in runs)
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def replaced(old: pa.ChunkedArray, at: Int64s, values: pa.ChunkedArray | None) -> pa.Array:
    """The old values with others at some positions; None stands for nulls."""
    if values is None:
        absent = np.zeros(len(old), dtype=bool)
        absent[at] = True
        return old.combine_chunks().take(pa.array(np.arange(len(old)), mask=absent))
    both = pa.chunked_array([*old.chunks, *values.chunks], type=old.type)
    source = np.arange(len(old))
    source[at] = len(old) + np.arange(len(at))
    return both.combine_chunks().take(pa.array(source))


def _overlay_column(
    table: pa.Table, column: str, values: pa.Table, part: Overlay, schema: Schema
) -> pa.Table:
    field = schema.arrow_field(column)
    late = values[column] if column in values.column_names else None
    place = table.column_names.index(column) if column in table.column_names else None
    if late is None and place is None:
        return table
    if part.whole and late is not None:
        new = late
    else:
        old = (
            pa.chunked_array([pa.nulls(len(table), field.type)]) if place is None else table[place]
        )
        new = replaced(old, part.at, late)
    if place is None:
        return table.append_column(field, new)
    return table.set_column(place, field, new)
