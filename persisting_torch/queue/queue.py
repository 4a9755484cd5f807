"""The queue as its users hold it: async methods, and `sync` for the same without await."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from tensordict import TensorDict, TensorDictBase

from persisting_torch.queue.engine import Engine
from persisting_torch.queue.keep import Given, parse_retention
from persisting_torch.queue.meta import BatchMeta
from persisting_torch.queue.options import check_options
from persisting_torch.queue.pacing import Pace, WhenFull
from persisting_torch.queue.partitions import Partitions, SyncPartitions
from persisting_torch.queue.place import Split, open_place
from persisting_torch.queue.reads import check_range
from persisting_torch.queue.report import stats
from persisting_torch.queue.seam import is_distributed, open_distributed
from persisting_torch.queue.threads import in_thread

if TYPE_CHECKING:
    import lance

    from persisting_torch.queue.look import Sampler
    from persisting_torch.queue.reader import QueueReader
    from persisting_torch.queue.writer import QueueWriter

RECORDS_A_STEP = 100


class Queue(Partitions):
    """A named, persistent, append-only collection of samples under `storage_path`.

    Any number of processes of one machine may open the same queue at once, to put, to claim and to
    read. Every method that may touch the disk is a coroutine and leaves the event loop free;
    `queue.sync` has the same methods without await.

    name: any text up to 1000 characters that fits a folder name once encoded.
    batch_size: samples that may wait in memory; the put that fills it returns after their flush.
        Larger is faster for small records (each flush costs some milliseconds) and risks more of
        them if the process is killed.
    auto_flush_interval_sec: seconds after which waiting samples are flushed in the background;
        0 for never.
    enable_metrics: count puts, flushes, reads and claims, and their time, for `stats()`.
    num_buckets: into how many buckets a distributed queue is split when it is made (None: 4), each
        owned by one node. It stays so; a queue that is made on one machine has one.
    bucket_column: the field by whose value samples go to buckets, so that those with the same value
        stay together (of GRPO, the prompt's id). Every record has to have it then. None: by "id",
        where samples have that, by their key, else evenly.
    zerocopy_mode: "auto" gives tensors over Arrow's memory; "force" also refuses, at put, whatever
        needs pickle or an extra copy; "off" copies everything (for finding faults).
    durability: "flush" survives the death of the process, "fsync" a loss of power too; of a
        distributed queue only what `cluster.init` told its nodes.
    allow_pickle: False refuses arbitrary objects, at put and at read.
    capacity: puts through this handle wait while tasks are so many samples behind, or more: while
        the slowest task of each partition has not taken so many, in all. In a partition that no
        task has taken from yet, all samples count for puts into it. A put goes in whole, whatever
        its size, once there is room. None for no limit. To keep rollouts at most v policy versions
        ahead: v times the samples of an optimizer step.
    samples_per_insert: how many of the samples put the slowest task is expected to take, above 0
        to 1. Where a sampler leaves some untaken for good, those would hold the room of others;
        with 0.5, a task is behind by half of what was put, less what it has taken.
    when_full: "wait" for room, or "raise" QueueFull.
    put_timeout: seconds that a put waits for room before it raises WaitTimeout; float("inf") for
        ever.
    retention: what becomes of samples that all tasks of their partition have consumed, and that
        no checkpoint on disk needs: "all" keeps them, "consumed" deletes them, an int deletes them,
        oldest first, while there are more than so many samples, and a float or timedelta once they
        were put so many seconds ago. It is stored with the queue, for all processes; None leaves it
        as it is stored ("all" at first). In a partition that no task has taken from all is kept.

    storage_path: a folder, or s3://bucket/folder for an object store, where a queue is one
        process's at a time, or a cluster's (docs/queue.md, docs/cluster.md).
    storage_options: how to reach the object store, as Lance has it: aws_access_key_id,
        aws_secret_access_key, aws_region, aws_endpoint, allow_http. The environment says the rest.

    Raises FormatError where something else stands at its path, BucketUnavailable where another
    host (of an object store: process) has it open, PersistingError where the path cannot be used.

    >>> import asyncio, tempfile
    >>> async def main():
    ...     async with Queue("rollouts", tempfile.mkdtemp()) as queue:
    ...         await queue.put({"prompt": "2 + 2", "reward": 1.0})
    ...         return await queue.get()
    >>> asyncio.run(main())
    [{'prompt': '2 + 2', 'reward': 1.0}]
    """

    _may_be_distributed = True

    def __init__(
        self,
        name: str,
        storage_path: str | os.PathLike[str] = "./data",
        *,
        batch_size: int = 100,
        auto_flush_interval_sec: float = 0.0,
        enable_metrics: bool = False,
        num_buckets: int | None = None,
        bucket_column: str | None = None,
        zerocopy_mode: Literal["auto", "force", "off"] = "auto",
        durability: Literal["flush", "fsync"] = "flush",
        allow_pickle: bool = True,
        capacity: int | None = None,
        samples_per_insert: float = 1.0,
        when_full: WhenFull = "wait",
        put_timeout: float = 600.0,
        retention: Given | None = None,
        storage_options: dict[str, str] | None = None,
    ) -> None:
        check_options(
            name,
            batch_size,
            auto_flush_interval_sec,
            zerocopy_mode,
            durability,
            num_buckets,
            bucket_column,
            storage_options,
            storage_path,
        )
        pace = Pace(capacity, samples_per_insert, when_full, put_timeout)
        pace.check(name)
        self.name = name
        self.storage_path = os.fspath(storage_path)
        self.storage_options = storage_options
        self.allow_pickle = allow_pickle
        self.zerocopy_mode = zerocopy_mode
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "auto_flush_interval_sec": auto_flush_interval_sec,
            "durability": durability,
            "allow_pickle": allow_pickle,
            "zerocopy_mode": zerocopy_mode,
            "pace": pace,
            "enable_metrics": enable_metrics,
            "retention": None if retention is None else parse_retention(retention, name),
        }
        distributed = self._may_be_distributed and is_distributed()
        split = Split(num_buckets, bucket_column, distributed)
        self.engine: Engine = (
            open_distributed(name, storage_path, split, storage_options=storage_options, **options)
            if distributed
            else Engine(open_place(name, storage_path, split, storage_options), **options)
        )
        self.num_buckets = self.engine.place.num_buckets
        self.bucket_column = self.engine.place.bucket_column
        self.sync: SyncQueue = SyncQueue(self)

    # Putting

    async def put(
        self,
        data: dict[str, Any] | Sequence[dict[str, Any]] | TensorDictBase,
        partition_id: str = "default",
        *,
        metadata: BatchMeta | None = None,
    ) -> BatchMeta:
        """Put one sample (a dict), many (a list of dicts), or the B samples of a TensorDict.

        A TensorDict of batch size [B, ...] is B samples, of batch size [] one. Values are copied:
        what is changed after the put does not show. With `metadata`, the fields of `data` are
        written into the samples that it names, and are on disk when this returns.

        Raises SchemaError, storing nothing of this put, for a value that does not fit its field;
        QueueSealed for a sealed partition; WaitTimeout or QueueFull where there is no room, as the
        queue's capacity says; StaleOwner, with `metadata`, for samples that a producer of this
        process had claimed and that were given to others since it did not answer; FlushFailed if
        samples could not be written, which are then kept in memory.
        """
        if metadata is not None:
            return await in_thread(self.engine.writes.put_fields, data, metadata)
        writes = self.engine.writes
        if self.engine.pace.capacity is not None:
            meta = await writes.put_when_room(data, partition_id)
        elif isinstance(data, dict):
            meta = writes.put(data, partition_id)
        else:
            meta = await in_thread(writes.put, data, partition_id)
        if writes.wants_flush(meta):
            await in_thread(self.engine.flush)
        return meta

    async def put_batch(
        self, records: Sequence[dict[str, Any]], partition_id: str = "default"
    ) -> BatchMeta:
        """Put many samples, with consecutive global indexes; all or none of them."""
        return await self.put(records, partition_id)

    async def flush(self) -> None:
        """Write what waits in memory. Raises FlushFailed, with the samples kept, if it cannot."""
        await in_thread(self.engine.flush)

    # Reading in order

    async def get(self, limit: int = 100, offset: int = 0) -> list[dict[str, Any]]:
        """Up to `limit` records after the first `offset`, in the order in which they were put.

        Each record has every field of the queue, None where it has no value. Marks nothing.
        """
        return await in_thread(self.engine.records, limit, offset)

    async def stream(
        self,
        limit: int | None = 100,
        offset: int = 0,
        wait: bool = False,
        timeout: float | None = None,
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Lists of records in order, `limit` records in all (None: no limit). Marks nothing.

        With `wait`, waits for further records instead of ending, until the whole queue is sealed;
        `timeout` seconds without one end it, too (None: never; the log then says after five
        minutes, ten, twenty, ... what is missing). Raises ProducerFailed when it waits and no
        producer is left.
        """
        check_range(limit, offset)
        stream = self.engine.stream(offset)
        left, deadline = limit, _deadline(timeout)
        while left is None or left > 0:
            step = RECORDS_A_STEP if left is None else min(left, RECORDS_A_STEP)
            records = await in_thread(stream.next, step)
            if records:
                left = None if left is None else left - len(records)
                yield records
                deadline = _deadline(timeout)
            elif not wait or not await stream.wait_async(deadline):
                return

    # Claiming

    async def get_meta(
        self,
        fields: Sequence[str] | None,
        batch_size: int,
        task_name: str = "default",
        partition_id: str = "default",
        sampler: Sampler | None = None,
        **sampling: Any,
    ) -> BatchMeta:
        """Claim ready samples for a task: what the sampler chooses is consumed, durably.

        Ready are samples that have all `fields`, and that the task has not consumed. Without a
        sampler: the first `batch_size` in index order, or as many as there are. `sampling` goes to
        the sampler; with dp_rank and batch_index in it, whoever asks for the same again, in
        whatever process, gets the same samples. The answer has size 0 if nothing is ready.
        """
        return await in_thread(
            self.engine.claim, fields, batch_size, task_name, partition_id, sampler, sampling
        )

    async def get_data(self, meta: BatchMeta, partition_id: str | None = None) -> TensorDict:
        """The fields that `meta` names of its samples, as a TensorDict of batch size [meta.size].

        Raises KeyError for samples that the queue does not hold.
        """
        return await in_thread(self.engine.data_of, meta, partition_id)

    async def get_batch(
        self,
        fields: Sequence[str] | None,
        batch_size: int,
        task_name: str = "default",
        partition_id: str = "default",
        sampler: Sampler | None = None,
        **sampling: Any,
    ) -> TensorDict:
        """`get_meta` and `get_data` in one."""
        return await in_thread(
            self.engine.claim_batch, fields, batch_size, task_name, partition_id, sampler, sampling
        )

    async def mark_consumed(
        self, task_name: str, global_indexes: Sequence[int], partition_id: str = "default"
    ) -> None:
        """Mark samples as consumed by a task. Raises KeyError for samples that are not there.

        With no samples it makes the task known to the partition: retention then keeps all that this
        task has not consumed.
        """
        await in_thread(self.engine.mark, task_name, partition_id, global_indexes)

    async def reset_consumption(self, task_name: str | None, partition_id: str = "default") -> None:
        """Let a task begin anew: nothing in the partition is consumed or assigned for it.

        With None, all tasks.
        """
        await in_thread(self.sync.reset_consumption, task_name, partition_id)

    async def clear(self, global_indexes: Sequence[int], partition_id: str = "default") -> None:
        """Remove samples for good. Raises KeyError, removing nothing, if one is not there."""
        await in_thread(self.engine.clear, partition_id, global_indexes)

    async def seal(self, partition_id: str | None = None) -> None:
        """Say that no more samples will come to a partition (None: to the whole queue)."""
        await in_thread(self.engine.seal, partition_id)

    # The rest

    async def stats(self) -> dict[str, Any]:
        """Figures of the queue: samples, bytes, partitions, tasks, fields, upkeep."""
        return await in_thread(stats, self.engine)

    def __len__(self) -> int:
        """Samples in the queue, waiting ones of this process included, cleared ones not."""
        return self.engine.count()

    def reader(self, rank: int | None = None, world_size: int | None = None) -> QueueReader:
        """A reader of this rank's share of the records, that remembers how far it has come."""
        from persisting_torch.queue.reader import QueueReader

        return QueueReader(self, rank, world_size)

    def writer(self) -> QueueWriter:
        """A writer that flushes when its `with` block ends."""
        from persisting_torch.queue.writer import QueueWriter

        return QueueWriter(self)

    def producer(self, name: str, *, essential: bool = False) -> AbstractContextManager[None]:
        """Registers this process as a producer while the block runs.

        If it fails or dies and no other producer is left, those who wait for samples get
        ProducerFailed with the name and the cause; of an `essential` one, whoever is left. What the
        block claims by get_meta or get_batch is leased to it: until fields are put into those
        samples, they are marked as consumed, or the block ends without an exception, the death of
        the producer makes them available again. Claims that name dp_rank and batch_index have no
        lease, since whoever asks gets them again.

        Raises PersistingError where another living producer has the name. A process that did not
        answer for more than ten seconds may find that its leases went to others: then puts of
        fields into those samples raise StaleOwner.
        """
        return self.engine.producer(name, essential=essential)

    def to_lance(self) -> lance.LanceDataset:
        """The queue's rows as a Lance dataset, for SQL, pandas, polars or duckdb.

        What waits is flushed, cleared samples are gone, and fields that arrived late are in their
        rows. Where this process may not write the queue, upkeep may not have come to all of that.
        """
        return self.engine.to_lance()

    def close(self) -> None:
        """Flush and give everything back; a second call does nothing."""
        self.engine.close()

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Queue:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await in_thread(self.close)

    def __repr__(self) -> str:
        return f"Queue({self.name!r}, {self.storage_path!r})"


class SyncQueue(SyncPartitions):
    """The methods of a Queue without await, for scripts, notebooks and callbacks."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        engine = queue.engine
        self._engine = engine
        self.flush: Callable[[], None] = engine.flush
        self.close: Callable[[], None] = queue.close

    def put(
        self,
        data: dict[str, Any] | Sequence[dict[str, Any]] | TensorDictBase,
        partition_id: str = "default",
        *,
        metadata: BatchMeta | None = None,
    ) -> BatchMeta:
        """See Queue.put."""
        if metadata is not None:
            return self._engine.writes.put_fields(data, metadata)
        meta = self._engine.writes.put(data, partition_id)
        if self._engine.writes.wants_flush(meta):
            self._engine.flush()
        return meta

    def put_batch(
        self, records: Sequence[dict[str, Any]], partition_id: str = "default"
    ) -> BatchMeta:
        """See Queue.put_batch."""
        return self.put(records, partition_id)

    def get(self, limit: int = 100, offset: int = 0) -> list[dict[str, Any]]:
        """See Queue.get."""
        return self._engine.records(limit, offset)

    def stream(
        self,
        limit: int | None = 100,
        offset: int = 0,
        wait: bool = False,
        timeout: float | None = None,
    ) -> Iterator[list[dict[str, Any]]]:
        """See Queue.stream."""
        check_range(limit, offset)
        stream = self._engine.stream(offset)
        left, deadline = limit, _deadline(timeout)
        while left is None or left > 0:
            step = RECORDS_A_STEP if left is None else min(left, RECORDS_A_STEP)
            records = stream.next(step)
            if records:
                left = None if left is None else left - len(records)
                yield records
                deadline = _deadline(timeout)
            elif not wait or not stream.wait(deadline):
                return

    def get_meta(
        self,
        fields: Sequence[str] | None,
        batch_size: int,
        task_name: str = "default",
        partition_id: str = "default",
        sampler: Sampler | None = None,
        **sampling: Any,
    ) -> BatchMeta:
        """See Queue.get_meta."""
        return self._engine.claim(fields, batch_size, task_name, partition_id, sampler, sampling)

    def get_data(self, meta: BatchMeta, partition_id: str | None = None) -> TensorDict:
        """See Queue.get_data."""
        return self._engine.data_of(meta, partition_id)

    def get_batch(
        self,
        fields: Sequence[str] | None,
        batch_size: int,
        task_name: str = "default",
        partition_id: str = "default",
        sampler: Sampler | None = None,
        **sampling: Any,
    ) -> TensorDict:
        """See Queue.get_batch."""
        return self._engine.claim_batch(
            fields, batch_size, task_name, partition_id, sampler, sampling
        )

    def mark_consumed(
        self, task_name: str, global_indexes: Sequence[int], partition_id: str = "default"
    ) -> None:
        """See Queue.mark_consumed."""
        self._engine.mark(task_name, partition_id, global_indexes)

    def reset_consumption(self, task_name: str | None, partition_id: str = "default") -> None:
        """See Queue.reset_consumption."""
        tasks = [task_name] if task_name is not None else self._tasks_of(partition_id)
        for task in tasks:
            self._engine.reset(task, partition_id)

    def clear(self, global_indexes: Sequence[int], partition_id: str = "default") -> None:
        """See Queue.clear."""
        self._engine.clear(partition_id, global_indexes)

    def seal(self, partition_id: str | None = None) -> None:
        """See Queue.seal."""
        self._engine.seal(partition_id)

    def stats(self) -> dict[str, Any]:
        """See Queue.stats."""
        return stats(self._engine)

    def __len__(self) -> int:
        return len(self._queue)


def _deadline(timeout: float | None) -> float:
    return float("inf") if timeout is None else time.monotonic() + timeout
