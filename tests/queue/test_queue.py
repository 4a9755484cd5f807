"""Putting, reading in order, reading by index, claiming, and what is refused: the Queue's interface."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from persisting_torch import (
    BatchMeta,
    GRPOGroupNSampler,
    ProducerFailed,
    Queue,
    QueueClosed,
    QueueSealed,
    RankAwareSampler,
    SchemaError,
    SequentialSampler,
    ShuffleSampler,
    WaitTimeout,
)
from persisting_torch.errors import PersistingError
from tests.queue.same import rows, same

NAN_WITH_PAYLOAD = struct.unpack("<d", struct.pack("<Q", 0x7FF8DEADBEEF0001))[0]


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


def run_python(code: str, *arguments: object, check: bool = True) -> str:
    """Run code in a process of its own; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


# Putting dicts, lists, TensorDicts


@pytest.mark.parametrize(
    "record",
    [
        {"x": torch.arange(6)},
        {"x": [1, 2, 3], "y": ["a", "b", "c"]},
        {"x": np.zeros((4, 2), dtype=np.float32)},
        {"x": {"nested": {"deep": [1, "two"]}}},
        {"x": None},
        {"x": (1, 2)},
        {"x": b"", "y": "", "z": False},
    ],
)
def test_a_dict_is_one_sample_whatever_its_values(queue: Queue, record: dict[str, Any]):
    meta = queue.sync.put(record)
    assert meta.size == 1
    assert meta.field_names == list(record)
    wanted = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in record.items()
    }
    assert same(queue.sync.get(), [wanted])
    queue.sync.flush()
    assert same(queue.sync.get(), [wanted])


def test_a_tensordict_is_as_many_samples_as_its_first_batch_dimension(queue: Queue):
    td = TensorDict({"x": torch.arange(12).view(3, 4), "y": torch.ones(3, 4, 2)}, batch_size=[3, 4])
    meta = queue.sync.put(td)
    assert meta.size == 3
    assert [record["x"].tolist() for record in queue.sync.get()] == td["x"].tolist()


def test_a_tensordict_without_batch_dimension_is_one_sample(queue: Queue):
    meta = queue.sync.put(TensorDict({"x": torch.arange(4), "word": "a"}, batch_size=[]))
    assert meta.size == 1
    assert same(queue.sync.get(), [{"x": torch.arange(4), "word": "a"}])


def test_an_empty_list_or_tensordict_puts_nothing(queue: Queue):
    assert queue.sync.put([]).size == 0
    assert queue.sync.put(TensorDict({"x": torch.zeros(0, 3)}, batch_size=[0])).size == 0
    assert len(queue) == 0
    queue.sync.flush()
    queue.sync.put({"x": torch.ones(3)})
    queue.sync.put([])
    queue.sync.put({"x": torch.zeros(3)})
    queue.sync.flush()
    assert [record["x"].tolist() for record in queue.sync.get()] == [[1.0] * 3, [0.0] * 3]


def test_samples_without_any_field_are_samples_all_the_same(queue: Queue):
    queue.sync.put({})
    queue.sync.put(TensorDict({}, batch_size=[2]))
    assert queue.sync.get() == [{}, {}, {}]
    queue.sync.flush()
    assert queue.sync.get() == [{}, {}, {}]
    queue.sync.put({"x": 1})
    assert queue.sync.get() == [{"x": None}, {"x": None}, {"x": None}, {"x": 1}]


@pytest.mark.parametrize("data", [1, "text", None, {1, 2}, torch.ones(2), [1], [{"x": 1}, None]])
def test_what_is_no_record_is_refused_by_name_of_its_type(queue: Queue, data: Any):
    with pytest.raises(SchemaError, match="'q'.*(dict|TensorDict)"):
        queue.sync.put(data)
    assert len(queue) == 0


def test_values_changed_after_the_put_do_not_show(queue: Queue):
    tensor, array, words, thing = torch.zeros(3), np.zeros(3), ["a"], {"k": [1]}
    batch = torch.zeros(200, 3)
    queue.sync.put({"t": tensor, "a": array, "w": words, "o": thing})
    queue.sync.put(TensorDict({"t": tensor[None]}, batch_size=[1]))
    queue.sync.put(TensorDict({"t": batch}, batch_size=[200]))
    tensor += 1
    array += 1
    batch += 1
    words.append("b")
    thing["k"].append(2)
    for _ in range(2):
        records = queue.sync.get(300)
        assert same(
            records[0],
            {
                "t": torch.zeros(3),
                "a": torch.zeros(3, dtype=torch.float64),
                "w": ["a"],
                "o": {"k": [1]},
            },
        )
        assert all(not record["t"].any() for record in records)
        queue.sync.flush()


def test_records_changed_after_get_do_not_change_the_queue(queue: Queue):
    queue.sync.put({"t": torch.zeros(3), "w": [1]})
    for _ in range(2):
        record = queue.sync.get()[0]
        record["t"] += 1
        record["w"].append(2)
        assert same(queue.sync.get()[0], {"t": torch.zeros(3), "w": [1]})
        queue.sync.flush()


# Reading in order


def test_get_answers_in_put_order_with_none_for_absent_fields(tmp_path: Path):
    wanted = [
        {"x": 1, "y": None, "z": None},
        {"x": None, "y": "a", "z": None},
        {"x": 2, "y": "b", "z": torch.ones(2)},
    ]
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"x": 1})
        queue.sync.put({"y": "a", "x": None})
        queue.sync.put([{"z": torch.ones(2), "x": 2, "y": "b"}])
        assert same(queue.sync.get(), wanted)
        queue.sync.flush()
        assert same(queue.sync.get(), wanted)
    with Queue("q", tmp_path) as queue:
        assert same(queue.sync.get(), wanted)
        assert [list(record) for record in queue.sync.get()] == [["x", "y", "z"]] * 3


def test_limit_and_offset_cross_the_border_between_rows_and_waiting_samples(queue: Queue):
    queue.sync.put([{"n": n} for n in range(10)])
    queue.sync.flush()
    queue.sync.put([{"n": n} for n in range(10, 15)])
    queue.sync.put(TensorDict({"m": torch.arange(15, 20)}, batch_size=[5]))
    for limit in (0, 1, 4, 12, 30):
        for offset in (0, 3, 9, 10, 13, 15, 17, 19, 20, 25):
            got = [
                record["n"] if record["m"] is None else int(record["m"])
                for record in queue.sync.get(limit, offset)
            ]
            assert got == list(range(20))[offset : offset + limit]


@pytest.mark.parametrize(("limit", "offset"), [(-1, 0), (1, -1)])
def test_a_negative_limit_or_offset_is_refused(queue: Queue, limit: int, offset: int):
    queue.sync.put([{"n": n} for n in range(3)])
    for _ in range(2):
        with pytest.raises(ValueError, match="-1"):
            queue.sync.get(limit, offset)
        with pytest.raises(ValueError, match="-1"):
            list(queue.sync.stream(limit, offset))
        queue.sync.flush()


