"""From the Arrow columns of a table back to records and TensorDicts."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection

from persisting_torch.errors import SchemaError
from persisting_torch.queue.dtypes import bits, storage_of
from persisting_torch.queue.fields import Field, FieldType, Schema, Variant
from persisting_torch.queue.tensors import (
    Rows,
    dense,
    elements,
    join_rows,
    pad_rows,
    rows_of,
    valid_rows,
)

_NUMBERS = frozenset({"int", "float"})


def to_records(
    table: pa.Table,
    schema: Schema,
    names: Sequence[str],
    *,
    copy: bool = False,
    allow_pickle: bool = True,
) -> list[dict[str, Any]]:
    """The rows as dicts that hold every name, None where a row has no value.

    Tensors are views of the table's memory unless copy is True. Raises SchemaError for a name that
    the schema does not have, and for a pickled object when allow_pickle is False.
    """
    columns = [_Column(_field(schema, name), table, schema, allow_pickle) for name in names]
    if not columns:
        return [{} for _ in range(table.num_rows)]
    values = [column.values(copy) for column in columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def to_tensordict(
    table: pa.Table,
    schema: Schema,
    names: Sequence[str],
    *,
    pad: Mapping[str, float] | None = None,
    copy: bool = False,
    allow_pickle: bool = True,
) -> TensorDict:
    """The rows as a TensorDict of batch size [rows], nested as the fields' paths say.

    Numbers are int64, float64 or bool tensors; tensors of one shape are tensors over the table's
    memory; those of varying length, and lists of numbers, are jagged nested tensors over it, or
    padded to the longest row with the value that `pad` has for the field. Strings, bytes, objects,
    and fields that some row has no value for, are a NonTensorStack of the rows' values. What a
    field has become (float, jagged) it is in every batch, whatever the rows of the batch hold.

    Writing to a tensor writes to the table's memory unless copy is True. Raises SchemaError for a
    name that the schema does not have, and for a pickled object when allow_pickle is False.
    """
    source: dict[str, Any] = {}
    for name in names:
        field = _field(schema, name)
        fill = pad.get(name) if pad else None
        level = source
        for key in field.path[:-1]:
            level = level.setdefault(key, {})
        value = None if copy else _plain_tensor(field, table)
        if value is None:
            value = _Column(field, table, schema, allow_pickle).batch(fill, copy)
        level[field.path[-1]] = value
    return TensorDict(source, batch_size=[table.num_rows])


def _field(schema: Schema, name: str) -> Field:
    field = schema.fields.get(name)
    if field is None:
        raise SchemaError(
            f"queue {schema.queue!r} has no field {name!r}. It has"
            f" {', '.join(map(repr, schema.fields)) or 'no fields yet'}."
        )
    return field


class _Column:
    """One field's part of a table: the arrays of its variants that hold a value here."""

    def __init__(self, field: Field, table: pa.Table, schema: Schema, allow_pickle: bool) -> None:
        self.field = field
        self.queue = schema.queue
        self.length = table.num_rows
        self.allow_pickle = allow_pickle
        self.types = [variant.type for variant in field.variants]
        self.kinds = {type_.kind for type_ in self.types}
        self.parts: list[tuple[Variant, pa.Array]] = []
        for variant in field.variants:
            array = _array(table, variant.column)
            if array is not None and array.null_count < len(array):
                self.parts.append((variant, array))

    @property
    def complete(self) -> bool:
        """Whether every row has a value."""
        return bool(sum(len(a) - a.null_count for _, a in self.parts) == self.length)

    def values(self, copy: bool) -> list[Any]:
        """The value of every row, None where there is none."""
        merged: list[Any] | None = None
        for variant, array in self.parts:
            values = self._decode(variant.type, array, copy)
            if merged is None:
                merged = values
            else:
                for number, value in enumerate(values):
                    if value is not None:
                        merged[number] = value
        if merged is None:
            return [None] * self.length
        if self.kinds >= _NUMBERS:
            return [float(v) if type(v) is int and int(float(v)) == v else v for v in merged]
        return merged

    def batch(self, fill: float | None, copy: bool) -> Any:
        """The rows as one tensor where the field's types have that form, else row by row."""
        if self.types and self.complete:
            if "ragged" in self.kinds:
                return self._jagged(self.types[0].dtype, fill, copy)
            if "tensor" in self.kinds:
                type_ = next(t for t in self.types if t.kind == "tensor")
                if self._ints_fit(storage_of(type_.dtype).dtype):
                    return self._dense(type_, copy)
            elif self.kinds <= _NUMBERS:
                dtype = "float64" if "float" in self.kinds else "int64"
                return self._dense(FieldType("tensor", dtype), copy)
            elif self.kinds == {"bool"}:
                flags = [array.cast(pa.uint8()) for _, array in self.parts]
                return elements(flags[0] if flags else pa.array([], pa.uint8())).view(torch.bool)
            elif self.kinds == {"list"}:
                dtype = _list_dtype({t.dtype for t in self.types if t.dtype})
                if dtype and not any(_has_null_elements(array) for _, array in self.parts):
                    return self._jagged(dtype, fill, copy)
        if not self.length:
            return NonTensorData(data=[], batch_size=[0])
        return NonTensorStack(*map(_wrapped, self.values(copy)))

    def _decode(self, type_: FieldType, array: pa.Array, copy: bool) -> list[Any]:
        if type_.kind == "object":
            return [
                None if pickled is None else self._unpickle(pickled)
                for pickled in array.to_pylist()
            ]
        if type_ == FieldType("list"):
            return [None if present is None else [] for present in array.to_pylist()]
        if type_.kind not in ("tensor", "ragged"):
            return array.to_pylist()  # type: ignore[no-any-return]
        if type_.kind == "tensor":
            rows = list(dense(array, type_).unbind(0))
        else:
            rows = rows_of(array, type_).split()
        if copy:
            rows = [row.clone() for row in rows]
        if array.null_count == 0:
            return rows
        return [row if there else None for row, there in zip(rows, valid_rows(array), strict=True)]

    def _unpickle(self, pickled: bytes) -> Any:
        where = f"queue {self.queue!r}, field {self.field.name!r}"
        if not self.allow_pickle:
            raise SchemaError(
                f"{where}: a value is a pickled object, which allow_pickle=False refuses to load."
                " Ask for other fields, or open the queue with allow_pickle=True if you trust"
                " those who wrote it."
            )
        try:
            return pickle.loads(pickled)
        except (AttributeError, ImportError) as error:
            raise SchemaError(
                f"{where}: a pickled object cannot be loaded here ({error}). Make its class"
                " importable in this process."
            ) from error

    def _ints_fit(self, dtype: torch.dtype) -> bool:
        """Whether the Python ints here keep their values in the dtype of the field's tensors."""
        numbers = [elements(a.drop_null()) for v, a in self.parts if v.type.kind == "int"]
        if not numbers or dtype.is_floating_point or dtype.is_complex:
            return True
        limits = torch.iinfo(dtype)
        return all(limits.min <= int(n.min()) and int(n.max()) <= limits.max for n in numbers)

    def _dense(self, type_: FieldType, copy: bool) -> torch.Tensor:
        dtype = storage_of(type_.dtype).dtype
        if len(self.parts) == 1:
            tensor = _tensor(*self.parts[0], dtype)
            return tensor.clone() if copy else tensor
        whole = torch.empty((self.length, *type_.shape), dtype=dtype)
        for variant, array in self.parts:
            values = _tensor(variant, array.drop_null(), dtype)
            bits(whole)[torch.from_numpy(valid_rows(array))] = bits(values)
        return whole

    def _jagged(self, dtype: str, fill: float | None, copy: bool) -> torch.Tensor:
        torch_dtype = storage_of(dtype).dtype
        if len(self.parts) == 1:
            variant, array = self.parts[0]
            rows = rows_of(array, variant.type)
            rows = Rows(rows.values.to(torch_dtype), rows.offsets)
        else:
            trailing = next((t.shape for t in self.types if t.kind == "ragged"), ())
            rows = join_rows(
                [(valid_rows(a), rows_of(a.drop_null(), v.type)) for v, a in self.parts],
                self.length,
                torch.empty((0, *trailing), dtype=torch_dtype),
            )
        if fill is not None:
            return pad_rows(rows, fill, f"queue {self.queue!r}, field {self.field.name!r}")
        values = rows.values.clone() if copy else rows.values
        return torch.nested.nested_tensor_from_jagged(values, rows.offsets)


