"""The way out: from positions and indexes to records and TensorDicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tensordict import TensorDict

from persisting_torch.queue.again import again
from persisting_torch.queue.books import Books
from persisting_torch.queue.buffer import INDEX_COLUMN, Chunk, group_columns
from persisting_torch.queue.clearing import enter_cleared
from persisting_torch.queue.decode import to_records, to_tensordict
from persisting_torch.queue.gone import nth_present, present_from
from persisting_torch.queue.late import LateFields
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.runs import Int64s
from persisting_torch.queue.sets import set_of
from persisting_torch.queue.stores import Store


@dataclass
class Moved:
    """How far a stream has come, and what it met on the way."""

    row: int
    count: int
    records: list[dict[str, Any]]
    sealed: bool
    """Whether the whole queue was sealed by then, so that no more samples would come."""


class Reads:
    """Reading of one bucket: committed rows with their late fields, and samples that wait."""

    def __init__(
        self,
        ledger: Ledger,
        books: Books,
        rows: Store,
        late: LateFields[Any],
        zerocopy_mode: str,
        allow_pickle: bool,
    ) -> None:
        self.ledger = ledger
        self.books = books
        self.rows = rows
        self.late = late
        self.copy = zerocopy_mode == "off"
        self.allow_pickle = allow_pickle

    def _follow(self) -> None:
        self.books.follow()
        self.late.follow()

    # In order

    def records(self, limit: int, offset: int, waiting: Sequence[Chunk]) -> list[dict[str, Any]]:
        """Up to `limit` records after the first `offset`: rows as committed, then waiting ones."""
        with self.ledger.lock:
            self._follow()
            gone, total = self.books.gone, self.books.rows
            present = total - len(gone)
            rows = present_from(gone, nth_present(gone, min(offset, present)), total, limit)
            indexes = self.books.runs.indexes_of(rows)
            waiting = self._not_committed(waiting)
        records = self._records_of(rows, indexes)
        return records + self._waiting_records(
            waiting, max(0, offset - present), limit - len(records)
        )

    def advance(
        self,
        limit: int,
        row: int,
        had: set[int],
        waiting: Sequence[Chunk],
        buckets: Sequence[int] | None = None,
        *,
        values: bool = True,
    ) -> Moved:
        """Up to `limit` records from row id `row` on, and of waiting samples.

        With `buckets`, only of rows in these. `had` holds indexes of samples that were met while
        they waited; they are not met again.
        """
        with self.ledger.lock:
            self._follow()
            found: list[Int64s] = [np.empty(0, dtype=np.int64)]
            count = 0
            had -= {index for index in had if index in self.books.cleared_indexes}
            while count < limit and row < self.books.rows:
                step = present_from(self.books.gone, row, self.books.rows, limit - count)
                row = int(step[-1]) + 1 if len(step) == limit - count else self.books.rows
                if buckets is not None:
                    step = step[np.isin(self.books.places.buckets(step), buckets)]
                keep = _not_met(self.books.runs.indexes_of(step), had)
                found.append(step[keep])
                count += int(keep.sum())
            rows = np.concatenate(found)
            indexes = self.books.runs.indexes_of(rows)
            waiting = self._not_committed(waiting)
            sealed = self.books.sealed is not None
        records = self._records_of(rows, indexes) if values else []
        for chunk in waiting:
            fresh = [at for at in chunk.indexes if at not in had][: limit - count]
            if fresh:
                start = fresh[0] - chunk.first
                if values:
                    records += self._chunk_records(chunk, start, start + len(fresh))
                had.update(fresh)
                count += len(fresh)
        return Moved(row, count, records, sealed)

    def count(self, waiting: Sequence[Chunk]) -> int:
        """Samples that are there, waiting ones included."""
        with self.ledger.reading() as tx:
            self.books.refresh(tx)
            committed = self.books.rows - len(self.books.gone)
            return committed + sum(len(chunk) for chunk in self._not_committed(waiting))

    def _records_of(self, rows: Int64s, indexes: Int64s) -> list[dict[str, Any]]:
        """Records of rows, but those that were cleared and removed meanwhile."""
        while len(rows):
            names = self.names_of(None)
            try:
                return self._to_records(self.table(rows, indexes, names), names, copy=self.copy)
            except KeyError:
                self.ledger.catch_up()
                with self.ledger.lock:
                    self._follow()
                    cleared = self.books.cleared_indexes
                    there = np.array([at not in cleared for at in indexes.tolist()])
                if there.all():
                    raise
                rows, indexes = rows[there], indexes[there]
        return []

    def _to_records(self, table: pa.Table, names: list[str], copy: bool) -> list[dict[str, Any]]:
        return to_records(
            table, self.books.schema, names, copy=copy, allow_pickle=self.allow_pickle
        )

    def _not_committed(self, waiting: Sequence[Chunk]) -> list[Chunk]:
        arrived = self.books.arrived_of
        return [
            part
            for chunk in waiting
            for part in chunk.without(arrived(chunk.partition, chunk.first, len(chunk)))
        ]

    def _waiting_records(
        self, waiting: Sequence[Chunk], skip: int, limit: int
    ) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        for chunk in waiting:
            if skip < len(chunk) and len(records) < limit:
                records += self._chunk_records(chunk, skip, skip + limit - len(records))
            skip = max(0, skip - len(chunk))
        return records

    def _chunk_records(self, chunk: Chunk, start: int, stop: int) -> list[dict[str, Any]]:
        """Waiting samples, by way of the columns that their flush would write."""
        columns, _ = group_columns([chunk], self.books.schema)
        part = {name: array[start:stop] for name, array in columns.items()}
        count = len(range(len(chunk))[start:stop])
        table = pa.table({INDEX_COLUMN: np.arange(count), **part})
        names = list(self.books.schema.fields)
        return self._to_records(table, names, copy=True)

    # By index

    def names_of(self, fields: Sequence[str] | None) -> list[str]:
        """Names of stored fields: a name that others nest under stands for all of those.

        A name that was never put stays as it is: its samples may still come.
        """
        with self.ledger.lock:
            known = list(self.books.schema.fields)
        if fields is None:
            return known
        names: list[str] = []
        for field in fields:
            if field == INDEX_COLUMN and field not in known:
                continue
            nested = [name for name in known if name.startswith(f"{field}.")]
            names += [field] if field in known or not nested else nested
        return names

    def batch(
        self,
        partition: str,
        indexes: Int64s,
        fields: Sequence[str] | None,
        pad: dict[str, float] | None,
        *,
        known: bool = False,
    ) -> TensorDict:
        """A TensorDict of batch size [n] with the fields of these samples, in their order.

        `known` samples were just found in the partition, and are not looked up there again.
        """
        with self.ledger.lock:
            if not known:
                self.books.follow_others()
            self.late.follow()
            names = self.names_of(fields)
            self._check_names(names)
            rows = self._rows_of(partition, indexes, known)
            schema = self.books.schema
        table = self.table(rows, indexes, names)
        batch = to_tensordict(
            table, schema, names, pad=pad, copy=self.copy, allow_pickle=self.allow_pickle
        )
        if fields is not None and INDEX_COLUMN in fields and INDEX_COLUMN not in names:
            batch[INDEX_COLUMN] = torch.from_numpy(indexes.copy())
        return batch

    def column(self, indexes: Int64s, field: str) -> pa.Table:
        """The stored columns of one field of samples that the partition is known to hold."""
        with self.ledger.lock:
            self.late.follow()
            self._check_names([field])
            rows = self.books.runs.rows_of(indexes)
        return self.table(rows, indexes, [field])

    def _check_names(self, names: Sequence[str]) -> None:
        unknown = [name for name in names if name not in self.books.schema.fields]
        if unknown:
            known = ", ".join(self.books.schema.fields) or "none yet"
            raise KeyError(
                f"queue {self.books.schema.queue!r} has no field {', '.join(unknown)}."
                f" Its fields are: {known}."
            )

    def check_indexes(self, partition: str, indexes: Int64s) -> None:
        """Raise KeyError naming indexes that the partition does not hold."""
        with self.ledger.lock:
            self._follow()
            self._rows_of(partition, indexes)

    def _rows_of(self, partition: str, indexes: Int64s, known: bool = False) -> Int64s:
        if known:
            return self.books.runs.rows_of(indexes)
        unknown = self.books.strays(partition, indexes)
        if unknown:
            self.ledger.catch_up()
            self._follow()
            unknown = self.books.strays(partition, indexes)
        if unknown:
            raise KeyError(
                f"{self.books.schema.queue}/{partition} holds no samples with global indexes"
                f" {unknown}."
            )
        if self.books.cleared_indexes:
            gone = self.books.cleared_indexes & set_of(indexes)
            if gone:
                raise KeyError(
                    f"samples {list(gone)[:10]} of queue {self.books.schema.queue!r} are gone: they"
                    f" were cleared, or consumed and deleted (retention={self.books.retention})."
                )
        return self.books.runs.rows_of(indexes)

    def table(self, rows: Int64s, indexes: Int64s, names: Sequence[str]) -> pa.Table:
        """The stored columns of these fields, late values in place, for samples by row and index.

        Which late values there are is looked up before the rows are read: so a fold that comes
        between leaves nothing out. Raises KeyError for rows that are not there.
        """
        while True:
            with self.ledger.lock:
                found = self.late.find(indexes, names)
                schema, folds = self.books.schema, self.late.folds
            whole = {name for part in found if part.whole for name in part.names}
            columns = [
                v.column
                for name in names
                if name not in whole
                for v in schema.fields[name].variants
            ]
            try:
                table = self.rows.read(rows, columns) if columns and len(rows) else pa.table({})
                if not table.column_names:
                    table = pa.table({INDEX_COLUMN: indexes})
                return self.late.overlay(table, found, schema)
            except KeyError:
                self.ledger.catch_up()
                with self.ledger.lock:
                    self._follow()
                    if self.late.folds == folds:
                        raise

    # Removing

    @again
    def clear(self, partition: str, indexes: Sequence[int]) -> None:
        """Enter samples as cleared; upkeep removes their rows."""
        with self.ledger.transaction() as tx:
            self.books.refresh(tx)
            unknown = self.books.strays(partition, indexes)
            if unknown:
                raise KeyError(
                    f"{self.books.schema.queue}/{partition} holds no samples with global indexes"
                    f" {unknown}; nothing was cleared."
                )
            members = set_of(indexes) - self.books.cleared_indexes
            if members:
                enter_cleared(tx, self.books.partitions[partition].id, members)


def check_range(limit: int | None, offset: int) -> None:
    """Raise ValueError for a negative limit or offset; a limit of None is none."""
    if offset < 0 or (limit is not None and limit < 0):
        raise ValueError(f"limit and offset must not be negative, got {limit} and {offset}.")


def _not_met(indexes: Int64s, had: set[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of the samples were not met while they waited; those that were are struck off."""
    keep = np.ones(len(indexes), dtype=bool)
    if had:
        for at, index in enumerate(indexes.tolist()):
            if index in had:
                had.discard(index)
                keep[at] = False
    return keep