def test_stream_gives_limit_records_in_all(queue: Queue):
    queue.sync.put([{"n": n} for n in range(250)])
    queue.sync.flush()
    queue.sync.put([{"n": n} for n in range(250, 320)])

    async def streamed(*arguments: Any) -> list[int]:
        return [r["n"] async for records in queue.stream(*arguments) for r in records]

    for limit, offset in ((100, 0), (130, 200), (None, 0), (None, 310), (0, 0), (5, 319), (5, 400)):
        wanted = list(range(320))[offset:][:limit]
        assert asyncio.run(streamed(limit, offset)) == wanted
        assert [r["n"] for rs in queue.sync.stream(limit, offset) for r in rs] == wanted


def test_a_stream_meets_each_sample_once_though_it_is_flushed_meanwhile(queue: Queue):
    queue.sync.put([{"n": n} for n in range(5)])
    met = []
    stream = queue.sync.stream(None, wait=True, timeout=0)
    met += [record["n"] for record in next(stream)]
    queue.sync.put({"n": 5})
    queue.sync.flush()
    met += [record["n"] for record in next(stream)]
    queue.sync.put({"n": 6})
    met += [record["n"] for record in next(stream)]
    queue.sync.flush()
    assert next(stream, None) is None
    assert met == list(range(7))


TENSORS = [
    torch.tensor([NAN_WITH_PAYLOAD, -0.0, math.inf, 5e-324], dtype=torch.float64),
    torch.tensor([-(2**63), 2**63 - 1, 0, -1]),
    torch.tensor([0x7FC0DEAD, -0x80000000, 1, 2], dtype=torch.int32).view(torch.float32),
    torch.tensor([0x7FC1, -0x8000], dtype=torch.int16).view(torch.bfloat16),
    torch.tensor([0x7F, 0x80, 1], dtype=torch.uint8).view(torch.float8_e4m3fn),
    torch.tensor([True, False]),
    torch.tensor([complex(-0.0, math.nan), 1 + 2j]),
    torch.zeros(0, 3),
    torch.zeros(2, 0),
    torch.tensor(NAN_WITH_PAYLOAD, dtype=torch.float64),
    torch.tensor(2**64 - 1, dtype=torch.uint64),
]
SCALARS = [
    NAN_WITH_PAYLOAD,
    -0.0,
    5e-324,
    -math.inf,
    2**63 - 1,
    -(2**63),
    "",
    "\x00é😀",
    b"",
    b"\0",
]


def test_every_bit_comes_back_before_and_after_flush_and_restart(tmp_path: Path):
    values = [*TENSORS, *SCALARS, True, None, [], [1, None], [-0.0, NAN_WITH_PAYLOAD], ["", "a"]]
    record = {f"f{number}": value for number, value in enumerate(values)}
    ragged = [{"r": torch.arange(n, dtype=torch.int16)} for n in (3, 0, 1)]
    wanted = [
        {**record, "r": None},
        *({**dict.fromkeys(record), **each} for each in ragged),
    ]
    with Queue("q", tmp_path) as queue:
        queue.sync.put(record)
        queue.sync.put(ragged)
        assert same(queue.sync.get(), wanted)
        queue.sync.flush()
        assert same(queue.sync.get(), wanted)
    with Queue("q", tmp_path) as queue:
        assert same(queue.sync.get(), wanted)
        batch = queue.sync.get_batch(["r"], 3, "all")
        assert [row.tolist() for row in batch["r"].unbind()] == [[0, 1, 2], [], [0]]


def test_tensors_in_a_batch_come_back_bit_for_bit(queue: Queue):
    td = TensorDict({str(n): torch.stack([t, t]) for n, t in enumerate(TENSORS)}, batch_size=[2])
    meta = queue.sync.put(td)
    got = queue.sync.get_data(meta)
    for key in td.keys():
        column = got[key].unbind() if got[key].is_nested else list(got[key])
        assert same(list(column), list(td[key])), key


values = (
    st.integers(-(2**63), 2**63 - 1)
    | st.floats(width=64)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.booleans()
    | st.none()
    | st.lists(st.integers(-5, 5), max_size=3)
    | st.lists(st.floats(width=64), min_size=1, max_size=3)
    | st.integers(0, 4).map(lambda n: torch.arange(n, dtype=torch.float32))
    | st.integers(0, 3).map(lambda n: torch.full((2, 2), n, dtype=torch.int8))
    | st.sampled_from(["pickled"]).map(lambda text: {"a": (text, 1)})
)
KIND_OF_FIELD = {
    "tensor1": lambda v: isinstance(v, torch.Tensor) and v.dim() == 1,
    "tensor2": lambda v: isinstance(v, torch.Tensor) and v.dim() == 2,
    "list": lambda v: isinstance(v, list),
    **{
        kind.__name__: (lambda v, k=kind: type(v) is k)
        for kind in (int, float, str, bytes, bool, dict)
    },
}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(values, max_size=6), max_size=8))
def test_whatever_is_put_reads_the_same_before_and_after_flush(
    tmp_path_factory: pytest.TempPathFactory, puts: list[list[Any]]
):
    given_records = []
    for put in puts:
        record: dict[str, Any] = {}
        for value in put:
            kinds = [kind for kind, fits in KIND_OF_FIELD.items() if fits(value)]
            record[kinds[0] if kinds else "none"] = value
        given_records.append(record)
    with Queue("q", tmp_path_factory.mktemp("same")) as queue:
        for record in given_records:
            queue.sync.put(record)
        names = list(dict.fromkeys(name for record in given_records for name in record))
        before = queue.sync.get()
        queue.sync.flush()
        after = queue.sync.get()
        assert same(before, after)
        for record, got in zip(given_records, after, strict=True):
            assert set(got) == set(names)
            for name, value in {**dict.fromkeys(names), **record}.items():
                if isinstance(value, list) and got[name] != value:
                    assert same([float(v) for v in value], [float(v) for v in got[name]])
                else:
                    assert same(value, got[name]) or name == "list"


# Types that grow and widen


def test_an_int_field_that_meets_a_float_becomes_float_without_losing_large_ints(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        queue.sync.put([{"n": 1}, {"n": 2**53 + 1}])
        queue.sync.flush()
        queue.sync.put({"n": 0.5})
        wanted = [{"n": 1.0}, {"n": 2**53 + 1}, {"n": 0.5}]
        assert same(queue.sync.get(), wanted)
        queue.sync.flush()
        assert same(queue.sync.get(), wanted)
    with Queue("q", tmp_path) as queue:
        assert same(queue.sync.get(), wanted)
        batch = queue.sync.get_batch(["n"], 3)
        assert batch["n"].dtype == torch.float64
        assert batch["n"].tolist() == [1.0, float(2**53 + 1), 0.5]


def test_a_tensor_of_another_length_makes_the_field_ragged(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"t": torch.ones(2, 3)})
        queue.sync.flush()
        queue.sync.put({"t": torch.ones(4, 3)})
        queue.sync.put(TensorDict({"t": torch.zeros(2, 1, 3)}, batch_size=[2]))
        shapes = [tuple(record["t"].shape) for record in queue.sync.get()]
        assert shapes == [(2, 3), (4, 3), (1, 3), (1, 3)]
        queue.sync.flush()
        assert [tuple(record["t"].shape) for record in queue.sync.get()] == shapes
    with Queue("q", tmp_path) as queue:
        batch = queue.sync.get_batch(["t"], 4)
        assert batch["t"].is_nested
        assert [tuple(row.shape) for row in batch["t"].unbind()] == shapes


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize(
    ("stored", "given", "stored_as", "given_as"),
    [
        (torch.ones(3), torch.ones(3, dtype=torch.float64), "float32 tensor", "float64 tensor"),
        (torch.ones(3, 2), torch.ones(3, 4), r"float32 tensor of shape \(3, 2\)", r"\(3, 4\)"),
        (1, "text", "int", "str"),
        ("text", 1.5, "str", "float"),
        (True, 1, "bool", "int"),
        ("text", b"bytes", "str", "bytes"),
        (1, {"a": 1}, "int", "object"),
        ([1], ["a"], "list of int", "list of str"),
    ],
)
def test_a_type_that_does_not_fit_is_refused_at_put_and_nothing_is_lost(
    queue: Queue, flushed: bool, stored: Any, given: Any, stored_as: str, given_as: str
):
    queue.sync.put({"x": stored, "n": 1})
    if flushed:
        queue.sync.flush()
    before = queue.sync.get()
    with pytest.raises(SchemaError, match=rf"'q'.*'x'.*{stored_as}.*{given_as}"):
        queue.sync.put({"new": 1, "x": given})
    with pytest.raises(SchemaError, match="'x'"):
        queue.sync.put([{"x": stored}, {"x": given}])
    assert same(queue.sync.get(), before)
    queue.sync.put({"x": stored, "n": 2})
    queue.sync.flush()
    assert [record["n"] for record in queue.sync.get()] == [1, 2]
    assert all(same(record["x"], stored) for record in queue.sync.get())


