"""Reading: memory, empty batches, padding, what is missing."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

from persisting_torch.errors import SchemaError
from persisting_torch.queue.decode import to_records, to_tensordict
from persisting_torch.queue.encode import (
    copy_array,
)
from tests.queue.codec_tables import (
    batch_table,
    encoded,
    nested_rows,
    stored_table,
)


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


def test_an_empty_batch_can_be_put_again() -> None:
    table, schema = stored_table(
        [{"x": torch.ones(3), "s": "a", "r": torch.ones(n)} for n in (1, 2)]
    )
    names = ["x", "s", "r"]
    batch = encoded(to_tensordict(table.slice(0, 0), schema, names))
    assert batch.length == 0
    assert batch.empty == [("s", ("s",))]
    again, _ = batch_table(batch, schema)
    assert to_tensordict(again, schema, names)["x"].shape == (0, 3)


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
