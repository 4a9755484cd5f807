"""From stored values and TensorDicts to the Arrow columns of a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from tensordict import (
    LazyStackedTensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

from persisting_torch.errors import SchemaError
from persisting_torch.queue.dtypes import NAMES, bits, storage_of
from persisting_torch.queue.fields import FieldType, Path, Pickled, Schema, Variant, tensor_type
from persisting_torch.queue.names import check_name
from persisting_torch.queue.stored import (
    Stored,
    ZeroCopyMode,
    host_tensor,
    new_types,
    own_tensor,
    snapshot,
    snapshot_record,
    type_of,
)

__all__ = [
    "EncodedBatch",
    "Pickled",
    "Stored",
    "ZeroCopyMode",
    "copy_array",
    "detach",
    "encode_batch",
    "encode_rows",
    "new_types",
    "physical_columns",
    "snapshot",
    "snapshot_record",
    "type_of",
]

Column = tuple[str, Path, FieldType, pa.Array]


@dataclass(frozen=True)
class EncodedBatch:
    """Samples as Arrow columns.

    A field whose values are of several types has a column for each, null where another type holds
    the value. `empty` names the fields that hold nothing but None.
    """

    length: int
    columns: list[Column]
    empty: list[tuple[str, Path]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The size of the columns in memory."""
        return sum(array.nbytes for _, _, _, array in self.columns)

    def part(self, start: int, stop: int) -> EncodedBatch:
        """Samples start to stop - 1, in the same memory."""
        columns = [(*column[:3], column[3].slice(start, stop - start)) for column in self.columns]
        return EncodedBatch(stop - start, columns, self.empty)


def encode_rows(rows: Sequence[dict[str, Stored]], schema: Schema) -> dict[str, pa.Array]:
    """The physical columns of stored records, one row a record.

    Only columns that hold a value are present. Every type must have been registered in the schema.
    """
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        for variant, part in _by_variant(name, values, schema):
            columns[variant.column] = _encode(part, variant.type)
    return columns


def physical_columns(batch: EncodedBatch, schema: Schema) -> dict[str, pa.Array]:
    """The physical columns of an encoded batch, in the form that each column is stored in."""
    columns: dict[str, pa.Array] = {}
    for name, path, given, array in batch.columns:
        variant = schema.admit(name, path, given)
        assert variant is not None, f"{given} of field {name!r} is not registered"
        columns[variant.column] = _conform(array, given, variant.type)
    return columns


def encode_batch(
    td: TensorDictBase, *, queue: str, allow_pickle: bool, zerocopy_mode: ZeroCopyMode
) -> EncodedBatch:
    """The samples of a TensorDict or tensorclass along its first batch dimension.

    A TensorDict without batch dimension is one sample. Columns of contiguous host tensors share
    the tensors' memory (`detach` makes them private), unless zerocopy_mode is "off". Raises
    SchemaError for a leaf that cannot be stored.
    """
    if not td.batch_dims:
        for path, leaf in _leaves(td, ()):
            if isinstance(leaf, torch.Tensor) and leaf.is_nested:
                own_tensor(leaf, f"queue {queue!r}, field {_dotted(path, queue)!r}", zerocopy_mode)
        td = td.unsqueeze(0)
    length = td.batch_size[0]
    columns: list[Column] = []
    empty: list[tuple[str, Path]] = []
    paths: dict[str, Path] = {}
    for path, leaf in _leaves(td, ()):
        name = _dotted(path, queue)
        if paths.setdefault(name, path) != path:
            raise SchemaError(
                f"queue {queue!r}: the keys {paths[name]} and {path} are both called {name!r}."
                " Rename one of them."
            )
        if isinstance(leaf, torch.Tensor) and not leaf.is_nested:
            given, array = _encode_leaf(leaf, f"queue {queue!r}, field {name!r}", zerocopy_mode)
            columns.append((name, path, given, array))
            continue
        if isinstance(leaf, torch.Tensor):
            jagged = _encode_jagged(leaf, f"queue {queue!r}, field {name!r}", zerocopy_mode)
            if jagged is not None:
                columns.append((name, path, *jagged))
                continue
            leaf = leaf.unbind()
        values = [
            snapshot(
                value,
                field=name,
                queue=queue,
                allow_pickle=allow_pickle,
                zerocopy_mode=zerocopy_mode,
            )
            for value in leaf
        ]
        parts = list(_encode_values(name, path, values, queue))
        columns += parts
        if not parts:
            empty.append((name, path))
    return EncodedBatch(length, columns, empty)