def test_a_refused_list_leaves_no_field_behind(queue: Queue):
    with pytest.raises(SchemaError, match="'x'"):
        queue.sync.put([{"x": 1}, {"x": "a"}])
    queue.sync.put([{"x": "b"}, {"x": "c"}])
    assert queue.sync.get() == [{"x": "b"}, {"x": "c"}]


def test_two_handles_that_put_conflicting_types_before_any_flush_agree_on_the_first(
    tmp_path: Path,
):
    with Queue("q", tmp_path) as one, Queue("q", tmp_path) as two:
        one.sync.put({"x": 1})
        with pytest.raises(SchemaError, match="'x'.*int.*str"):
            two.sync.put({"x": "a"})
        two.sync.put({"x": 2})
        one.sync.flush()
        two.sync.flush()
        assert one.sync.get() == two.sync.get() == [{"x": 1}, {"x": 2}]


def test_two_processes_that_put_conflicting_types_before_any_flush_agree_on_the_first(
    tmp_path: Path,
):
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"x": torch.ones(3)})
        answer = run_python(
            "import sys, torch; from persisting_torch import Queue, SchemaError\n"
            "with Queue('q', sys.argv[1]) as queue:\n"
            "    queue.sync.put({'x': torch.ones(5), 'y': 1})\n"
            "    try: queue.sync.put({'x': torch.ones(3).int()})\n"
            "    except SchemaError as error: print(error)",
            tmp_path,
        )
        assert "float32 tensor" in answer
        assert "int32 tensor" in answer
        queue.sync.flush()
        assert [len(record["x"]) for record in queue.sync.get()] == [5, 3]


def test_int_and_float_from_two_handles_are_one_field(tmp_path: Path):
    with Queue("q", tmp_path) as one, Queue("q", tmp_path) as two:
        one.sync.put({"x": 1})
        two.sync.put({"x": 0.5})
        one.sync.put({"x": 2})
        two.sync.flush()
        one.sync.flush()
        assert same(one.sync.get(), [{"x": 0.5}, {"x": 1.0}, {"x": 2.0}])
        assert same(two.sync.get(), one.sync.get())


# Fields that arrive later


