"""What a sampler may look at, remember and drop while it chooses."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyroaring import BitMap64

from persisting_torch.errors import SchemaError
from persisting_torch.queue.decode import to_records, to_tensordict
from persisting_torch.queue.fields import FieldType, Schema
from persisting_torch.queue.policies import policy_folder, read_pointer
from persisting_torch.queue.runs import Int64s
from persisting_torch.queue.sets import pack_set, set_of

if TYPE_CHECKING:
    from persisting_torch.queue.books import Books
    from persisting_torch.queue.reads import Reads

Values = np.ndarray[Any, np.dtype[Any]] | list[Any]

NOT_IN_NUMPY = (
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)


class Sampler(Protocol):
    """What the engine needs of a sampler; persisting_torch.samplers.BaseSampler has it."""

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]: ...

    def clear_cache(self, partition_id: str) -> None: ...


class Look:
    """One sampler's look at the samples of a partition, while it chooses for a task.

    Given as the keyword `look` to samplers whose class says `looks = True`. It is good for that one
    call: what is noted and dropped is committed with the claim, or not at all.
    """

    def __init__(
        self,
        tx: sqlite3.Connection,
        books: Books,
        reads: Reads,
        task: str,
        partition: str,
        fields: frozenset[str] = frozenset(),
    ) -> None:
        self.queue = books.ledger.place.queue
        self.task = task
        self.partition = partition
        self.fields = fields
        self.dropped: dict[str, BitMap64] = {}
        self.noted: dict[str, Any] = {}
        self._tx = tx
        self._books = books
        self._reads = reads
        self.over = self.sealed and not self.lacking
        """Whether nothing worth waiting for will become ready any more."""

    @property
    def sealed(self) -> bool:
        """Whether no more samples will come to the partition."""
        return self._books.is_sealed(self.partition)

    @property
    def lacking(self) -> int:
        """How many samples that the task has not taken lack fields which were asked for."""
        ready = self._books.view(self.task, self.partition, self.fields).available
        there = self._books.view(self.task, self.partition, frozenset()).available
        return len(there) - len(ready)

    @property
    def opened(self) -> object:
        """Stands for the queue as it is opened here, for what is remembered of it in memory."""
        return self._books

    @property
    def policy_version(self) -> int | None:
        """The newest policy version that was announced for the queue; None before the first."""
        place = self._books.ledger.place
        newest = read_pointer(policy_folder(place.root), place.files)
        return None if newest is None else newest.version

    def having(self, field: str) -> BitMap64:
        """The partition's samples that have the field, taken ones too; to be left as it is."""
        where = self._books.partitions.get(self.partition)
        return BitMap64() if where is None else where.having.get(field, BitMap64())

    def values(self, field: str, indexes: Sequence[int] | Int64s | BitMap64) -> Values:
        """The field's value of each sample, in the order of the indexes.

        An array [n] for numbers and zero-dimensional tensors of which none is missing, else a list
        (None where a sample has no value). Raises KeyError for a field that was never put.
        """
        table = self._reads.column(_as_array(indexes), field)
        return values_of(table, self._books.schema, field, self._reads.allow_pickle)

    def lengths(self, field: str, indexes: Sequence[int] | Int64s | BitMap64) -> Int64s:
        """The length of each sample's value, int64 [n]: a tensor's first dimension, or len().

        0 where a sample has no value. Raises KeyError for a field that was never put, SchemaError
        for one whose values have no length.
        """
        table = self._reads.column(_as_array(indexes), field)
        return lengths_of(table, self._books.schema, field)

    def recall(self, key: str) -> Any:
        """What was noted under the key for this task and partition; None if nothing."""
        if key in self.noted:
            return self.noted[key]
        task = self._books.tasks.get((self.task, self.partition))
        if task is None or not self._remembers:
            return None
        found = self._tx.execute(
            "SELECT value FROM notes WHERE task = ? AND key = ?", (task.id, key)
        ).fetchone()
        return None if found is None else json.loads(found[0])

    @cached_property
    def _remembers(self) -> bool:
        """Whether anything was noted before, for this task and partition."""
        task = self._books.tasks[self.task, self.partition]
        found = self._tx.execute("SELECT 1 FROM notes WHERE task = ? LIMIT 1", (task.id,))
        return found.fetchone() is not None

    def note(self, key: str, value: Any) -> None:
        """Remember something that JSON can hold, durably; None forgets it."""
        self.noted[key] = value

    def drop(self, indexes: Sequence[int] | Int64s | BitMap64, reason: str) -> None:
        """Let samples go untrained: they count as consumed, and as dropped for this reason."""
        self.dropped[reason] = self.dropped.get(reason, BitMap64()) | set_of(_as_array(indexes))

    def deal(
        self,
        sampler: Sampler,
        ready: Sequence[int],
        batch_size: int,
        dp_size: int,
        **where: Any,
    ) -> list[list[int]]:
        """The slices that another sampler makes of ready samples, as `deal` says."""
        return deal(sampler, ready, batch_size, dp_size, self, **where)

    @property
    def gone(self) -> BitMap64:
        """All samples that were dropped in this look."""
        return BitMap64().union(*self.dropped.values())

    @property
    def changes(self) -> bool:
        return bool(self.noted) or any(self.dropped.values())

    def enter(self, tx: sqlite3.Connection, task: int) -> BitMap64:
        """Enter what was noted and dropped; the samples that are dropped, for the claim."""
        for key, value in self.noted.items():
            if value is None:
                tx.execute("DELETE FROM notes WHERE task = ? AND key = ?", (task, key))
            else:
                tx.execute(
                    "INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", (task, key, json.dumps(value))
                )
        for reason, members in self.dropped.items():
            drop(tx, task, reason, members)
        gone = self.gone
        self.noted, self.dropped = {}, {}
        return gone


