"""Samples by key: put, updated, tagged, read and removed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from persisting_torch import KVInterface, Queue, QueueSealed, SchemaError
from tests.queue import children
from tests.queue.same import same


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


@pytest.fixture
def kv(queue: Queue) -> KVInterface:
    return KVInterface(queue)


def run(action: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(action)


def test_a_put_on_a_known_key_updates_the_given_fields_and_keeps_the_others(
    queue: Queue, kv: KVInterface
):
    run(kv.kv_put("a", {"prompt": "p", "score": 1}, "train", tag={"step": 1}))
    run(kv.kv_put("a", {"score": 2, "reward": torch.tensor(0.5)}, "train"))
    got = run(kv.kv_batch_get(["a"], "train"))
    assert got["prompt"] == ["p"]
    assert got["score"].tolist() == [2]
    assert got["reward"].tolist() == [0.5]
    assert run(kv.kv_list("train")) == [("a", {"step": 1})]
    assert len(queue) == 1
    run(kv.kv_put("a", {"score": 3}, "train", tag={"step": 2}))
    assert run(kv.kv_list("train")) == [("a", {"step": 2})]


def test_data_of_none_updates_only_the_tag(queue: Queue, kv: KVInterface):
    run(kv.kv_put("a", {"x": 1}, "train"))
    assert run(kv.kv_list("train")) == [("a", None)]
    run(kv.kv_put("a", None, "train", tag={"n": [1, None]}))
    assert run(kv.kv_list("train")) == [("a", {"n": [1, None]})]
    run(kv.kv_put("a", None, "train"))
    assert run(kv.kv_list("train")) == [("a", {"n": [1, None]})]
    assert queue.sync.get() == [{"x": 1}]


def test_unknown_keys_are_key_errors_that_name_them(queue: Queue, kv: KVInterface):
    run(kv.kv_put("a", {"x": 1}, "train"))
    for action in (
        kv.kv_batch_get(["a", "b", "c"], "train"),
        kv.kv_clear(["a", "b", "c"], "train"),
        kv.kv_batch_put(["a", "b", "c"], None, "train", [{}, {}, {}]),
    ):
        with pytest.raises(KeyError, match=r"q/train.*'b', 'c'"):
            run(action)
    with pytest.raises(KeyError, match=r"never.*'a'"):
        run(kv.kv_batch_get(["a"], "never"))
    assert run(kv.kv_list("never")) == []
    assert run(kv.kv_list("train")) == [("a", None)]
    assert len(queue) == 1


def test_what_a_put_by_key_has_done_is_durable_and_seen_by_a_second_process(
    tmp_path: Path, queue: Queue, kv: KVInterface
):
    run(kv.kv_batch_put(["b", "a"], [{"x": 1}, {"x": 2}], "train", [None, {"t": 1}]))
    answer = children.run(
        """
        import asyncio, sys
        from persisting_torch import KVInterface, Queue
        with Queue("q", sys.argv[1]) as queue:
            kv = KVInterface(queue)
            print(asyncio.run(kv.kv_list("train")))
            print(asyncio.run(kv.kv_batch_get(["a", "b"], "train"))["x"].tolist())
            asyncio.run(kv.kv_put("a", {"x": 7}, "train", {"t": 2}))
            asyncio.run(kv.kv_clear(["b"], "train"))
        """,
        tmp_path,
    ).out
    assert answer.splitlines() == ["[('a', {'t': 1}), ('b', None)]", "[2, 1]"]
    assert run(kv.kv_list("train")) == [("a", {"t": 2})]
    assert run(kv.kv_batch_get(["a"], "train"))["x"].tolist() == [7]


def test_samples_come_back_in_the_order_of_the_keys_asked_for(kv: KVInterface):
    run(kv.kv_batch_put(list("abc"), [{"x": n} for n in range(3)], "train"))
    got = run(kv.kv_batch_get(["c", "a", "b", "a"], "train"))
    assert got["x"].tolist() == [2, 0, 1, 0]
    assert run(kv.kv_batch_get([], "train")).batch_size == torch.Size([0])


def test_only_the_fields_asked_for_come_back(kv: KVInterface):
    run(kv.kv_put("a", {"x": 1, "y": 2}, "train"))
    assert list(run(kv.kv_batch_get(["a"], "train", ["y"])).keys()) == ["y"]


def test_tensordicts_are_put_whole_and_updated_in_part(queue: Queue, kv: KVInterface):
    td = TensorDict({"ids": torch.arange(6).view(3, 2)}, batch_size=[3])
    run(kv.kv_batch_put(["a", "b", "c"], td, "train"))
    run(kv.kv_put("b", TensorDict({"ids": torch.tensor([9, 9])}, batch_size=[]), "train"))
    run(kv.kv_put("d", TensorDict({"ids": torch.tensor([[8, 8]])}, batch_size=[1]), "train"))
    mixed = TensorDict({"ids": torch.full((2, 2), 7)}, batch_size=[2])
    run(kv.kv_batch_put(["new", "a"], mixed, "train"))
    got = run(kv.kv_batch_get(["a", "b", "c", "d", "new"], "train"))
    assert got["ids"].tolist() == [[7, 7], [9, 9], [4, 5], [8, 8], [7, 7]]
    assert len(queue) == 5


def test_keys_of_one_put_that_come_twice_are_refused(queue: Queue, kv: KVInterface):
    with pytest.raises(SchemaError, match=r"'a'.*more than once"):
        run(kv.kv_batch_put(["a", "b", "a"], [{"x": 1}] * 3, "train"))
    assert len(queue) == 0


def test_as_many_samples_and_tags_as_keys_are_wanted(queue: Queue, kv: KVInterface):
    with pytest.raises(SchemaError, match=r"1 samples.*2 keys"):
        run(kv.kv_batch_put(["a", "b"], [{"x": 1}], "train"))
    with pytest.raises(SchemaError, match=r"1 tags.*2 keys"):
        run(kv.kv_batch_put(["a", "b"], [{"x": 1}] * 2, "train", [{}]))
    with pytest.raises(SchemaError, match="tag of key 'a'"):
        run(kv.kv_put("a", {"x": 1}, "train", {"t": object()}))
    assert len(queue) == 0


def test_a_put_of_known_and_new_keys_is_refused_whole(queue: Queue, kv: KVInterface):
    run(kv.kv_put("old", {"x": 1}, "train"))
    for data in ([{"x": 2}, {"x": "text"}], [{"x": "text"}, {"x": 2}]):
        with pytest.raises(SchemaError, match="'x'"):
            run(kv.kv_batch_put(["new", "old"], data, "train"))
    assert queue.sync.get() == [{"x": 1}]
    assert run(kv.kv_list("train")) == [("old", None)]


def test_cleared_keys_are_gone_with_their_samples_and_can_be_put_anew(
    queue: Queue, kv: KVInterface
):
    run(kv.kv_batch_put(["a", "b"], [{"x": 1}, {"x": 2}], "train"))
    run(kv.kv_clear(["a"], "train"))
    assert run(kv.kv_list("train")) == [("b", None)]
    assert queue.sync.get() == [{"x": 2}]
    run(kv.kv_put("a", {"y": 3}, "train"))
    assert same(queue.sync.get(), [{"x": 2, "y": None}, {"x": None, "y": 3}])


def test_a_sample_cleared_by_its_index_takes_its_key_with_it(queue: Queue, kv: KVInterface):
    run(kv.kv_put("a", {"x": 1}, "train"))
    index = run(kv.kv_batch_get(["a"], "train", ["_index"]))["_index"].tolist()
    queue.sync.clear(index, "train")
    assert run(kv.kv_list("train")) == []


def test_keys_are_of_their_partition(kv: KVInterface):
    run(kv.kv_put("a", {"x": 1}, "one"))
    run(kv.kv_put("a", {"x": 2}, "two"))
    run(kv.kv_put("a", {"x": 3}, "one"))
    assert run(kv.kv_batch_get(["a"], "one"))["x"].tolist() == [3]
    assert run(kv.kv_batch_get(["a"], "two"))["x"].tolist() == [2]


ODD = ["a/b", "..", " ", "'; DROP TABLE keys; --", "é😀", "%2F", "x" * 1000, "a\nb", "A", "a"]


def test_keys_may_hold_any_characters(kv: KVInterface):
    run(kv.kv_batch_put(ODD, [{"x": n} for n in range(len(ODD))], "tr/ain"))
    assert run(kv.kv_batch_get(ODD, "tr/ain"))["x"].tolist() == list(range(len(ODD)))
    assert [key for key, _ in run(kv.kv_list("tr/ain"))] == sorted(ODD, key=str.encode)


@pytest.mark.parametrize("key", ["", 7, "x" * 1001, "\ud800"])
def test_what_cannot_be_a_key_is_refused(queue: Queue, kv: KVInterface, key: Any):
    with pytest.raises(SchemaError, match="key"):
        run(kv.kv_put(key, {"x": 1}, "train"))
    assert len(queue) == 0


def test_keyed_samples_are_claimed_like_others(queue: Queue, kv: KVInterface):
    run(kv.kv_batch_put(["a", "b"], [{"x": 1}, {"x": 2}], "train"))
    assert queue.sync.get_batch(["x"], 5, "t", "train")["x"].tolist() == [1, 2]
    run(kv.kv_put("a", {"y": 1}, "train"))
    assert queue.sync.get_batch(["x", "y"], 5, "u", "train")["y"].tolist() == [1]


def test_a_sealed_partition_takes_no_new_keys_but_updates_of_known_ones(
    queue: Queue, kv: KVInterface
):
    run(kv.kv_put("a", {"x": 1}, "train"))
    queue.sync.seal("train")
    with pytest.raises(QueueSealed):
        run(kv.kv_put("b", {"x": 1}, "train"))
    run(kv.kv_put("a", {"x": 2}, "train"))
    assert queue.sync.get() == [{"x": 2}]


def test_two_handles_that_put_the_same_new_keys_at_once_share_the_samples(tmp_path: Path):
    keys = [f"k{n}" for n in range(12)]
    with Queue("q", tmp_path) as one, Queue("q", tmp_path) as two:

        def put(queue: Queue, field: str) -> None:
            for key in keys:
                run(KVInterface(queue).kv_put(key, {field: 1}, "train"))

        threads = [
            threading.Thread(target=put, args=(queue, field))
            for queue, field in ((one, "x"), (two, "y"), (one, "z"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one.sync.get() == [{"x": 1, "y": 1, "z": 1}] * len(keys)


def test_a_put_of_a_new_key_waits_for_room_and_one_of_a_known_key_does_not(tmp_path: Path):
    async def fill(queue: Queue, kv: KVInterface) -> None:
        for key in ("a", "b"):
            await kv.kv_put(key, {"x": 1}, "train")
        await asyncio.wait_for(kv.kv_put("a", {"x": 2}, "train"), 10)
        third = asyncio.create_task(kv.kv_put("c", {"x": 3}, "train"))
        await asyncio.sleep(0.2)
        assert not third.done()
        await queue.get_meta(["x"], 1, partition_id="train")
        await asyncio.wait_for(third, 10)

    with Queue("q", tmp_path, capacity=2) as queue:
        run(fill(queue, KVInterface(queue)))
        assert len(queue) == 3


def test_the_same_methods_are_there_without_await(queue: Queue, kv: KVInterface):
    kv.sync.kv_put("a", {"x": 1}, "train", tag={"step": 1})
    kv.sync.kv_batch_put(["a", "b"], [{"x": 2}, {"x": 3}], "train")
    assert kv.sync.kv_batch_get(["b", "a"], "train")["x"].tolist() == [3, 2]
    assert kv.sync.kv_list("train") == [("a", {"step": 1}), ("b", None)]
    kv.sync.kv_clear(["a"], "train")
    assert kv.sync.kv_list("train") == [("b", None)]
    assert run(kv.kv_batch_get(["b"], "train"))["x"].tolist() == [3]


def test_a_put_returns_the_metadata_of_its_samples_in_the_order_of_the_keys(
    queue: Queue, kv: KVInterface
):
    first = run(kv.kv_put("b", {"x": 1}, "train", tag={"n": 1}))
    assert (first.global_indexes, first.field_names) == ([0], ["x"])
    assert (first.partition_id, first.custom_meta) == ("train", [{"n": 1}])
    both = run(kv.kv_batch_put(["a", "b"], [{"x": 2, "y": 1}, {"x": 3, "y": 2}], "train"))
    assert (both.global_indexes, sorted(both.field_names)) == ([1, 0], ["x", "y"])
    assert queue.sync.get_data(both)["x"].tolist() == [2, 3]
    tagged = run(kv.kv_put("a", None, "train", tag={"n": 2}))
    assert (tagged.global_indexes, tagged.field_names) == ([1], [])


def test_the_metadata_of_keys_names_the_fields_that_all_of_them_have(kv: KVInterface):
    run(kv.kv_batch_put(["a", "b"], [{"x": 1, "y": 1}, {"x": 2}], "train", [{"n": 1}, None]))
    meta = run(kv.kv_meta(["b", "a"], "train"))
    assert (meta.global_indexes, meta.field_names) == ([1, 0], ["x"])
    assert meta.custom_meta == [{}, {"n": 1}]
    assert run(kv.kv_meta("a", "train")).field_names == ["x", "y"]
    assert run(kv.kv_meta("a", "train", ["y"])).field_names == ["y"]
    with pytest.raises(KeyError, match="nothing"):
        run(kv.kv_meta(["a", "nothing"], "train"))


def test_the_keys_of_samples_come_in_the_order_of_the_samples(queue: Queue, kv: KVInterface):
    run(kv.kv_batch_put(["b", "a"], [{"x": 1}, {"x": 2}], "train"))
    queue.sync.put({"x": 3}, "train")
    assert run(kv.kv_keys([1, 0, 1], "train")) == ["a", "b", "a"]
    assert run(kv.kv_keys(0, "train")) == ["b"]
    for indexes, partition in ([2], "train"), ([0], "val"):
        with pytest.raises(KeyError, match=str(indexes[0])):
            run(kv.kv_keys(indexes, partition))


def test_a_single_key_or_field_may_be_given_as_it_is(kv: KVInterface):
    run(kv.kv_batch_put(["key", "k"], [{"long": 1, "y": 1}, {"long": 2, "y": 2}], "train"))
    got = run(kv.kv_batch_get("key", "train", "long"))
    assert (list(got.keys()), got["long"].tolist()) == (["long"], [1])
    run(kv.kv_clear("key", "train"))
    assert run(kv.kv_list("train")) == [("k", None)]