def test_put_with_metadata_adds_fields_and_newer_values(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        meta = queue.sync.put([{"prompt": f"p{n}", "score": 0} for n in range(4)])
        part = meta.select_samples([3, 1])
        queue.sync.put(
            TensorDict({"reward": torch.tensor([3.0, 1.0])}, batch_size=[2]), metadata=part
        )
        queue.sync.put([{"score": 7}, {"reward": torch.tensor(9.0)}], metadata=part)
        wanted = [
            {"prompt": "p0", "score": 0, "reward": None},
            {"prompt": "p1", "score": 0, "reward": torch.tensor(9.0)},
            {"prompt": "p2", "score": 0, "reward": None},
            {"prompt": "p3", "score": 7, "reward": torch.tensor(3.0)},
        ]
        assert same(queue.sync.get(), wanted)
        assert len(queue) == 4
        assert queue.sync.get_meta(["reward"], 9, "t").global_indexes == sorted(part.global_indexes)
    with Queue("q", tmp_path) as queue:
        assert same(queue.sync.get(), wanted)
        batch = queue.sync.get_data(part)
        assert batch["reward"].tolist() == [3.0, 9.0]
        assert batch["prompt"] == ["p3", "p1"]


def test_late_fields_may_be_ragged_nested_and_widen_what_is_there(queue: Queue):
    meta = queue.sync.put([{"n": 1, "t": torch.ones(2)}, {"n": 2, "t": torch.ones(2)}])
    queue.sync.put([{"n": 0.5, "t": torch.zeros(3)}], metadata=meta.select_samples([0]))
    td = TensorDict({"obs": {"pixel": torch.arange(4).view(2, 2)}}, batch_size=[2])
    queue.sync.put(td, metadata=meta)
    for _ in range(2):
        assert same(
            queue.sync.get(),
            [
                {"n": 0.5, "t": torch.zeros(3), "obs.pixel": torch.tensor([0, 1])},
                {"n": 2.0, "t": torch.ones(2), "obs.pixel": torch.tensor([2, 3])},
            ],
        )
        queue.sync.flush()
    batch = queue.sync.get_data(BatchMeta(meta.global_indexes, "default"))
    assert batch["obs", "pixel"].tolist() == [[0, 1], [2, 3]]
    assert [row.tolist() for row in batch["t"].unbind()] == [[0, 0, 0], [1, 1]]


def test_none_in_a_late_put_leaves_the_value_that_is_there(queue: Queue):
    meta = queue.sync.put([{"x": 1}, {"x": 2}])
    queue.sync.put([{"x": None, "y": 1}, {"x": 5, "y": None}], metadata=meta)
    assert queue.sync.get() == [{"x": 1, "y": 1}, {"x": 5, "y": None}]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_late_put_of_another_length_is_refused_and_leaves_nothing(queue: Queue, count: int):
    meta = queue.sync.put([{"x": 1}, {"x": 2}])
    with pytest.raises(SchemaError, match=rf"{count} values.*2 samples"):
        queue.sync.put([{"y": 1}] * count, metadata=meta)
    queue.sync.put([{"y": "a"}] * 2, metadata=meta)
    assert queue.sync.get() == [{"x": 1, "y": "a"}, {"x": 2, "y": "a"}]


def test_a_late_put_for_unknown_samples_is_refused_and_leaves_nothing(queue: Queue):
    meta = queue.sync.put([{"x": 1}, {"x": 2}])
    unknown = BatchMeta([meta.global_indexes[0], 10**6], "default")
    with pytest.raises(KeyError, match="1000000"):
        queue.sync.put([{"y": 1}, {"y": 2}], metadata=unknown)
    other = BatchMeta(meta.global_indexes, "other")
    with pytest.raises(KeyError, match="other"):
        queue.sync.put([{"y": 1}, {"y": 2}], metadata=other)
    queue.sync.put([{"y": "a"}] * 2, metadata=meta)
    assert queue.sync.get() == [{"x": 1, "y": "a"}, {"x": 2, "y": "a"}]
    assert queue.sync.stats()["partitions"].keys() == {"default"}


def test_a_late_put_that_names_a_sample_twice_is_refused(queue: Queue):
    meta = queue.sync.put([{"x": 1}, {"x": 2}])
    with pytest.raises(SchemaError, match="more than once"):
        queue.sync.put([{"y": 1}, {"y": 2}], metadata=meta.select_samples([1, 1]))


def test_a_late_put_into_cleared_samples_is_refused(queue: Queue):
    meta = queue.sync.put([{"x": 1}, {"x": 2}])
    queue.sync.clear(meta.global_indexes[:1])
    with pytest.raises(KeyError, match="cleared"):
        queue.sync.put([{"y": 1}, {"y": 2}], metadata=meta)


def test_a_late_field_makes_samples_ready_in_another_process(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        meta = queue.sync.put([{"x": n} for n in range(4)])
        queue.sync.flush()
        run_python(
            "import sys; from persisting_torch import Queue, BatchMeta\n"
            "with Queue('q', sys.argv[1]) as queue:\n"
            "    queue.sync.put([{'y': 7}, {'y': 8}], metadata=BatchMeta([1, 2], 'default'))",
            tmp_path,
        )
        got = queue.sync.get_meta(["x", "y"], 4)
        assert got.global_indexes == meta.global_indexes[1:3]
        assert queue.sync.get_data(got)["y"].tolist() == [7, 8]


# Claiming


def test_a_meta_from_put_reads_its_samples(queue: Queue):
    meta = queue.sync.put(TensorDict({"x": torch.arange(5), "y": torch.ones(5, 2)}, batch_size=[5]))
    assert (meta.size, meta.partition_id, meta.field_names) == (5, "default", ["x", "y"])
    batch = queue.sync.get_data(pickle.loads(pickle.dumps(meta)))
    assert batch.batch_size == torch.Size([5])
    assert batch["x"].tolist() == list(range(5))
    reversed_ = queue.sync.get_data(meta.select_samples([4, 0, 0]).select_fields(["x"]))
    assert list(reversed_.keys()) == ["x"]
    assert reversed_["x"].tolist() == [4, 0, 0]


def test_get_meta_gives_the_first_ready_samples_once_for_each_task(queue: Queue):
    indexes = queue.sync.put([{"x": n} for n in range(10)]).global_indexes
    assert queue.sync.get_meta(["x"], 4).global_indexes == indexes[:4]
    assert queue.sync.get_meta(["x"], 4).global_indexes == indexes[4:8]
    assert queue.sync.get_meta(["x"], 4).global_indexes == indexes[8:]
    assert queue.sync.get_meta(["x"], 4).size == 0
    assert queue.sync.get_meta(["x"], 4, "other task").global_indexes == indexes[:4]
    assert queue.sync.get_meta(["x"], 4, "third", sampler=SequentialSampler()).size == 4


def test_get_meta_passes_over_samples_that_lack_a_field(queue: Queue):
    indexes = queue.sync.put([{"x": 1}, {"x": 1, "y": 2}, {"y": 3}, {"x": 4, "y": None}])
    assert queue.sync.get_meta(["x", "y"], 4).global_indexes == indexes.global_indexes[1:2]
    assert queue.sync.get_meta(None, 4).global_indexes == [
        indexes.global_indexes[at] for at in (0, 2, 3)
    ]


def test_fields_that_were_never_put_are_ready_nowhere(queue: Queue):
    queue.sync.put({"x": 1})
    meta = queue.sync.get_meta(["x", "reward"], 4)
    assert meta.size == 0
    batch = queue.sync.get_batch(["reward"], 4)
    assert batch.batch_size == torch.Size([0])
    assert queue.sync.get_data(meta).batch_size == torch.Size([0])
    assert queue.sync.get_meta(["x"], 4, partition_id="never put").size == 0


def test_reading_an_unknown_field_or_sample_is_a_key_error_that_names_it(queue: Queue):
    meta = queue.sync.put({"x": 1})
    with pytest.raises(KeyError, match="no field nothing.*x"):
        queue.sync.get_data(BatchMeta(meta.global_indexes, "default", ["nothing"]))
    with pytest.raises(KeyError, match="77"):
        queue.sync.get_data(BatchMeta([77], "default"))


def test_a_field_may_be_named_by_where_it_nests(queue: Queue):
    td = TensorDict({"obs": {"a": torch.ones(2), "b": {"c": torch.zeros(2)}}}, batch_size=[2])
    queue.sync.put(td)
    queue.sync.put({"x": 1})
    meta = queue.sync.get_meta(["obs"], 4)
    assert meta.size == 2
    batch = queue.sync.get_data(meta)
    assert batch["obs", "b", "c"].tolist() == [0.0, 0.0]
    assert queue.sync.get_batch(["obs.b"], 4, "t")["obs", "b", "c"].shape == (2,)
    assert queue.sync.get_batch(["obs.a"], 4, "u")["obs", "a"].tolist() == [1.0, 1.0]


def test_batch_sizes_below_one_are_refused(queue: Queue):
    for size in (0, -1):
        with pytest.raises(ValueError, match="batch_size"):
            queue.sync.get_meta(None, size)


def test_rank_aware_and_grpo_samplers_give_all_or_nothing(queue: Queue):
    indexes = queue.sync.put([{"x": n} for n in range(6)]).global_indexes
    rank_aware, grpo = RankAwareSampler(), GRPOGroupNSampler(4)
    ask = {"sampler": rank_aware, "dp_rank": 0}
    assert queue.sync.get_meta(["x"], 7, "r", batch_index=0, **ask).size == 0
    assert queue.sync.get_meta(["x"], 5, "r", batch_index=0, **ask).global_indexes == indexes[:5]
    assert queue.sync.get_meta(["x"], 5, "r", batch_index=0, **ask).global_indexes == indexes[:5]
    assert queue.sync.get_meta(["x"], 5, "r", batch_index=1, **ask).size == 0
    assert queue.sync.get_meta(["x"], 8, "g", sampler=grpo).size == 0
    assert queue.sync.get_meta(["x"], 4, "g", sampler=grpo).global_indexes == indexes[:4]


def test_a_sampler_sees_waiting_samples_too(queue: Queue):
    first = queue.sync.put([{"x": 0}, {"x": 1}, {"x": 2}]).global_indexes
    queue.sync.flush()
    queue.sync.clear([first[1]])
    second = queue.sync.put([{"x": 3}]).global_indexes
    got = queue.sync.get_meta(["x"], 2, sampler=GRPOGroupNSampler(2))
    assert got.global_indexes == [first[2], second[0]]


def test_a_batch_of_one_rank_and_number_is_the_same_in_another_process(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        queue.sync.put([{"x": n} for n in range(64)])
        ask = {"sampler": ShuffleSampler(7), "dp_rank": 1, "batch_index": 3}
        got = queue.sync.get_meta(["x"], 8, **ask).global_indexes
        queue.sync.put([{"x": n} for n in range(64)])
        again = run_python(
            "import sys; from persisting_torch import Queue, ShuffleSampler\n"
            "with Queue('q', sys.argv[1]) as queue:\n"
            "    ask = dict(sampler=ShuffleSampler(7), dp_rank=1, batch_index=3)\n"
            "    print(queue.sync.get_meta(['x'], 8, **ask).global_indexes)",
            tmp_path,
        )
        assert again.strip() == str(got)
        assert len(set(queue.sync.get_meta(["x"], 200).global_indexes) & set(got)) == 0


def test_a_reset_task_begins_anew_with_the_same_sampler_object(queue: Queue):
    indexes = queue.sync.put([{"x": n} for n in range(8)]).global_indexes
    sampler = RankAwareSampler()
    ask = {"sampler": sampler, "dp_rank": 0, "batch_index": 0}
    assert queue.sync.get_meta(["x"], 4, **ask).global_indexes == indexes[:4]
    queue.sync.reset_consumption("default")
    queue.sync.clear(indexes[:2])
    assert queue.sync.get_meta(["x"], 4, **ask).global_indexes == indexes[2:6]


class Greedy:
    """Consumes more than it samples, and may make things up."""

    def __init__(self, sampled: list[int], consumed: list[int]) -> None:
        self.answer = sampled, consumed

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any):
        return self.answer

    def clear_cache(self, partition_id: str) -> None:
        pass


def test_what_a_sampler_consumes_is_consumed_though_it_is_not_in_the_batch(queue: Queue):
    indexes = queue.sync.put([{"x": n} for n in range(4)]).global_indexes
    got = queue.sync.get_meta(["x"], 2, sampler=Greedy(indexes[2:3], indexes[1:]))
    assert got.global_indexes == indexes[2:3]
    assert queue.sync.get_meta(["x"], 4).global_indexes == indexes[:1]


@pytest.mark.parametrize("answer", [([999], [999]), ([0], [999]), ([999], []), ([-5], [-5])])
def test_a_sampler_that_makes_indexes_up_is_refused_and_takes_nothing(
    queue: Queue, answer: tuple[list[int], list[int]]
):
    indexes = queue.sync.put([{"x": n} for n in range(4)]).global_indexes
    with pytest.raises(PersistingError, match="Greedy"):
        queue.sync.get_meta(["x"], 2, sampler=Greedy(*answer))
    assert queue.sync.get_meta(["x"], 4).global_indexes == indexes


def test_a_sampler_that_raises_takes_nothing_and_leaves_the_queue_usable(queue: Queue):
    indexes = queue.sync.put([{"x": n} for n in range(4)]).global_indexes
    with pytest.raises(ValueError, match="multiple"):
        queue.sync.get_meta(["x"], 3, sampler=GRPOGroupNSampler(2))
    assert queue.sync.get_meta(["x"], 4).global_indexes == indexes


def test_mark_consumed_takes_samples_and_reset_gives_them_back(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        indexes = queue.sync.put([{"x": n} for n in range(6)]).global_indexes
        queue.sync.mark_consumed("t", indexes[1:3])
        queue.sync.mark_consumed("t", indexes[2:4])
        queue.sync.mark_consumed("t", [])
        assert queue.sync.get_meta(["x"], 1, "t").global_indexes == indexes[:1]
    with Queue("q", tmp_path) as queue:
        assert queue.sync.get_meta(["x"], 6, "t").global_indexes == indexes[4:]
        queue.sync.reset_consumption("t")
        queue.sync.reset_consumption("unknown task")
        assert queue.sync.get_meta(["x"], 6, "t").global_indexes == indexes


@pytest.mark.parametrize("unknown", [10**6, -1])
def test_marking_or_clearing_unknown_samples_is_a_key_error_that_changes_nothing(
    queue: Queue, unknown: int
):
    indexes = queue.sync.put([{"x": n} for n in range(3)]).global_indexes
    with pytest.raises(KeyError, match=str(unknown)):
        queue.sync.mark_consumed("t", [indexes[0], unknown])
    with pytest.raises(KeyError, match=str(unknown)):
        queue.sync.clear([indexes[0], unknown])
    with pytest.raises(KeyError, match=str(indexes[0])):
        queue.sync.mark_consumed("t", indexes, "other")
    with pytest.raises(KeyError, match=str(indexes[0])):
        queue.sync.clear(indexes, "other")
    assert len(queue) == 3
    assert queue.sync.get_meta(["x"], 3, "t").global_indexes == indexes
    assert queue.sync.stats()["partitions"].keys() == {"default"}


def test_indexes_may_come_as_arrays_tensors_and_ranges(queue: Queue):
    indexes = queue.sync.put([{"x": n} for n in range(8)]).global_indexes
    queue.sync.mark_consumed("t", np.array(indexes[:2]))
    queue.sync.mark_consumed("t", torch.tensor(indexes[2:4]))
    queue.sync.mark_consumed("t", range(indexes[4], indexes[4] + 2))
    queue.sync.clear(np.array(indexes[6:7]))
    assert queue.sync.get_meta(["x"], 8, "t").global_indexes == indexes[7:]


def test_cleared_samples_are_gone_for_good_and_their_indexes_are_never_given_again(
    tmp_path: Path,
):
    with Queue("q", tmp_path) as queue:
        indexes = queue.sync.put([{"x": n} for n in range(6)]).global_indexes
        queue.sync.clear(indexes[4:])
        queue.sync.clear(indexes[1:2])
        queue.sync.clear(indexes[1:2])
        assert [record["x"] for record in queue.sync.get()] == [0, 2, 3]
        assert [record["x"] for record in queue.sync.get(1, 1)] == [2]
        assert len(queue) == 3
        with pytest.raises(KeyError, match="cleared"):
            queue.sync.get_data(BatchMeta(indexes[:2], "default"))
        assert queue.sync.get_meta(["x"], 6).global_indexes == [indexes[at] for at in (0, 2, 3)]
        assert queue.engine.tending.tend()
        assert [record["x"] for record in queue.sync.get()] == [0, 2, 3]
    with Queue("q", tmp_path) as queue:
        new = queue.sync.put([{"x": 10}]).global_indexes
        assert not set(new) & set(indexes)
        assert [record["x"] for record in queue.sync.get()] == [0, 2, 3, 10]
        assert [r["x"] for rs in queue.sync.stream(None, 1) for r in rs] == [2, 3, 10]


def test_partitions_keep_to_themselves(queue: Queue):
    one = queue.sync.put([{"x": n} for n in range(3)], "one").global_indexes
    two = queue.sync.put([{"x": n} for n in range(3)], "two").global_indexes
    assert not set(one) & set(two)
    assert queue.sync.get_meta(["x"], 9, "t", "one").global_indexes == one
    queue.sync.reset_consumption("t", "two")
    assert queue.sync.get_meta(["x"], 9, "t", "one").size == 0
    assert queue.sync.get_meta(["x"], 9, "t", "two").global_indexes == two
    with pytest.raises(KeyError, match="two"):
        queue.sync.get_data(BatchMeta(one, "one", ["x"]), "two")
    with pytest.raises(KeyError, match="two"):
        queue.sync.get_data(BatchMeta(one, "two", ["x"]))
    queue.sync.seal("one")
    queue.sync.put({"x": 1}, "two")


def test_indexes_are_unique_across_handles_clear_and_restart(tmp_path: Path):
    met: list[int] = []
    for _ in range(3):
        with Queue("q", tmp_path) as one, Queue("q", tmp_path) as two:
            for queue in (one, two, one):
                met += queue.sync.put([{"x": n} for n in range(50)]).global_indexes
                met += queue.sync.put({"x": 1}).global_indexes
                met += queue.sync.put(
                    TensorDict({"t": torch.ones(70)}, batch_size=[70])
                ).global_indexes
            one.sync.flush()
            one.sync.clear(met[-70:])
    assert len(met) == len(set(met)) == 3 * 3 * 121


# Sealing, closing


def test_a_sealed_partition_takes_no_more_but_keeps_what_waited(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"x": 1}, "train")
        queue.sync.seal("train")
        for data in ({"x": 2}, [{"x": 2}], TensorDict({"y": torch.ones(2)}, batch_size=[2])):
            with pytest.raises(QueueSealed, match=r"q/train"):
                queue.sync.put(data, "train")
        with Queue("q", tmp_path) as other:
            assert other.sync.get() == [{"x": 1}]
            with pytest.raises(QueueSealed, match=r"q/train"):
                other.sync.put({"x": 2}, "train")
        queue.sync.put({"x": 3}, "val")
        queue.sync.seal()
        with pytest.raises(QueueSealed):
            queue.sync.put({"x": 3}, "val")
        queue.sync.seal("train")
        queue.sync.seal()
        assert queue.sync.get() == [{"x": 1}, {"x": 3}]


def test_a_partition_can_be_sealed_before_its_first_sample(queue: Queue):
    queue.sync.seal("never")
    with pytest.raises(QueueSealed, match="q/never"):
        queue.sync.put({"x": 1}, "never")
    assert queue.engine.await_assignment("t", "never", 0, batch_size=1, timeout=0) is None


def test_a_seal_by_another_process_is_seen_within_a_poll(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"x": 1})
        run_python(
            "import sys; from persisting_torch import Queue\n"
            "with Queue('q', sys.argv[1]) as queue: queue.sync.seal('default')",
            tmp_path,
        )
        time.sleep(0.05)
        with pytest.raises(QueueSealed):
            queue.sync.put({"x": 2})


def test_late_fields_reach_samples_of_a_sealed_partition(queue: Queue):
    meta = queue.sync.put([{"x": 1}])
    queue.sync.seal()
    queue.sync.put([{"y": 2}], metadata=meta)
    assert queue.sync.get() == [{"x": 1, "y": 2}]


def test_a_closed_queue_says_so_whatever_is_asked(tmp_path: Path):
    queue = Queue("q", tmp_path)
    meta = queue.sync.put({"x": 1})
    queue.close()
    queue.close()
    calls = [
        lambda: queue.sync.put({"x": 1}),
        lambda: queue.sync.put([{"x": 1}]),
        lambda: queue.sync.put({"y": 1}, metadata=meta),
        lambda: queue.sync.flush(),
        lambda: queue.sync.get(),
        lambda: list(queue.sync.stream()),
        lambda: queue.sync.get_meta(["x"], 1),
        lambda: queue.sync.get_data(meta),
        lambda: queue.sync.mark_consumed("t", meta.global_indexes),
        lambda: queue.sync.reset_consumption("t"),
        lambda: queue.sync.clear(meta.global_indexes),
        lambda: queue.sync.seal(),
        lambda: queue.sync.stats(),
        lambda: len(queue),
        lambda: queue.to_lance(),
        lambda: queue.producer("p").__enter__(),
        lambda: asyncio.run(queue.put({"x": 1})),
        lambda: asyncio.run(queue.reader(0, 1).get()),
    ]
    for call in calls:
        with pytest.raises(QueueClosed, match="'q'"):
            call()
    with Queue("q", tmp_path) as again:
        assert again.sync.get() == [{"x": 1}]


def test_every_put_that_returned_is_there_though_another_thread_closed_the_queue(tmp_path: Path):
    for attempt in range(5):
        path = tmp_path / str(attempt)
        queue = Queue("q", path, batch_size=50)
        put: list[int] = []

        def keep_putting(queue: Queue = queue, put: list[int] = put) -> None:
            while True:
                try:
                    put += queue.sync.put({"x": 1}).global_indexes
                except QueueClosed:
                    return

        threads = [threading.Thread(target=keep_putting) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        queue.close()
        for thread in threads:
            thread.join()
        with Queue("q", path) as again:
            assert len(again) == len(put)


def test_threads_may_put_new_fields_read_and_claim_at_once(tmp_path: Path):
    errors: list[BaseException] = []
    claimed: list[int] = []
    with Queue("q", tmp_path, batch_size=20) as queue:

        def guarded(action: Any) -> None:
            try:
                for step in range(40):
                    action(step)
            except BaseException as error:
                errors.append(error)

        def put(step: int) -> None:
            queue.sync.put([{"x": step, f"f{step}": step}] * 3)
            queue.sync.put(TensorDict({f"t{step}": torch.ones(2)}, batch_size=[2]))

        def claim(step: int) -> None:
            claimed.extend(queue.sync.get_meta(["x"], 5).global_indexes)

        def read(step: int) -> None:
            queue.sync.get(20)
            queue.sync.get_batch(None, 2, f"task {step % 3}")

        actions = [put, put, claim, claim, read]
        threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(queue) == 2 * 40 * 5
        while (meta := queue.sync.get_meta(["x"], 100)).size:
            claimed += meta.global_indexes
        assert len(claimed) == len(set(claimed)) == 2 * 40 * 3


# Figures


def test_stats_and_len_count_what_is_there(tmp_path: Path):
    with Queue("q", tmp_path, enable_metrics=True) as queue:
        indexes = queue.sync.put([{"x": n} for n in range(10)], "a").global_indexes
        queue.sync.put({"y": "text"}, "b")
        waiting = queue.sync.stats()
        assert (waiting["total_count"], waiting["buffer_size"], len(queue)) == (11, 11, 11)
        queue.sync.get_meta(["x"], 4, "t", "a")
        queue.sync.clear(indexes[:1], "a")
        stats = queue.sync.stats()
        assert (stats["total_count"], stats["persisted_count"], len(queue)) == (10, 10, 10)
        assert stats["partitions"] == {
            "a": {"samples": 9, "sealed": False},
            "b": {"samples": 1, "sealed": False},
        }
        assert stats["tasks"]["t"]["a"]["available"] == 6
        assert stats["fields"] == {"x": "int", "y": "str"}
        assert stats["metrics"]["put"] == 11
        assert stats["metrics"]["claimed"] == 4
        import json

        json.dumps(stats)
    with Queue("q", tmp_path) as queue:
        assert "metrics" not in queue.sync.stats()
        assert len(queue) == 10


# Readers and writers


def test_readers_share_the_records_without_overlap_or_gap(tmp_path: Path):
    async def main() -> None:
        async with Queue("q", tmp_path) as queue:
            await queue.put([{"n": n} for n in range(10)])
            readers = [queue.reader(rank, 3) for rank in range(3)]
            met: list[list[int]] = [[], [], []]

            async def read(limit: int) -> None:
                for reader, own in zip(readers, met, strict=True):
                    own += [record["n"] for record in await reader.get(limit)]

            await read(2)
            await queue.flush()
            await read(100)
            await queue.put([{"n": n} for n in range(10, 17)])
            await read(100)
            await read(100)
            assert met == [list(range(17))[rank::3] for rank in range(3)]
            readers[1].reset()
            assert [r["n"] for r in await readers[1].get(3)] == [1, 4, 7]
            streamed = [r["n"] async for records in readers[1].stream(2) for r in records]
            assert streamed == [10, 13]

    asyncio.run(main())


def test_a_reader_waits_for_its_own_records(tmp_path: Path):
    async def main() -> None:
        async with Queue("q", tmp_path) as queue:
            reader = queue.reader(1, 2)
            waiting = asyncio.create_task(reader.get(wait=True, timeout=10))
            await asyncio.sleep(0.02)
            await queue.put({"n": 0})
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await queue.put({"n": 1})
            assert [record["n"] for record in await waiting] == [1]
            assert await reader.get(wait=True, timeout=0.02) == []

    asyncio.run(main())


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(queue: Queue, rank: int, world_size: int):
    with pytest.raises(ValueError, match="rank"):
        queue.reader(rank, world_size)


def test_a_reader_takes_its_rank_from_torchruns_environment(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
):
    assert (queue.reader().rank, queue.reader().world_size) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (queue.reader().rank, queue.reader().world_size) == (3, 4)
    assert (queue.reader(1, 2).rank, queue.reader(1, 2).world_size) == (1, 2)


def test_a_writer_flushes_when_its_block_ends(tmp_path: Path):
    async def main() -> None:
        with Queue("q", tmp_path) as queue, Queue("q", tmp_path) as other:
            async with queue.writer() as writer:
                await writer.put({"n": 0})
                await writer.put_batch([{"n": 1}, {"n": 2}])
                assert await other.get() == []
            assert [record["n"] for record in await other.get()] == [0, 1, 2]

    asyncio.run(main())


# Producers


def test_a_failed_producer_reaches_the_one_who_waits(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=30)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        with pytest.raises(ZeroDivisionError), queue.producer("rollout-1"):
            queue.sync.put({"x": 1})
            1 / 0  # noqa: B018
        thread.join(10)
        assert len(failed) == 1
        assert isinstance(failed[0], ProducerFailed)
        assert "rollout-1" in str(failed[0])
        assert "ZeroDivisionError: division by zero" in str(failed[0])


def test_a_wait_goes_on_while_another_producer_lives(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        with pytest.raises(ZeroDivisionError), queue.producer("one"):
            1 / 0  # noqa: B018
        with queue.producer("two"), pytest.raises(WaitTimeout):
            queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=1.2)
        with pytest.raises(ProducerFailed, match="one"):
            queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=10)
        with queue.producer("one"), pytest.raises(WaitTimeout):
            queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=1.2)