def unit_of(sampler: Sampler | None) -> str:
    """What a batch size counts: "samples", or what the sampler says that it counts."""
    return getattr(sampler, "counts", "samples")


def needs_of(sampler: Sampler | None) -> tuple[str, ...]:
    """Fields without which a sample is not ready for this sampler."""
    return tuple(getattr(sampler, "needs", ()))


def drop(tx: sqlite3.Connection, task: int, reason: str, members: BitMap64) -> None:
    """Enter samples as let go by a task; the caller enters the claim."""
    if members:
        tx.execute(
            "INSERT INTO dropped (task, reason, first, count, members) VALUES (?, ?, ?, ?, ?)",
            (task, reason, *pack_set(members)),
        )


def deal(
    sampler: Sampler,
    ready: Sequence[int],
    batch_size: int,
    dp_size: int,
    look: Look,
    **where: Any,
) -> list[list[int]]:
    """The slices of a global batch, `batch_size` samples for each of `dp_size` ranks, or []."""
    if getattr(sampler, "looks", False):
        where["look"] = look
    own = getattr(sampler, "deal", None)
    if own is not None:
        slices: list[list[int]] = own(ready, batch_size, dp_size, **where)
        return slices
    size = batch_size * dp_size
    if len(ready) < size:
        return []
    sampled, consumed = sampler.sample(ready, size, dp_rank=0, **where)
    look.drop(list(set_of(consumed) - set_of(sampled)), "sampler")
    if len(sampled) != size:
        return []
    return [list(sampled[at : at + batch_size]) for at in range(0, size, batch_size)]


def fold_drops(tx: sqlite3.Connection, books: Books, most: int) -> None:
    """Join what a task has dropped for a reason into one set where there are more than `most`."""
    books.refresh(tx)
    crowded = tx.execute(
        "SELECT task, reason FROM dropped GROUP BY task, reason HAVING count(*) > ?", (most,)
    ).fetchall()
    dropped = {task.id: task.dropped for task in books.tasks.values()}
    for task, reason in crowded:
        tx.execute("DELETE FROM dropped WHERE task = ? AND reason = ?", (task, reason))
        drop(tx, task, reason, dropped[task][reason])


def _as_array(indexes: Sequence[int] | Int64s | BitMap64) -> Int64s:
    if isinstance(indexes, BitMap64):
        return np.array(indexes.to_array(), dtype=np.int64)
    return np.asarray(indexes, dtype=np.int64)


def values_of(table: pa.Table, schema: Schema, name: str, allow_pickle: bool) -> Values:
    """The field's values of a table's rows, as `Look.values` gives them."""
    batch = to_tensordict(table, schema, [name], allow_pickle=allow_pickle)
    path = schema.fields[name].path
    column = batch.get(path if len(path) > 1 else path[0])
    if isinstance(column, torch.Tensor) and not column.is_nested and column.ndim == 1:
        return (column.float() if column.dtype in NOT_IN_NUMPY else column).numpy()
    return [row[name] for row in to_records(table, schema, [name], allow_pickle=allow_pickle)]


def lengths_of(table: pa.Table, schema: Schema, name: str) -> Int64s:
    """The lengths of a table's rows in one field, as `Look.lengths` gives them."""
    total = np.zeros(table.num_rows, dtype=np.int64)
    for variant in schema.fields[name].variants:
        if variant.column in table.column_names:
            total += _lengths_of(table[variant.column], variant.type, schema.queue, name)
    return total


def _lengths_of(column: pa.ChunkedArray, kind: FieldType, queue: str, name: str) -> Int64s:
    stored = column.type
    if kind.kind == "tensor" and kind.shape:
        lengths = pc.multiply(pc.is_valid(column).cast(pa.int64()), kind.shape[0])
    elif kind.kind == "ragged" and pa.types.is_integer(stored):
        lengths = column
    elif kind.kind in ("ragged", "list") and pa.types.is_large_list(stored):
        lengths = pc.divide(pc.list_value_length(column), math.prod(kind.shape))
    elif kind.kind in ("str", "bytes"):
        lengths = pc.binary_length(column) if kind.kind == "bytes" else pc.utf8_length(column)
    elif kind.kind == "list":
        lengths = pa.chunked_array([pa.nulls(len(column), pa.int64())])
    else:
        raise SchemaError(
            f"queue {queue!r}: values of field {name!r} ({kind}) have no length. Name a field of"
            " tensors, lists or text, or one that holds the lengths as numbers."
        )
    return np.asarray(pc.fill_null(lengths, 0).cast(pa.int64()).to_numpy())
