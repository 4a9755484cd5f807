"""Samples dealt to the buckets of a queue, and put into each of them.

A flush makes one table for each bucket that has part in it. Where a sample goes follows from its
own values: who tries again after a failure sends it to the same bucket, which takes it once.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata
from pyroaring import BitMap64
from tensordict import is_tensor_collection

from persisting_torch.errors import SchemaError
from persisting_torch.queue.again import again
from persisting_torch.queue.books import Books
from persisting_torch.queue.buffer import INDEX_COLUMN, Arrivals, Composed, Names
from persisting_torch.queue.commit import Committer
from persisting_torch.queue.fields import Schema
from persisting_torch.queue.late import LateBatch
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.locks import Lock
from persisting_torch.queue.places import pack
from persisting_torch.queue.record import Mark
from persisting_torch.queue.runs import Int64s
from persisting_torch.queue.sets import runs_of, set_of
from persisting_torch.queue.threads import at_once

if TYPE_CHECKING:
    from persisting_torch.queue.producers import Finishing

NEIGHBOURS = 6  # 2 ** 6 samples of consecutive indexes stay together where nothing else decides
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2 ** 64 / golden ratio (Knuth, TAOCP 3, 6.4)


@dataclass(frozen=True)
class Router:
    """Which bucket a sample belongs to.

    By the value of the bucket column; where a sample has none, by its key; else by its index.
    """

    queue: str
    num_buckets: int
    column: str | None

    def check(self, data: Any) -> None:
        """Raise SchemaError for a record without the bucket column, where one was asked for."""
        if self.column is None or is_tensor_collection(data):
            return
        records = data if isinstance(data, list | tuple) else [data]
        for number, record in enumerate(records):
            if isinstance(record, dict) and record.get(self.column) is None:
                raise SchemaError(
                    f"queue {self.queue!r}: record {number} has no {self.column!r}, the field that"
                    f" says which of the {self.num_buckets} buckets it goes to. Give it one, or"
                    " make the queue without bucket_column."
                )

    def buckets(self, composed: Composed, schema: Schema) -> Int64s:
        """The bucket of each row of the table."""
        indexes: Int64s = composed.table[INDEX_COLUMN].to_numpy()
        found: Int64s = (indexes >> NEIGHBOURS) % self.num_buckets
        if composed.keys:
            at = {index: position for position, index in enumerate(indexes.tolist())}
            for _, key, index, _ in composed.keys:
                found[at[index]] = zlib.crc32(key.encode()) % self.num_buckets
        known = schema.fields.get(self.column or "id")
        for variant in known.variants if known is not None else ():
            if variant.column in composed.table.column_names:
                values = composed.table[variant.column].combine_chunks()
                has = values.is_valid().to_numpy(zero_copy_only=False)
                found[has] = _hashes(values.drop_null()) % self.num_buckets
        return found


def _hashes(values: pa.Array) -> Int64s:
    """A number for each value, the same for equal values in whatever process; not negative."""
    if pa.types.is_integer(values.type):
        return _spread(values.to_numpy().astype(np.int64))
    told = [zlib.crc32(repr(value).encode()) for value in values.to_pylist()]
    found = np.array(told, dtype=np.int64)
    if pa.types.is_floating(values.type):
        # A field that held whole numbers may come to hold others: 2.0 belongs where 2 went.
        numbers = values.to_numpy(zero_copy_only=False).astype(np.float64)
        whole = (np.abs(numbers) < 2.0**63) & (numbers == np.trunc(numbers))
        found[whole] = _spread(numbers[whole].astype(np.int64))
    return found


def _spread(whole: Int64s) -> Int64s:
    spread: Int64s = ((whole.view(np.uint64) * _SPREAD) >> np.uint64(33)).astype(np.int64)
    return spread


def split(composed: Composed, buckets: Int64s) -> dict[int, Composed]:
    """What a flush writes, by bucket."""
    return {
        bucket: part_of(composed, np.flatnonzero(buckets == bucket))
        for bucket in np.unique(buckets).tolist()
    }


def part_of(composed: Composed, at: Int64s) -> Composed:
    """Some of the rows that a flush writes, at these positions."""
    if len(at) == len(composed.table):
        return composed
    at = at[np.argsort(composed.table[INDEX_COLUMN].to_numpy()[at], kind="stable")]
    table = composed.table.take(pa.array(at))
    indexes = table[INDEX_COLUMN].to_numpy()
    members = set_of(indexes)
    arrivals: Arrivals = {}
    for place, arrived in composed.arrivals.items():
        if own := arrived & members:
            arrivals[place] = own
    keys = [key for key in composed.keys if key[2] in members]
    return Composed(table, runs_of(indexes), arrivals, keys)


def split_late(late: LateBatch, buckets: Int64s) -> dict[int, LateBatch]:
    """A put of late fields, by bucket."""
    found = {}
    for bucket in np.unique(buckets).tolist():
        at = np.flatnonzero(buckets == bucket)
        arrivals, start = [], 0
        for names, indexes in late.arrivals:
            own = buckets[start : start + len(indexes)] == bucket
            start += len(indexes)
            if own.any():
                arrivals.append((names, indexes[own]))
        found[bucket] = LateBatch(late.table.take(pa.array(at)), arrivals)
    return found


class Appender(Protocol):
    """A bucket as those see it who put into it: here, or with its owner in another process."""

    def append(self, composed: Composed) -> Mark | None:
        """Have them stored. How far the log of an owner elsewhere has come then, for the replica
        here to expect; None where the ledger is here.
        """

    def append_late(
        self,
        late: LateBatch,
        partition: str,
        keys: list[tuple[str, str, int, str | None]],
        finishing: Finishing,
    ) -> int: ...

    writer: str


@dataclass
class BucketCommitter(Committer):
    """Puts rows into one of several buckets, and enters them in the queue's ledger.

    In one transaction after the rows are there, without a note before: rows that were not entered
    are in no place, so nobody reads them, and upkeep removes them. `check` is called in that
    transaction, and raises where another process owns the bucket by now.
    """

    bucket: int = 0
    numbered: bool = True  # whether rows have places; those of a queue of one bucket do not
    check: Callable[[sqlite3.Connection], None] = lambda tx: None
    strays: bool = True  # whether there may be rows in no place

    def append(self, composed: Composed) -> None:
        """Commit those of the samples that have not arrived yet."""
        with self.lock:
            known = self._arrived(composed)
            if known:
                indexes = composed.table[INDEX_COLUMN].to_pylist()
                fresh = [index not in known for index in indexes]
                composed = part_of(composed, np.flatnonzero(fresh))
            if len(composed.table):
                self._append(composed)

    def append_written(self, composed: Composed, fragments: list[FragmentMetadata]) -> bool:
        """Commit samples whose rows, but not `table`, are in files already: see RowStore.stage.

        False, with nothing done, where only `append` can do it: some have arrived, or the files are
        not those of this bucket.
        """
        with self.lock:
            known = self._arrived(composed)
            if known:
                return known == BitMap64().union(*composed.arrivals.values())
            count = sum(part.physical_rows for part in fragments)
            if count != sum(length for _, length in composed.runs):
                raise ValueError(f"{composed.runs} were to be put, and {count} rows are written")
            if not self.rows.knows(fragments):
                return False
            self._commit(
                "data",
                count,
                lambda: self.rows.append_written(fragments),
                self._note(composed),
                composed.arrivals,
            )
            return True

    def _arrived(self, composed: Composed) -> BitMap64:
        """Those of the samples that have arrived already."""
        known = BitMap64()
        with self.ledger.lock:
            self.books.follow()
            for (partition, _), members in composed.arrivals.items():
                if partition in self.books.partitions:
                    known |= members & self.books.partitions[partition].arrived
        return known

    def append_kept(
        self,
        fragments: list[FragmentMetadata],
        kept: list[tuple[Names, int]],
        gone: list[int],
        version: int,
    ) -> None:
        """See Committer. The version is this bucket's, and says nothing about the others."""
        super().append_kept(fragments, kept, gone, 0)

    def recover(self) -> bool:
        """Nothing: there are no notes."""
        return False

    def _commit(
        self,
        which: str,
        count: int,
        append: Callable[[], None],
        note: dict[str, Any],
        came: Arrivals,
        check: Callable[[sqlite3.Connection], None] | None = None,
    ) -> int:
        store = self._store(which)
        append()
        first_row = store.rows - count
        before, self.strays = self.strays, True
        entered = self._enter_all(which, first_row, count, note, came, check)
        self.strays = before
        return entered

    @again
    def _enter_all(
        self,
        which: str,
        first_row: int,
        count: int,
        note: dict[str, Any],
        came: Arrivals,
        check: Callable[[sqlite3.Connection], None] | None,
    ) -> int:
        note = dict(note)
        with self.ledger.transaction(hurry=True) as tx:
            self.books.refresh(tx)
            self.check(tx)
            if check is not None:
                check(tx)
            self._number(tx, note, came)
            if which == "late":
                entered = pack(self.bucket, first_row)
            else:
                entered = self._place(tx, first_row, count) if self.numbered else first_row
            self._enter(tx, which, entered, note)
            return entered

    def _place(self, tx: sqlite3.Connection, bucket_row: int, count: int) -> int:
        """Number rows of the bucket as the next ones of the queue; the first number."""
        first_row = self.books.rows
        before = tx.execute(
            "SELECT seq, first_row, count, bucket_row FROM places WHERE seq ="
            " (SELECT max(seq) FROM places) AND bucket = ?"
            " AND first_row + count = ? AND bucket_row + count = ?",
            (self.bucket, first_row, bucket_row),
        ).fetchone()
        start = first_row
        if before is not None:
            seq, start, already, bucket_row = before
            count += already
            tx.execute("DELETE FROM places WHERE seq = ?", (seq,))
        tx.execute(
            "INSERT INTO places (first_row, count, bucket, bucket_row) VALUES (?, ?, ?, ?)",
            (start, count, self.bucket, bucket_row),
        )
        return first_row


