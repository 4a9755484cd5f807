"""Late fields brought into the rows that they belong to, off the path of those who put and get.

1. What the late values are to replace is written beside the rows, and what is kept of them beside
   the late rows, without a lock; no version has it yet.
2. Under the commit lock, if nothing else happened to these fragments, one commit gives the rows
   their values. The ledger still says that late values are newer, and they are the same.
3. One transaction of the ledger takes the late rows off its list and says which version of the rows
   has their values. Only now are they not looked for in `late.lance` any more.
4. Fragments of `late.lance` of which no row is on the list are removed.

Who dies between two of these steps leaves a queue that reads the same. A late value that was put
meanwhile is newer than all of this and stays on the list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata

from persisting_torch.queue.buffer import INDEX_COLUMN, Names
from persisting_torch.queue.columns import (
    NewColumns,
    read_columns,
    replace_columns,
    write_columns,
)
from persisting_torch.queue.fields import Schema
from persisting_torch.queue.folding import Kept, Plan, Thrift, plan
from persisting_torch.queue.fragments import Int64s
from persisting_torch.queue.late import ranges, replaced
from persisting_torch.queue.newest import covered
from persisting_torch.queue.storage import FRAGMENT_BYTES, RowStore, data_files

if TYPE_CHECKING:
    from persisting_torch.queue.parts import Plain
    from persisting_torch.queue.shard import Shard

ATTEMPTS = 4  # the last one holds the commit lock from its beginning
ROWS_AT_ONCE = 8192
MOST_LATE = 256  # runs of late rows that nobody has looked after
REST_FACTOR = 50  # folding that does not pay takes a fiftieth of the time at most


def fold(
    bucket: Plain | Shard, thrift: Thrift = Thrift.LITTLE, stop: Callable[[], bool] = lambda: False
) -> bool:
    """Fold late values that it pays to fold, and merge small puts; whether anything was done.

    Any number of processes may do it at once.
    """
    if not bucket.late.store.exists():
        return False
    for attempt in range(ATTEMPTS):
        alone = attempt == ATTEMPTS - 1
        with bucket.commit_lock if alone else nullcontext():
            found = plan(bucket, thrift)
            if found is None or stop():
                return False
            try:
                if Fold(bucket, found).carry_out(stop):
                    return True
            except (KeyError, OSError, ValueError) as error:
                gone = isinstance(error, KeyError) or "Not found" in str(error)
                if alone or not gone:  # else somebody has taken away what was to be read
                    raise
    return False


def sweep(bucket: Plain | Shard) -> None:
    """Remove fragments of `late.lance` that hold nothing that counts."""
    if bucket.late.store.exists() and len(_dead_rows(bucket)):
        with bucket.commit_lock:
            bucket.committer.recover()
            bucket.late.store.delete(_dead_rows(bucket))


def _dead_rows(bucket: Plain | Shard) -> Int64s:
    """Rows of late fragments in which no row counts."""
    table = bucket.late.store.table()
    with bucket.ledger.lock:
        bucket.books.follow()
        firsts, ends = ranges(list(bucket.books.late.values()))
    rows = [table.positions[i].in_order() for i in table.ids]
    dead = [own for own in rows if not covered(own, firsts, ends).any()]
    return np.concatenate(dead) if dead else np.empty(0, dtype=np.int64)


class Folds:
    """One process's part in the folding: at once what pays, and the rest now and then."""

    def __init__(self, bucket: Plain | Shard) -> None:
        self._bucket = bucket
        self._left = 0
        self._rest = False
        self._rest_due = 0.0

    def run(self, stop: Callable[[], bool], thrift: Thrift = Thrift.LITTLE) -> None:
        """Fold, and remove what that leaves of `late.lance`. Others do no upkeep meanwhile."""
        started = time.monotonic()
        fold(self._bucket, thrift, stop)
        sweep(self._bucket)
        now = time.monotonic()
        self._rest_due = max(self._rest_due, now + REST_FACTOR * (now - started))
        self._left = len(self._bucket.books.late)
        self._rest = thrift is Thrift.LITTLE and self._left > 0

    def due(self) -> bool:
        """Whether many late puts have come since, whoever made them."""
        return len(self._bucket.books.late) > self._left + MOST_LATE

    def rest_due(self) -> bool:
        """Whether it is time to fold what did not pay."""
        return self._rest and time.monotonic() >= self._rest_due


