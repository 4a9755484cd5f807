"""Whether two values are the same bit for bit, and a batch's values one sample at a time."""

from __future__ import annotations

import struct
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase


def same(one: Any, other: Any) -> bool:
    """Equal in type and in every bit: NaN payloads count, and so does the sign of zero."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def rows(batch: TensorDictBase) -> list[dict[str, Any]]:
    """The samples of a batch as dicts of dotted names; numbers as tensors without dimensions."""
    columns: dict[str, list[Any]] = {}
    for name in batch.keys():  # noqa: SIM118
        column = batch.get(name)
        if isinstance(column, TensorDict):
            nested = rows(column)
            for inner in nested[0] if nested else ():
                columns[f"{name}.{inner}"] = [row[inner] for row in nested]
        elif isinstance(column, torch.Tensor):
            columns[name] = list(column.unbind())
        else:
            columns[name] = column.tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().contiguous().flatten()
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
