"""Putting, figures, options: the plainest parts of a Queue's interface."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from persisting_torch import (
    BatchMeta,
    Queue,
    SchemaError,
)
from persisting_torch.errors import PersistingError
from tests.queue.same import same


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


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
    with pytest.raises(SchemaError, match=r"'q'.*(dict|TensorDict)"):
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


def test_rows_are_a_plain_lance_dataset_with_readable_columns(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        with pytest.raises(PersistingError, match=r"'q'.*no rows"):
            queue.to_lance()
        indexes = queue.sync.put(
            [{"reward": 0.5 * n, "prompt": f"p{n}", "ids": torch.arange(2)} for n in range(4)]
        ).global_indexes
        queue.sync.put(TensorDict({"obs": {"pixel": torch.ones(1)}}, batch_size=[1]))
        queue.sync.clear(indexes[:1])
        dataset = queue.to_lance()
        rows_of_it = dataset.to_table(columns=["_index", "prompt"]).to_pydict()
        assert rows_of_it["_index"][:3] == indexes[1:]
        assert rows_of_it["prompt"][:3] == ["p1", "p2", "p3"]
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
            with pytest.raises(SchemaError, match=r"'q'.*pickle"):
                careful.sync.put(data)
        meta = careful.sync.get_meta(["x"], 1)
        assert careful.sync.get_data(meta)["x"].tolist() == [1]
        for read in (
            lambda: careful.sync.get(),
            lambda: list(careful.sync.stream()),
            lambda: careful.sync.get_data(BatchMeta(meta.global_indexes, "default")),
        ):
            with pytest.raises(SchemaError, match=r"'thing'.*pickle"):
                read()
        careful.sync.put({"x": 2})


def test_zerocopy_force_refuses_what_needs_pickle_or_a_copy(tmp_path: Path):
    with Queue("q", tmp_path, zerocopy_mode="force") as queue:
        queue.sync.put(TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]))
        with pytest.raises(SchemaError, match="'force'"):
            queue.sync.put({"y": {"a": 1}})
        with pytest.raises(SchemaError, match=r"'force'.*contiguous"):
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