class Fold:
    """One plan, carried out."""

    def __init__(self, bucket: Plain | Shard, found: Plan) -> None:
        self.bucket = bucket
        self.plan = found
        self.late: RowStore = bucket.late.store
        self.changes: list[NewColumns] = []
        self.written: list[FragmentMetadata] = []

    def carry_out(self, stop: Callable[[], bool]) -> bool:
        """False, with nothing done, if something came between or `stop` says so."""
        try:
            whole = self._write(stop)
        except BaseException:
            self._discard()
            raise
        if whole:
            with self.bucket.commit_lock:
                self.bucket.committer.recover()
                whole = self._fits()
                if whole:
                    self._commit()
        if not whole:
            self._discard()
            return False
        sweep(self.bucket)
        return True

    def _write(self, stop: Callable[[], bool]) -> bool:
        """Write all files; whether `stop` let it."""
        with self.bucket.ledger.lock:
            schema = self.bucket.books.schema
        for slot, parts in self.plan.by_slot().items():
            if stop():
                return False
            self.changes.append(self._new_columns(slot, parts, schema))
        for kept in self.plan.kept:
            if stop():
                return False
            self.written += self._write_kept(kept, schema)
        return True

    def _new_columns(
        self, slot: int, parts: list[tuple[list[str], Int64s, Int64s]], schema: Schema
    ) -> NewColumns:
        """A fragment's columns of these fields, with the late values in place."""
        table, fragment = self.plan.table, self.plan.table.fragment(slot)
        columns: dict[str, pa.Array] = {}
        for names, offsets, rows in parts:
            wanted = [v.column for name in names for v in schema.fields[name].variants]
            late = self.late.read(rows, wanted)
            old = read_columns(table, fragment, wanted)
            for column in wanted:
                if column in old.column_names:
                    before = old[column]
                elif column in late.column_names:
                    kind = table.schema.field(column).type
                    before = pa.chunked_array([pa.nulls(fragment.metadata.physical_rows, kind)])
                else:
                    continue
                values = late[column] if column in late.column_names else None
                columns[column] = replaced(before, offsets, values)
        return write_columns(table, fragment, columns)

    def _write_kept(self, kept: Kept, schema: Schema) -> list[FragmentMetadata]:
        """Late rows written again, with just the fields for which they are kept."""
        columns = [v.column for name in kept.names for v in schema.fields[name].variants]
        pieces = [
            kept.rows[start : start + ROWS_AT_ONCE]
            for start in range(0, len(kept.rows), ROWS_AT_ONCE)
        ]
        first = self.late.read(pieces[0], [INDEX_COLUMN, *columns])

        def batches() -> Iterator[pa.RecordBatch]:
            yield from first.to_batches()
            for piece in pieces[1:]:
                yield from self.late.read(piece, [INDEX_COLUMN, *columns]).to_batches()

        reader = pa.RecordBatchReader.from_batches(first.schema, batches())
        row_bytes = max(1, first.nbytes // len(first))
        return self.late.write(reader, max(1, FRAGMENT_BYTES // row_bytes))

    def _fits(self) -> bool:
        """Commit the new columns, with the lock held; False if something came between."""
        with self.bucket.ledger.lock:
            self.bucket.books.follow()
            if any(run.seq not in self.bucket.books.late for run in self.plan.gone):
                return False
        return not self.changes or replace_columns(self.bucket.rows, self.changes)

    def _commit(self) -> None:
        """Enter what has left, and what is kept of it, with the lock held."""
        bucket = self.bucket
        with bucket.ledger.lock:
            bucket.late.follow()
            kept = [part for group in self.plan.kept for part in self._newest_of(group)]
        version = bucket.rows.version if self.changes else 0
        bucket.committer.append_kept(
            self.written, kept, [run.seq for run in self.plan.gone], version
        )
        with bucket.ledger.lock:
            bucket.books.follow()
            bucket.late.follow()

    def _newest_of(self, kept: Kept) -> list[tuple[Names, int]]:
        """What the rows hold that is still the newest, as (names, how many rows)."""
        valid = np.zeros((len(kept.rows), len(kept.names)), dtype=bool)
        for overlay in self.bucket.late.find(kept.indexes, kept.names):
            for name in overlay.names:
                number = kept.names.index(name)
                valid[overlay.at, number] = overlay.rows == kept.rows[overlay.at]
        edges = np.flatnonzero((valid[1:] != valid[:-1]).any(axis=1)) + 1
        return [
            (
                tuple(name for name, has in zip(kept.names, part[0], strict=True) if has),
                len(part),
            )
            for part in np.split(valid, edges)
        ]

    def _discard(self) -> None:
        """Delete the files of what was written in vain."""
        folders = [(self.bucket.rows, change.files) for change in self.changes]
        folders.append((self.late, data_files(self.written)))
        for store, files in folders:
            store.discard(files)