def test_samples_that_suffice_are_given_though_the_producer_has_failed(queue: Queue):
    with pytest.raises(ZeroDivisionError), queue.producer("one"):
        queue.sync.put([{"x": 1}, {"x": 2}])
        1 / 0  # noqa: B018
    assert queue.engine.await_assignment("t", "default", 0, batch_size=2, timeout=5) is not None


def test_a_killed_producer_reaches_the_one_who_waits_in_another_process(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        producer = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys, time; from persisting_torch import Queue\n"
                "queue = Queue('q', sys.argv[1])\n"
                "with queue.producer('rollout-7'):\n"
                "    queue.sync.put({'x': 1}); queue.sync.flush(); print('up', flush=True)\n"
                "    time.sleep(60)",
                str(tmp_path),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert producer.stdout is not None
        assert producer.stdout.readline() == "up\n"
        with pytest.raises(WaitTimeout):
            queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=1.5)
        os.kill(producer.pid, 9)
        start = time.monotonic()
        try:
            with pytest.raises(ProducerFailed, match=f"rollout-7.*{producer.pid}.*died"):
                queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=30)
            assert time.monotonic() - start < 10
        finally:
            producer.wait()
            producer.stdout.close()


def test_producers_are_checked_though_other_news_keeps_coming(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        with pytest.raises(ZeroDivisionError), queue.producer("one"):
            1 / 0  # noqa: B018
        stop = threading.Event()

        def chatter() -> None:
            while not stop.wait(0.1):
                queue.sync.put({"x": 1}, "other")
                queue.sync.flush()

        thread = threading.Thread(target=chatter)
        thread.start()
        try:
            with pytest.raises(ProducerFailed):
                queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=8)
        finally:
            stop.set()
            thread.join()


