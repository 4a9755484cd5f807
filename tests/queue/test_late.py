"""Fields that samples get after they were put."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from persisting_torch import (
    BatchMeta,
    Queue,
    SchemaError,
)
from tests.queue import children
from tests.queue.same import same


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


def test_put_with_metadata_adds_fields_and_newer_values(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        meta = queue.sync.put([{"prompt": f"p{n}", "score": 0} for n in range(4)])
        part = meta.select_samples([3, 1])
        part = queue.sync.put(
            TensorDict({"reward": torch.tensor([3.0, 1.0])}, batch_size=[2]), metadata=part
        )
        assert part.field_names == ["prompt", "score", "reward"]
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
        children.run(
            "import sys; from persisting_torch import Queue, BatchMeta\n"
            "with Queue('q', sys.argv[1]) as queue:\n"
            "    queue.sync.put([{'y': 7}, {'y': 8}], metadata=BatchMeta([1, 2], 'default'))",
            tmp_path,
        )
        got = queue.sync.get_meta(["x", "y"], 4)
        assert got.global_indexes == meta.global_indexes[1:3]
        assert queue.sync.get_data(got)["y"].tolist() == [7, 8]


def test_late_fields_are_folded_by_themselves_in_a_quiet_moment(queue: Queue):
    meta = queue.sync.put([{"x": n} for n in range(20)])
    queue.sync.flush()
    queue.sync.put([{"y": n} for n in range(20)], metadata=meta)
    deadline = time.monotonic() + 30
    while queue.engine.books.late:
        assert time.monotonic() < deadline, "no upkeep came"
        time.sleep(0.05)
    assert [record["y"] for record in queue.sync.get()] == list(range(20))
