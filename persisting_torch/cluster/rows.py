"""What the owner of a bucket does with its rows for all others: takes them in, and sends them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata

from persisting_torch.cluster.peer import aligned
from persisting_torch.cluster.remote import composed_of, held_of, late_of
from persisting_torch.cluster.replica import Replica
from persisting_torch.cluster.trouble import Elsewhere
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import StaleOwner
from persisting_torch.queue.books import Books
from persisting_torch.queue.engine import Engine
from persisting_torch.queue.files import LOCAL
from persisting_torch.queue.locks import ThreadLock
from persisting_torch.queue.ownership import Ownership
from persisting_torch.queue.parts import many_parts
from persisting_torch.queue.place import Place
from persisting_torch.queue.producers import Finishing, Producer, Work
from persisting_torch.queue.shard import Shard
from persisting_torch.queue.shards import BucketCommitter
from persisting_torch.queue.storage import RowStore

PUT_SECONDS = 2.0
WIDEST_TYPE = 16  # bytes, of Arrow's; Lance takes no buffers at odd addresses

Answer = tuple[Message, "pa.Table | None"]
Operation = Callable[[Message, "pa.Table | None"], Answer]


class LeaseLost(Exception):
    """A producer was held to be dead before its work came in."""


class RowService:
    """The rows of one bucket, for those who put and read. Any number of threads may call it."""

    def __init__(
        self,
        place: Place,
        bucket: int,
        ownership: Ownership,
        ledger: Replica,
        books: Books,
        *,
        fsync: bool = False,
    ) -> None:
        """Takes the bucket's datasets and its part of the ledger from whoever had them before."""
        self._ledger = ledger
        own = place.of_bucket(bucket)
        rows, late = _store(own.data, own, fsync), _store(own.late, own, fsync)
        epoch = ownership.owner.epoch
        with ledger.transaction() as tx:
            books.refresh(tx)
            if place.storage and bucket:
                _come_home(tx, place, bucket, ownership.owner.node)
            _begin_epoch(tx, bucket, epoch)
        # After that, for what an earlier owner commits in the middle of it is undone: it must not
        # be able to enter such rows any more.
        for store in (rows, late):
            store.guard = ownership.check
            store.fence()
        self.committer = BucketCommitter(
            ledger,
            books,
            ThreadLock(f"the rows of {own.bucket}"),
            rows,
            late,
            bucket=bucket,
            numbered=place.num_buckets > 1,
            check=partial(_check_epoch, bucket=bucket, epoch=epoch, where=own.bucket),
        )
        parts = many_parts(
            place,
            ledger,
            books,
            self.committer.lock,
            rows=[rows],
            late=[late],
            appenders=[],
            shards=[Shard(ledger, books, self.committer)],
            upkeep_lock=ThreadLock(f"the upkeep of {own.bucket}"),
            tends_ledger=bucket == 0,
            local=False,
        )
        self.engine = Engine(place, parts=parts)
        self._leaving = False
        self.operations: Mapping[str, Operation] = {
            "append": self._append,
            "append_written": self._append_written,
            "append_late": self._append_late,
            "rows": self._rows,
            "figures": self._figures,
            "tend": self._tend,
        }

    def close(self) -> None:
        """End upkeep, let the put that is being written end, and let the bucket go."""
        self.engine.tending.stop()
        self._leaving = True
        if self.committer.lock.acquire(PUT_SECONDS):
            self.committer.lock.release()
        self.engine.close()

    def _refuse_if_leaving(self) -> None:
        if self._leaving:
            raise StaleOwner(f"{self.engine.place.root} is given to another owner. Ask that one.")

    def abandon(self) -> None:
        """Let go of a bucket that belongs to another owner by now."""
        self.engine.abandon()

    # Taking in

    def _append(self, request: Message, table: pa.Table | None) -> Answer:
        assert table is not None
        with self.committer.lock:
            self._refuse_if_leaving()
            self.committer.writer = request.header["writer"]
            self.committer.append(composed_of(request.header, aligned(table, WIDEST_TYPE)))
            mark = self._ledger.mark()
        self.engine.tending.note_flush(table.nbytes)
        return Message({"mark": mark}), None

    def _append_written(self, request: Message, table: pa.Table | None) -> Answer:
        header = request.header
        fragments = [FragmentMetadata.from_json(json.dumps(told)) for told in header["fragments"]]
        with self.committer.lock:
            self._refuse_if_leaving()
            self.committer.writer = header["writer"]
            done = self.committer.append_written(composed_of(header, pa.table({})), fragments)
            mark = self._ledger.mark()
        files = [file for part in fragments for file in part.files]
        self.engine.tending.note_flush(sum(file.file_size_bytes or 0 for file in files))
        return Message({"done": done, "mark": mark}), None

    def _append_late(self, request: Message, table: pa.Table | None) -> Answer:
        assert table is not None
        header = request.header
        keys = [(partition, key, index, tag) for partition, key, index, tag in header["keys"]]
        finishing = self._finishing(header)
        try:
            with self.committer.lock:
                self._refuse_if_leaving()
                self.committer.writer = header["writer"]
                first_row = self.committer.append_late(
                    late_of(header, aligned(table, WIDEST_TYPE)),
                    header["partition"],
                    keys,
                    finishing,
                )
        except LeaseLost as lost:
            return Message({"lost": [str(lost)]}), None
        self.engine.tending.note_late(table.nbytes)
        return Message({"first_row": first_row}), None

    def _finishing(self, header: dict[str, Any]) -> Finishing:
        queue = self.engine.place.queue
        return RemoteFinishing(
            [
                Work(Producer(name, False, queue), members, started)
                for name, started, members in held_of(header)
            ]
        )

    # Sending

    def _rows(self, request: Message, table: pa.Table | None) -> Answer:
        header = request.header
        rows = np.frombuffer(request.attached[0], dtype="<i8")
        return Message({}), self._store(header).read(rows, header["columns"])

    def _figures(self, request: Message, table: pa.Table | None) -> Answer:
        store = self._store(request.header)
        if not store.exists():
            return Message({"rows": 0, "fragments": 0, "versions": 0}), None
        store.refresh()
        return Message(
            {"rows": store.rows, "fragments": store.fragments, "versions": store.versions}
        ), None

    def _store(self, header: dict[str, Any]) -> RowStore:
        return self.committer.rows if header["store"] == "data" else self.committer.late

    # Upkeep

    def _tend(self, request: Message, table: pa.Table | None) -> Answer:
        """One round of upkeep, now."""
        return Message({"done": self.engine.tending.tend()}), None