# Capacity


def test_puts_wait_while_the_queue_is_full_until_samples_are_consumed(tmp_path: Path):
    with Queue("q", tmp_path, capacity=4) as queue:
        queue.sync.put([{"x": n} for n in range(4)])
        done = threading.Event()

        def put() -> None:
            queue.sync.put({"x": 4})
            done.set()

        thread = threading.Thread(target=put)
        thread.start()
        assert not done.wait(0.3)
        with Queue("q", tmp_path) as consumer:
            assert consumer.sync.get_meta(["x"], 1).size == 1
        assert done.wait(10)
        thread.join()


def test_more_async_puts_than_threads_may_wait_for_room_while_a_consumer_makes_it(
    tmp_path: Path,
):
    async def main() -> list[int]:
        async with Queue("q", tmp_path, capacity=2) as queue:
            puts = [asyncio.create_task(queue.put({"x": n})) for n in range(40)]
            taken: list[int] = []
            while len(taken) < 40:
                meta = await queue.get_meta(["x"], 8)
                taken += meta.global_indexes
                await asyncio.sleep(0.005)
            await asyncio.gather(*puts)
            return taken

    taken = asyncio.run(asyncio.wait_for(main(), 60))
    assert len(set(taken)) == 40


# Options


def test_rows_are_a_plain_lance_dataset_with_readable_columns(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        with pytest.raises(PersistingError, match="'q'.*no rows"):
            queue.to_lance()
        indexes = queue.sync.put(
            [{"reward": 0.5 * n, "prompt": f"p{n}", "ids": torch.arange(2)} for n in range(4)]
        ).global_indexes
        queue.sync.put(TensorDict({"obs": {"pixel": torch.ones(1)}}, batch_size=[1]))
        queue.sync.clear(indexes[:1])
        dataset = queue.to_lance()
        frame = dataset.to_table(columns=["_index", "_partition", "reward", "prompt"]).to_pandas()
        assert frame["_index"].tolist()[:3] == indexes[1:]
        assert frame["prompt"].tolist()[:3] == ["p1", "p2", "p3"]
        assert {"_index", "_partition", "reward", "prompt", "ids"} < set(dataset.schema.names)
        assert dataset.scanner(
            columns=["prompt"], filter="reward > 1.0"
        ).to_table().to_pydict() == {"prompt": ["p3"]}


def test_allow_pickle_false_refuses_objects_at_put_and_at_read(tmp_path: Path):
    with Queue("q", tmp_path) as trusting:
        trusting.sync.put({"x": 1, "thing": {"a": 1}})
    with Queue("q", tmp_path, allow_pickle=False) as careful:
        for data in (
            {"y": {"a": 1}},
            [{"x": 1}, {"y": object}],
            TensorDict({"y": "s"}, batch_size=[]).set_non_tensor("z", {1, 2}),
        ):
            with pytest.raises(SchemaError, match="'q'.*pickle"):
                careful.sync.put(data)
        meta = careful.sync.get_meta(["x"], 1)
        assert careful.sync.get_data(meta)["x"].tolist() == [1]
        for read in (
            lambda: careful.sync.get(),
            lambda: list(careful.sync.stream()),
            lambda: careful.sync.get_data(BatchMeta(meta.global_indexes, "default")),
        ):
            with pytest.raises(SchemaError, match="'thing'.*pickle"):
                read()
        careful.sync.put({"x": 2})


def test_zerocopy_force_refuses_what_needs_pickle_or_a_copy(tmp_path: Path):
    with Queue("q", tmp_path, zerocopy_mode="force") as queue:
        queue.sync.put(TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]))
        with pytest.raises(SchemaError, match="'force'"):
            queue.sync.put({"y": {"a": 1}})
        with pytest.raises(SchemaError, match="'force'.*contiguous"):
            queue.sync.put(TensorDict({"x": torch.ones(3, 2).T}, batch_size=[2]))
        assert len(queue) == 2


