"""Engines of a distributed queue: for those who put and read, and for those who own buckets."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from persisting_torch.cluster.bucket import Bucket
from persisting_torch.cluster.finder import Finder, Target
from persisting_torch.cluster.head import Head
from persisting_torch.cluster.keeping import Answer, Key
from persisting_torch.cluster.remote import BucketStore, RemoteAppender, SharedLock
from persisting_torch.cluster.replica import Replica
from persisting_torch.cluster.rows import RowService
from persisting_torch.cluster.service import LedgerService
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import PersistingError, StaleOwner
from persisting_torch.queue.books import Books
from persisting_torch.queue.engine import Engine
from persisting_torch.queue.files import LOCAL
from persisting_torch.queue.locks import ThreadLock
from persisting_torch.queue.objects import is_url
from persisting_torch.queue.ownership import Ownership
from persisting_torch.queue.parts import Parts, many_parts
from persisting_torch.queue.place import Place, Split, open_place, whole_path
from persisting_torch.queue.threads import Background
from persisting_torch.queue.urls import reached
from persisting_torch.queue.waiting import hub_of


class SharedReplica(Replica):
    """A queue's ledger as this process has it, once for all who use it."""

    users = 0

    def close(self) -> None:
        """Let go of it; the last who does closes it."""
        with _lock:
            self.users -= 1
            if self.users > 0:
                return
            _replicas.pop(self.key, None)
        super().close()

    key: tuple[Finder, str, str]


@dataclass
class Ledgers:
    """The ledger of a queue and the books that mirror it, shared by all engines of this process."""

    ledger: SharedReplica
    books: Books


def ledgers_of(finder: Finder, place: Place, storage_path: str) -> Ledgers:
    """The replica of a queue's ledger in this process; `close` of the ledger gives it back."""
    key = (finder, place.queue, storage_path)
    with _lock:
        found = _replicas.get(key)
        if found is not None:
            found.ledger.users += 1
            return found
    target = Target(place.queue, storage_path, 0, storage_options=place.files.options)
    head = Head(Bucket(finder, target))
    ledger = SharedReplica(place, head, hub_of(place.bucket))
    ledger.key, ledger.users = key, 1
    made = Ledgers(ledger, Books(ledger))
    with _lock:
        found = _replicas.setdefault(key, made)
        if found is not made:
            found.ledger.users += 1
    if found is not made:
        Replica.close(ledger)
    return found


_replicas: dict[tuple[Finder, str, str], Ledgers] = {}
_lock = threading.Lock()


# Those who put and read


def open_engine(
    finder: Finder,
    queue: str,
    storage_path: str | os.PathLike[str],
    split: Split,
    storage_options: dict[str, str] | None = None,
    **options: Any,
) -> Engine:
    """The engine of a process that uses the queue, whoever owns its buckets.

    Raises BucketUnavailable if nobody owns them and nobody can, PersistingError where the queue is
    split otherwise, or in an object store that this process cannot reach.
    """
    path = whole_path(storage_path)
    # Not left to the nodes alone: they may reach what this process, which reads there, does not.
    files = reached(queue, path, storage_options) if is_url(path) else LOCAL
    fsync = options.pop("durability", "flush") == "fsync"
    target = Target(queue, path, 0, split, storage_options)
    place = replace(_described(finder, target, split, fsync), files=files)
    return Engine(place, parts=_parts(finder, place, path), **options)


def _described(finder: Finder, target: Target, split: Split, fsync: bool) -> Place:
    """The queue as the owner of its first bucket knows it; made there, if need be."""
    queue, head = target.queue, Bucket(finder, target)
    answer = head.ask("describe", {"split": [split.num_buckets, split.bucket_column]}).header
    if fsync and not answer["fsync"]:
        raise PersistingError(
            f"queue {queue!r} is to survive a loss of power (durability='fsync'), which in a"
            " cluster its nodes have to see to. Start all of them with"
            " cluster.init(durability='fsync')."
        )
    return Place(
        queue=queue,
        root=answer["root"],
        bucket=os.path.join(answer["root"], "bucket-0"),
        writable=True,
        network=False,
        num_buckets=answer["num_buckets"],
        bucket_column=answer["bucket_column"],
    )


