"""Fields whose types grow, and types that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from persisting_torch import (
    Queue,
    SchemaError,
)
from tests.queue import children
from tests.queue.same import same


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


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
        with pytest.raises(SchemaError, match=r"'x'.*int.*str"):
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
        answer = children.run(
            "import sys, torch; from persisting_torch import Queue, SchemaError\n"
            "with Queue('q', sys.argv[1]) as queue:\n"
            "    queue.sync.put({'x': torch.ones(5), 'y': 1})\n"
            "    try: queue.sync.put({'x': torch.ones(3).int()})\n"
            "    except SchemaError as error: print(error)",
            tmp_path,
        ).out
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
