from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from persisting_torch.queue.ready import ReadyIndexes
from persisting_torch.samplers import GRPOGroupNSampler

TEN_MILLION = 10_000_000


@pytest.mark.parametrize(
    ("n", "ready", "batch_size", "expected"),
    [
        (4, [0, 1, 2, 3, 4, 5, 6, 7], 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (4, list(range(12)), 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1, [0, 1, 2, 3, 4, 5], 3, [0, 1, 2]),
        (1, [9, 3, 6], 2, [3, 6]),
        (4, [3, 4, 5, 6, 9, 10, 11, 12], 8, [3, 4, 5, 6, 9, 10, 11, 12]),
        (3, [0, 1, 3, 4, 5, 6, 7, 9, 10, 11], 6, [3, 4, 5, 9, 10, 11]),
        (4, [10, 11, 12, 5, 6, 7, 8, 9], 8, [5, 6, 7, 8, 9, 10, 11, 12]),
        (2, [0, 0, 1, 2], 2, [0, 1]),
        (2, [0, 1, 2, 3], 0, []),
        (2, [0, 1, 2, 3], -2, []),
    ],
)
def test_the_first_complete_groups_are_sampled_and_consumed(n, ready, batch_size, expected):
    assert GRPOGroupNSampler(n).sample(ready, batch_size) == (expected, expected)


@pytest.mark.parametrize(
    ("n", "ready", "batch_size"),
    [
        (4, [0, 1, 2, 3], 8),
        (4, list(range(16)), 20),
        (3, [0, 1, 3, 4, 6, 7], 6),
        (3, [0, 1, 3, 4, 5, 6, 7], 6),
        (2, [], 2),
    ],
)
def test_too_few_complete_groups_give_nothing_at_all(n, ready, batch_size):
    assert GRPOGroupNSampler(n).sample(ready, batch_size) == ([], [])
    assert GRPOGroupNSampler(n).sample(ReadyIndexes(BitMap64(ready)), batch_size) == ([], [])


def test_the_ready_list_is_left_as_it_was():
    ready = [3, 2, 1, 0]
    GRPOGroupNSampler(2).sample(ready, 4)
    assert ready == [3, 2, 1, 0]


@pytest.mark.parametrize("n", [0, -2])
def test_a_group_size_that_is_not_positive_is_refused(n):
    with pytest.raises(ValueError, match=f"n_samples_per_prompt must be positive, got {n}"):
        GRPOGroupNSampler(n_samples_per_prompt=n)


def test_a_batch_that_would_tear_a_group_apart_is_refused():
    with pytest.raises(ValueError, match="must be a multiple of n_samples_per_prompt 4"):
        GRPOGroupNSampler(4).sample(list(range(8)), 7)


def test_a_cached_answer_goes_before_a_batch_size_that_does_not_fit():
    sampler = GRPOGroupNSampler(2)
    assert sampler.sample([0, 1], 2, "task", "p", dp_rank=0, batch_index=0) == ([0, 1], [0, 1])
    assert sampler.sample([], 3, "task", "p", dp_rank=0, batch_index=0) == ([0, 1], [0, 1])


def test_without_a_rank_every_answer_is_chosen_anew():
    sampler = GRPOGroupNSampler(2)
    assert sampler.sample([0, 1, 2, 3], 2, "task", "p", batch_index=0) == ([0, 1], [0, 1])
    assert sampler.sample([2, 3], 2, "task", "p", batch_index=0) == ([2, 3], [2, 3])


def test_with_a_rank_but_no_batch_index_the_first_answer_stays():
    sampler = GRPOGroupNSampler(2)
    assert sampler.sample([0, 1, 2, 3], 2, dp_rank=1) == ([0, 1], [0, 1])
    assert sampler.sample([2, 3], 2, dp_rank=1) == ([0, 1], [0, 1])


def first_groups(indexes: list[int], n: int, batch_size: int) -> list[int]:
    """Try every place for a group, from the left."""
    found: list[int] = []
    place = 0
    while place + n <= len(indexes) and len(found) < batch_size:
        group = indexes[place : place + n]
        whole = group == list(range(group[0], group[0] + n))
        found += group if whole else []
        place += n if whole else 1
    return found if len(found) == batch_size else []


@given(st.sets(st.integers(0, 200), max_size=200), st.integers(1, 5), st.integers(0, 8))
def test_lists_and_ready_indexes_give_the_leftmost_groups(indexes, n, groups):
    expected = first_groups(sorted(indexes), n, n * groups)
    sampler = GRPOGroupNSampler(n)
    assert sampler.sample(list(indexes), n * groups) == (expected, expected)
    assert sampler.sample(ReadyIndexes(BitMap64(indexes)), n * groups) == (expected, expected)


def test_a_complete_group_behind_many_incomplete_ones_is_found_without_reading_them_all():
    broken = BitMap64(range(TEN_MILLION)) - BitMap64(range(0, TEN_MILLION, 8))
    whole = list(range(TEN_MILLION + 1, TEN_MILLION + 9))
    sampler = GRPOGroupNSampler(8)
    started = time.perf_counter()
    for _ in range(20):
        assert sampler.sample(ReadyIndexes(broken), 8) == ([], [])
        assert sampler.sample(ReadyIndexes(broken | BitMap64(whole)), 8) == (whole, whole)
    assert time.perf_counter() - started < 10


def test_in_training_every_rank_gets_whole_groups():
    deal = GRPOGroupNSampler(2).deal
    assert deal([0, 1, 3, 4, 5, 6, 8, 9], 2, 3) == [[0, 1], [3, 4], [5, 6]]
    assert deal([0, 1, 3, 4, 5, 6, 8, 9], 4, 2) == [[0, 1, 3, 4], [5, 6, 8, 9]]
    assert deal([0, 1, 3, 4, 5], 2, 3) == []
    with pytest.raises(ValueError, match="must be a multiple of n_samples_per_prompt 2"):
        deal([0, 1, 2, 3, 4, 5], 3, 2)
