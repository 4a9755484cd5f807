"""One process's engine of one bucket: the parts tied together, synchronous and thread-safe.

put   intake    values checked, copied, given an index; they wait in memory
flush commit    rows into Lance, bookkeeping into the ledger, in step
claim claims    a sampler chooses among what is ready; the ledger remembers
read  reads     row ids to records or TensorDicts
tick            what is due now and then: flush by age, lease, upkeep
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import lance
import numpy as np
from tensordict import TensorDict

from persisting_torch.errors import (
    BucketUnavailable,
    PersistingError,
    QueueClosed,
    StaleOwner,
)
from persisting_torch.queue import lifecycle
from persisting_torch.queue.again import again
from persisting_torch.queue.assignments import Assignments
from persisting_torch.queue.claims import Claims
from persisting_torch.queue.custom import CustomMeta
from persisting_torch.queue.global_batches import GlobalBatches
from persisting_torch.queue.intake import Intake
from persisting_torch.queue.keep import Retention, store_retention
from persisting_torch.queue.lease import RENEW_SECONDS, end_lease, renew_lease, take_lease
from persisting_torch.queue.look import Look, Sampler, needs_of
from persisting_torch.queue.meta import BatchMeta
from persisting_torch.queue.metrics import Metrics
from persisting_torch.queue.names import check_name
from persisting_torch.queue.options import check_batch_size
from persisting_torch.queue.ownership import refuse_living_owner
from persisting_torch.queue.pacing import Pace
from persisting_torch.queue.parts import Parts, local_parts
from persisting_torch.queue.place import Place
from persisting_torch.queue.producers import ROUND_SECONDS, Producers
from persisting_torch.queue.reads import Reads, check_range
from persisting_torch.queue.runs import Int64s
from persisting_torch.queue.storage import RowStore
from persisting_torch.queue.stored import ZeroCopyMode
from persisting_torch.queue.stream import Stream
from persisting_torch.queue.takeover import check_in_place
from persisting_torch.queue.tending import Tending
from persisting_torch.queue.waiting import hub_of
from persisting_torch.queue.writes import Writes


class Engine(GlobalBatches):
    """Everything a queue does, for one bucket and one process."""

    def __init__(
        self,
        place: Place,
        *,
        batch_size: int = 100,
        auto_flush_interval_sec: float = 0.0,
        durability: str = "flush",
        allow_pickle: bool = True,
        zerocopy_mode: ZeroCopyMode = "auto",
        pace: Pace | None = None,
        enable_metrics: bool = False,
        retention: Retention | None = None,
        parts: Parts | None = None,
    ) -> None:
        """The parts are those of a queue of this machine, unless others are given."""
        lifecycle.check_process(f"queue {place.queue!r}")
        self.place = place
        self.auto_flush_interval_sec = auto_flush_interval_sec
        self.pace = pace or Pace()
        self.metrics = Metrics(enable_metrics)
        given = parts is not None
        parts = parts or local_parts(place, fsync=durability == "fsync")
        try:
            self._begin(parts, batch_size, allow_pickle, zerocopy_mode, retention)
        except BaseException:
            if not given:
                parts.ledger.close()  # which gives back what it holds
            raise

    def _begin(
        self,
        parts: Parts,
        batch_size: int,
        allow_pickle: bool,
        zerocopy_mode: ZeroCopyMode,
        retention: Retention | None,
    ) -> None:
        """Tie the parts together, settle what others have left, and know what is there."""
        place = self.place
        self.ledger, self.books = parts.ledger, parts.books
        self.rows, self.late = parts.rows, parts.late
        self.committer, self.commit_lock = parts.committer, parts.committer.lock
        self.router = parts.router
        self.serves = not parts.local and bool(parts.shards)
        self._leases = parts.local and parts.leased and place.writable
        self._lease_end = self._lease() if self._leases else math.inf
        self.intake = Intake(
            self.ledger,
            self.books,
            batch_size=batch_size,
            allow_pickle=allow_pickle,
            zerocopy_mode=zerocopy_mode,
        )
        self.hub = hub_of(place.bucket)
        self.reads = Reads(
            self.ledger, self.books, self.rows, self.late, zerocopy_mode, allow_pickle
        )
        self.claims = Claims(self.ledger, self.books, self.reads)
        self.custom = CustomMeta(self.ledger, self.books)
        self.assignments = Assignments(self.ledger, self.books, self.reads)
        self.tending = Tending(self, parts)
        self.writes = Writes(self)
        self._error: BaseException | None = None
        self._closed = False
        self._lease_due = time.monotonic() + RENEW_SECONDS
        self.producers = Producers(self.committer, self.hub)
        self._closing = threading.RLock()
        if place.writable:
            if parts.local:
                with self.commit_lock:
                    self.committer.recover()
            if retention is not None:
                with self.ledger.transaction() as tx:
                    store_retention(tx, retention)
        with self.ledger.reading() as tx:
            self.books.refresh(tx)
        lifecycle.register(self)

    def _lease(self) -> float:
        """Say that this process has the queue open, unless a cluster has; until when that holds."""
        end = take_lease(self.ledger, id(self))
        try:
            refuse_living_owner(self.place)
            check_in_place(self.ledger)
        except BaseException:
            end_lease(self.ledger, id(self))
            raise
        return end

    # Checks

    @property
    def closed(self) -> bool:
        return self._closed or self.ledger.closed

    def check_open(self, *, writing: bool = False) -> None:
        """Raise unless the engine may be used (to write) in this process, at this time."""
        lifecycle.check_process(f"queue {self.place.queue!r}")
        if self._closed:
            self.ledger.refuse_closed()
        self.ledger.check_open()
        if writing and not self.place.writable:
            raise PersistingError(
                f"queue {self.place.queue!r} is read-only: {self.place.bucket} may not be written"
                " by this process. Open it as a user who may."
            )
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if writing and time.time() > self._lease_end:
            self._lease_end = renew_lease(self.ledger, id(self))
            self.ledger.check_open()

    def flush(self) -> None:
        """Write all that waits. Raises FlushFailed, with the samples kept, if it cannot."""
        self.check_open(writing=bool(self.intake.buffer.chunks))
        self.writes.flush()

    # Reading in order

    def records(self, limit: int, offset: int = 0) -> list[dict[str, Any]]:
        """Up to `limit` records after the first `offset`, in order, waiting ones included."""
        self.check_open()
        check_range(limit, offset)
        return self.reads.records(limit, offset, self.writes.waiting())

    def stream(self, offset: int = 0, buckets: Sequence[int] | None = None) -> Stream:
        """A position in the order of samples (of some buckets) that only moves forward."""
        return Stream(self, offset, buckets)

    def count(self) -> int:
        """Samples of the queue, waiting ones included, cleared ones not."""
        self.check_open()
        return self.reads.count(self.writes.waiting())

    # Reading by index

    def read_batch(
        self,
        partition: str,
        indexes: Sequence[int] | Int64s,
        fields: Sequence[str] | None = None,
        pad: dict[str, float] | None = None,
    ) -> TensorDict:
        """The fields of these samples (None: all fields), in their order; batch size [n].

        "_index" among the fields gives the global indexes, int64 [n]. Raises KeyError for samples
        that the queue does not hold, or fields that it has never seen.
        """
        self.check_open()
        wanted = np.asarray(indexes, dtype=np.int64)
        self.writes.flush_indexes(wanted)
        with self.metrics.timed("read", len(wanted)):
            return self.reads.batch(partition, wanted, fields, pad)

    def to_lance(self) -> lance.LanceDataset:
        """The rows as a Lance dataset, with what waits flushed and what is cleared gone.

        Fields that arrived late are folded into the rows first. On a queue that this process may
        only read, those that upkeep has not folded yet are in a dataset of their own, `late.lance`.
        """
        self.check_open()
        if self.place.writable:
            self.flush()
            self.tending.remove_cleared()
            self.tending.fold_all()
        if not isinstance(self.rows, RowStore):
            raise PersistingError(
                f"queue {self.place.queue!r} has {self.place.num_buckets} buckets, and so as many"
                f" Lance datasets: {self.place.root}/bucket-*/data.lance. Open those, or export()"
                " the queue into one."
            )
        if not self.rows.exists():
            raise PersistingError(
                f"queue {self.place.queue!r} has no rows yet. Put and flush some first."
            )
        return self.rows.dataset()

    def snapshot(self, partition: str, fields: Sequence[str] | None = None) -> Int64s:
        """Indexes of all samples that have the fields now, in order, whoever took them."""
        self.check_open()
        self.writes.flush_partition(partition)
        needed = self.needed(fields)
        with self.ledger.reading() as tx:
            self.books.refresh(tx)
            ready = self.books.ready_whoever_took(partition, needed)
            return np.array(ready.to_array(), dtype=np.int64)

    def list_all(self, partition: str, sampler: Any, samples: Int64s) -> list[list[int]]:
        """The episodes, or whatever the sampler counts, that these samples make up, each a list."""
        with self.ledger.reading() as tx:
            self.books.refresh(tx)
            look = Look(tx, self.books, self.reads, "", partition)
            listed: list[list[int]] = sampler.list_all(samples.tolist(), look)
            return listed

    def needed(self, fields: Sequence[str] | None) -> frozenset[str]:
        """The fields that a sample must have to be ready, as stored."""
        if not fields:
            return frozenset()
        self.books.follow()
        return frozenset(self.reads.names_of(fields))

    # Claiming

    def claim(
        self,
        fields: Sequence[str] | None,
        batch_size: int,
        task: str = "default",
        partition: str = "default",
        sampler: Sampler | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Ready samples that the sampler chose, taken for the task. Size 0 if there are none."""
        chosen, names = self._take(fields, batch_size, task, partition, sampler, sampling or {})
        return BatchMeta(chosen, partition, names, self.custom.of(chosen))

    def _take(
        self,
        fields: Sequence[str] | None,
        batch_size: int,
        task: str,
        partition: str,
        sampler: Sampler | None,
        sampling: dict[str, Any],
    ) -> tuple[Sequence[int], list[str]]:
        """The samples that are taken, and the stored names of the fields asked for."""
        self.check_open(writing=True)
        check_batch_size(batch_size)
        if fields is None or not self.books.schema.fields.keys() >= set(fields):
            self.books.follow()
        names = self.reads.names_of(fields)
        needed = frozenset(names) if fields else frozenset()
        needed |= self.needed(needs_of(sampler))
        if self.writes.samples_waiting and (
            sampler is not None or self.claims.available(task, partition, needed) < batch_size
        ):
            self.writes.flush_partition(partition)
        check_name(task, "task_name")
        with self.metrics.timed("claim"):
            chosen = self._choose(task, partition, needed, batch_size, sampler, sampling)
        self.metrics.count("claimed", len(chosen))
        return chosen, names

    def _choose(
        self,
        task: str,
        partition: str,
        needed: frozenset[str],
        batch_size: int,
        sampler: Sampler | None,
        sampling: dict[str, Any],
    ) -> Sequence[int]:
        producers = self.producers
        order = (task, partition, needed, batch_size, sampler, sampling, producers.current())
        chosen = self.claims.claim(*order)
        if len(chosen) < batch_size and producers.reclaim() and not chosen:
            chosen = self.claims.claim(*order)
        producers.claimed(chosen)
        return chosen

    def claim_batch(
        self,
        fields: Sequence[str] | None,
        batch_size: int,
        task: str = "default",
        partition: str = "default",
        sampler: Sampler | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> TensorDict:
        """`claim`, and the data of what was claimed."""
        chosen, names = self._take(fields, batch_size, task, partition, sampler, sampling or {})
        if not len(chosen):
            return TensorDict({}, batch_size=[0])
        with self.metrics.timed("read", len(chosen)):
            indexes = np.asarray(chosen, dtype=np.int64)
            return self.reads.batch(partition, indexes, names or None, None, known=True)

    def data_of(self, meta: BatchMeta, partition: str | None = None) -> TensorDict:
        """The fields that a BatchMeta names of its samples; batch size [meta.size]."""
        if not meta.size:
            return TensorDict({}, batch_size=[0])
        where = meta.partition_id if partition is None else partition
        return self.read_batch(where, meta.index_array(), meta.field_names or None)

    def mark(self, task: str, partition: str, indexes: Sequence[int]) -> None:
        """Take these samples for the task, whoever decided it."""
        self.check_open(writing=True)
        self.writes.flush_partition(partition)
        self.claims.mark(check_name(task, "task_name"), partition, indexes)
        self.producers.marked(task, partition, indexes)

    def reset(self, task: str, partition: str) -> None:
        """Forget all that the task has taken in the partition."""
        self.check_open(writing=True)
        self.claims.reset(task, partition)
        self.hub.notify()

    def clear(self, partition: str, indexes: Sequence[int]) -> None:
        """Remove samples for good. Their indexes are never given again.

        Raises KeyError naming indexes that the partition does not hold.
        """
        self.check_open(writing=True)
        self.writes.flush_partition(partition)
        self.reads.clear(partition, indexes)
        self.books.follow()
        self.hub.notify()
        self.tending.note_flush()

    @again
    def seal(self, partition: str | None) -> None:
        """No more samples will come to the partition, or with None to the queue."""
        self.check_open(writing=True)
        self.flush()
        with self.ledger.transaction() as tx:
            self.books.refresh(tx)
            if partition is None:
                tx.execute("INSERT OR IGNORE INTO meta VALUES ('sealed', ?)", (time.time(),))
            else:
                number = self.books.partition_id(tx, check_name(partition, "partition_id"))
                tx.execute(
                    "UPDATE partitions SET sealed = ? WHERE sealed IS NULL AND id = ?",
                    (time.time(), number),
                )
        with self.ledger.reading() as tx:
            self.books.refresh(tx)
        self.hub.notify()

    # Producers

    def producer(self, name: str, *, essential: bool = False) -> AbstractContextManager[None]:
        """Registers a producer while the block runs; what it put is flushed at the end."""
        self.check_open(writing=True)
        check_name(name, "producer name")
        return self.producers.block(name, essential, self.flush)

    # Now and then

    def tick(self) -> float:
        """Flush what has waited long enough, renew the lease; seconds until the next turn."""
        now = time.monotonic()
        turns = [1.0]
        try:
            self.producers.beat()
            if self._leases and now >= self._lease_due:
                self._lease_end = renew_lease(self.ledger, id(self))
                self._lease_due = now + RENEW_SECONDS
            interval = self.auto_flush_interval_sec
            if interval > 0:
                oldest = self.intake.buffer.oldest
                if oldest is not None and now - oldest >= interval:
                    self.writes.flush()
                turns.append(max(0.005, min(interval / 4, 0.25)))
            self.tending.tick()
            self.producers.reclaim(ROUND_SECONDS)
        except (QueueClosed, StaleOwner, BucketUnavailable):
            pass  # those who use the queue are told, too
        except Exception as error:
            self._error = error
        return min(turns)

    def close(self) -> None:
        """Flush, end upkeep, give everything back. A second call does nothing.

        Raises FlushFailed if samples that wait cannot be written, and stays open. In the fork of a
        process that has the queue open there is nothing to close.
        """
        if lifecycle.is_fork():
            return
        with self._closing:
            if self._closed:
                return
            self._error = None
            with self.intake.closing():
                self.writes.flush()
            self.tending.stop()
            lifecycle.unregister(self)
            with self.intake.lock, self.ledger.lock:
                try:
                    if self.place.writable and self.ledger.lost is None:
                        self.intake.give_back()
                    if self._leases and self.ledger.lost is None:
                        end_lease(self.ledger, id(self))
                finally:
                    self._closed = True
                    self.ledger.close()
        self.commit_lock.close()
        self.hub.notify()

    def abandon(self) -> None:
        """Close without a trace: what it looked after belongs to another process by now."""
        lifecycle.unregister(self)
        self._closed = True
        self.tending.stop()
        self.ledger.close()
        self.commit_lock.close()
