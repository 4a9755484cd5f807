"""What a field can hold, and which types may live together in one field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

import pyarrow as pa

from persisting_torch.errors import FormatError, SchemaError
from persisting_torch.queue.dtypes import FLOAT, INTEGER, storage_of
from persisting_torch.queue.names import column_name

Kind = Literal["int", "float", "bool", "str", "bytes", "list", "tensor", "ragged", "object"]
Path = tuple[str, ...]

METADATA_KEY = b"persisting_torch"
MAX_FIXED_SIZE = 2**31 - 1


class Pickled(bytes):
    """The stored form of an arbitrary Python object: its pickle."""


NoneType = type(None)

_SCALAR_ARROW: dict[str, pa.DataType] = {
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "str": pa.large_string(),
    "bytes": pa.large_binary(),
    "object": pa.large_binary(),
}
_SCALAR_CLASSES: dict[str, type] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "bytes": bytes,
    "object": Pickled,
}


@dataclass(frozen=True, slots=True)
class FieldType:
    """The type of one physical column.

    `dtype` is the torch dtype's name for "tensor" and "ragged"; "int", "float", "bool" or "str" for
    "list", and "" for a list that has no elements to tell. `shape` is the shape of one sample for
    "tensor", and the shape after the first, varying dimension for "ragged".
    """

    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type of the column."""
        return _arrow_type(self.kind, self.dtype, self.shape)

    def to_json(self) -> str:
        """The type as a JSON object; `from_json` reads it."""
        return json.dumps(self._dict())

    @classmethod
    def from_json(cls, text: str) -> FieldType:
        """The type that `to_json` wrote; FormatError for a kind that this version does not know."""
        parts = json.loads(text)
        kind = parts["kind"]
        if kind not in ("list", "tensor", "ragged") and kind not in _SCALAR_ARROW:
            raise FormatError(
                f"a field has a type of kind {kind!r}, which this version of persisting_torch does"
                " not know. Read the queue with a newer version."
            )
        return cls(kind, parts.get("dtype", ""), tuple(parts.get("shape", ())))

    def _dict(self) -> dict[str, object]:
        parts: dict[str, object] = {"kind": self.kind}
        if self.dtype:
            parts["dtype"] = self.dtype
        if self.kind in ("tensor", "ragged"):
            parts["shape"] = list(self.shape)
        return parts

    def __str__(self) -> str:
        if self.kind == "tensor":
            return f"{self.dtype} tensor of shape {self.shape}"
        if self.kind == "ragged":
            shape = ", ".join(["*", *map(str, self.shape)])
            return f"{self.dtype} tensor of varying shape ({shape})"
        if self.kind == "list":
            return f"list of {self.dtype}" if self.dtype else "empty list"
        return "pickled object" if self.kind == "object" else self.kind


@lru_cache(maxsize=4096)
def tensor_type(dtype: str, shape: tuple[int, ...]) -> FieldType:
    """The type of one tensor. One without a first dimension to count on is ragged at once."""
    if shape and (shape[0] == 0 or prod(shape) * storage_of(dtype).width > MAX_FIXED_SIZE):
        return FieldType("ragged", dtype, shape[1:])
    return FieldType("tensor", dtype, shape)


@lru_cache(maxsize=4096)
def _arrow_type(kind: str, dtype: str, shape: tuple[int, ...]) -> pa.DataType:
    if kind == "list":
        # A list without elements is only there or not there.
        return pa.large_list(_SCALAR_ARROW[dtype]) if dtype else pa.bool_()
    if kind == "ragged":
        return pa.large_list(storage_of(dtype).arrow) if prod(shape) else pa.int64()
    if kind == "tensor":
        storage = storage_of(dtype)
        size = prod(shape) * storage.width
        if size == 0:
            return pa.bool_()
        return storage.arrow if not shape and storage.width == 1 else pa.list_(storage.arrow, size)
    return _SCALAR_ARROW[kind]


@dataclass(frozen=True)
class Variant:
    """One physical column of a field."""

    column: str
    type: FieldType


@dataclass(frozen=True)
class Field:
    """A field by its dotted name, where it nests, and its physical columns.

    At most one variant holds tensors of a fixed shape; a field that has only met None has none.
    """

    name: str
    path: Path
    variants: tuple[Variant, ...] = ()

    def __str__(self) -> str:
        return " or ".join(str(variant.type) for variant in self.variants) or "nothing but None"