def _plain_tensor(field: Field, table: pa.Table) -> torch.Tensor | None:
    """The short way for the most common field: tensors of one shape, every row with one."""
    if len(field.variants) != 1 or field.variants[0].type.kind != "tensor":
        return None
    array = _array(table, field.variants[0].column)
    if array is None or array.null_count:
        return None
    return dense(array, field.variants[0].type)


def _array(table: pa.Table, column: str) -> pa.Array | None:
    """A column in one piece; None where the table does not have it."""
    number = table.schema.get_field_index(column)
    if number < 0:
        return None
    chunks = table.column(number).chunks
    if len(chunks) == 1:
        return chunks[0]
    return pa.concat_arrays(chunks) if chunks else None


def _tensor(variant: Variant, array: pa.Array, dtype: torch.dtype) -> torch.Tensor:
    """A column of tensors or of Python numbers as a tensor of the given dtype."""
    tensor = dense(array, variant.type) if variant.type.kind == "tensor" else elements(array)
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _list_dtype(dtypes: set[str]) -> str:
    """The dtype of a jagged tensor of such lists; empty where there is none."""
    if not dtypes or "str" in dtypes:
        return ""
    return "float64" if "float" in dtypes else "int64" if "int" in dtypes else "bool"


def _has_null_elements(array: pa.Array) -> bool:
    if not pa.types.is_large_list(array.type) or not array.values.null_count:
        return False
    return bool(array.flatten().null_count)


def _wrapped(value: Any) -> Any:
    """TensorDicts that are one sample's object are wrapped, or the stack would merge them."""
    return NonTensorData(data=value) if is_tensor_collection(value) else value
