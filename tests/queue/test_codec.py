"""What is put comes back as it was: in memory, through Lance, as records and as TensorDicts."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, tensorclass

from persisting_torch.errors import SchemaError
from persisting_torch.queue.decode import to_records, to_tensordict
from persisting_torch.queue.dtypes import STORAGE
from persisting_torch.queue.encode import (
    EncodedBatch,
    copy_array,
    detach,
    encode_batch,
    encode_rows,
    new_types,
    physical_columns,
    snapshot_record,
)
from persisting_torch.queue.fields import Schema

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")

FAST = settings(max_examples=60, deadline=None, derandomize=True)
Journey = Callable[[pa.Table], pa.Table]


def stored_table(
    records: Iterable[dict[str, Any]], schema: Schema | None = None, **options: Any
) -> tuple[pa.Table, Schema]:
    schema = Schema("q") if schema is None else schema
    settings_ = {"allow_pickle": True, "zerocopy_mode": "auto"} | options
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
    settings_ = {"allow_pickle": True, "zerocopy_mode": "auto"} | options
    return encode_batch(td, queue="q", **settings_)


def round_trip(*records: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    table, schema = stored_table(records, **options)
    return to_records(table, schema, list(schema.fields))


def round_trip_batch(td: Any, **options: Any) -> TensorDict:
    table, schema = batch_table(encoded(td, **options))
    return to_tensordict(table, schema, list(schema.fields))


@pytest.fixture(params=["memory", "lance", "pieces"])
def journey(request: pytest.FixtureRequest, tmp_path: Path) -> Journey:
    """Ways on which a table comes back: as it is, from a Lance dataset, or in sliced pieces."""

    def through_lance(table: pa.Table) -> pa.Table:
        path = str(tmp_path / "data.lance")
        half = len(table) // 2
        for part in (table.slice(0, half), table.slice(half)):
            ds = lance.write_dataset(
                part,
                path,
                mode="append" if Path(path).exists() else "create",
                data_storage_version="2.0",
                enable_stable_row_ids=True,
            )
        back = ds.scanner(with_row_id=True).to_table().sort_by("_rowid")
        assert back.column("_index").to_pylist() == table.column("_index").to_pylist()
        return back

    def in_pieces(table: pa.Table) -> pa.Table:
        padded = pa.concat_tables([table, table, table]).combine_chunks().slice(len(table))
        return pa.concat_tables([padded.slice(0, 1), padded.slice(1, len(table) - 1)])

    return {"memory": lambda table: table, "lance": through_lance, "pieces": in_pieces}[
        request.param
    ]


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


# --- every kind and dtype, through Lance ---


@pytest.mark.parametrize("dtype", list(STORAGE))
def test_tensors_of_every_dtype_come_back_bit_for_bit(dtype: str, journey: Journey) -> None:
    torch.manual_seed(0)
    kind = STORAGE[dtype].dtype
    records: list[dict[str, Any]] = [
        {
            "scalar": random_tensor(kind),
            "one": random_tensor(kind, 1),
            "matrix": random_tensor(kind, 3, 4),
            "ragged": random_tensor(kind, length, 2),
            "empty_rows": random_tensor(kind, length % 2),
            "no_elements": random_tensor(kind, 2, 0),
            "ragged_no_elements": random_tensor(kind, length, 0),
            "sometimes": None if length % 3 else random_tensor(kind, 3),
            "sometimes_scalar": None if length % 3 else random_tensor(kind),
            "sometimes_ragged": None if length % 2 else random_tensor(kind, length),
            "sometimes_nothing": None if length % 2 else random_tensor(kind, 3, 0),
        }
        for length in (4, 1, 0, 7, 4, 3, 0, 5)
    ]
    table, schema = stored_table(records)
    table = journey(table)
    assert same(to_records(table, schema, list(records[0])), records)

    batch = to_tensordict(table, schema, list(records[0]))
    for name in ("scalar", "one", "matrix", "no_elements"):
        assert same(batch[name], torch.stack([record[name] for record in records])), name
    for name in ("ragged", "empty_rows", "ragged_no_elements"):
        assert same(nested_rows(batch[name]), [record[name] for record in records]), name
    for name in (name for name in records[0] if name.startswith("sometimes")):
        assert same(list(batch[name]), [record[name] for record in records]), name


@pytest.mark.parametrize("dtype", list(STORAGE))
def test_batches_of_every_dtype_come_back_bit_for_bit(dtype: str, journey: Journey) -> None:
    torch.manual_seed(1)
    kind = STORAGE[dtype].dtype
    offsets = torch.tensor([0, 2, 2, 7, 8, 9])
    ragged = random_tensor(kind, 9, 3)
    td = TensorDict(
        {
            "scalar": random_tensor(kind, 5),
            "matrix": random_tensor(kind, 5, 3, 4),
            "empty": random_tensor(kind, 5, 0, 2),
            "strided": random_tensor(kind, 4, 5).t(),
            "inner": {"ragged": torch.nested.nested_tensor_from_jagged(ragged, offsets)},
        },
        batch_size=[5],
    )
    table, schema = batch_table(encoded(td))
    back = to_tensordict(journey(table), schema, list(schema.fields))
    for name in ("scalar", "matrix", "strided"):
        assert same(back[name], td[name].contiguous()), name
    assert same(nested_rows(back["inner", "ragged"]), nested_rows(td["inner", "ragged"]))
    assert [row.shape for row in nested_rows(back["empty"])] == [(0, 2)] * 5
    assert back.batch_size == torch.Size([5])
    assert schema.fields["inner.ragged"].path == ("inner", "ragged")


RECORDS: list[dict[str, Any]] = [
    {
        "int": -(2**63), "float": -0.0, "bool": True, "str": "", "bytes": b"", "list": [],
        "floats": [math.nan, -math.inf], "flags": [True, False], "words": ["", "ä", "\x00"],
        "object": {"a": (1, [2])}, "mixed": 1, "gaps": [None, -0.5],
    },
    {
        "int": 2**63 - 1, "float": 5e-324, "bool": False, "str": "\U0001f600\x00", "bytes": b"\xff",
        "list": [1, 2, 3], "floats": [], "flags": [], "words": [], "object": None, "mixed": 0.5,
        "gaps": [None, None, 1.0], "late": "x",
    },
    {
        "int": None, "float": None, "bool": None, "str": None, "bytes": None, "list": None,
        "floats": None, "flags": None, "words": None, "object": {1, 2}, "mixed": None, "gaps": None,
    },
]  # fmt: skip


def test_python_values_come_back_as_they_were(journey: Journey) -> None:
    nan = struct.unpack("d", struct.pack("Q", 0xFFF8_0000_DEAD_BEEF))[0]
    records = [*RECORDS, {"float": nan, "floats": [nan]}]
    table, schema = stored_table(records)
    names = list(schema.fields)
    expected = [{name: record.get(name) for name in names} for record in records]
    expected[0]["mixed"] = 1.0
    assert same(to_records(journey(table), schema, names), expected)


def test_python_values_are_tensors_in_a_batch(journey: Journey) -> None:
    records = [
        {"i": n, "f": n / 3, "b": n % 2 == 0, "m": n if n % 2 else n + 0.5, "l": [n] * n,
         "lm": [n] if n % 2 else [0.5] * n, "lb": [True] * n, "s": str(n), "ls": ["a"] * n}
        for n in range(5)
    ]  # fmt: skip
    table, schema = stored_table(records)
    batch = to_tensordict(journey(table), schema, list(schema.fields))
    assert same(batch["i"], torch.arange(5))
    assert same(batch["f"], torch.arange(5, dtype=torch.float64) / 3)
    assert same(batch["b"], torch.tensor([True, False, True, False, True]))
    assert same(batch["m"], torch.tensor([0.5, 1.0, 2.5, 3.0, 4.5], dtype=torch.float64))
    assert same(nested_rows(batch["l"]), [torch.full((n,), n) for n in range(5)])
    assert [row.tolist() for row in nested_rows(batch["lm"])] == [
        [], [1.0], [0.5, 0.5], [3.0], [0.5] * 4,
    ]  # fmt: skip
    assert batch["lm"].dtype == torch.float64
    assert same(nested_rows(batch["lb"]), [torch.ones(n, dtype=torch.bool) for n in range(5)])
    assert list(batch["s"]) == ["0", "1", "2", "3", "4"]
    assert list(batch["ls"]) == [["a"] * n for n in range(5)]
    assert batch[3]["s"] == "3"
    assert batch[3]["ls"] == ["a"] * 3


def test_names_of_every_kind_name_columns_of_lance(journey: Journey) -> None:
    names = [
        "a",
        "A",
        "a.b",
        "_index",
        "_rowid",
        "a@1",
        "a%",
        "`",
        '"',
        "ä ö",
        "sel*ect",
        "\n",
        "\\",
    ]
    records = [{name: number for number, name in enumerate(names)}, {"a": 0.5}]
    table, schema = stored_table(records)
    back = to_records(journey(table), schema, names)
    assert back[0] == records[0]
    assert back[1] == dict.fromkeys(names, None) | {"a": 0.5}


# --- property tests ---

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=True, width=64)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "int": INT64,
    "float": FLOATS,
    "bool": st.booleans(),
    "str": st.text(max_size=8),
    "bytes": st.binary(max_size=8),
    "ints": st.lists(INT64, max_size=4),
    "floats": st.lists(st.none() | FLOATS, min_size=1, max_size=4).filter(any),
    "words": st.lists(st.text(max_size=3), max_size=3),
    "big": st.integers(2**63, 2**80),
    "map": st.dictionaries(st.text(max_size=2), INT64, max_size=2),
}
ANY_RECORD = st.fixed_dictionaries(
    {}, optional={name: st.none() | values for name, values in KINDS.items()}
)


@FAST
@given(st.lists(ANY_RECORD, min_size=1, max_size=6), st.integers(0, 5))
def test_any_records_come_back(records: list[dict[str, Any]], start: int) -> None:
    table, schema = stored_table(records)
    names = list(schema.fields)
    expected = [{name: record.get(name) for name in names} for record in records]
    assert same(to_records(table.slice(start), schema, names), expected[start:])
    for number, row in enumerate(to_tensordict(table, schema, names).unbind(0)):
        for name in names:
            value = row[name]
            if isinstance(value, torch.Tensor):
                value = value.tolist()
            assert same(value, expected[number][name]), (name, number)


SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@FAST
@given(SHAPES, st.lists(st.integers(0, 3), max_size=2), st.sampled_from(list(STORAGE)))
def test_tensors_of_any_lengths_come_back(
    lengths: list[int], trailing: list[int], dtype: str
) -> None:
    warnings.filterwarnings("ignore", message="ComplexHalf support")
    tensors = [random_tensor(STORAGE[dtype].dtype, length, *trailing) for length in lengths]
    table, schema = stored_table({"x": tensor} for tensor in tensors)
    assert same([row["x"] for row in to_records(table, schema, ["x"])], tensors)
    batch = to_tensordict(table, schema, ["x"])["x"]
    rows = nested_rows(batch) if batch.is_nested else list(batch)
    assert same([row.contiguous() for row in rows], tensors)

    padded = to_tensordict(table, schema, ["x"], pad={"x": 1})["x"]
    assert padded.shape == (len(lengths), max(lengths), *trailing)
    for tensor, row in zip(tensors, padded, strict=True):
        assert same(row[: len(tensor)], tensor)
        end = row[len(tensor) :]
        assert same(end, torch.ones_like(end, dtype=torch.float64).to(end.dtype))


@FAST
@given(st.lists(st.none() | INT64 | FLOATS, min_size=1, max_size=8))
def test_ints_and_floats_are_one_field_of_floats(values: list[float | None]) -> None:
    table, schema = stored_table({"x": value} for value in values)
    back = [row["x"] for row in to_records(table, schema, ["x"])]
    assert all(one == other or one != one for one, other in zip(back, values, strict=True))
    if float in set(map(type, values)):
        assert all(type(v) is float or v is None or int(float(v)) != v for v in back)
    batch = to_tensordict(table, schema, ["x"])["x"]
    if None not in values:
        floats = torch.tensor([float(v) for v in values if v is not None], dtype=torch.float64)
        if batch.dtype == torch.float64:
            assert same(batch, floats)


# --- what a put takes, and what it makes its own ---


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4).t(),
        torch.arange(12)[::3],
        torch.tensor(5).expand(2, 3),
        torch.randn(3, requires_grad=True),
        torch.nn.Parameter(torch.randn(2)),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(1.5),
        torch.empty(0),
    ],
    ids=["transposed", "strided", "expanded", "requires_grad", "parameter", "conj", "neg",
         "channels_last", "no_dimensions", "empty"],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["auto", "off", "force"])
def test_a_tensor_of_any_layout_is_stored_by_its_values(tensor: torch.Tensor, mode: str) -> None:
    back = round_trip({"x": tensor}, zerocopy_mode=mode)[0]["x"]
    assert same(back, tensor.detach().resolve_conj().resolve_neg().contiguous().clone())
    assert type(back) is torch.Tensor
    assert not back.requires_grad
    if mode != "force" and tensor.ndim:
        assert same(round_trip_batch(TensorDict({"x": tensor}, [len(tensor)]))["x"], back)


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6)[::-1],
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        read_only(np.arange(3, dtype=np.uint16)),
        np.array(7, dtype=np.int8),
        np.array([True, False]),
        np.array([1 + 2j], dtype=np.complex64),
        np.arange(4, dtype=np.longlong),
        np.zeros((0, 3), np.float16),
    ],
    ids=["reversed", "big_endian", "fortran", "read_only", "no_dimensions", "bool", "complex",
         "longlong", "empty"],
)  # fmt: skip
def test_a_numpy_array_comes_back_as_a_tensor(array: Any, recwarn: pytest.WarningsRecorder) -> None:
    back = round_trip({"x": array}, allow_pickle=False)[0]["x"]
    assert isinstance(back, torch.Tensor)
    assert back.shape == array.shape
    assert back.numpy().dtype == array.dtype.newbyteorder("=")
    assert (back.numpy() == array).all()
    back.fill_(1)
    assert not recwarn.list


def test_numpy_scalars_keep_their_dtype() -> None:
    record = {"f": np.float32(0.1), "d": np.float64(0.1), "i": np.uint8(255), "b": np.bool_(True),
              "s": np.str_("ä"), "y": np.bytes_(b"z")}  # fmt: skip
    back = round_trip(record, allow_pickle=False)[0]
    assert same(back["f"], torch.tensor(np.float32(0.1)))
    assert same(back["d"], torch.tensor(0.1, dtype=torch.float64))
    assert same(back["i"], torch.tensor(255, dtype=torch.uint8))
    assert same(back["b"], torch.tensor(True))
    assert same([back["s"], back["y"]], ["ä", b"z"])


@pytest.mark.parametrize(
    "array",
    [
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array([5], dtype="timedelta64[s]"),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["a", None], dtype=object),
        np.array(["ab", "c"]),
        np.ma.masked_array([1, 2], mask=[True, False]),
        np.datetime64("2020-01-01"),
        np.arange(2, dtype=np.longdouble),
    ],
    ids=["datetime", "timedelta", "structured", "object", "text", "masked", "date", "longdouble"],
)
def test_other_numpy_arrays_need_pickle(array: Any) -> None:
    back = round_trip({"x": array})[0]["x"]
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert repr(back) == repr(array)
    with pytest.raises(SchemaError, match="allow_pickle=False"):
        round_trip({"x": array}, allow_pickle=False)


def test_what_is_stored_does_not_change_with_what_was_given() -> None:
    given_ = {
        "tensor": torch.zeros(3), "array": np.zeros(3), "list": [1, 2], "object": {"a": [1]},
        "column": torch.zeros(3, 3)[:, 1],
    }  # fmt: skip
    schema = Schema("q")
    row = snapshot_record(given_, queue="q", allow_pickle=True, zerocopy_mode="auto")
    given_["tensor"] += 1
    given_["column"] += 1
    given_["array"] += 1
    given_["list"].append(3)
    given_["object"]["a"].append(2)
    for name, path, type_ in new_types(row, schema):
        assert type_ is not None
        schema.add(name, path, schema.new_variant(name, type_))
    table = as_table(encode_rows([row], schema), schema, 1)
    back = to_records(table, schema, list(given_))[0]
    assert same(back["tensor"], torch.zeros(3))
    assert same(back["column"], torch.zeros(3))
    assert same(back["array"], torch.zeros(3, dtype=torch.float64))
    assert back["list"] == [1, 2]
    assert back["object"] == {"a": [1]}


def test_a_memory_mapped_tensordict_is_stored(tmp_path: Path) -> None:
    td = TensorDict({"x": torch.randn(4, 3), "s": ["a", "b", "c", "d"]}, [4]).memmap(str(tmp_path))
    back = round_trip_batch(td)
    assert same(back["x"], torch.as_tensor(td["x"]).as_subclass(torch.Tensor))
    assert list(back["s"]) == ["a", "b", "c", "d"]
    assert same(round_trip({"x": td[1]["x"]})[0]["x"], back["x"][1].clone())


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("not me")


REFUSED: dict[str, tuple[Any, str]] = {
    "sparse": (torch.eye(3).to_sparse(), "to_dense"),
    "csr": (torch.eye(3).to_sparse_csr(), "to_dense"),
    "meta": (torch.empty(3, device="meta"), "meta"),
    "jagged": (
        torch.nested.nested_tensor_from_jagged(torch.ones(3), torch.tensor([0, 1, 3])),
        "many samples",
    ),
    "unpicklable": (Unpicklable(), "not me"),
    "lambda": (lambda: 0, "pickled"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_stored_is_refused_by_name(what: str) -> None:
    value, remedy = REFUSED[what]
    with pytest.raises(SchemaError, match=remedy) as refusal:
        round_trip({"ok": 1, "bad one": value})
    assert "'q'" in str(refusal.value)
    assert "'bad one'" in str(refusal.value)


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning")
def test_quantized_tensors_are_refused() -> None:
    value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(SchemaError, match="Dequantize"):
        round_trip({"x": value})


class Word(str):
    __slots__ = ()


NEED_PICKLE: dict[str, Any] = {
    "wide int": 2**63,
    "surrogate": "\ud800",
    "dict": {"a": 1},
    "tuple": (1, 2),
    "nested list": [[1], [2]],
    "mixed list": [1, "a"],
    "bools and ints": [True, 1],
    "wide list": [1, 2**64],
    "wide int among floats": [0.5, 2**53 + 1],
    "surrogate list": ["\udfff"],
    "list of None": [None],
    "none": type(None),
    "subclass": Word("x"),
    "complex": 1j,
    "bytearray": bytearray(b"x"),
}


@pytest.mark.parametrize("what", NEED_PICKLE)
def test_any_other_object_comes_back_by_pickle_or_is_refused(what: str) -> None:
    value = NEED_PICKLE[what]
    table, schema = stored_table([{"x": value}])
    assert same(to_records(table, schema, ["x"])[0]["x"], value)
    assert same(list(to_tensordict(table, schema, ["x"])["x"]), [value])
    for read in (to_records, to_tensordict):
        with pytest.raises(SchemaError, match=r"'q', field 'x'.*allow_pickle=False"):
            read(table, schema, ["x"], allow_pickle=False)
    with pytest.raises(SchemaError, match=r"'q', field 'x'.*allow_pickle=False"):
        round_trip({"x": value}, allow_pickle=False)
    with pytest.raises(SchemaError, match=r"'q', field 'x'.*zerocopy_mode='force'"):
        round_trip({"x": value}, zerocopy_mode="force")


def test_the_values_of_a_batch_of_strings_can_be_put_again() -> None:
    td = round_trip_batch(TensorDict({"s": NonTensorStack(["a"], ["b", "c"])}, [2]))
    assert round_trip({"x": td["s"][1]}, allow_pickle=False) == [{"x": ["b", "c"]}]
    words = TensorDict({"s": ["a", "b"]}, [2])["s"]
    assert round_trip({"x": words}, allow_pickle=False) == [{"x": ["a", "b"]}]


def test_bad_keys_are_refused() -> None:
    for name in (1, "", "\ud800", "a\x00", "x" * 2000):
        with pytest.raises(SchemaError, match="field name"):
            round_trip({name: 1})
    with pytest.raises(SchemaError, match="field name"):
        encoded(TensorDict({"a\x00": torch.ones(1)}, [1]))


# --- fields of several types ---


def test_a_field_that_became_ragged_is_jagged_in_every_batch() -> None:
    tensors = [torch.arange(n) for n in (3, 3, 5, 0, 3)]
    table, schema = stored_table({"x": tensor} for tensor in tensors)
    assert same(nested_rows(to_tensordict(table, schema, ["x"])["x"]), tensors)
    alike = to_tensordict(table.slice(0, 2), schema, ["x"])["x"]
    assert same(nested_rows(alike), tensors[:2])
    padded = to_tensordict(table, schema, ["x"], pad={"x": -1})["x"]
    assert padded.tolist() == [
        [0, 1, 2, -1, -1], [0, 1, 2, -1, -1], [0, 1, 2, 3, 4], [-1] * 5, [0, 1, 2, -1, -1],
    ]  # fmt: skip


def test_numbers_join_tensors_without_dimensions() -> None:
    values: list[Any] = [torch.tensor(1, dtype=torch.int16), -7, torch.tensor(3, dtype=torch.int16)]
    table, schema = stored_table({"x": value} for value in values)
    assert same([row["x"] for row in to_records(table, schema, ["x"])], values)
    batch = to_tensordict(table, schema, ["x"])["x"]
    assert same(batch, torch.tensor([1, -7, 3], dtype=torch.int16))

    values = [torch.tensor(0.5), 2, 0.25]
    table, schema = stored_table({"x": value} for value in values)
    assert same(to_tensordict(table, schema, ["x"])["x"], torch.tensor([0.5, 2, 0.25]))


def test_a_number_that_the_tensors_dtype_cannot_hold_is_not_wrapped_around() -> None:
    values = [torch.tensor(1, dtype=torch.uint8), 300]
    table, schema = stored_table({"x": value} for value in values)
    assert same(list(to_tensordict(table, schema, ["x"])["x"]), values)


def test_empty_lists_join_objects_and_lists() -> None:
    messages: list[Any] = [[], [{"role": "user"}], []]
    assert round_trip(*({"x": value} for value in messages)) == [{"x": value} for value in messages]
    numbers = [[], [0.5], [], [1]]
    table, schema = stored_table({"x": value} for value in numbers)
    assert [row["x"] for row in to_records(table, schema, ["x"])] == numbers
    rows = nested_rows(to_tensordict(table, schema, ["x"])["x"])
    assert [row.tolist() for row in rows] == numbers
    table, schema = stored_table([{"x": []}, {"x": None}])
    assert to_records(table, schema, ["x"]) == [{"x": []}, {"x": None}]


def test_lists_with_gaps_stay_lists_in_a_batch() -> None:
    table, schema = stored_table([{"x": [1, None]}, {"x": [2]}])
    assert list(to_tensordict(table, schema, ["x"])["x"]) == [[1, None], [2]]
    assert nested_rows(to_tensordict(table.slice(1), schema, ["x"])["x"])[0].tolist() == [2]


def test_a_value_that_does_not_fit_its_field_is_refused() -> None:
    _, schema = stored_table([{"a": 1, "t": torch.ones(3)}])
    for record in ({"a": "1"}, {"t": torch.ones(3, 1)}, {"t": torch.ones(3).double()}, {"t": 1}):
        with pytest.raises(SchemaError, match="'q', field"):
            stored_table([record], schema)
    assert len(schema.fields["t"].variants) == 1


# --- batches ---


@tensorclass
class Step:
    obs: torch.Tensor
    name: str


def test_tensordicts_nest_and_hold_tensorclasses() -> None:
    td = TensorDict(
        {
            "a": {"b": {"c": torch.arange(6).view(2, 3)}},
            "step": Step(obs=torch.ones(2, 4), name="go", batch_size=[2]),
            "same": "constant",
            "words": NonTensorStack("x", None),
            "objects": NonTensorStack({"k": 1}, {"k": 2}),
            "nothing": NonTensorStack(None, None),
        },
        batch_size=[2],
    )
    back = round_trip_batch(td)
    assert same(back["a", "b", "c"], td["a", "b", "c"])
    assert same(back["step", "obs"], torch.ones(2, 4))
    assert list(back["step", "name"]) == ["go", "go"]
    assert list(back["same"]) == ["constant", "constant"]
    assert list(back["words"]) == ["x", None]
    assert list(back["objects"]) == [{"k": 1}, {"k": 2}]
    assert list(back["nothing"]) == [None, None]
    assert same(round_trip_batch(td["step"])["obs"], torch.ones(2, 4))


def test_more_batch_dimensions_belong_to_the_sample() -> None:
    td = TensorDict({"x": torch.arange(12).view(2, 3, 2), "s": "w"}, batch_size=[2, 3])
    back = round_trip_batch(td)
    assert back.batch_size == torch.Size([2])
    assert same(back["x"], td["x"])
    assert list(back["s"]) == [["w"] * 3] * 2


def test_a_tensordict_without_batch_dimension_is_one_sample() -> None:
    td = TensorDict({"x": torch.arange(3), "n": {"y": torch.tensor(1.5)}, "s": "w", "l": [1, 2]})
    back = round_trip_batch(td)
    assert back.batch_size == torch.Size([1])
    assert same(back["x"], torch.arange(3)[None])
    assert same(back["n", "y"], torch.tensor([1.5]))
    assert list(back["s"]) == ["w"]
    jagged = torch.nested.nested_tensor_from_jagged(torch.ones(3), torch.tensor([0, 1, 3]))
    with pytest.raises(SchemaError, match=r"'q', field 'n\.x'.*many samples"):
        encoded(TensorDict({"n": {"x": jagged}}))


def test_lazy_stacks_may_differ_in_shape_and_keys() -> None:
    parts = [
        TensorDict({"x": torch.ones(n), "s": str(n), "n": {"y": torch.tensor(n)}})
        for n in (2, 3, 2)
    ]
    parts[1]["extra"] = torch.zeros(2)
    td = LazyStackedTensorDict(*parts)
    back = round_trip_batch(td)
    assert same(nested_rows(back["x"]), [torch.ones(n) for n in (2, 3, 2)])
    assert list(back["s"]) == ["2", "3", "2"]
    assert same(back["n", "y"], torch.tensor([2, 3, 2]))
    assert same(list(back["extra"]), [None, torch.zeros(2), None])
    outer = round_trip_batch(TensorDict({"inner": td}, batch_size=[3]))
    assert same(nested_rows(outer["inner", "x"]), [torch.ones(n) for n in (2, 3, 2)])


def test_nested_tensors_of_any_layout_are_stored() -> None:
    rows = [torch.randn(n, 2) for n in (3, 0, 2)]
    strided = torch.nested.nested_tensor(rows)
    values, offsets = torch.randn(10, 2), torch.tensor([0, 4, 8, 10])
    holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths=torch.tensor([1, 4, 0]))
    later = torch.nested.nested_tensor_from_jagged(values, torch.tensor([2, 4, 4, 9]))
    td = TensorDict({"strided": strided, "holes": holes, "later": later}, batch_size=[3])
    back = round_trip_batch(td)
    assert same(nested_rows(back["strided"]), rows)
    assert same(nested_rows(back["holes"]), [values[:1], values[4:8], values[:0]])
    assert same(nested_rows(back["later"]), [values[2:4], values[:0], values[4:9]])


def test_batches_and_records_share_fields_of_varying_length() -> None:
    schema = Schema("q")
    one, _ = stored_table([{"x": torch.arange(4)}, {"x": torch.arange(2)}], schema)
    for batch in (
        TensorDict({"x": torch.arange(6).view(2, 3)}, [2]),
        TensorDict({"x": torch.arange(8).view(2, 4)}, [2]),
        TensorDict({"x": torch.zeros(2, 0, dtype=torch.int64)}, [2]),
    ):
        two, _ = batch_table(encoded(batch), schema)
        table = pa.concat_tables([one, two], promote_options="default")
        rows = nested_rows(to_tensordict(table, schema, ["x"])["x"])
        assert same(rows, [torch.arange(4), torch.arange(2), *batch["x"].unbind(0)])
    assert len(schema.fields["x"].variants) == 2


def test_a_batch_shares_memory_until_it_is_detached() -> None:
    td = TensorDict({"x": torch.zeros(3, 2), "y": torch.zeros(3)}, [3])
    shared, private, off = encoded(td), detach(encoded(td)), encoded(td, zerocopy_mode="off")
    td["x"].fill_(7)
    for batch, value in ((shared, 7), (private, 0), (off, 0)):
        table, schema = batch_table(batch)
        assert same(to_tensordict(table, schema, ["x"])["x"], torch.full((3, 2), float(value)))
    assert shared.nbytes == private.nbytes == 3 * 2 * 4 + 3 * 4


def test_force_refuses_copies_and_pickle() -> None:
    with pytest.raises(SchemaError, match="contiguous"):
        encoded(TensorDict({"x": torch.ones(3, 4).t()}, [4]), zerocopy_mode="force")
    with pytest.raises(SchemaError, match="pickle"):
        encoded(TensorDict({"x": NonTensorStack({"a": 1})}, [1]), zerocopy_mode="force")
    fine = TensorDict({"x": torch.ones(4, 2), "s": ["a", "b", "c", "d"]}, [4])
    assert encoded(fine, zerocopy_mode="force").length == 4


@pytest.mark.parametrize(
    "td",
    [
        TensorDict({"x": torch.eye(2).to_sparse()}, [2]),
        TensorDict({"n": {"x": torch.ones(2, device="meta")}}, [2]),
        TensorDict({"n": {"x": NonTensorStack(1, "a")}}, [2]),
        TensorDict({"n": {"x": torch.ones(2)}, "n.x": torch.ones(2)}, [2]),
    ],
    ids=["sparse", "meta", "mixed", "called_the_same"],
)
def test_a_bad_leaf_is_refused_by_name(td: TensorDict) -> None:
    with pytest.raises(SchemaError, match=r"'q'.*x'"):
        encoded(td)


# --- reading ---


def test_tensors_lie_over_the_tables_memory_unless_copied() -> None:
    records = [{"x": torch.arange(3), "n": n, "r": torch.ones(n)} for n in (1, 2)]
    table, schema = stored_table(records)
    names = ["x", "n"]
    one, two = to_tensordict(table, schema, names), to_tensordict(table, schema, names)
    mine = to_tensordict(table, schema, names, copy=True)
    record, mine_too = to_records(table, schema, names), to_records(table, schema, names, copy=True)
    start = table.column("x").chunk(0).values.buffers()[1].address
    assert one["x"].data_ptr() == start
    one["x"][0] = 7
    one["n"][0] = 9
    assert two["x"][0].tolist() == record[0]["x"].tolist() == [7, 7, 7]
    assert two["n"].tolist() == [9, 2]
    assert mine["x"][0].tolist() == mine_too[0]["x"].tolist() == [0, 1, 2]


def test_jagged_values_lie_over_the_tables_memory() -> None:
    td = TensorDict(
        {"x": torch.nested.nested_tensor_from_jagged(torch.ones(5), torch.tensor([0, 2, 5]))}, [2]
    )
    table, schema = batch_table(encoded(td))
    address = table.column("x").chunk(0).values.buffers()[1].address
    assert address == td["x"].values().data_ptr()
    assert to_tensordict(table, schema, ["x"])["x"].values().data_ptr() == address
    assert to_tensordict(table, schema, ["x"], copy=True)["x"].values().data_ptr() != address


def test_a_batch_of_no_rows_has_every_field_in_its_form() -> None:
    records = [
        {"i": 1, "m": 1, "b": True, "s": "a", "t": torch.ones(2, 3), "z": torch.tensor(1),
         "r": torch.ones(1, 2), "l": [1], "e": torch.ones(2, 0), "o": {}, "none": None},
        {"m": 0.5, "r": torch.ones(2, 2)},
    ]  # fmt: skip
    table, schema = stored_table(records)
    for empty in (table.slice(0, 0), table.slice(1, 0), pa.table({"other": pa.array([], "int8")})):
        batch = to_tensordict(empty, schema, list(schema.fields))
        assert batch.batch_size == torch.Size([0])
        assert (batch["i"].dtype, batch["i"].shape) == (torch.int64, (0,))
        assert (batch["m"].dtype, batch["m"].shape) == (torch.float64, (0,))
        assert (batch["b"].dtype, batch["b"].shape) == (torch.bool, (0,))
        assert (batch["t"].dtype, batch["t"].shape) == (torch.float32, (0, 2, 3))
        assert batch["z"].shape == (0,)
        assert batch["e"].shape == (0, 2, 0)
        assert nested_rows(batch["r"]) == nested_rows(batch["l"]) == []
        assert [list(batch[name]) for name in ("s", "o", "none")] == [[], [], []]
        assert (batch["r"] + 1).is_nested
        assert batch.clone().batch_size == torch.Size([0])
        padded = to_tensordict(empty, schema, ["r"], pad={"r": 0})
        assert padded["r"].shape == (0, 0, 2)
        assert to_records(empty, schema, list(schema.fields)) == []


def test_an_empty_batch_can_be_put() -> None:
    td = TensorDict({"x": torch.ones(0, 3), "s": NonTensorStack()}, [0])
    batch = encoded(td)
    assert batch.length == 0
    table, schema = batch_table(batch)
    assert to_tensordict(table, schema, ["x", "s"])["x"].shape == (0, 3)


def test_a_column_that_the_table_lacks_is_all_null() -> None:
    table, schema = stored_table([{"a": 1, "b": torch.ones(2)}])
    table = table.select(["a"])
    assert to_records(table, schema, ["a", "b"]) == [{"a": 1, "b": None}]
    assert list(to_tensordict(table, schema, ["b"])["b"]) == [None]
    with pytest.raises(SchemaError, match="no field 'c'"):
        to_records(table, schema, ["c"])


def test_records_of_no_fields_are_as_many_as_the_rows() -> None:
    table, schema = stored_table([{"a": 1}, {"a": 2}])
    assert to_records(table, schema, []) == [{}, {}]
    assert to_tensordict(table, schema, []).batch_size == torch.Size([2])


def test_padding_must_be_a_value_of_the_dtype() -> None:
    table, schema = stored_table([{"x": torch.ones(n, dtype=torch.uint8)} for n in (1, 2)])
    for fill in (-1, 256, 0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"'q', field 'x'.*uint8"):
            to_tensordict(table, schema, ["x"], pad={"x": fill})
    assert to_tensordict(table, schema, ["x"], pad={"x": 255})["x"].tolist() == [[1, 255], [1, 1]]


def test_objects_that_are_tensordicts_stay_one_sample_each() -> None:
    values = [TensorDict({"a": torch.ones(n)}) for n in (1, 2)]
    table, schema = stored_table({"x": value} for value in values)
    batch = to_tensordict(table, schema, ["x"])
    assert [value["a"].tolist() for value in batch["x"]] == [[1.0], [1.0, 1.0]]


def test_a_copied_slice_holds_only_its_own_rows() -> None:
    array = pa.array([[1, 2], None, [3]], pa.large_list(pa.int64()))
    part = copy_array(array.slice(1))
    assert part.to_pylist() == [None, [3]]
    assert len(part.values) == 1
    assert part.values.buffers()[1].address != array.values.buffers()[1].address
