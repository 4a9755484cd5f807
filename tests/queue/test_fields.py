"""Which types may live together in one field."""

from __future__ import annotations

import json
import pickle

import pyarrow as pa
import pytest

from persisting_torch.errors import FormatError, SchemaError
from persisting_torch.queue.dtypes import STORAGE
from persisting_torch.queue.fields import METADATA_KEY, FieldType, Schema

INT, FLOAT, BOOL = FieldType("int"), FieldType("float"), FieldType("bool")
STR, BYTES, OBJECT = FieldType("str"), FieldType("bytes"), FieldType("object")
NO_ELEMENTS = FieldType("list")


def tensor(*shape: int, dtype: str = "float32") -> FieldType:
    return FieldType("tensor", dtype, shape)


def ragged(*shape: int, dtype: str = "float32") -> FieldType:
    return FieldType("ragged", dtype, shape)


def lists(dtype: str) -> FieldType:
    return FieldType("list", dtype)


def schema_of(*types: FieldType, name: str = "x") -> Schema:
    schema = Schema("q")
    for type_ in types:
        assert schema.admit(name, (name,), type_) is None
        schema.add(name, (name,), schema.new_variant(name, type_))
    return schema


EVERY_TYPE = [
    INT, FLOAT, BOOL, STR, BYTES, OBJECT, NO_ELEMENTS,
    *(lists(dtype) for dtype in ("int", "float", "bool", "str")),
    *(make(*shape, dtype=dtype) for dtype in STORAGE for make in (tensor, ragged)
      for shape in ((), (1,), (3, 4), (3, 0))),
]  # fmt: skip


@pytest.mark.parametrize("type_", EVERY_TYPE, ids=str)
def test_a_type_survives_its_json_and_its_pickle(type_: FieldType) -> None:
    assert FieldType.from_json(type_.to_json()) == type_
    assert pickle.loads(pickle.dumps(type_)) == type_
    assert isinstance(type_.arrow, pa.DataType)


def test_a_kind_from_a_newer_version_is_a_format_error() -> None:
    with pytest.raises(FormatError, match="hologram"):
        FieldType.from_json('{"kind": "hologram"}')


JOINING = [
    (INT, FLOAT),
    (INT, tensor(dtype="int8")),
    (INT, tensor(dtype="bfloat16")),
    (FLOAT, tensor()),
    (FLOAT, tensor(dtype="complex64")),
    (lists("int"), lists("float")),
    (NO_ELEMENTS, lists("str")),
    (NO_ELEMENTS, OBJECT),
    (tensor(3), tensor(5)),
    (tensor(3, 4), ragged(4)),
    (tensor(3, 0), tensor(5, 0)),
]
APART = [
    (INT, STR), (INT, BOOL), (BOOL, FLOAT), (STR, BYTES), (OBJECT, INT), (OBJECT, lists("int")),
    (FLOAT, tensor(dtype="int64")), (BOOL, tensor(dtype="bool")), (INT, tensor(dtype="bool")),
    (INT, tensor(1)), (lists("int"), lists("str")), (lists("int"), lists("bool")),
    (lists("int"), tensor(2, dtype="int64")), (tensor(), tensor(dtype="float64")),
    (tensor(3), tensor(3, dtype="float16")), (tensor(3), tensor()), (tensor(3), tensor(3, 1)),
    (tensor(3, 4), tensor(3, 5)), (ragged(4), ragged(5)), (ragged(4), ragged(4, dtype="int8")),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), JOINING, ids=str)
def test_types_that_have_a_common_meaning_join_in_either_order(
    one: FieldType, other: FieldType
) -> None:
    for first, second in ((one, other), (other, one)):
        schema = schema_of(first)
        if schema.admit("x", ("x",), second) is None:
            schema.add("x", ("x",), schema.new_variant("x", second))
        assert schema.admit("x", ("x",), first) is not None
        assert schema.admit("x", ("x",), second) is not None


@pytest.mark.parametrize(("one", "other"), APART, ids=str)
def test_types_without_a_common_meaning_are_refused_in_either_order(
    one: FieldType, other: FieldType
) -> None:
    for first, second in ((one, other), (other, one)):
        schema = schema_of(first)
        with pytest.raises(SchemaError) as refusal:
            schema.admit("x", ("x",), second)
        for part in ("'q'", "'x'", str(first), str(second)):
            assert part in str(refusal.value)


def test_none_joins_every_field_and_needs_no_variant() -> None:
    schema = Schema("q")
    schema.add("x", ("x",), None)
    assert schema.fields["x"].variants == ()
    assert schema.admit("x", ("x",), None) is None
    assert schema.admit("x", ("x",), STR) is None
    schema.add("x", ("x",), schema.new_variant("x", STR))
    with pytest.raises(SchemaError):
        schema.admit("x", ("x",), INT)


def test_a_field_of_many_lengths_needs_two_columns() -> None:
    schema = schema_of(tensor(5, 2), tensor(7, 2))
    for length in (0, 1, 5, 7, 900):
        type_ = tensor(length, 2) if length else ragged(2)
        variant = schema.admit("x", ("x",), type_)
        assert variant is not None
        assert variant.type == (tensor(5, 2) if length == 5 else ragged(2))
    assert [variant.column for variant in schema.fields["x"].variants] == ["x", "x@1"]


def test_a_second_fixed_shape_is_not_registered_as_such() -> None:
    schema = schema_of(tensor(5))
    with pytest.raises(ValueError, match="ragged"):
        schema.add("x", ("x",), type(schema.fields["x"].variants[0])("x@1", tensor(7)))


def test_adding_a_known_variant_again_changes_nothing() -> None:
    schema = schema_of(tensor(5))
    before = schema.fields["x"]
    schema.add("x", ("x",), before.variants[0])
    assert schema.fields["x"] == before


def test_one_name_does_not_stand_for_two_places() -> None:
    schema = Schema("q")
    schema.add("a.b", ("a.b",), schema.new_variant("a.b", INT))
    with pytest.raises(SchemaError, match="nested"):
        schema.admit("a.b", ("a", "b"), INT)


def test_a_field_does_not_nest_in_another_field() -> None:
    schema = Schema("q")
    schema.add("a", ("a",), schema.new_variant("a", INT))
    schema.add("n.x.y", ("n", "x", "y"), schema.new_variant("n.x.y", INT))
    with pytest.raises(SchemaError, match=r"'a\.b' would lie inside field 'a'"):
        schema.admit("a.b", ("a", "b"), INT)
    with pytest.raises(SchemaError, match=r"'n\.x\.y' lies inside"):
        schema.admit("n.x", ("n", "x"), INT)
    assert schema.admit("n.x.z", ("n", "x", "z"), INT) is None
    assert schema.admit("a.b", ("a.b",), INT) is None


def test_the_arrow_field_describes_itself() -> None:
    schema = schema_of(tensor(3, 4), name="_obs")
    field = schema.arrow_field("%5Fobs")
    assert field.nullable
    assert field.type == pa.list_(pa.float32(), 12)
    assert json.loads(field.metadata[METADATA_KEY]) == {
        "name": "_obs",
        "path": ["_obs"],
        "type": {"kind": "tensor", "dtype": "float32", "shape": [3, 4]},
    }
