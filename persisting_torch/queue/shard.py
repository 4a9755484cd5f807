"""One of several buckets as the upkeep of its rows sees it: a queue of its own."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap64

from persisting_torch.queue.books import Books, LateRun
from persisting_torch.queue.clearing import MOST_ENTRIES, count_deleted, fold_cleared, forget_runs
from persisting_torch.queue.late import LateFields
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.places import BUCKET_SHIFT, ROW_MASK, pack
from persisting_torch.queue.runs import Int64s
from persisting_torch.queue.sets import unpack_set

if TYPE_CHECKING:
    from persisting_torch.queue.fields import Schema
    from persisting_torch.queue.shards import BucketCommitter
    from persisting_torch.queue.storage import RowStore


class ShardRuns:
    """Where samples stand among the rows of one bucket."""

    def __init__(self, books: Books, bucket: int) -> None:
        self._books = books
        self._bucket = bucket

    def rows_of(self, indexes: Int64s) -> Int64s:
        """Rows of the bucket; -1 for a sample that is elsewhere or nowhere."""
        rows = self._books.runs.rows_of(indexes)
        packed = np.where(rows < 0, np.int64(-1), self._books.places.packed(rows))
        return np.where(packed >> BUCKET_SHIFT == self._bucket, packed & ROW_MASK, np.int64(-1))


class ShardBooks:
    """The books of the queue, as far as they are about the rows of one bucket."""

    folded_version = 0

    def __init__(self, books: Books, bucket: int) -> None:
        self._books = books
        self._bucket = bucket
        self.runs = ShardRuns(books, bucket)

    @property
    def schema(self) -> Schema:
        return self._books.schema

    @property
    def folds(self) -> int:
        return self._books.folds

    @property
    def last_late(self) -> int:
        return self._books.last_late

    @property
    def cleared_indexes(self) -> BitMap64:
        return self._books.cleared_indexes

    @property
    def late(self) -> dict[int, LateRun]:
        """The bucket's runs of late rows, numbered as the bucket numbers them."""
        return {
            seq: LateRun(seq, run.names, run.first_row & ROW_MASK, run.count)
            for seq, run in self._books.late.items()
            if run.first_row >> BUCKET_SHIFT == self._bucket
        }

    def follow(self) -> None:
        self._books.follow()

    def catch_up(self) -> None:
        self._books.catch_up()


class Shard:
    """What upkeep needs of one bucket; the names are those of an Engine."""

    def __init__(self, ledger: Ledger, books: Books, committer: BucketCommitter) -> None:
        self.ledger = ledger
        self.committer = committer
        self.commit_lock = committer.lock
        self.rows = committer.rows
        self.bucket = committer.bucket
        self.all = books
        self.books = ShardBooks(books, self.bucket)
        self.late = LateFields(committer.late, committer.rows, self.books)

    def remove_rows(self) -> bool:
        """Delete the bucket's rows of samples that were cleared since the last time.

        And those that a failed put has left behind. Whether there were any cleared ones.
        """
        if self.committer.strays:
            self._remove_strays()
        with self.ledger.reading() as tx:
            self.all.refresh(tx)
            news = tx.execute(
                "SELECT seq, first, count, members FROM cleared WHERE seq > ?", (self._removed(tx),)
            ).fetchall()
            if not news:
                return False
            members = BitMap64().union(*(unpack_set(*packed) for _, *packed in news))
            rows = self.books.runs.rows_of(np.array(members.to_array(), dtype=np.int64))
        rows = rows[rows >= 0]
        with self.commit_lock:
            nbytes = self.rows.delete(rows)
        last = max(seq for seq, *_ in news)
        with self.ledger.transaction() as tx:
            self.all.refresh(tx)
            self.committer.check(tx)
            if self._removed(tx) < last:
                count_deleted(tx, len(rows), nbytes)
                self._note_removed(tx, last)
        return True

    def _removed(self, tx: sqlite3.Connection) -> int:
        """The newest entry of `cleared` whose rows this bucket has deleted."""
        key = f"removed:{self.bucket}"
        found = tx.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return int(found[0]) if found else 0

    def _note_removed(self, tx: sqlite3.Connection, last: int) -> None:
        """Once all buckets have deleted theirs, the ledger forgets where those rows were."""
        count = self.ledger.place.num_buckets
        tx.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"removed:{self.bucket}", last))
        marks = tx.execute(
            "SELECT value FROM meta WHERE key GLOB 'removed:*'",
        ).fetchall()
        if len(marks) < count:
            return
        everywhere = min(mark for (mark,) in marks)
        tx.execute("INSERT OR REPLACE INTO meta VALUES ('removed', ?)", (everywhere,))
        if tx.execute("SELECT max(seq) FROM cleared").fetchone()[0] == everywhere:
            forget_runs(tx, self.all.gone)
            _forget_places(tx, self.all.gone)
            fold_cleared(tx, MOST_ENTRIES)
            tx.execute(
                "UPDATE meta SET value = (SELECT value FROM meta WHERE key = 'removed')"
                " WHERE key GLOB 'removed:*'"
            )

    def _remove_strays(self) -> None:
        with self.commit_lock:
            remove_strays(self.rows, self.all, self.bucket)
            self.committer.strays = False


def remove_strays(store: RowStore, books: Books, bucket: int = 0) -> None:
    """Delete a bucket's rows that the ledger does not know, with the lock of its commits held.

    Whoever put them died, or failed, before it said where they are.
    """
    if not store.exists():
        return
    with books.ledger.lock:
        books.follow()
        table = store.table()
        rows = [table.positions[number].in_order() for number in table.ids]
        stored = np.concatenate([np.empty(0, dtype=np.int64), *rows])
        numbers = books.places.rows(stored + pack(bucket, 0))
        known = numbers >= 0
        known[known] = books.runs.indexes_of(numbers[known]) >= 0
    store.delete(stored[~known])


def _forget_places(tx: sqlite3.Connection, gone: BitMap64) -> None:
    """Drop places without a row that is there, but for the last, which new rows may lengthen."""
    places = tx.execute("SELECT seq, first_row, first_row + count FROM places").fetchall()
    last = max((end for _, _, end in places), default=0)
    dead = [(seq,) for seq, row, end in places if end < last and gone.contains_range(row, end)]
    tx.executemany("DELETE FROM places WHERE seq = ?", dead)