def _parts(finder: Finder, place: Place, storage_path: str) -> Parts:
    shared = ledgers_of(finder, place, storage_path)
    buckets = [
        Bucket(finder, _target(place, storage_path, number)) for number in range(place.num_buckets)
    ]
    places = [place.of_bucket(number) for number in range(place.num_buckets)]
    both = list(zip(buckets, places, strict=True))
    rows = [BucketStore(bucket, own, "data") for bucket, own in both]
    return many_parts(
        place,
        shared.ledger,
        shared.books,
        SharedLock(Head(buckets[0])),
        rows=rows,
        late=[BucketStore(bucket, own, "late") for bucket, own in both],
        appenders=[RemoteAppender(*one) for one in zip(buckets, rows, strict=True)],
        shards=[],
        upkeep_lock=ThreadLock("upkeep"),
        tends_ledger=False,
        local=False,
    )


def _target(place: Place, storage_path: str, bucket: int) -> Target:
    split = Split(place.num_buckets, place.bucket_column, distributed=True)
    return Target(place.queue, storage_path, bucket, split, place.files.options)


# Those who own


class BucketStorage:
    """One bucket that this process owns: its rows, and with the first one the queue's ledger."""

    def __init__(
        self, key: Key, ownership: Ownership, finder: Finder, *, fsync: bool = False
    ) -> None:
        self._fsync = fsync
        self._key = key
        self._ownership = ownership
        self.place = self._place()
        self._finder = finder
        self._ledger: LedgerService | None = None
        self._rows: RowService | None = None
        self._opening = threading.Lock()
        self._closed = False
        if key.bucket == 0:
            self._ledger = LedgerService.open(self.place, ownership, fsync=fsync)
            Background(self._open_soon)  # not now: it asks the ledger, and so this bucket
        else:
            self._opened()

    def answer(self, request: Message, table: pa.Table | None) -> Answer:
        """The answer to a request for the rows or the ledger."""
        op = request.header["op"]
        if op == "describe":
            return self._describe(request), None
        if self._ledger is not None and op in self._ledger.operations:
            return self._ledger.operations[op](request, table)
        operation = self._opened().operations.get(op)
        if operation is None:
            raise PersistingError(
                f"the owner of {self._key} does not know {op!r}: it runs another release. Give all"
                " nodes the same."
            )
        return operation(request, table)

    def _describe(self, request: Message) -> Message:
        column_count, column = request.header["split"]
        asked = Split(column_count, column, distributed=True)
        place = self._place(asked)
        return Message(
            {
                "root": place.root,
                "num_buckets": place.num_buckets,
                "bucket_column": place.bucket_column,
                "fsync": self._fsync or place.files is not LOCAL,
            }
        )

    def _place(self, asked: Split | None = None) -> Place:
        options = self._ownership.files.options
        return open_place(self._key.queue, self._key.storage_path, asked, options)

    def _opened(self) -> RowService:
        """The rows; to open them needs the ledger, and so its owner."""
        with self._opening:
            if self._closed:
                raise StaleOwner(f"{self._key} was closed here. Ask its new owner.")
            if self._rows is None:
                shared = ledgers_of(self._finder, self.place, self._key.storage_path)
                try:
                    self._rows = RowService(
                        self.place,
                        self._key.bucket,
                        self._ownership,
                        shared.ledger,
                        shared.books,
                        fsync=self._fsync,
                    )
                except BaseException:
                    shared.ledger.close()
                    raise
            return self._rows

    def _open_soon(self) -> None:
        """Have upkeep begin, whether anybody asks for rows or not."""
        try:
            self._opened()
        except PersistingError:
            return  # whoever asks for rows is told

    def settle(self, limit: float, *, anyway: bool) -> bool:
        """See Service. With the ledger: not while somebody has the queue alone.

        The rows are closed here, since that waits for transactions of this process, which need the
        ledger to be answered for.
        """
        if self._ledger is not None and not self._ledger.have_alone(limit) and not anyway:
            return False
        self._close_rows()
        if self._ledger is not None:
            self._ledger.have_turn(limit)  # or whoever has it tries again elsewhere
        return True

    def close(self) -> None:
        """Write what there is to write, and end."""
        self._close_rows()
        if self._ledger is not None:
            self._ledger.close()

    def _close_rows(self) -> None:
        with self._opening:
            rows, self._rows, self._closed = self._rows, None, True
        if rows is not None:
            rows.close()

    def abandon(self) -> None:
        """End without a trace: the bucket belongs to another owner by now."""
        if self._ledger is not None:
            self._ledger.abandon()
        with self._opening:
            self._closed = True
            if self._rows is not None:
                self._rows.abandon()