@pytest.mark.parametrize("options", [{"zerocopy_mode": "off"}, {"durability": "fsync"}])
def test_other_modes_give_the_same_answers(tmp_path: Path, options: dict[str, Any]):
    with Queue("q", tmp_path, **options) as queue:
        meta = queue.sync.put(
            TensorDict({"x": torch.arange(6).view(2, 3), "w": ["a", "b"]}, batch_size=[2])
        )
        queue.sync.put([{"x": torch.arange(2)}, {"x": None}])
        queue.sync.put([{"r": 1.5}, {"r": 2.5}], metadata=meta)
        batch = queue.sync.get_data(BatchMeta(meta.global_indexes, "default"))
        batch["x"].unbind()[0].add_(1)
    with Queue("q", tmp_path) as queue:
        assert same(
            queue.sync.get(),
            [
                {"x": torch.tensor([0, 1, 2]), "w": "a", "r": 1.5},
                {"x": torch.tensor([3, 4, 5]), "w": "b", "r": 2.5},
                {"x": torch.arange(2), "w": None, "r": None},
                {"x": None, "w": None, "r": None},
            ],
        )


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"auto_flush_interval_sec": -1}, "auto_flush_interval_sec"),
        ({"zerocopy_mode": "maybe"}, "zerocopy_mode"),
        ({"durability": "hope"}, "durability"),
        ({"capacity": 0}, "capacity"),
        ({"num_buckets": 0}, "num_buckets"),
        ({"bucket_column": ""}, "bucket_column"),
        ({"storage_options": {"key": "value"}}, "storage_options"),
    ],
)
def test_bad_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], what: str):
    with pytest.raises(ValueError, match=f"'q'.*{what}"):
        Queue("q", tmp_path, **options)
    assert not (tmp_path / "q").exists()


