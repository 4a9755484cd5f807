"""From what users give to the private copies that wait for their flush."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import torch
from tensordict import utils as tensordict_utils

from persisting_torch.errors import SchemaError
from persisting_torch.queue.dtypes import NAMES, STORAGE
from persisting_torch.queue.fields import FieldType, NoneType, Path, Pickled, Schema, tensor_type
from persisting_torch.queue.names import check_name

Stored: TypeAlias = "int | float | bool | str | bytes | list[Any] | torch.Tensor | Pickled | None"
ZeroCopyMode = Literal["auto", "force", "off"]

_INT64 = range(-(2**63), 2**63)
_AS_THEY_ARE = frozenset({float, bool, bytes, NoneType})
_NUMPY_NUMBERS = "biufc"
# td["words"] is a LinkedList in the versions of tensordict that have it.
_LISTS = frozenset({list, getattr(tensordict_utils, "LinkedList", list)})
_ELEMENTS: dict[type, str] = {int: "int", float: "float", bool: "bool", str: "str"}

_INT = FieldType("int")
_SCALAR_TYPES: dict[type, FieldType | None] = {
    int: _INT,
    float: FieldType("float"),
    bool: FieldType("bool"),
    str: FieldType("str"),
    bytes: FieldType("bytes"),
    Pickled: FieldType("object"),
    NoneType: None,
}
_LIST_TYPES = {kind: FieldType("list", kind) for kind in ("", *_ELEMENTS.values())}

_known_names: set[str] = set()


def snapshot_record(
    record: Mapping[str, Any], *, queue: str, allow_pickle: bool, zerocopy_mode: ZeroCopyMode
) -> dict[str, Stored]:
    """`snapshot` of every value of a record, whose keys must be usable as field names."""
    stored: dict[str, Stored] = {}
    known = _known_names
    for name, value in record.items():
        if type(name) is not str or name not in known:
            known.add(check_name(name, f"queue {queue!r}: a field name"))
        kind = type(value)
        if (
            kind in _AS_THEY_ARE
            or (kind is int and -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF)
            or (kind is str and value.isascii())
        ):
            stored[name] = value
        else:
            stored[name] = snapshot(
                value,
                field=name,
                queue=queue,
                allow_pickle=allow_pickle,
                zerocopy_mode=zerocopy_mode,
            )
    return stored


def snapshot(
    value: Any, *, field: str, queue: str, allow_pickle: bool, zerocopy_mode: ZeroCopyMode
) -> Stored:
    """The stored form of a value: a private copy that later changes of the value do not reach.

    Tensors and numpy arrays become contiguous tensors on the host, numpy scalars tensors without
    dimensions. Raises SchemaError, naming queue and field, for what cannot be stored.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is int and value in _INT64):
        return value  # type: ignore[no-any-return]
    if kind is str and _is_text(value):
        return value  # type: ignore[no-any-return]
    where = f"queue {queue!r}, field {field!r}"
    if isinstance(value, torch.Tensor):
        return own_tensor(value, where, zerocopy_mode)
    if isinstance(value, np.ndarray | np.generic):
        plain = _from_numpy(value, where)
        if plain is not None:
            return plain
    elif kind in _LISTS:
        plain = _plain_list(value)
        if plain is not None:
            return plain
        value = list(value)
    return _pickled(value, where, allow_pickle, zerocopy_mode)


def type_of(stored: Stored) -> FieldType | None:
    """The type of a stored value; None for None."""
    kind = type(stored)
    if kind in _SCALAR_TYPES:
        return _SCALAR_TYPES[kind]
    if isinstance(stored, torch.Tensor):
        return tensor_type(NAMES[stored.dtype], tuple(stored.shape))
    assert isinstance(stored, list), f"not a stored value: {kind}"
    element = next((element for element in stored if element is not None), None)
    return _LIST_TYPES["" if element is None else _ELEMENTS[type(element)]]


def new_types(
    record: Mapping[str, Stored], schema: Schema
) -> list[tuple[str, Path, FieldType | None]]:
    """(name, path, type) of what a stored record needs registered before its flush.

    Empty for a record of known types. A type of None stands for a new field that has only met
    None. Raises SchemaError, naming the field, for a value that its field does not take.
    """
    new: list[tuple[str, Path, FieldType | None]] = []
    scalars = schema.scalars
    for name, value in record.items():
        known = scalars.get(name)
        if known is not None and type(value) in known and schema.fields[name].path == (name,):
            continue
        type_ = type_of(value)
        path = (name,)
        variant = schema.admit(name, path, type_)
        if variant is None and (type_ is not None or known is None):
            new.append((name, path, type_))
    return new


def own_tensor(tensor: torch.Tensor, where: str, zerocopy_mode: ZeroCopyMode) -> torch.Tensor:
    """A contiguous copy on the host, without gradient, that shares no memory."""
    plain = host_tensor(tensor, where, zerocopy_mode)
    if plain.is_cpu and tensor.is_cpu:
        return plain.clone(memory_format=torch.contiguous_format)
    return plain.contiguous()


