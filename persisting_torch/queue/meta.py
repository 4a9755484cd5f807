"""Which samples, of which partition, with which fields: the handle that puts and reads share."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise
from operator import index
from types import MappingProxyType
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

_NO_META: Mapping[str, Any] = MappingProxyType({})
_SHOWN = 6


class BatchMeta:
    """Names samples of one partition; holds none of their data.

    `global_indexes` may be any sequence of int64; a range stays a range, anything else is kept at
    8 bytes an index. `custom_meta`, where given, has one dict for each sample, `extra_info` is one
    for the whole. Small, picklable, comparable by value; selections and chunks are new objects:
    `meta[3]` and `meta[:8]`, too, are BatchMetas.

    Raises ValueError where `custom_meta` has another length than `global_indexes`.

    >>> meta = BatchMeta(range(40, 45), "train_0", ("prompt", "reward"))
    >>> meta.size, meta.global_indexes, meta.field_names
    (5, [40, 41, 42, 43, 44], ['prompt', 'reward'])
    >>> [part.global_indexes for part in meta.chunk(2)]
    [[40, 41, 42], [43, 44]]
    """

    __slots__ = ("_custom_meta", "_extra_info", "_fields", "_indexes", "_list", "partition_id")

    def __init__(
        self,
        global_indexes: Sequence[int] | npt.NDArray[np.integer[Any]],
        partition_id: str,
        field_names: Sequence[str] = (),
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        extra_info: Mapping[str, Any] | None = None,
    ) -> None:
        self._indexes = (
            global_indexes if type(global_indexes) is range else _compact(global_indexes)
        )
        self._list: list[int] | None = None
        self.partition_id = partition_id
        self._fields = tuple(field_names)
        self._extra_info = dict(extra_info) if extra_info else None
        self._custom_meta: list[dict[str, Any]] | None = None
        if custom_meta is not None:
            if len(custom_meta) != len(self._indexes):
                raise ValueError(
                    f"custom_meta has {len(custom_meta)} entries for {len(self._indexes)} samples"
                    f" of partition {partition_id!r}. Give one dict for each sample."
                )
            self._custom_meta = [dict(entry) for entry in custom_meta]

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self._indexes)

    @property
    def global_indexes(self) -> list[int]:
        """The samples' global indexes, in order; the same list at every call: copy to change it."""
        if self._list is None:
            self._list = list(self._indexes)
        return self._list

    @property
    def field_names(self) -> list[str]:
        """The names of the fields."""
        return list(self._fields)

    @property
    def custom_meta(self) -> list[dict[str, Any]]:
        """One dict for each sample, in the order of `global_indexes`; changes to them are kept."""
        if self._custom_meta is None:
            self._custom_meta = [{} for _ in self._indexes]
        return self._custom_meta

    @property
    def extra_info(self) -> dict[str, Any]:
        """What was noted about the samples as a whole; changes to it are kept."""
        if self._extra_info is None:
            self._extra_info = {}
        return self._extra_info

    @property
    def samples(self) -> Samples:
        """The samples one by one: `meta.samples[3].global_index`."""
        return Samples(self)

    def index_array(self) -> npt.NDArray[np.int64]:
        """The global indexes as a new int64 array of shape [size]."""
        if isinstance(self._indexes, range):
            steps = self._indexes
            return np.arange(steps.start, steps.stop, steps.step, dtype=np.int64)
        return np.array(self._indexes, dtype=np.int64)

    def select_fields(self, field_names: Sequence[str]) -> BatchMeta:
        """The same samples with only these fields, in this order.

        Raises ValueError for a field that this meta does not have.
        """
        unknown = [name for name in field_names if name not in self._fields]
        if unknown:
            raise ValueError(
                f"no field {', '.join(map(repr, unknown))} in this meta of partition"
                f" {self.partition_id!r}; it has {', '.join(map(repr, self._fields)) or 'none'}."
            )
        return self._with(tuple(dict.fromkeys(field_names)))

    def with_fields(self, field_names: Sequence[str]) -> BatchMeta:
        """The same samples with these fields too, after those that it has."""
        return self._with(tuple(dict.fromkeys([*self._fields, *field_names])))

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any]]) -> None:
        """Add these entries to those that the samples have: one dict for each sample, in order.

        Raises ValueError, changing nothing, where there are not as many dicts as samples.
        """
        if len(custom_meta) != self.size:
            raise ValueError(
                f"{len(custom_meta)} dicts were given for {self.size} samples of partition"
                f" {self.partition_id!r}. Give one for each sample, empty where there is nothing."
            )
        for entry, more in zip(self.custom_meta, custom_meta, strict=True):
            entry.update(more)

    def select_samples(self, positions: Iterable[SupportsIndex]) -> BatchMeta:
        """The samples at these positions, in this order; a position may come more than once.

        Raises ValueError for a position outside [0, size).
        """
        places = [index(place) for place in positions]
        if places and not 0 <= min(places) <= max(places) < self.size:
            wrong = next(place for place in places if not 0 <= place < self.size)
            raise ValueError(
                f"position {wrong} is outside [0, {self.size}), the samples of this meta."
                " Positions count from its first sample; they are not global indexes."
            )
        indexes = array("q", [self._indexes[place] for place in places])
        custom = self._custom_meta
        return BatchMeta(
            indexes,
            self.partition_id,
            self._fields,
            None if custom is None else [custom[place] for place in places],
            self._extra_info,
        )

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """`chunks` parts in order, as even as possible: the first ones get the remainder.

        With fewer samples than chunks the last parts are empty. Raises ValueError where `chunks`
        is not positive.
        """
        if chunks <= 0:
            raise ValueError(f"chunks must be positive, got {chunks}.")
        each, remainder = divmod(self.size, chunks)
        ends = [each * n + min(n, remainder) for n in range(chunks + 1)]
        return [self._cut(slice(*bounds)) for bounds in pairwise(ends)]

    def union(self, other: BatchMeta) -> BatchMeta:
        """The same samples with the fields of both; where their notes differ, the other's count.

        A meta without samples adds nothing. Raises ValueError where they name other samples.
        """
        if not (self.size and other.size):
            return copy(self if self.size else other)
        if self.partition_id != other.partition_id or not _same(self._indexes, other._indexes):
            raise ValueError(
                f"cannot unite metas of different samples: {self!r} and {other!r}. Bring them to"
                " the same samples, in the same order, with select_samples."
            )
        joined = self.with_fields(other._fields)
        joined.extra_info.update(other.extra_info)
        if other._custom_meta is not None:
            joined.update_custom_meta(other._custom_meta)
        return joined

    @classmethod
    def concat(cls, metas: Sequence[BatchMeta]) -> BatchMeta:
        """The samples of all the metas, in order; empty ones are passed over.

        Raises ValueError where there is no meta, or where partitions, fields or the values of one
        key of `extra_info` differ.
        """
        if not metas:
            raise ValueError("nothing to concatenate: give at least one BatchMeta.")
        parts = [meta for meta in metas if meta.size] or [metas[0]]
        first = parts[0]
        for place, part in enumerate(parts[1:], start=1):
            if part.partition_id != first.partition_id:
                raise ValueError(
                    f"cannot concatenate metas of different partitions: {first.partition_id!r} and,"
                    f" at place {place}, {part.partition_id!r}. Concatenate each partition alone."
                )
            if set(part._fields) != set(first._fields):
                raise ValueError(
                    f"cannot concatenate metas with different fields: {first.field_names} and,"
                    f" at place {place}, {part.field_names}. Bring them to the same fields with"
                    " select_fields."
                )
        custom = None
        if any(part._custom_meta is not None for part in parts):
            custom = [entry for part in parts for entry in part.custom_meta]
        indexes = _join([part._indexes for part in parts])
        return cls(indexes, first.partition_id, first._fields, custom, _join_infos(parts))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and dicts, for JSON (if `custom_meta` holds what JSON knows)."""
        return {
            "global_indexes": list(self._indexes),
            "partition_id": self.partition_id,
            "field_names": self.field_names,
            "custom_meta": self._custom_meta_or_none(),
            "extra_info": dict(self._extra_info or {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BatchMeta:
        """The meta whose `to_dict` gave `data`."""
        return cls(
            data["global_indexes"],
            data["partition_id"],
            data["field_names"],
            data.get("custom_meta"),
            data.get("extra_info"),
        )

    def __len__(self) -> int:
        return len(self._indexes)

    def __getitem__(self, position: SupportsIndex | slice) -> BatchMeta:
        """One sample, or the samples of a slice."""
        if isinstance(position, slice):
            return self._cut(position)
        place = range(self.size)[position]
        return self._cut(slice(place, place + 1))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchMeta):
            return NotImplemented
        return (
            self.partition_id == other.partition_id
            and self._fields == other._fields
            and _same(self._indexes, other._indexes)
            and self._custom_meta_or_none() == other._custom_meta_or_none()
            and _infos_agree(self._extra_info or {}, other._extra_info or {})
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[BatchMeta], tuple[Any, ...]]:
        custom = self._custom_meta_or_none()
        place = (self._indexes, self.partition_id, self._fields)
        return BatchMeta, (*place, custom, self._extra_info or None)

    def __repr__(self) -> str:
        shown = list(map(str, self._indexes[:_SHOWN]))
        if self.size > _SHOWN:
            shown[-2:] = ["...", str(self._indexes[-1])]
        return (
            f"BatchMeta(size={self.size}, partition_id={self.partition_id!r},"
            f" field_names={self.field_names}, global_indexes=[{', '.join(shown)}])"
        )

    def _cut(self, part: slice) -> BatchMeta:
        custom = self._custom_meta
        return BatchMeta(
            self._indexes[part],
            self.partition_id,
            self._fields,
            None if custom is None else custom[part],
            self._extra_info,
        )

    def _with(self, fields: tuple[str, ...]) -> BatchMeta:
        custom, info = self._custom_meta, self._extra_info
        return BatchMeta(self._indexes, self.partition_id, fields, custom, info)

    def _custom_meta_or_none(self) -> list[dict[str, Any]] | None:
        """A copy of the custom meta; None where no sample has any."""
        if self._custom_meta is None or not any(self._custom_meta):
            return None
        return [dict(entry) for entry in self._custom_meta]


class Sample:
    """One sample of a BatchMeta, read only."""

    __slots__ = ("_meta", "_position")

    def __init__(self, meta: BatchMeta, position: int) -> None:
        self._meta = meta
        self._position = position

    @property
    def global_index(self) -> int:
        """The sample's name within its queue."""
        return self._meta._indexes[self._position]

    @property
    def partition_id(self) -> str:
        """The partition that the sample is in."""
        return self._meta.partition_id

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of its fields."""
        return self._meta._fields

    @property
    def custom_meta(self) -> Mapping[str, Any]:
        """What was noted about this sample."""
        custom = self._meta._custom_meta
        return _NO_META if custom is None else MappingProxyType(custom[self._position])

    def __repr__(self) -> str:
        return (
            f"Sample(global_index={self.global_index}, partition_id={self.partition_id!r},"
            f" fields={list(self.fields)})"
        )


class Samples(Sequence[Sample]):
    """The samples of a BatchMeta as a sequence; each is made when it is asked for."""

    __slots__ = ("_meta",)

    def __init__(self, meta: BatchMeta) -> None:
        self._meta = meta

    def __len__(self) -> int:
        return self._meta.size

    @overload
    def __getitem__(self, position: SupportsIndex) -> Sample: ...
    @overload
    def __getitem__(self, position: slice) -> list[Sample]: ...
    def __getitem__(self, position: SupportsIndex | slice) -> Sample | list[Sample]:
        places = range(self._meta.size)
        if isinstance(position, slice):
            return [Sample(self._meta, place) for place in places[position]]
        return Sample(self._meta, places[position])

    def __iter__(self) -> Iterator[Sample]:
        return (Sample(self._meta, place) for place in range(self._meta.size))

    def __repr__(self) -> str:
        return f"Samples({self._meta!r})"


def _compact(indexes: Iterable[int] | npt.NDArray[np.integer[Any]]) -> range | array[int]:
    """A private copy at 8 bytes an index; a range is its own copy."""
    if isinstance(indexes, range):
        return indexes
    if isinstance(indexes, np.ndarray):
        copied = array("q")
        copied.frombytes(indexes.astype(np.int64, casting="same_kind").tobytes())
        return copied
    return array("q", indexes)


def _join_infos(parts: Sequence[BatchMeta]) -> dict[str, Any]:
    """The `extra_info` of all; ValueError where two say different things under one key."""
    joined: dict[str, Any] = {}
    for part in parts:
        for key, value in (part._extra_info or {}).items():
            if not _agree(joined.setdefault(key, value), value):
                raise ValueError(
                    f"cannot concatenate metas whose extra_info differs in {key!r}:"
                    f" {joined[key]!r} and {value!r}. Make it the same, or take it out."
                )
    return joined


def _infos_agree(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(_agree(left[key], right[key]) for key in left)


def _agree(left: Any, right: Any) -> bool:
    """Whether two values are equal; tensors and arrays by shape and elements."""
    if hasattr(left, "shape") or hasattr(right, "shape"):
        shapes = getattr(left, "shape", None), getattr(right, "shape", None)
        return shapes[0] == shapes[1] and bool((left == right).all())
    return bool(left == right)


def _same(left: range | array[int], right: range | array[int]) -> bool:
    if type(left) is type(right):
        return left == right
    return len(left) == len(right) and list(left) == list(right)


def _join(parts: Sequence[range | array[int]]) -> range | array[int]:
    """One after another: a range where they are ranges that meet end to end."""
    joined: range | array[int] = parts[0]
    for part in parts[1:]:
        if (
            isinstance(joined, range)
            and isinstance(part, range)
            and joined.step == part.step == 1
            and joined.stop == part.start
        ):
            joined = range(joined.start, part.stop)
            continue
        if isinstance(joined, range) or joined is parts[0]:
            joined = array("q", joined)
        joined.extend(part)
    return joined
