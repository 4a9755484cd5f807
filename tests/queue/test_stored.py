"""What a put takes, what it makes its own, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from persisting_torch.errors import SchemaError
from persisting_torch.queue.decode import to_records, to_tensordict
from persisting_torch.queue.encode import (
    encode_rows,
    new_types,
    snapshot_record,
)
from persisting_torch.queue.fields import Schema
from tests.queue.codec_tables import (
    as_table,
    encoded,
    round_trip,
    round_trip_batch,
    same,
    stored_table,
)


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
    given_: dict[str, Any] = {
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