def host_tensor(tensor: torch.Tensor, where: str, zerocopy_mode: ZeroCopyMode) -> torch.Tensor:
    """The tensor's values on the host, without gradient; SchemaError for what has no such form."""
    if tensor.is_nested:
        raise SchemaError(
            f"{where}: a nested tensor is many samples, not the value of one. Put its parts one by"
            " one (tensor.unbind()), or put a TensorDict with a batch dimension."
        )
    if tensor.dtype not in NAMES:
        raise SchemaError(
            f"{where}: tensors of dtype {tensor.dtype} cannot be stored. Dequantize or convert it"
            f" to one of {', '.join(NAMES.values())}."
        )
    if tensor.layout is not torch.strided:
        raise SchemaError(
            f"{where}: tensors of layout {tensor.layout} cannot be stored. Use .to_dense(), or"
            " store indices and values as fields of their own."
        )
    if tensor.is_meta:
        raise SchemaError(
            f"{where}: a tensor on the meta device has no values. Materialize it first."
        )
    plain = tensor.detach()
    if type(plain).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise SchemaError(
            f"{where}: a {type(tensor).__name__} has no memory of its own. Convert it to a plain"
            " tensor (for a DTensor .full_tensor(), or .to_local() for this rank's part)."
        )
    if not plain.is_cpu:
        if zerocopy_mode == "force":
            raise SchemaError(
                f"{where}: zerocopy_mode='force' refuses the copy from {tensor.device} to the host."
                " Use .cpu() before the put, or zerocopy_mode='auto'."
            )
        plain = plain.cpu()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    return plain.resolve_conj().resolve_neg()


def _is_text(value: str) -> bool:
    """Whether a string is valid Unicode: lone surrogates have no UTF-8."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain_list(value: list[Any]) -> list[Any] | None:
    """A copy of a list of one kind of scalar, possibly with None between; None for other lists."""
    kinds = set(map(type, value))
    nullable = NoneType in kinds
    kinds.discard(NoneType)
    present = [element for element in value if element is not None] if nullable else value
    if kinds == {int, float}:
        # Floats hold these ints too, unless they are too large to come back equal.
        ints = [element for element in present if type(element) is int]
        if not _fit_int64(ints) or any(int(float(element)) != element for element in ints):
            return None
        return [float(element) if type(element) is int else element for element in value]
    if kinds == {int}:
        return list(value) if _fit_int64(present) else None
    if kinds == {str}:
        return list(value) if all(map(_is_text, present)) else None
    if kinds in ({float}, {bool}) or not value:
        return list(value)
    return None


def _fit_int64(values: list[int]) -> bool:
    try:
        array("q", values)
    except OverflowError:
        return False
    return True


def _from_numpy(value: Any, where: str) -> Stored:
    """The stored form of a numpy array or scalar; None for one that only pickle can hold."""
    if isinstance(value, np.str_):
        return str(value) if _is_text(value) else None
    if isinstance(value, np.bytes_):
        return bytes(value)
    if isinstance(value, np.ma.MaskedArray):
        return None
    dtype = value.dtype
    if dtype.kind in _NUMPY_NUMBERS and dtype.name in STORAGE:
        return torch.from_numpy(np.array(value, dtype=dtype.newbyteorder("="), order="C"))
    if dtype.name.startswith(("bfloat16", "float8_", "float4_", "float6_", "int4", "uint4")):
        raise SchemaError(
            f"{where}: numpy arrays of dtype {dtype} are not supported. Convert it to a torch"
            f" tensor: torch.from_numpy(array.view('u{dtype.itemsize}')).view(torch.{dtype.name})."
        )
    return None


def _pickled(value: Any, where: str, allow_pickle: bool, zerocopy_mode: ZeroCopyMode) -> Pickled:
    if not allow_pickle or zerocopy_mode == "force":
        _refuse_pickle(value, where, "allow_pickle=False" if not allow_pickle else "'force'")
    try:
        return Pickled(pickle.dumps(value, protocol=5))
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise SchemaError(
            f"{where}: {_describe(value)} cannot be pickled ({error}). Put plain values, tensors or"
            " objects that pickle can carry."
        ) from error


def _refuse_pickle(value: Any, where: str, setting: str) -> NoReturn:
    setting = setting if setting.startswith("allow") else f"zerocopy_mode={setting}"
    raise SchemaError(
        f"{where}: {_describe(value)} could only be stored with pickle, which {setting} refuses."
        " Put int (64 bits), float, bool, str, bytes, lists of one kind of these, tensors or numpy"
        " arrays of numbers."
    )


def _describe(value: Any) -> str:
    kind = type(value)
    if kind is list:
        kinds = sorted({type(element).__name__ for element in value})
        return f"a list of {' and '.join(kinds)}"
    if kind is int:
        return "an int outside 64 bits"
    if kind is str:
        return "a string that is not valid Unicode"
    if isinstance(value, np.ndarray):
        return f"a numpy array of dtype {value.dtype}"
    return f"a value of type {kind.__module__}.{kind.__qualname__}"