def detach(batch: EncodedBatch) -> EncodedBatch:
    """The same batch in memory of its own."""
    return replace(
        batch,
        columns=[
            (name, path, given, copy_array(array)) for name, path, given, array in batch.columns
        ],
    )


def copy_array(array: pa.Array) -> pa.Array:
    """A deep copy of an Arrow array, of its own rows only where it is a slice."""
    return pa.concat_arrays([array])


def _leaves(td: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """(path, tensor or list of values per sample) of every leaf."""
    if isinstance(getattr(td, "_tensordict", td), LazyStackedTensorDict):
        yield from _lazy_leaves(td, path)
        return
    for key, value in td.items():
        if value is None:
            continue
        if is_non_tensor(value):
            yield (*path, key), value.tolist() if value.batch_dims else [value.data]
        elif is_tensor_collection(value):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _lazy_leaves(td: Any, path: Path) -> Iterator[tuple[Path, list[Any]]]:
    """The leaves of a lazy stack, whose samples may differ in shape and in keys."""
    rows = [dict(_sample(row, path)) for row in td.unbind(0)]
    for leaf in dict.fromkeys(leaf for row in rows for leaf in row):
        yield leaf, [row.get(leaf) for row in rows]


def _sample(td: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in td.items():
        if is_non_tensor(value):
            yield (*path, key), value.tolist() if value.batch_dims else value.data
        elif is_tensor_collection(value):
            yield from _sample(value, (*path, key))
        else:
            yield (*path, key), value


def _dotted(path: Path, queue: str) -> str:
    what = f"queue {queue!r}: a field name"
    return check_name(".".join(check_name(key, what) for key in path), what)


def _encode_leaf(
    leaf: torch.Tensor, where: str, zerocopy_mode: ZeroCopyMode
) -> tuple[FieldType, pa.Array]:
    tensor = _contiguous(leaf, where, zerocopy_mode)
    given = tensor_type(NAMES[tensor.dtype], tuple(tensor.shape[1:]))
    if given.kind == "tensor":
        return given, _fixed_array(tensor, given)
    lengths = np.full(len(tensor), tensor.shape[1], dtype=np.int64)
    return given, _ragged_array(tensor.flatten(0, 1), lengths, given)


def _encode_jagged(
    leaf: Any, where: str, zerocopy_mode: ZeroCopyMode
) -> tuple[FieldType, pa.Array] | None:
    """A jagged tensor [batch, varying, ...] over its own values; None for other nested tensors."""
    if leaf.layout is not torch.jagged or leaf._ragged_idx != 1 or leaf.lengths() is not None:
        return None
    values = _contiguous(leaf.values(), where, zerocopy_mode)
    offsets = leaf.offsets().detach().cpu().to(torch.int64)
    given = FieldType("ragged", NAMES[values.dtype], tuple(values.shape[1:]))
    values = values[int(offsets[0]) : int(offsets[-1])]
    return given, _ragged_array(values, offsets.diff().numpy(), given)


def _contiguous(leaf: torch.Tensor, where: str, zerocopy_mode: ZeroCopyMode) -> torch.Tensor:
    """The leaf's own memory where it lies as Arrow wants it, a copy where it does not."""
    if zerocopy_mode == "off":
        return own_tensor(leaf, where, zerocopy_mode)
    tensor = host_tensor(leaf, where, zerocopy_mode)
    if zerocopy_mode == "force" and (not leaf.is_contiguous() or leaf.is_conj() or leaf.is_neg()):
        raise SchemaError(
            f"{where}: zerocopy_mode='force' refuses the copy of a tensor that is not contiguous."
            " Use .contiguous() before the put, or zerocopy_mode='auto'."
        )
    return tensor.contiguous()


def _encode_values(name: str, path: Path, values: list[Stored], queue: str) -> Iterator[Column]:
    """The columns of one leaf's values, each type of values in a column of its own."""
    schema = Schema(queue)
    schema.add(name, path, None)
    for given in dict.fromkeys(map(type_of, values)):
        if given is not None and schema.admit(name, path, given) is None:
            schema.add(name, path, schema.new_variant(name, given))
    # What a later, wider type can hold as well shall not need a column of its own.
    variants = schema.fields[name].variants
    kinds = {variant.type.kind for variant in variants}
    widest = Schema(queue)
    for variant in variants:
        narrow = variant.type.kind == "tensor" and "ragged" in kinds
        narrow |= variant.type == FieldType("list") and any(v.type.dtype for v in variants)
        if not narrow:
            widest.add(name, path, variant)
    if not variants:
        return
    for variant, part in _by_variant(name, values, widest):
        yield name, path, variant.type, _encode(part, variant.type)


def _by_variant(
    name: str, values: list[Stored], schema: Schema
) -> Iterable[tuple[Variant, list[Stored]]]:
    """The values for each variant of a field that has any, with None for the others."""
    field_ = schema.fields[name]
    if len(field_.variants) == 1:
        return () if all(value is None for value in values) else ((field_.variants[0], values),)
    parts: dict[str, tuple[Variant, list[Stored]]] = {}
    for number, value in enumerate(values):
        if value is None:
            continue
        variant = schema.admit(name, field_.path, type_of(value))
        assert variant is not None, f"{type_of(value)} of field {name!r} is not registered"
        if variant.column not in parts:
            parts[variant.column] = variant, [None] * len(values)
        parts[variant.column][1][number] = value
    return parts.values()


def _encode(values: list[Any], type_: FieldType) -> pa.Array:
    """The column of the given type for values of that type, or None."""
    if type_.kind not in ("tensor", "ragged"):
        if type_ == FieldType("list"):
            values = [None if value is None else True for value in values]
        return pa.array(values, type_.arrow)
    valid = np.array([value is not None for value in values], dtype=bool)
    present = [value for value in values if value is not None]
    if type_.kind == "tensor":
        stacked = torch.stack(present)
        if len(present) < len(values):
            whole = torch.zeros((len(values), *type_.shape), dtype=stacked.dtype)
            bits(whole)[torch.from_numpy(valid)] = bits(stacked)
            stacked = whole
        return _fixed_array(stacked, type_, valid)
    lengths = np.array([0 if value is None else len(value) for value in values], dtype=np.int64)
    return _ragged_array(torch.cat(present), lengths, type_, valid)


def _fixed_array(
    tensor: torch.Tensor, type_: FieldType, valid: NDArray[np.bool_] | None = None
) -> pa.Array:
    """A contiguous tensor [n, *shape] as a column over its own memory."""
    length, bitmap = len(tensor), _bitmap(valid)
    if not prod(type_.shape):
        present = np.ones(length, dtype=bool) if valid is None else valid
        return pa.array(np.ones(length, dtype=bool), mask=~present)
    values = _elements(tensor, type_, None if pa.types.is_fixed_size_list(type_.arrow) else bitmap)
    if not pa.types.is_fixed_size_list(type_.arrow):
        return values
    return pa.Array.from_buffers(type_.arrow, length, [bitmap], children=[values])


def _ragged_array(
    values: torch.Tensor,
    lengths: NDArray[np.int64],
    type_: FieldType,
    valid: NDArray[np.bool_] | None = None,
) -> pa.Array:
    """The values [total, *shape] of all rows in turn, as a column over their memory."""
    per_row = prod(type_.shape) * storage_of(type_.dtype).width
    if not per_row:
        return pa.array(lengths, mask=None if valid is None else ~valid)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths * per_row, out=offsets[1:])
    return pa.Array.from_buffers(
        type_.arrow,
        len(lengths),
        [_bitmap(valid), pa.py_buffer(offsets)],
        children=[_elements(values, type_, None)],
    )


def _elements(tensor: torch.Tensor, type_: FieldType, bitmap: pa.Buffer | None) -> pa.Array:
    storage = storage_of(type_.dtype)
    memory = pa.foreign_buffer(tensor.data_ptr(), tensor.nbytes, base=tensor)
    return pa.Array.from_buffers(storage.arrow, tensor.numel() * storage.width, [bitmap, memory])


def _bitmap(valid: NDArray[np.bool_] | None) -> pa.Buffer | None:
    return None if valid is None or valid.all() else pa.array(valid).buffers()[1]


def _conform(array: pa.Array, given: FieldType, stored: FieldType) -> pa.Array:
    """A column of the given type in the form of a stored type that holds it."""
    if given == stored:
        return array
    mask = array.is_null() if array.null_count else None
    if stored.kind == "list":
        offsets = pa.array(np.zeros(len(array) + 1, dtype=np.int64))
        empty = pa.array([], stored.arrow.value_type)
        return pa.LargeListArray.from_arrays(offsets, empty, mask=mask)
    if not prod(stored.shape):
        lengths = np.full(len(array), given.shape[0], dtype=np.int64)
        present = array.is_valid().to_numpy(zero_copy_only=False)
        return pa.array(lengths, mask=~present)
    size = prod(given.shape) * storage_of(given.dtype).width
    if not pa.types.is_fixed_size_list(array.type):
        raise AssertionError(f"{given} does not fit {stored}")
    values = array.values.slice(array.offset * size, len(array) * size)
    offsets = pa.array(np.arange(len(array) + 1, dtype=np.int64) * size)
    return pa.LargeListArray.from_arrays(offsets, values, mask=mask)
