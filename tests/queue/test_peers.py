"""What is asked about partitions, and what is noted about samples: TransferQueue's questions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from persisting_torch import BatchMeta, KVInterface, Queue, SchemaError


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


def told(status: tuple[torch.Tensor, torch.Tensor]) -> dict[int, Any]:
    indexes, values = status
    assert indexes.dtype == torch.int64
    assert values.dtype == torch.int8
    return dict(zip(indexes.tolist(), values.tolist(), strict=True))


def test_consumption_status_tells_of_each_sample_whether_the_task_took_it(queue: Queue):
    queue.sync.put([{"x": n} for n in range(4)], "train")
    assert told(queue.sync.get_consumption_status("t", "train")) == {0: 0, 1: 0, 2: 0, 3: 0}
    queue.sync.get_meta(["x"], 2, "t", "train")
    queue.sync.mark_consumed("t", [3], "train")
    assert told(queue.sync.get_consumption_status("t", "train")) == {0: 1, 1: 1, 2: 0, 3: 1}
    assert told(queue.sync.get_consumption_status("other", "train")) == {0: 0, 1: 0, 2: 0, 3: 0}
    assert not queue.sync.check_consumption_status("t", "train")
    queue.sync.clear([2], "train")
    assert told(queue.sync.get_consumption_status("t", "train")) == {0: 1, 1: 1, 3: 1}
    assert queue.sync.check_consumption_status("t", "train")
    queue.sync.put({"x": 9}, "train")
    assert not queue.sync.check_consumption_status("t", "train")


def test_production_status_tells_of_each_sample_and_field_whether_it_is_there(queue: Queue):
    queue.sync.put([{"x": n} for n in range(3)], "train")
    queue.sync.put([{"y": 1.0}, {"y": 2.0}], "train", metadata=BatchMeta([0, 2], "train"))
    status = queue.sync.get_production_status(["y", "x", "z"], "train")
    assert told(status) == {0: [1, 1, 0], 1: [0, 1, 0], 2: [1, 1, 0]}
    assert queue.sync.check_production_status(["x"], "train")
    assert not queue.sync.check_production_status(["x", "y"], "train")
    queue.sync.put([{"y": 3.0}], "train", metadata=BatchMeta([1], "train"))
    assert queue.sync.check_production_status(["x", "y"], "train")


def test_a_nested_field_is_there_when_all_of_it_is(queue: Queue):
    part = TensorDict({"obs": TensorDict({"image": torch.zeros(2, 3)}, [2])}, [2])
    queue.sync.put(part)
    late = TensorDict({"obs": TensorDict({"depth": torch.zeros(1, 3)}, [1])}, [1])
    queue.sync.put(late, metadata=BatchMeta([1], "default"))
    assert told(queue.sync.get_production_status(["obs"])) == {0: [0], 1: [1]}


def test_a_partition_without_samples_is_empty_and_neither_produced_nor_consumed(queue: Queue):
    assert told(queue.sync.get_consumption_status("t", "none")) == {}
    indexes, status = queue.sync.get_production_status(["x", "y"], "none")
    assert indexes.shape == (0,)
    assert status.shape == (0, 2)
    assert not queue.sync.check_consumption_status("t", "none")
    assert not queue.sync.check_production_status(["x"], "none")
    assert queue.sync.peek_meta(None, "none").size == 0
    queue.sync.clear_partition("none")


@settings(max_examples=25, deadline=None)
@given(
    put=st.integers(0, 12),
    taken=st.sets(st.integers(0, 11)),
    cleared=st.sets(st.integers(0, 11)),
)
def test_the_status_is_that_of_a_model_in_memory(
    tmp_path_factory: pytest.TempPathFactory, put: int, taken: set[int], cleared: set[int]
):
    taken, cleared = ({n for n in some if n < put} for some in (taken, cleared))
    with Queue("q", tmp_path_factory.mktemp("q")) as queue:
        queue.sync.put([{"x": n} for n in range(put)])
        queue.sync.mark_consumed("t", sorted(taken))
        queue.sync.clear(sorted(cleared))
        present = sorted(set(range(put)) - cleared)
        assert told(queue.sync.get_consumption_status("t")) == {n: n in taken for n in present}
        assert queue.sync.check_consumption_status("t") == (bool(present) and {*present} <= taken)
        assert queue.sync.peek_meta().global_indexes == present


def test_the_partition_list_names_those_that_hold_samples(queue: Queue):
    assert queue.sync.get_partition_list() == []
    queue.sync.put({"x": 1}, "b")
    queue.sync.flush()
    queue.sync.put({"x": 1}, "a")
    assert queue.sync.get_partition_list() == ["a", "b"]
    queue.sync.clear_partition("b")
    assert queue.sync.get_partition_list() == ["a"]
    queue.sync.put({"x": 1}, "b")
    assert queue.sync.get_partition_list() == ["a", "b"]


def test_clearing_a_partition_leaves_the_others_and_takes_its_keys(queue: Queue):
    kv = KVInterface(queue)
    kv.sync.kv_batch_put(["a", "b"], [{"x": 1}, {"x": 2}], "train")
    queue.sync.put({"x": 3}, "val")
    queue.sync.clear_partition("train")
    assert kv.sync.kv_list("train") == []
    assert queue.sync.get() == [{"x": 3}]
    assert kv.sync.kv_put("a", {"x": 4}, "train").global_indexes == [3]


def test_a_peek_takes_nothing_and_sees_what_others_took(queue: Queue):
    queue.sync.put([{"x": n, "y": n} for n in range(3)] + [{"x": 3}])
    queue.sync.get_meta(["x"], 2, "t")
    peeked = queue.sync.peek_meta(["x", "y"])
    assert (peeked.global_indexes, peeked.field_names) == ([0, 1, 2], ["x", "y"])
    assert queue.sync.get_data(peeked)["y"].tolist() == [0, 1, 2]
    assert queue.sync.peek_meta().size == 4
    assert queue.sync.get_meta(["x"], 9, "t").global_indexes == [2, 3]


def test_custom_meta_comes_back_with_every_meta_of_the_samples_and_after_opening_anew(
    tmp_path: Path,
):
    with Queue("q", tmp_path) as queue:
        queue.sync.put([{"x": n} for n in range(4)])
        meta = queue.sync.peek_meta()[1:3]
        meta.update_custom_meta([{"score": 0.5}, {"score": None, "tags": ["a"]}])
        queue.sync.set_custom_meta(meta)
    with Queue("q", tmp_path) as queue:
        claimed = queue.sync.get_meta(["x"], 4)
        assert claimed.custom_meta == [{}, {"score": 0.5}, {"score": None, "tags": ["a"]}, {}]
        assert queue.sync.peek_meta().custom_meta == claimed.custom_meta
        assert queue.sync.get() == [{"x": n} for n in range(4)]


def test_custom_meta_that_is_set_takes_the_place_of_what_was(queue: Queue):
    queue.sync.put([{"x": 0}, {"x": 1}])
    queue.sync.set_custom_meta(BatchMeta([0, 1], "default", (), [{"a": 1, "b": 1}, {"a": 2}]))
    queue.sync.set_custom_meta(BatchMeta([0, 1], "default", (), [{"a": 3}, {}]))
    assert queue.sync.peek_meta().custom_meta == [{"a": 3}, {}]


def test_custom_meta_is_found_for_samples_far_apart_and_in_any_order(queue: Queue):
    queue.sync.put(TensorDict({"x": torch.arange(3000)}, [3000]))
    noted = BatchMeta([5, 2990, 1500], "default", (), [{"n": 5}, {"n": 2990}, {"n": 1500}])
    queue.sync.set_custom_meta(noted)
    assert queue.engine.custom.of([2990, 7, 5]) == [{"n": 2990}, {}, {"n": 5}]
    assert queue.engine.custom.of(range(4, 7)) == [{}, {"n": 5}, {}]
    assert queue.engine.custom.of(range(6, 9)) is None


def test_custom_meta_of_a_sample_with_a_key_is_its_tag(queue: Queue):
    kv = KVInterface(queue)
    kv.sync.kv_batch_put(["a", "b"], [{"x": 1}, {"x": 2}], "kv", [{"s": 1}, None])
    meta = queue.sync.get_meta(["x"], 2, "t", "kv")
    assert meta.custom_meta == [{"s": 1}, {}]
    meta.custom_meta[1]["s"] = 2
    queue.sync.set_custom_meta(meta)
    assert kv.sync.kv_list("kv") == [("a", {"s": 1}), ("b", {"s": 2})]
    kv.sync.kv_put("a", None, "kv", tag={"s": 3})
    assert queue.sync.peek_meta(None, "kv").custom_meta == [{"s": 3}, {"s": 2}]


def test_custom_meta_goes_with_its_sample(queue: Queue):
    queue.sync.put([{"x": 0}, {"x": 1}])
    queue.sync.set_custom_meta(BatchMeta([0, 1], "default", (), [{"a": 1}, {"a": 2}]))
    queue.sync.clear([0])
    assert queue.sync.peek_meta().custom_meta == [{"a": 2}]
    with queue.engine.ledger.reading() as tx:
        assert tx.execute("SELECT sample FROM custom").fetchall() == [(1,)]


@pytest.mark.parametrize("note", [{"a": torch.zeros(2)}, {"a": {1, 2}}, {"a": object()}])
def test_custom_meta_that_json_cannot_hold_is_refused_and_nothing_is_noted(
    queue: Queue, note: dict[str, Any]
):
    queue.sync.put([{"x": 0}, {"x": 1}])
    with pytest.raises(SchemaError, match="sample 1"):
        queue.sync.set_custom_meta(BatchMeta([0, 1], "default", (), [{"a": 1}, note]))
    assert queue.sync.peek_meta().custom_meta == [{}, {}]


def test_custom_meta_of_a_sample_that_is_not_there_is_a_key_error(queue: Queue):
    queue.sync.put([{"x": 0}, {"x": 1}])
    queue.sync.clear([1])
    for index in (1, 7):
        with pytest.raises(KeyError, match=str(index)):
            queue.sync.set_custom_meta(BatchMeta([0, index], "default", (), [{"a": 1}, {"a": 1}]))
    assert queue.sync.peek_meta().custom_meta == [{}]


def test_resetting_without_a_task_resets_all_tasks_of_the_partition(queue: Queue):
    for partition in ("train", "val"):
        queue.sync.put([{"x": 0}, {"x": 1}], partition)
        for task in ("a", "b"):
            queue.sync.get_meta(["x"], 2, task, partition)
    queue.sync.reset_consumption(None, "train")
    for task in ("a", "b"):
        assert not queue.sync.check_consumption_status(task, "train")
        assert queue.sync.check_consumption_status(task, "val")
        assert queue.sync.get_meta(["x"], 2, task, "train").size == 2


async def ask_everything(queue: Queue) -> list[Any]:
    meta = await queue.peek_meta(["x"], "train")
    meta.update_custom_meta([{"n": 1}])
    await queue.set_custom_meta(meta)
    answers = [
        await queue.get_partition_list(),
        (await queue.peek_meta(["x"], "train")).custom_meta,
        told(await queue.get_consumption_status("t", "train")),
        told(await queue.get_production_status(["x"], "train")),
        await queue.check_consumption_status("t", "train"),
        await queue.check_production_status(["x"], "train"),
    ]
    await queue.reset_consumption(None, "train")
    await queue.clear_partition("train")
    return [*answers, await queue.get_partition_list()]


def test_every_question_can_be_awaited(queue: Queue):
    queue.sync.put({"x": 1}, "train")
    found = asyncio.run(ask_everything(queue))
    assert found == [["train"], [{"n": 1}], {0: 0}, {0: [1]}, False, True, []]
