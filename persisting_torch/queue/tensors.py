"""Arrow arrays seen as torch tensors, without a copy wherever the memory allows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from persisting_torch.queue.dtypes import bits, storage_of
from persisting_torch.queue.fields import FieldType

Part = tuple[NDArray[np.bool_], "Rows"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of varying length: row i is values[offsets[i] : offsets[i + 1]]; offsets are int64."""

    values: torch.Tensor
    offsets: torch.Tensor

    def split(self) -> list[torch.Tensor]:
        """Each row as a view."""
        lengths = self.offsets.diff().tolist()
        return list(torch.split(self.values, lengths)) if lengths else []


def elements(array: pa.Array) -> torch.Tensor:
    """The memory of a primitive array as a tensor; what lies under nulls is arbitrary."""
    validity, memory = array.buffers()
    if validity is not None:
        array = pa.Array.from_buffers(array.type, len(array), [None, memory], offset=array.offset)
    return from_dlpack(array)


def valid_rows(array: pa.Array) -> NDArray[np.bool_]:
    """True for the rows that are not null."""
    mask: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return mask


def dense(array: pa.Array, type_: FieldType) -> torch.Tensor:
    """A column of tensors of one shape as one tensor [rows, *shape]."""
    storage = storage_of(type_.dtype)
    shape = (len(array), *type_.shape)
    size = prod(type_.shape) * storage.width
    if not size:
        return torch.empty(shape, dtype=storage.dtype)
    if pa.types.is_fixed_size_list(array.type):
        start = array.offset * size
        flat = elements(array.values)[start : start + len(array) * size]
    else:
        flat = elements(array)
    if flat.dtype is not storage.dtype:
        flat = flat.view(storage.dtype)
    return flat.view(shape)


def rows_of(array: pa.Array, type_: FieldType) -> Rows:
    """A column of lists, or of tensors of any kind, as rows of varying length."""
    if type_.kind == "tensor":
        return _equal_rows(dense(array, type_))
    if type_.kind == "list":
        return _list_rows(array, type_.dtype)
    storage = storage_of(type_.dtype)
    per_row = prod(type_.shape) * storage.width
    if not per_row:
        offsets = _from_lengths(torch.from_numpy(array.fill_null(0).to_numpy().copy()))
        return Rows(torch.empty((int(offsets[-1]), *type_.shape), dtype=storage.dtype), offsets)
    flat, offsets = _lists(array)
    if per_row > 1:
        offsets = offsets // per_row
    return Rows(elements(flat).view(storage.dtype).view(-1, *type_.shape), offsets)


def join_rows(parts: Sequence[Part], length: int, empty: torch.Tensor) -> Rows:
    """Rows that lie in several columns, in order; each part says which rows it has.

    `empty` has the dtype and the trailing shape of the values.
    """
    lengths = torch.zeros(length, dtype=torch.int64)
    pieces: list[torch.Tensor] = [empty] * length
    for mask, rows in parts:
        lengths[torch.from_numpy(mask)] = rows.offsets.diff()
        for number, row in zip(np.flatnonzero(mask).tolist(), rows.split(), strict=True):
            pieces[number] = row.to(empty.dtype)
    return Rows(torch.cat([empty, *pieces]), _from_lengths(lengths))


def pad_rows(rows: Rows, fill: float, where: str, *, to: int | None = None) -> torch.Tensor:
    """The rows as one tensor [rows, longest row or `to`, ...] with `fill` after the end of each.

    Raises ValueError when the dtype cannot hold the value.
    """
    dtype = rows.values.dtype
    _check_fill(fill, dtype, where)
    lengths = rows.offsets.diff()
    longest = to if to is not None else int(lengths.max()) if len(lengths) else 0
    padded = torch.empty((len(lengths), longest, *rows.values.shape[1:]), dtype=dtype)
    bits(padded)[:] = bits(torch.tensor(fill, dtype=dtype))
    within = torch.arange(longest) < lengths[:, None]
    bits(padded)[within] = bits(rows.values)
    return padded


def _check_fill(fill: float, dtype: torch.dtype, where: str) -> None:
    if dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not isfinite(fill) or fill != int(fill) or not low <= fill <= high:
        raise ValueError(
            f"{where}: {fill} cannot pad values of dtype {dtype}. Give a whole number from {low} to"
            f" {high}."
        )


def _lists(array: pa.Array) -> tuple[pa.Array, torch.Tensor]:
    """The elements of a large_list array, and offsets into them that begin with 0."""
    if not len(array):
        return array.values.slice(0, 0), torch.zeros(1, dtype=torch.int64)
    offsets = elements(array.offsets)
    start, stop = int(offsets[0]), int(offsets[-1])
    return array.values.slice(start, stop - start), offsets - start if start else offsets


def _list_rows(array: pa.Array, dtype: str) -> Rows:
    if not dtype:
        return Rows(torch.empty(0), torch.zeros(len(array) + 1, dtype=torch.int64))
    flat, offsets = _lists(array)
    if dtype == "bool":
        return Rows(elements(flat.cast(pa.uint8())).view(torch.bool), offsets)
    return Rows(elements(flat), offsets)


def _equal_rows(tensor: torch.Tensor) -> Rows:
    length = tensor.shape[1]
    offsets = torch.arange(0, len(tensor) * length + 1, length, dtype=torch.int64)
    return Rows(tensor.flatten(0, 1), offsets)


def _from_lengths(lengths: torch.Tensor) -> torch.Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets
