"""Reading records in order: get and stream, bit for bit."""

from __future__ import annotations

import asyncio
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from persisting_torch import (
    Queue,
)
from tests.queue.same import same

NAN_WITH_PAYLOAD = struct.unpack("<d", struct.pack("<Q", 0x7FF8DEADBEEF0001))[0]


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


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
    for key in td.keys():  # noqa: SIM118
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
