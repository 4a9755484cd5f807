"""What is put comes back as it was, from memory and from Lance."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from persisting_torch.queue.decode import to_records, to_tensordict
from persisting_torch.queue.dtypes import STORAGE
from tests.queue.codec_tables import (
    batch_table,
    encoded,
    nested_rows,
    random_tensor,
    same,
    stored_table,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")

FAST = settings(max_examples=60, deadline=None, derandomize=True)
Journey = Callable[[pa.Table], pa.Table]


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
