"""Tables made of records and batches, and equality to the bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import torch
from tensordict import TensorDict

from persisting_torch.queue.decode import to_records, to_tensordict
from persisting_torch.queue.encode import (
    EncodedBatch,
    encode_batch,
    encode_rows,
    new_types,
    physical_columns,
    snapshot_record,
)
from persisting_torch.queue.fields import Schema


def stored_table(
    records: Iterable[dict[str, Any]], schema: Schema | None = None, **options: Any
) -> tuple[pa.Table, Schema]:
    schema = Schema("q") if schema is None else schema
    settings_: dict[str, Any] = {"allow_pickle": True, "zerocopy_mode": "auto"} | options
    rows = []
    for record in records:
        row = snapshot_record(record, queue="q", **settings_)
        for name, path, type_ in new_types(row, schema):
            schema.add(name, path, None if type_ is None else schema.new_variant(name, type_))
        assert not any(type_ for _, _, type_ in new_types(row, schema))
        rows.append(row)
    return as_table(encode_rows(rows, schema), schema, len(rows)), schema


def batch_table(batch: EncodedBatch, schema: Schema | None = None) -> tuple[pa.Table, Schema]:
    schema = Schema("q") if schema is None else schema
    for name, path, type_, _ in batch.columns:
        if schema.admit(name, path, type_) is None:
            schema.add(name, path, schema.new_variant(name, type_))
    for name, path in batch.empty:
        schema.add(name, path, None)
    return as_table(physical_columns(batch, schema), schema, batch.length), schema


def as_table(columns: dict[str, pa.Array], schema: Schema, length: int) -> pa.Table:
    fields = [pa.field("_index", pa.int64()), *(schema.arrow_field(column) for column in columns)]
    arrays = [pa.array(range(length), pa.int64()), *columns.values()]
    for array in arrays:
        array.validate(full=True)
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def encoded(td: Any, **options: Any) -> EncodedBatch:
    settings_: dict[str, Any] = {"allow_pickle": True, "zerocopy_mode": "auto"} | options
    return encode_batch(td, queue="q", **settings_)


def round_trip(*records: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    table, schema = stored_table(records, **options)
    return to_records(table, schema, list(schema.fields))


def round_trip_batch(td: Any, **options: Any) -> TensorDict:
    table, schema = batch_table(encoded(td, **options))
    return to_tensordict(table, schema, list(schema.fields))


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits at all, so that NaN payloads and both zeros are among them."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = math.prod(shape)
    memory = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return memory.view(dtype).reshape(shape)


def memory_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy())


def same(one: Any, other: Any) -> bool:
    """Equal in type and to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and memory_of(one) == memory_of(other)
        )
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def nested_rows(tensor: torch.Tensor) -> list[torch.Tensor]:
    assert tensor.is_nested
    return list(tensor.unbind())
