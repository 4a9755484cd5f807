"""What an engine is put together from: here for a queue on this machine's file systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from persisting_torch.queue.books import Books
from persisting_torch.queue.clearing import remove_rows
from persisting_torch.queue.commit import Committer
from persisting_torch.queue.copying import CopiedLedger
from persisting_torch.queue.files import LOCAL
from persisting_torch.queue.holding import HeldLedger, give_back, hold_of
from persisting_torch.queue.late import LateFields
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.locks import FileLock, Lock, ThreadLock
from persisting_torch.queue.place import Place
from persisting_torch.queue.runs import Int64s
from persisting_torch.queue.shard import Shard, remove_strays
from persisting_torch.queue.shards import Appender, BucketCommitter, ManyCommitter, Router
from persisting_torch.queue.storage import RowStore
from persisting_torch.queue.stores import ManyStores, Store

if TYPE_CHECKING:
    pass


class Puts(Appender, Protocol):
    """Commits what is put: to one bucket, or to many."""

    lock: Lock
    ledger: Ledger
    books: Books

    def recover(self) -> bool: ...


@dataclass
class Parts:
    """The parts of one process's engine.

    shards are the buckets whose rows this process looks after. `tends_ledger`: whether it also
    looks after the ledger. `local`: whether the queue belongs to this machine, not to a cluster;
    `leased`: whether the processes of this machine share it, each by a lease in the ledger.
    """

    ledger: Ledger
    books: Books
    rows: Store
    late: LateFields[Any]
    committer: Puts
    shards: Sequence[Shard | Plain]
    upkeep_lock: Lock
    tends_ledger: bool = True
    local: bool = True
    leased: bool = True
    router: Router | None = None


@dataclass
class Plain:
    """A queue's only bucket, as upkeep sees it."""

    ledger: Ledger
    books: Books
    rows: RowStore
    late: LateFields[RowStore]
    committer: Committer
    commit_lock: Lock = field(init=False)
    strays: bool = True  # whether there may be rows that the ledger does not know

    def __post_init__(self) -> None:
        self.commit_lock = self.committer.lock

    def remove_rows(self) -> bool:
        """Delete the rows of samples that were cleared since the last time."""
        if self.strays:
            self._remove_strays()
        return remove_rows(self)

    def _remove_strays(self) -> None:
        """Delete what puts left behind that failed while the queue belonged to a cluster."""
        with self.ledger.reading() as tx:
            shared = tx.execute("SELECT 1 FROM meta WHERE key = 'epoch:0'").fetchone()
        if shared is not None:
            with self.commit_lock:
                self.committer.recover()
                remove_strays(self.rows, self.books)
        self.strays = False


def local_parts(place: Place, *, fsync: bool) -> Parts:
    """The parts for a queue that this machine has for itself."""
    if place.files is not LOCAL:
        return _held_parts(place) if place.writable else _copied_parts(place)
    lock = FileLock(place.commit_lock)
    if place.writable:
        with lock:
            ledger = Ledger(place, fsync=fsync)
    else:
        ledger = Ledger(place)
    return _parts_around(place, ledger, lock, FileLock(place.upkeep_lock), fsync=fsync)


def _copied_parts(place: Place) -> Parts:
    """The parts for a look at a queue in an object store, whoever has it."""
    locks = (ThreadLock(f"{what} of queue {place.queue!r}") for what in ("the rows", "upkeep"))
    return _parts_around(place, CopiedLedger(place), *locks)


def _parts_around(
    place: Place, ledger: Ledger, lock: Lock, upkeep_lock: Lock, *, fsync: bool = False
) -> Parts:
    books = Books(ledger)

    def store(path: str) -> RowStore:
        return RowStore(path, fsync=fsync, files=place.files)

    if place.num_buckets == 1:
        rows, late_rows = store(place.data), store(place.late)
        late = LateFields(late_rows, rows, books)
        committer = Committer(ledger, books, lock, rows, late_rows)
        plain = Plain(ledger, books, rows, late, committer)
        return Parts(ledger, books, rows, late, committer, [plain], upkeep_lock)
    places = [place.of_bucket(number) for number in range(place.num_buckets)]
    return _parts_of_buckets(
        place,
        ledger,
        books,
        lock,
        [store(own.data) for own in places],
        [store(own.late) for own in places],
        upkeep_lock=upkeep_lock,
    )


def _held_parts(place: Place) -> Parts:
    """The parts for a queue in an object store, which this process has for itself."""
    hold = hold_of(place)
    try:
        ledger = HeldLedger(hold)
    except BaseException:
        give_back(hold)
        raise
    books, lock = Books(ledger), hold.commit_lock
    if place.num_buckets == 1:
        (rows,), (late_rows,) = hold.rows, hold.late
        late = LateFields(late_rows, rows, books)
        committer = Committer(ledger, books, lock, rows, late_rows)
        plain = Plain(ledger, books, rows, late, committer)
        return Parts(ledger, books, rows, late, committer, [plain], hold.upkeep_lock, leased=False)
    parts = _parts_of_buckets(
        place, ledger, books, lock, hold.rows, hold.late, upkeep_lock=hold.upkeep_lock
    )
    return replace(parts, leased=False)


def _parts_of_buckets(
    place: Place,
    ledger: Ledger,
    books: Books,
    lock: Lock,
    rows: Sequence[RowStore],
    late: Sequence[RowStore],
    *,
    upkeep_lock: Lock,
) -> Parts:
    """The parts where all the buckets are this process's to write."""
    committers = [
        BucketCommitter(ledger, books, lock, own, own_late, bucket=number)
        for number, (own, own_late) in enumerate(zip(rows, late, strict=True))
    ]
    return many_parts(
        place,
        ledger,
        books,
        lock,
        rows=rows,
        late=late,
        appenders=committers,
        shards=[Shard(ledger, books, committer) for committer in committers],
        upkeep_lock=upkeep_lock,
    )


def many_parts(
    place: Place,
    ledger: Ledger,
    books: Books,
    lock: Lock,
    *,
    rows: Sequence[Store],
    late: Sequence[Store],
    appenders: Sequence[Appender],
    shards: Sequence[Shard],
    upkeep_lock: Lock,
    tends_ledger: bool = True,
    local: bool = True,
) -> Parts:
    """The parts for a queue of several buckets, given how each of them is read and written."""

    def packed(numbers: Int64s) -> Int64s:
        with ledger.lock:
            return books.places.packed(numbers)

    router = Router(place.queue, place.num_buckets, place.bucket_column)
    every = ManyStores(place.data, rows, packed)
    late_rows = ManyStores(place.late, late, lambda numbers: numbers)
    return Parts(
        ledger=ledger,
        books=books,
        rows=every,
        late=LateFields(late_rows, every, books),
        committer=ManyCommitter(ledger, books, lock, router, appenders, apart=not local),
        shards=shards,
        upkeep_lock=upkeep_lock,
        tends_ledger=tends_ledger,
        local=local,
        router=router,
    )
