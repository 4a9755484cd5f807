"""TensorDicts of every make, and fields that hold several types."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, tensorclass

from persisting_torch.errors import SchemaError
from persisting_torch.queue.decode import to_records, to_tensordict
from persisting_torch.queue.encode import (
    detach,
)
from persisting_torch.queue.fields import Schema
from tests.queue.codec_tables import (
    batch_table,
    encoded,
    nested_rows,
    round_trip,
    round_trip_batch,
    same,
    stored_table,
)


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