def test_waiting_samples_are_flushed_after_the_interval(tmp_path: Path):
    with Queue("q", tmp_path, auto_flush_interval_sec=0.05) as queue, Queue("q", tmp_path) as other:
        queue.sync.put({"x": 1})
        deadline = time.monotonic() + 10
        while not other.sync.get() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert other.sync.get() == [{"x": 1}]


def test_the_put_that_fills_the_batch_returns_after_its_flush(tmp_path: Path):
    async def main() -> None:
        with Queue("q", tmp_path, batch_size=3) as queue, Queue("q", tmp_path) as other:
            await queue.put({"x": 0})
            await queue.put({"x": 1})
            assert len(other) == 0
            await queue.put({"x": 2})
            assert len(other) == 3
            await queue.put([{"x": 3}, {"x": 4}, {"x": 5}, {"x": 6}])
            assert len(other) == 7

    asyncio.run(main())


# Global batches


def test_a_global_batch_is_formed_once_and_answered_identically(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        indexes = queue.sync.put([{"x": n} for n in range(10)]).global_indexes
        ask: dict[str, Any] = {"batch_size": 2, "dp_size": 2, "fields": ["x"], "timeout": 0}
        first = queue.engine.await_assignment("t", "default", 0, **ask)
        assert first is not None
        assert first.slices == (tuple(indexes[:2]), tuple(indexes[2:4]))
        assert queue.engine.await_assignment("t", "default", 0, **ask) == first
        with pytest.raises(WaitTimeout):
            queue.engine.await_assignment("t", "default", 2, **ask)
        with pytest.raises(PersistingError, match=r"2 ranks of 2 samples.*1 ranks of 2"):
            queue.engine.await_assignment("t", "default", 0, batch_size=2, timeout=0)
        queue.sync.seal()
        assert queue.engine.await_assignment("t", "default", 2, **ask) is None
    with Queue("q", tmp_path) as queue:
        assert queue.engine.await_assignment("t", "default", 0, **ask) == first
        queue.engine.commit_cursor("t", "default", 1)
        assert queue.engine.cursor("t", "default") == 1
        queue.engine.commit_cursor("t", "default", 0)
        assert queue.engine.cursor("t", "default") == 1
        assert queue.engine.books_of("t", "default") == {
            "put": 10,
            "once": 4,
            "twice": 0,
            "never": 6,
        }
        queue.sync.clear(indexes[:4])
        assert queue.engine.books_of("t", "default") == {
            "put": 10,
            "once": 4,
            "twice": 0,
            "never": 6,
        }


@pytest.mark.parametrize(
    ("last", "sizes", "padding"),
    [("drop", None, None), ("pad", (2, 2), (0, 1)), ("split", (2, 1), (0, 0))],
)
def test_the_remainder_of_a_sealed_partition_is_dropped_padded_or_split(
    queue: Queue, last: Any, sizes: Any, padding: Any
):
    indexes = queue.sync.put([{"x": n} for n in range(7)]).global_indexes
    queue.sync.seal()
    ask: dict[str, Any] = {"batch_size": 2, "dp_size": 2, "last": last, "timeout": 0}
    assert queue.engine.await_assignment("t", "default", 0, **ask) is not None
    rest = queue.engine.await_assignment("t", "default", 1, **ask)
    if sizes is None:
        assert rest is None
        return
    assert tuple(map(len, rest.slices)) == sizes
    assert rest.padding == padding
    assert {index for part in rest.slices for index in part} == set(indexes[4:])
    assert queue.engine.await_assignment("t", "default", 2, **ask) is None


@pytest.mark.parametrize("last", ["pad", "split"])
def test_the_remainder_of_a_sealed_partition_keeps_whole_groups(queue: Queue, last: Any):
    indexes = queue.sync.put([{"x": n} for n in range(11)]).global_indexes
    queue.sync.seal()
    ask: dict[str, Any] = {"batch_size": 4, "dp_size": 2, "last": last, "timeout": 0}
    sampler = GRPOGroupNSampler(2)
    first = queue.engine.await_assignment("t", "default", 0, sampler=sampler, **ask)
    assert first is not None
    rest = queue.engine.await_assignment("t", "default", 1, sampler=sampler, **ask)
    assert rest is not None
    assert {index for part in rest.slices for index in part} == set(indexes[8:10])
    assert queue.engine.await_assignment("t", "default", 2, sampler=sampler, **ask) is None
