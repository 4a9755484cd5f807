"""Putting and flushing: from the caller's data to rows that are durable."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from tensordict import TensorDictBase, is_tensor_collection

from persisting_torch.errors import FlushFailed, PersistingError, SchemaError
from persisting_torch.queue.buffer import Chunk, compose
from persisting_torch.queue.intake import own_chunks
from persisting_torch.queue.meta import BatchMeta
from persisting_torch.queue.pacing import await_room
from persisting_torch.queue.runs import Int64s
from persisting_torch.queue.threads import undisturbed

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine


class Writes:
    """What one process writes into one bucket."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.intake = engine.intake
        self._flush_lock = threading.RLock()
        self._flushing: list[Chunk] = []
        self._unsure = False

    # Putting

    def put(
        self,
        data: dict[str, Any] | Sequence[dict[str, Any]] | TensorDictBase,
        partition: str = "default",
    ) -> BatchMeta:
        """Samples into memory, with their indexes; `full` says whether to flush."""
        engine = self.engine
        engine.check_open(writing=True)
        if engine.capacity is not None:
            await_room(engine, engine.capacity, partition)
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

        Raises SchemaError if there are not as many values as samples, KeyError for unknown samples.
        """
        engine = self.engine
        engine.check_open(writing=True)
        chunk = self._fields_chunk(data, meta)
        indexes = meta.index_array()
        if len(chunk) != len(indexes):
            raise SchemaError(
                f"queue {engine.place.queue!r}: {len(chunk)} values were given for the"
                f" {len(indexes)} samples of the metadata. Give one for each, in their order."
            )
        if len(chunk):
            self.flush()
            engine.reads.check_indexes(meta.partition_id, indexes)
            with engine.ledger.lock:
                late = engine.late.compose(chunk, indexes, engine.books.schema)
            keys = [(meta.partition_id, key, index, tag) for key, index, tag in tags]
            undisturbed(engine.committer.append_late, late, meta.partition_id, keys)
            engine.hub.notify()
        return meta

    def _fields_chunk(
        self, data: dict[str, Any] | Sequence[dict[str, Any]] | TensorDictBase, meta: BatchMeta
    ) -> Chunk:
        if is_tensor_collection(data):
            batch = self.intake.encode(cast(TensorDictBase, data))
            self.intake.admit_batch(batch)
            return Chunk(meta.partition_id, 0, batch=batch)
        rows = self.intake.snapshot([data] if isinstance(data, dict) else data)
        self.intake.admit_records(rows)
        return Chunk(meta.partition_id, 0, rows)

    # Flushing

    @property
    def full(self) -> bool:
        """Whether so much waits that it wants to be flushed."""
        return self.intake.full

    def flush(self) -> None:
        """Write all that waits. Raises FlushFailed, with the samples kept, if it cannot."""
        with self.intake.lock:
            waiting = self._in_memory()
        if waiting:
            undisturbed(self._flush)

    def _flush(self) -> None:
        with self._flush_lock:
            with self.intake.lock:
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
                    f" be written to {self.engine.place.bucket}: {error}. They are kept in memory;"
                    " make room or access and call flush() again."
                ) from error
            finally:
                with self.intake.lock:
                    if not done:
                        self._unsure = True
                        own_chunks(chunks)
                        self.intake.buffer.put_back(chunks)
                    self._flushing = []
        self.engine.hub.notify()
        self.engine.tending.maybe_start()

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
            rows = engine.books.runs.rows_of([chunk.first for chunk in chunks])
        return [chunk for chunk, row in zip(chunks, rows, strict=True) if row < 0]

    def flush_partition(self, partition: str) -> None:
        """Write what waits, if the partition has part in it."""
        with self.intake.lock:
            waiting = any(chunk.partition == partition for chunk in self._in_memory())
        if waiting:
            self.flush()

    def flush_indexes(self, indexes: Int64s) -> None:
        """Write what waits, if one of these samples may be part of it."""
        if not len(indexes):
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

    def _in_memory(self) -> list[Chunk]:
        return [*self._flushing, *self.intake.buffer.chunks]