def _store(path: str, place: Place, fsync: bool) -> RowStore:
    if place.files is LOCAL:
        return RowStore(path, fsync=fsync)
    # Durable once it is there; and whoever else commits conflicts with the owner, who sees it then.
    return RowStore(path, files=place.files, alone=True)


class RemoteFinishing(Finishing):
    """Work that producers of another process finish."""

    def check(self, tx: sqlite3.Connection) -> None:
        for work in self.parts:
            if not work.is_its_own(tx):
                raise LeaseLost(work.producer.name)


def _come_home(tx: sqlite3.Connection, place: Place, bucket: int, node: str) -> None:
    """Note where the bucket's rows lie. Raises Elsewhere if that is on other storage."""
    key = f"home:{bucket}"
    found = tx.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    storage, last = json.loads(found[0]) if found else (place.storage, node)
    if storage != place.storage:
        raise Elsewhere(
            f"bucket {bucket} of queue {place.queue!r} lies on storage that {node} does not see;"
            f" {last} had it last."
        )
    tx.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps([storage, node])))


def _begin_epoch(tx: sqlite3.Connection, bucket: int, epoch: int) -> None:
    """From here on no earlier owner can enter rows of the bucket."""
    found = tx.execute("SELECT value FROM meta WHERE key = ?", (f"epoch:{bucket}",)).fetchone()
    if found is not None and found[0] > epoch:
        raise _stale(f"bucket {bucket}", epoch, found[0])
    tx.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"epoch:{bucket}", epoch))


def _check_epoch(tx: sqlite3.Connection, *, bucket: int, epoch: int, where: str) -> None:
    found = tx.execute("SELECT value FROM meta WHERE key = ?", (f"epoch:{bucket}",)).fetchone()
    if found is None or found[0] != epoch:
        raise _stale(where, epoch, found and found[0])


def _stale(where: str, epoch: int, now: int | None) -> StaleOwner:
    return StaleOwner(
        f"{where} has the owner of epoch {now} by now; the one of epoch {epoch} may not write any"
        " more. Ask the new owner."
    )
