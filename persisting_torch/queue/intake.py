"""The way in: values checked and copied, fields registered, indexes given, samples kept waiting."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDictBase

from persisting_torch.errors import QueueClosed, QueueSealed, SchemaError
from persisting_torch.queue.again import again
from persisting_torch.queue.books import Books
from persisting_torch.queue.buffer import Buffer, Chunk
from persisting_torch.queue.encode import (
    EncodedBatch,
    detach,
    encode_batch,
    new_types,
    snapshot_record,
)
from persisting_torch.queue.fields import FieldType, Schema
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.meta import BatchMeta
from persisting_torch.queue.names import check_name
from persisting_torch.queue.stored import ZeroCopyMode
from persisting_torch.queue.waiting import POLL_SECONDS

FEWEST_RESERVED = 64
MOST_RESERVED = 4096
PUTS_RESERVED = 4  # for puts of so many samples that each would have to reserve its own
MOST_WAITING_BYTES = 64 << 20

Given = tuple[str, tuple[str, ...], "FieldType | None"]


class Intake:
    """Puts of one process into one bucket."""

    def __init__(
        self,
        ledger: Ledger,
        books: Books,
        *,
        batch_size: int,
        allow_pickle: bool,
        zerocopy_mode: ZeroCopyMode,
    ) -> None:
        self.ledger = ledger
        self.books = books
        self.batch_size = batch_size
        self.allow_pickle = allow_pickle
        self.zerocopy_mode = zerocopy_mode
        self.lock = threading.RLock()
        self.buffer = Buffer()
        self._next = self._end = 0
        self._reserved = FEWEST_RESERVED // 2
        self._closed = False
        self._looked = time.monotonic()

    @property
    def full(self) -> bool:
        """Whether the waiting samples want to be flushed."""
        return self.buffer.samples >= self.batch_size or self.buffer.nbytes >= MOST_WAITING_BYTES

    # Putting

    def put_record(self, record: dict[str, Any], partition: str) -> BatchMeta:
        """One sample; its values are copied."""
        row = snapshot_record(
            record,
            queue=self.books.schema.queue,
            allow_pickle=self.allow_pickle,
            zerocopy_mode=self.zerocopy_mode,
        )
        with self.lock:
            self.check_partition(partition)
            new = new_types(row, self.books.schema)
            if new:
                self.admit(new)
            first = self._next
            if first == self._end:
                first = self._more_indexes(1)
            self._next = first + 1
            if not self.buffer.append(partition, first, row):
                self.buffer.add(Chunk(partition, first, [row]))
            return BatchMeta(range(first, first + 1), partition, tuple(row))

    def put_records(
        self,
        records: Sequence[dict[str, Any]],
        partition: str,
        keys: Sequence[str] | None = None,
        tags: Sequence[str | None] | None = None,
    ) -> BatchMeta:
        """Many samples with consecutive indexes, all or none of them."""
        rows = self.snapshot(records)
        with self.lock:
            self.check_partition(partition)
            self.admit_records(rows)
            first = self._indexes(len(rows))
            chunk = Chunk(partition, first, rows)
            self._add(chunk, keys, tags)
            return BatchMeta(chunk.indexes, partition, chunk.field_names)

    def put_tensordict(
        self,
        td: TensorDictBase,
        partition: str,
        keys: Sequence[str] | None = None,
        tags: Sequence[str | None] | None = None,
    ) -> BatchMeta:
        """The B samples of a TensorDict of batch size [B, ...], or the one of batch size []."""
        batch = self.encode(td)
        if batch.length < self.batch_size:
            batch = detach(batch)
        with self.lock:
            self.check_partition(partition)
            self.admit_batch(batch)
            first = self._indexes(batch.length)
            chunk = Chunk(partition, first, batch=batch)
            self._add(chunk, keys, tags)
            return BatchMeta(chunk.indexes, partition, chunk.field_names)

    def snapshot(self, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Records with their values checked and copied."""
        rows = []
        for number, record in enumerate(records):
            if not isinstance(record, dict):
                raise SchemaError(
                    f"queue {self.books.schema.queue!r}: record {number} of the list is a"
                    f" {type(record).__name__}, not a dict. Put dicts, lists of dicts, or a"
                    " TensorDict."
                )
            rows.append(
                snapshot_record(
                    record,
                    queue=self.books.schema.queue,
                    allow_pickle=self.allow_pickle,
                    zerocopy_mode=self.zerocopy_mode,
                )
            )
        return rows

    def encode(self, td: TensorDictBase) -> EncodedBatch:
        return encode_batch(
            td,
            queue=self.books.schema.queue,
            allow_pickle=self.allow_pickle,
            zerocopy_mode=self.zerocopy_mode,
        )

    def _add(
        self, chunk: Chunk, keys: Sequence[str] | None, tags: Sequence[str | None] | None
    ) -> None:
        if keys is not None:
            tags = tags or [None] * len(keys)
            chunk.keys = list(zip(keys, chunk.indexes, tags, strict=True))
        if len(chunk):
            self.buffer.add(chunk)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Takes nothing in while the block runs, nor after it unless it fails."""
        with self.lock:
            self._closed = True
        try:
            yield
        except BaseException:
            self._closed = False
            raise

    def check_partition(self, partition: str) -> None:
        """Raise unless samples may be put there: QueueSealed, QueueClosed."""
        if self._closed:
            raise QueueClosed(
                f"queue {self.books.schema.queue!r} is being closed by another thread: nothing more"
                " can be put."
            )
        books = self.books
        now = time.monotonic()
        if now - self._looked > POLL_SECONDS:
            self._looked = now
            books.glance()
        known = books.partitions.get(partition)
        if known is not None and known.sealed is None and books.sealed is None:
            return
        check_name(partition, "partition_id")
        if books.is_sealed(partition):
            raise QueueSealed(
                f"{books.schema.queue}/{partition} was sealed: no more samples can be put."
                " Put into another partition or queue."
            )

    # Fields

    def admit_records(self, rows: Iterable[dict[str, Any]]) -> None:
        """Check the types of copied records against the fields, registering what is new."""
        schema = self.books.schema
        self.admit(dict.fromkeys(new for row in rows for new in new_types(row, schema)))

    def admit_chunk(self, chunk: Chunk) -> None:
        """Check the types of a chunk's values likewise."""
        if chunk.batch is None:
            self.admit_records(chunk.rows)
        else:
            self.admit_batch(chunk.batch)

    def admit_batch(self, batch: EncodedBatch) -> None:
        """Check the types of an encoded batch likewise."""
        self.admit(
            [
                *((name, path, kind) for name, path, kind, _ in batch.columns),
                *((name, path, None) for name, path in batch.empty),
            ]
        )

    @again
    def admit(self, given: Iterable[Given]) -> None:
        """Check types against the fields, registering what is new; SchemaError refuses all."""
        new = [each for each in given if _is_new(self.books.schema, *each)]
        if not new:
            return
        with self.ledger.transaction(hurry=True) as tx:
            self.books.refresh(tx)
            trial = copy.deepcopy(self.books.schema)
            for name, path, kind in new:
                if not _is_new(trial, name, path, kind):
                    continue
                variant = None if kind is None else trial.new_variant(name, kind)
                trial.add(name, path, variant)
                tx.execute(
                    "INSERT INTO fields (name, path, field_column, type) VALUES (?, ?, ?, ?)",
                    (
                        name,
                        json.dumps(path),
                        variant and variant.column,
                        variant and variant.type.to_json(),
                    ),
                )
        self.books.follow()

    # Indexes

    def _indexes(self, count: int) -> int:
        """The first of `count` consecutive new indexes."""
        first = self._next
        if self._end - first < count:
            first = self._more_indexes(count)
        self._next = first + count
        return first

    def _more_indexes(self, count: int) -> int:
        """Reserve more, in larger steps the faster they go; the first of `count` in a row."""
        left = self._end - self._next
        self._reserved = min(2 * self._reserved, max(MOST_RESERVED, PUTS_RESERVED * count))
        wanted = max(count - left, self._reserved)
        first = self.ledger.reserve(wanted)
        end = first + wanted
        if first != self._end:
            if wanted < count:
                first, end = self._reserve_whole(count)
            self._next = first
        self._end = end
        return self._next

    def _reserve_whole(self, count: int) -> tuple[int, int]:
        first = self.ledger.reserve(count)
        return first, first + count

    def give_back(self) -> None:
        """Return the indexes that were reserved and not used, if they are the newest."""
        if self._next < self._end:
            self.ledger.give_back(self._next, self._end)
            self._end = self._next


def _is_new(schema: Schema, name: str, path: tuple[str, ...], kind: FieldType | None) -> bool:
    return schema.admit(name, path, kind) is None and (
        kind is not None or name not in schema.fields
    )


def own_chunks(chunks: Iterable[Chunk]) -> None:
    """Give every encoded chunk its own memory, where it still shares the caller's."""
    for chunk in chunks:
        if chunk.batch is not None:
            chunk.batch = detach(chunk.batch)
