"""How the elements of a tensor lie in Arrow: the one table of dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import torch

from persisting_torch.errors import FormatError


@dataclass(frozen=True, slots=True)
class Storage:
    """The Arrow form of one torch dtype.

    One torch element is `width` Arrow values of type `arrow`, which torch reads as `element`.
    `category` orders dtypes as torch's promotion does: a number of a lower category can join a
    tensor of a higher one without changing its dtype.
    """

    dtype: torch.dtype
    arrow: pa.DataType
    element: torch.dtype
    width: int
    category: int


BOOL, INTEGER, FLOAT, COMPLEX = range(4)

_TABLE: list[tuple[str, pa.DataType, str, int, int]] = [
    ("bool", pa.uint8(), "uint8", 1, BOOL),
    ("int8", pa.int8(), "int8", 1, INTEGER),
    ("int16", pa.int16(), "int16", 1, INTEGER),
    ("int32", pa.int32(), "int32", 1, INTEGER),
    ("int64", pa.int64(), "int64", 1, INTEGER),
    ("uint8", pa.uint8(), "uint8", 1, INTEGER),
    ("uint16", pa.uint16(), "uint16", 1, INTEGER),
    ("uint32", pa.uint32(), "uint32", 1, INTEGER),
    ("uint64", pa.uint64(), "uint64", 1, INTEGER),
    ("float16", pa.float16(), "float16", 1, FLOAT),
    ("float32", pa.float32(), "float32", 1, FLOAT),
    ("float64", pa.float64(), "float64", 1, FLOAT),
    ("bfloat16", pa.uint16(), "uint16", 1, FLOAT),
    ("float8_e4m3fn", pa.uint8(), "uint8", 1, FLOAT),
    ("float8_e4m3fnuz", pa.uint8(), "uint8", 1, FLOAT),
    ("float8_e5m2", pa.uint8(), "uint8", 1, FLOAT),
    ("float8_e5m2fnuz", pa.uint8(), "uint8", 1, FLOAT),
    ("float8_e8m0fnu", pa.uint8(), "uint8", 1, FLOAT),
    ("complex32", pa.float16(), "float16", 2, COMPLEX),
    ("complex64", pa.float32(), "float32", 2, COMPLEX),
    ("complex128", pa.float64(), "float64", 2, COMPLEX),
]

STORAGE: dict[str, Storage] = {
    name: Storage(getattr(torch, name), arrow, getattr(torch, element), width, category)
    for name, arrow, element, width, category in _TABLE
    if hasattr(torch, name)
}

NAMES: dict[torch.dtype, str] = {storage.dtype: name for name, storage in STORAGE.items()}

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def storage_of(name: str) -> Storage:
    """The Arrow form of the dtype of this name; FormatError where this torch lacks the dtype."""
    try:
        return STORAGE[name]
    except KeyError:
        raise FormatError(
            f"a field holds tensors of dtype {name!r}, which torch {torch.__version__} does not"
            " have. Read the queue with a newer torch."
        ) from None


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, for which torch has every copying operation.

    A complex128 element, wider than any integer, becomes two in a new last dimension.
    """
    if tensor.dtype is torch.complex128:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_BITS[tensor.itemsize])
