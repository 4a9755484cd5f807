"""Who gets which samples: claims, marks, resets, clearing, partitions."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from persisting_torch import (
    BatchMeta,
    GRPOGroupNSampler,
    Queue,
    RankAwareSampler,
    SequentialSampler,
    ShuffleSampler,
)
from persisting_torch.errors import PersistingError
from tests.queue import children


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


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
    with pytest.raises(KeyError, match=r"no field nothing.*x"):
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
        again = children.run(
            "import sys; from persisting_torch import Queue, ShuffleSampler\n"
            "with Queue('q', sys.argv[1]) as queue:\n"
            "    ask = dict(sampler=ShuffleSampler(7), dp_rank=1, batch_index=3)\n"
            "    print(queue.sync.get_meta(['x'], 8, **ask).global_indexes)",
            tmp_path,
        ).out
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


def test_a_read_leaves_out_what_is_cleared_and_removed_before_it_comes_to_the_rows(queue: Queue):
    indexes = queue.sync.put([{"x": n} for n in range(4)]).global_indexes
    queue.sync.flush()
    reads, table = queue.engine.reads, queue.engine.reads.table
    left = [2, 1]

    def clear_first(*arguments: Any) -> Any:
        if left:
            queue.sync.clear([indexes[left.pop()]])
            queue.engine.tending.remove_cleared()
        return table(*arguments)

    reads.table = clear_first  # type: ignore[method-assign]
    assert [record["x"] for record in queue.sync.get()] == [0, 3]
    left += [3, 0]
    assert [r["x"] for records in queue.sync.stream(1) for r in records] == []
    assert len(queue) == 0


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
