from __future__ import annotations

import pytest
from pyroaring import BitMap64

from persisting_torch.queue.ready import ReadyIndexes
from persisting_torch.samplers import RankAwareSampler


def ask(sampler, ready, batch_size, rank=0, batch=0, task="task", partition="test"):
    return sampler.sample(
        ready, batch_size, dp_rank=rank, batch_index=batch, task_name=task, partition_id=partition
    )


def test_the_first_to_ask_gets_the_front():
    assert ask(RankAwareSampler(), [5, 1, 2, 3], 3) == ([5, 1, 2], [5, 1, 2])


def test_peers_of_one_rank_get_the_same_batch_whatever_is_ready_by_then():
    sampler = RankAwareSampler()
    assert ask(sampler, [0, 1, 2, 3], 2) == ([0, 1], [0, 1])
    assert ask(sampler, [2, 3], 2) == ([0, 1], [0, 1])
    assert ask(sampler, [], 2) == ([0, 1], [0, 1])
    assert ask(sampler, [2, 3, 4], 3) == ([0, 1], [0, 1])


def test_another_batch_another_rank_another_task_and_another_partition_are_chosen_anew():
    sampler = RankAwareSampler()
    assert ask(sampler, [0, 1, 2, 3], 2) == ([0, 1], [0, 1])
    assert ask(sampler, [2, 3], 2, batch=1) == ([2, 3], [2, 3])
    assert ask(sampler, [4, 5], 2, rank=1) == ([4, 5], [4, 5])
    assert ask(sampler, [6, 7], 2, task="other") == ([6, 7], [6, 7])
    assert ask(sampler, [8, 9], 2, partition="other") == ([8, 9], [8, 9])
    assert ask(sampler, [], 2) == ([0, 1], [0, 1])


@pytest.mark.parametrize(
    ("ready", "batch_size", "expected"),
    [([], 3, []), ([0, 1], 5, []), ([0, 1, 2], 0, []), ([0, 1, 2], -1, [0, 1])],
)
def test_a_batch_is_given_whole_or_not_at_all(ready, batch_size, expected):
    assert ask(RankAwareSampler(), ready, batch_size) == (expected, expected)


def test_a_negative_rank_is_refused_even_where_an_answer_is_cached():
    sampler = RankAwareSampler()
    ask(sampler, [0, 1], 2)
    with pytest.raises(ValueError, match="dp_rank must be greater than or equal to 0, got -1"):
        ask(sampler, [0, 1], 2, rank=-1)


def test_rank_batch_task_and_partition_have_to_be_given():
    with pytest.raises(TypeError, match="dp_rank"):
        RankAwareSampler().sample([0, 1], 2, batch_index=0, task_name="t", partition_id="p")


def test_arguments_may_be_positional_and_more_than_the_sampler_knows():
    sampler = RankAwareSampler()
    assert sampler([0, 1], 2, 0, 7, "task", "p", "ignored", other=42) == ([0, 1], [0, 1])
    assert sampler.has_cached_result("p", "task", {"dp_rank": 0, "batch_index": 7})


def test_ready_indexes_of_a_queue_are_sampled_as_a_list_is():
    sampler = RankAwareSampler()
    ready = ReadyIndexes(BitMap64([8, 3, 5]))
    assert ask(sampler, ready, 4) == ([], [])
    assert ask(sampler, ready, 2) == ([3, 5], [3, 5])
    assert ask(sampler, ReadyIndexes(BitMap64()), 2) == ([3, 5], [3, 5])
