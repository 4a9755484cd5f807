"""Putting and flushing: from the caller's data to rows that are durable."""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tensordict import TensorDictBase, is_tensor_collection

from persisting_torch.errors import BucketUnavailable, FlushFailed, PersistingError, SchemaError
from persisting_torch.queue.buffer import Chunk, compose
from persisting_torch.queue.intake import own_chunks
from persisting_torch.queue.meta import BatchMeta
from persisting_torch.queue.pacing import Room
from persisting_torch.queue.runs import Int64s
from persisting_torch.queue.threads import in_thread, undisturbed

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine


PARTS_OF_CAPACITY = 8


class Writes:
    """What one process writes into one bucket."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.intake = engine.intake
        self._flush_lock = threading.RLock()
        self._flushing: list[Chunk] = []
        self._unsure = False
        self.told_full = -math.inf  # when a put that waits for room last said so to all

    # Putting

    def put(
        self,
        data: dict[str, Any] | Sequence[dict[str, Any]] | TensorDictBase,
        partition: str = "default",
    ) -> BatchMeta:
        """Samples into memory, with their indexes; `wants_flush` says whether to flush.

        Where the handle has a capacity, waits for room, or raises as it was told to.
        """
        if self.engine.pace.capacity is None:
            return self.put_now(data, partition)
        room = Room(self.engine, partition)
        while (meta := self._put_if_room(data, partition, room)) is None:
            room.wait()
        return meta

    async def put_when_room(
        self, data: dict[str, Any] | Sequence[dict[str, Any]] | TensorDictBase, partition: str
    ) -> BatchMeta:
        """The same, holding up neither the event loop nor a thread while it waits."""
        room = Room(self.engine, partition)
        while (meta := await in_thread(self._put_if_room, data, partition, room)) is None:
            await room.wait_async()
        return meta

    def _put_if_room(
        self,
        data: dict[str, Any] | Sequence[dict[str, Any]] | TensorDictBase,
        partition: str,
        room: Room,
    ) -> BatchMeta | None:
        """Put, unless the queue is full: then what waits is flushed, for consumers to find.

        A put that has waited is flushed at once, and no other process looks for room meanwhile.
        """
        with self.intake.lock:
            if not room.waits and room.is_there():
                return self.put_now(data, partition)
        self.engine.flush()
        room.check()
        if not room.is_there():
            return None
        return undisturbed(self._put_in_turn, data, partition, room)

    def _put_in_turn(
        self,
        data: dict[str, Any] | Sequence[dict[str, Any]] | TensorDictBase,
        partition: str,
        room: Room,
    ) -> BatchMeta | None:
        with self.alone():
            if not room.is_there():
                return None
            meta = self.put_now(data, partition)
            self.flush()
            return meta

    def await_room(self, partition: str) -> None:
        """Wait until the queue is not full, or raise as the handle was told to."""
        room = Room(self.engine, partition)
        while not room.is_there():
            self.engine.flush()
            room.check()
            if not room.is_there():
                room.wait()

    def put_now(
        self, data: dict[str, Any] | Sequence[dict[str, Any]] | TensorDictBase, partition: str
    ) -> BatchMeta:
        """Put without regard to the capacity."""
        engine = self.engine
        engine.check_open(writing=True)
        if engine.router is not None:
            engine.router.check(data)
        if isinstance(data, dict):
            meta = self.intake.put_record(data, partition)
        else:
            meta = self._put_many(data, partition)
        engine.hub.notify()
        if engine.metrics.enabled:
            engine.metrics.count("put", meta.size)
        return meta

    def _put_many(
        self,
        data: Sequence[dict[str, Any]] | TensorDictBase,
        partition: str,
        keys: Sequence[str] | None = None,
        tags: Sequence[str | None] | None = None,
    ) -> BatchMeta:
        if is_tensor_collection(data):
            return self.intake.put_tensordict(cast(TensorDictBase, data), partition, keys, tags)
        if isinstance(data, list | tuple):
            return self.intake.put_records(data, partition, keys, tags)
        raise SchemaError(
            f"queue {self.engine.place.queue!r} takes a dict (one sample), a list of dicts or a"
            f" TensorDict, not {type(data).__name__}."
        )

    def put_with_keys(
        self,
        data: Sequence[dict[str, Any]] | TensorDictBase,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[str | None],
    ) -> BatchMeta:
        """New samples that are known by keys, on disk when this returns."""
        self.engine.check_open(writing=True)
        meta = self._put_many(data, partition, keys, tags)
        self.flush()
        return meta

    def put_fields(
        self,
        data: dict[str, Any] | Sequence[dict[str, Any]] | TensorDictBase,
        meta: BatchMeta,
        tags: Sequence[tuple[str, int, str | None]] = (),
    ) -> BatchMeta:
        """Fields into samples that exist, on disk when this returns.

        Returns the metadata with these fields added. What a producer of this process had claimed of
        them is finished. Raises SchemaError if there are not as many values as samples, or a sample
        is named twice; KeyError for samples that are not there; StaleOwner for samples whose claim
        was given to others because their producer did not answer.
        """
        engine = self.engine
        engine.check_open(writing=True)
        chunk = self._fields_chunk(data, meta.partition_id)
        indexes = meta.index_array()
        if len(chunk) != len(indexes):
            raise SchemaError(
                f"queue {engine.place.queue!r}: {len(chunk)} values were given for the"
                f" {len(indexes)} samples of the metadata. Give one for each, in their order."
            )
        if len(np.unique(indexes)) < len(indexes):
            raise SchemaError(
                f"queue {engine.place.queue!r}: the metadata names a sample more than once, so that"
                " it is not said which value it gets. Name each sample once."
            )
        if len(chunk):
            finishing = engine.producers.finishing(indexes)
            self.flush()
            engine.reads.check_indexes(meta.partition_id, indexes)
            self.intake.admit_chunk(chunk)
            with engine.ledger.lock:
                late = engine.late.compose(chunk, indexes, engine.books.schema)
            keys = [(meta.partition_id, key, index, tag) for key, index, tag in tags]
            try:
                first_row = undisturbed(
                    engine.committer.append_late, late, meta.partition_id, keys, finishing
                )
            except OSError as error:
                raise PersistingError(
                    f"queue {engine.place.queue!r}: fields of {len(indexes)} samples could not be"
                    f" written to {engine.place.bucket}: {error}. Make room or access and put them"
                    " again."
                ) from error
            with engine.ledger.lock:
                finishing.done()
                engine.late.remember(first_row, late.arrivals)
            engine.books.follow()
            engine.hub.notify()
            engine.tending.note_late(late.table.nbytes)
        return meta.with_fields(chunk.field_names)

    def _fields_chunk(
        self, data: dict[str, Any] | Sequence[dict[str, Any]] | TensorDictBase, partition: str
    ) -> Chunk:
        if is_tensor_collection(data):
            return Chunk(partition, 0, batch=self.intake.encode(cast(TensorDictBase, data)))
        rows = self.intake.snapshot([data] if isinstance(data, dict) else data)
        return Chunk(partition, 0, rows)

    def admit(self, data: Sequence[dict[str, Any]] | TensorDictBase) -> None:
        """Check values against the fields, registering what is new; SchemaError refuses all."""
        self.intake.admit_chunk(self._fields_chunk(data, ""))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else commits while the block runs, which knows all that was before."""
        with self._flush_lock, self.engine.commit_lock:
            self.engine.ledger.catch_up()
            yield

    # Flushing

    def wants_flush(self, put: BatchMeta) -> bool:
        """Whether a flush is due after this put.

        After a large one always: it may still share the caller's memory, even if the flush of
        another thread has begun with it.
        """
        return self.intake.full or put.size >= self.intake.batch_size or self._holds_back_much()

    def _holds_back_much(self) -> bool:
        """Whether more waits here than other processes should not know of when they pace."""
        capacity = self.engine.pace.capacity
        return capacity is not None and self.intake.buffer.samples * PARTS_OF_CAPACITY > capacity

    def flush(self) -> None:
        """Write all that waits. Raises FlushFailed, with the samples kept, if it cannot."""
        with self.intake.lock:
            waiting = self._in_memory()
        if waiting:
            undisturbed(self._flush)

    def _flush(self) -> None:
        with self._flush_lock:
            with self.intake.lock:
                nbytes = self.intake.buffer.nbytes
                chunks = self._flushing = self.intake.buffer.take()
            if not chunks:
                return
            done = False
            try:
                with self.engine.metrics.timed("flush", sum(map(len, chunks))):
                    self._commit(chunks)
                done = True
            except (
                OSError,
                PersistingError,
                ValueError,
                RuntimeError,
                sqlite3.Error,
            ) as error:
                raise FlushFailed(
                    f"queue {self.engine.place.queue!r}: {sum(map(len, chunks))} samples could not"
                    f" be written to {self.engine.place.bucket}: {str(error).rstrip('.')}. They are"
                    f" kept in memory; {_remedy(error)}call flush() again."
                ) from error
            finally:
                with self.intake.lock:
                    if not done:
                        self._unsure = True
                        own_chunks(chunks)
                        self.intake.buffer.put_back(chunks)
                    self._flushing = []
        self.engine.hub.notify()
        self.engine.tending.note_flush(nbytes)

    def _commit(self, chunks: list[Chunk]) -> None:
        engine = self.engine
        if self._unsure:
            chunks = self._not_yet_committed(chunks)
        if chunks:
            with engine.ledger.lock:
                composed = compose(chunks, engine.books.schema)
            engine.committer.append(composed)
        self._unsure = False

    def _not_yet_committed(self, chunks: list[Chunk]) -> list[Chunk]:
        """After a flush that failed nobody knows where: its rows may be there all the same."""
        engine = self.engine
        with engine.commit_lock:
            engine.committer.recover()
        with engine.ledger.reading() as tx:
            engine.books.refresh(tx)
            arrived = engine.books.arrived_of
            return [
                part
                for chunk in chunks
                for part in chunk.without(arrived(chunk.partition, chunk.first, len(chunk)))
            ]

    def flush_partition(self, partition: str) -> None:
        """Write what waits, if the partition has part in it."""
        with self.intake.lock:
            waiting = any(chunk.partition == partition for chunk in self._in_memory())
        if waiting:
            self.flush()

    def flush_indexes(self, indexes: Int64s) -> None:
        """Write what waits, if one of these samples may be part of it."""
        if not len(indexes) or not (self._flushing or self.intake.buffer.chunks):
            return
        low, high = int(indexes.min()), int(indexes.max())
        with self.intake.lock:
            waiting = any(c.first <= high and low < c.first + len(c) for c in self._in_memory())
        if waiting:
            self.flush()

    def waiting(self) -> list[Chunk]:
        """The samples that wait in memory or are being flushed, as they are now."""
        with self.intake.lock:
            return [
                Chunk(chunk.partition, chunk.first, list(chunk.rows), chunk.batch)
                for chunk in self._in_memory()
            ]

    @property
    def samples_waiting(self) -> int:
        return self.intake.buffer.samples + sum(map(len, self._flushing))

    def _in_memory(self) -> list[Chunk]:
        return [*self._flushing, *self.intake.buffer.chunks]


def _remedy(error: BaseException) -> str:
    return "" if isinstance(error, BucketUnavailable) else "make room or access and "