class Schema:
    """The fields of a queue, in the order in which they came. Pure memory, no I/O.

    `scalars` tells, for each field, the exact Python classes whose values it is known to hold, so
    that a record of known scalars is recognised by a look-up per field.
    """

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.fields: dict[str, Field] = {}
        self.scalars: dict[str, set[type]] = {}
        self._holders: dict[str, dict[FieldType, Variant]] = {}
        self._columns: dict[str, tuple[str, Variant]] = {}
        self._leaves: dict[Path, str] = {}
        self._branches: dict[Path, str] = {}

    def admit(self, name: str, path: Path, type: FieldType | None) -> Variant | None:
        """The variant that holds this type; None when a new one has to be registered.

        A type of None stands for a value of None, which joins every field and needs no variant.
        Raises SchemaError when the type, or the nesting, may not join what the field has.
        """
        field = self.fields.get(name)
        if field is None:
            self._check_nesting(name, path)
            return None
        if field.path != path:
            raise SchemaError(
                f"queue {self.queue!r}, field {name!r} is {_place(field.path)}, but was given as"
                f" {_place(path)}. Rename one of the two."
            )
        if type is None:
            return None
        holders = self._holders[name]
        variant = holders.get(type)
        if variant is not None:
            return variant
        for variant in field.variants:
            if _holds(variant.type, type):
                holders[type] = variant
                return variant
        for variant in field.variants:
            if not _join(variant.type, type):
                raise SchemaError(
                    f"queue {self.queue!r}, field {name!r} holds {field}, but was given"
                    f" {_a(type)}. {_remedy(variant.type, type)}"
                )
        return None

    def add(self, name: str, path: Path, variant: Variant | None) -> None:
        """Register a variant, or with None a field that has only met None."""
        field = self.fields.get(name)
        if field is None:
            self._check_nesting(name, path)
            self._leaves[path] = name
            for branch in _branches(path):
                self._branches.setdefault(branch, name)
            field = Field(name, path)
            self.scalars[name] = {NoneType}
            self._holders[name] = {}
        if variant is not None and variant.column not in self._columns:
            if variant.type.kind == "tensor" and any(
                known.type.kind == "tensor" for known in field.variants
            ):
                raise ValueError(
                    f"field {name!r} has a column for one tensor shape; the next is ragged:"
                    " use new_variant"
                )
            field = Field(name, field.path, (*field.variants, variant))
            self._columns[variant.column] = (name, variant)
            self._holders[name].clear()
            if variant.type.kind in _SCALAR_CLASSES:
                self.scalars[name].add(_SCALAR_CLASSES[variant.type.kind])
        self.fields[name] = field

    def new_variant(self, name: str, type: FieldType) -> Variant:
        """The variant to register for a type that `admit` found no variant for.

        A tensor whose field already holds another length becomes ragged, so that a field needs
        two columns at most, however many lengths come.
        """
        field = self.fields.get(name)
        if (
            type.kind == "tensor"
            and type.shape
            and field is not None
            and any(known.type.kind in ("tensor", "ragged") for known in field.variants)
        ):
            type = FieldType("ragged", type.dtype, type.shape[1:])
        return Variant(self.new_column(name, type), type)

    def new_column(self, name: str, type: FieldType) -> str:
        """The physical column for the next variant of a field."""
        field = self.fields.get(name)
        return column_name(name, len(field.variants) if field else 0)

    def arrow_field(self, column: str) -> pa.Field:
        """The Arrow field of a column: nullable, its name, path and type in the metadata."""
        name, variant = self._columns[column]
        described = {
            "name": name,
            "path": list(self.fields[name].path),
            "type": variant.type._dict(),
        }
        return pa.field(
            column, variant.type.arrow, metadata={METADATA_KEY: json.dumps(described).encode()}
        )

    def _check_nesting(self, name: str, path: Path) -> None:
        for branch in _branches(path):
            if branch in self._leaves:
                raise SchemaError(
                    f"queue {self.queue!r}: field {name!r} would lie inside field"
                    f" {self._leaves[branch]!r}, which holds values of its own. Rename one of them."
                )
        if path in self._branches:
            raise SchemaError(
                f"queue {self.queue!r}: field {name!r} was given a value, but field"
                f" {self._branches[path]!r} lies inside it. Rename one of them."
            )


def _branches(path: Path) -> Iterator[Path]:
    return (path[:depth] for depth in range(1, len(path)))


def _holds(stored: FieldType, given: FieldType) -> bool:
    """Whether a column of the stored type takes values of the given type as they are."""
    if stored == given:
        return True
    if stored.kind == "ragged" and given.kind == "tensor" and given.shape:
        return stored.dtype == given.dtype and stored.shape == given.shape[1:]
    return stored.kind == given.kind == "list" and not given.dtype


def _join(one: FieldType, other: FieldType) -> bool:
    """Whether values of the two types may be one field."""
    return _joins(one, other) or _joins(other, one)


def _joins(one: FieldType, other: FieldType) -> bool:
    match one.kind, other.kind:
        case "int", "float":
            return True
        case "int" | "float", "tensor":
            lowest = INTEGER if one.kind == "int" else FLOAT
            return not other.shape and storage_of(other.dtype).category >= lowest
        case "list", "list":
            return not one.dtype or {one.dtype, other.dtype} <= {"int", "float"}
        case "list", "object":
            return not one.dtype
        case "tensor" | "ragged", "tensor" | "ragged":
            return one.dtype == other.dtype and _trailing(one) == _trailing(other) is not None
    return one == other


def _trailing(type: FieldType) -> tuple[int, ...] | None:
    """The shape after the first dimension; None for a tensor without dimensions."""
    if type.kind == "ragged":
        return type.shape
    return type.shape[1:] if type.shape else None


def _place(path: Path) -> str:
    return f"the key {path[0]!r}" if len(path) == 1 else f"nested, {' -> '.join(map(repr, path))}"


def _a(type: FieldType) -> str:
    text = str(type)
    return f"{'an' if text[0] in 'aeio' else 'a'} {text}"


def _remedy(stored: FieldType, given: FieldType) -> str:
    tensors = ("tensor", "ragged")
    if stored.kind in tensors and given.kind in tensors:
        if stored.dtype != given.dtype:
            return f"Convert it with .to(torch.{stored.dtype}), or put it into another field."
        return "Only the first dimension may vary: reshape it, or put it into another field."
    if "object" in (stored.kind, given.kind):
        return "Give every sample a value of the same type, or put it into another field."
    return f"Convert it to {_a(stored)}, or put it into another field."
