from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from persisting_torch.samplers import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SequentialSampler,
    ShuffleSampler,
)

WHERE = {"task_name": "train", "partition_id": "p0"}
CACHING = [RankAwareSampler, GRPOGroupNSampler]


class LastFirst(BaseSampler):
    """A user's own sampler."""

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        newest = list(ready_indexes[-batch_size:])[::-1]
        return newest, newest[:1]


def test_the_base_cannot_be_made_without_a_sample_method():
    with pytest.raises(TypeError, match="abstract"):
        BaseSampler()


def test_a_subclass_needs_only_a_sample_method():
    sampler = LastFirst()
    assert sampler.sample([1, 2, 3, 4], 2) == ([4, 3], [4])
    assert not sampler.has_cached_result("p0", "train", {"dp_rank": 0, "batch_index": 0})
    sampler.clear_cache("p0")
    LastFirst().load_checkpoint(sampler.save_checkpoint())


@pytest.mark.parametrize(
    "sampler", [LastFirst(), SequentialSampler(), ShuffleSampler(3), GRPOGroupNSampler(2)]
)
def test_calling_a_sampler_is_sampling(sampler):
    ready = list(range(8))
    where = {**WHERE, "batch_index": 5}
    assert sampler(ready, 4, **where) == sampler.sample(ready, 4, **where)


@pytest.mark.parametrize("kind", CACHING)
def test_an_answer_is_cached_for_its_partition_task_rank_and_batch_alone(kind):
    sampler = kind()
    sampler.sample([1, 2], 2, dp_rank=0, batch_index=7, **WHERE)
    assert sampler.has_cached_result("p0", "train", {"dp_rank": 0, "batch_index": 7})
    for partition, task, rank, batch in [
        ("p1", "train", 0, 7),
        ("p0", "other", 0, 7),
        ("p0", "train", 1, 7),
        ("p0", "train", 0, 8),
        ("p0", "train", None, 7),
        ("p0", "train", 0, None),
    ]:
        config = {"dp_rank": rank, "batch_index": batch}
        assert not sampler.has_cached_result(partition, task, config)
    assert not sampler.has_cached_result("p0", "train")
    assert not sampler.has_cached_result("p0", "train", {})
    assert not sampler.has_cached_result("p0", "train", {"batch_index": 7})


@pytest.mark.parametrize("kind", CACHING)
def test_an_answer_that_could_not_be_given_is_not_cached(kind):
    sampler = kind()
    assert sampler.sample([1], 2, dp_rank=0, batch_index=0, **WHERE) == ([], [])
    assert not sampler.has_cached_result("p0", "train", {"dp_rank": 0, "batch_index": 0})
    assert sampler.sample([1, 2], 2, dp_rank=0, batch_index=0, **WHERE) == ([1, 2], [1, 2])


@pytest.mark.parametrize("kind", CACHING)
def test_clearing_one_partition_leaves_the_answers_of_others(kind):
    sampler = kind()
    for partition in ("p0", "p1"):
        sampler.sample(
            [1, 2], 2, dp_rank=0, batch_index=0, task_name="train", partition_id=partition
        )
    sampler.clear_cache("p0")
    sampler.clear_cache("never seen")
    question = {"dp_rank": 0, "batch_index": 0}
    assert not sampler.has_cached_result("p0", "train", question)
    assert sampler.has_cached_result("p1", "train", question)
    assert sampler.sample([5, 6], 2, **question, **WHERE) == ([5, 6], [5, 6])


@pytest.mark.parametrize("kind", CACHING)
def test_a_caller_that_changes_its_lists_does_not_change_the_cached_answer(kind):
    sampler = kind()
    question = {"dp_rank": 0, "batch_index": 0, **WHERE}
    for _ in range(3):
        sampled, consumed = sampler.sample([1, 2, 3], 2, **question)
        assert (sampled, consumed) == ([1, 2], [1, 2])
        sampled.append(99)
        assert consumed == [1, 2]
        consumed.clear()


@pytest.mark.parametrize("kind", CACHING)
def test_a_loaded_checkpoint_repeats_the_answers_given_before_it_was_saved(kind):
    sampler = kind()
    sampler.sample([1, 2], 2, dp_rank=0, batch_index=0, **WHERE)
    saved = sampler.save_checkpoint()
    sampler.sample([3, 4], 2, dp_rank=0, batch_index=1, **WHERE)

    restored = kind()
    restored.load_checkpoint(saved)
    assert restored.sample([8, 9], 2, dp_rank=0, batch_index=0, **WHERE) == ([1, 2], [1, 2])
    assert restored.sample([8, 9], 2, dp_rank=0, batch_index=1, **WHERE) == ([8, 9], [8, 9])
    assert sampler.sample([8, 9], 2, dp_rank=0, batch_index=1, **WHERE) == ([3, 4], [3, 4])