@dataclass
class ManyCommitter:
    """Deals what is put to the buckets and waits for all of them.

    `apart`: they have locks of their own, and are asked all at once.
    """

    ledger: Ledger
    books: Books
    lock: Lock
    router: Router
    appenders: Sequence[Appender]
    apart: bool
    _writer: str = field(default="")

    @property
    def writer(self) -> str:
        return self._writer

    @writer.setter
    def writer(self, name: str) -> None:
        self._writer = name
        for appender in self.appenders:
            appender.writer = name

    def recover(self) -> bool:
        """Nothing: there are no notes."""
        return False

    def append(self, composed: Composed) -> None:
        """Commit new samples; they are durable, and visible to all, when this returns.

        Where a bucket fails, others may have taken their part; trying again does the rest.
        """
        with self.ledger.lock:
            buckets = self.router.buckets(composed, self.books.schema)
        parts = split(composed, buckets)
        marks: list[Mark | None] = []

        def append(bucket: int, part: Composed) -> None:
            marks.append(self.appenders[bucket].append(part))

        self._each([partial(append, b, part) for b, part in parts.items()])
        for mark in marks:
            if mark is not None:
                self.ledger.expect(mark)
        if None in marks:
            self.books.catch_up()

    def append_late(
        self,
        late: LateBatch,
        partition: str,
        keys: list[tuple[str, str, int, str | None]],
        finishing: Finishing,
    ) -> int:
        """Commit fields of samples that exist already; likewise.

        Returns the first late row, or -1 where there are several first ones.
        """
        with self.ledger.lock:
            indexes = late.table[INDEX_COLUMN].to_numpy()
            rows = self.books.runs.rows_of(indexes)
            buckets = self.books.places.buckets(rows)
        if (rows < 0).any():
            raise KeyError(
                f"samples {indexes[rows < 0][:10].tolist()} of queue {self.router.queue!r} are"
                " gone: they were cleared, or consumed and deleted, a moment ago."
            )
        firsts: list[int] = []

        def append(bucket: int, part: LateBatch) -> None:
            members = BitMap64().union(*(set_of(own) for _, own in part.arrivals))
            own_keys = [key for key in keys if key[2] in members]
            own = [work._replace(members=work.members & members) for work in finishing.parts]
            done = replace(finishing, parts=[work for work in own if work.members])
            firsts.append(self.appenders[bucket].append_late(part, partition, own_keys, done))

        parts = split_late(late, buckets)
        self._each([partial(append, b, part) for b, part in parts.items()])
        self.ledger.catch_up()
        return firsts[0] if len(firsts) == 1 else -1

    def _each(self, calls: Sequence[Callable[[], object]]) -> None:
        if self.apart:
            at_once(calls)
        else:
            for call in calls:
                call()
