from __future__ import annotations

import pytest
from pyroaring import BitMap64

from persisting_torch.queue.ready import ReadyIndexes
from persisting_torch.samplers import SequentialSampler


@pytest.mark.parametrize(
    ("ready", "batch_size", "expected"),
    [
        ([0, 1, 2, 3, 4, 5], 3, [0, 1, 2]),
        ([], 3, []),
        ([0, 1], 5, [0, 1]),
        ([0, 1, 2, 3], 0, []),
        ([0, 1, 2, 3], -1, [0, 1, 2]),
        ([0, 1, 2, 3], -9, []),
        ([10, 5, 15, 20, 8], 3, [10, 5, 15]),
        ([0, 1, 0, 2, 1, 3], 4, [0, 1, 0, 2]),
    ],
)
def test_the_front_is_sampled_and_consumed_in_the_order_given(ready, batch_size, expected):
    assert SequentialSampler().sample(ready, batch_size) == (expected, expected)


def test_other_arguments_are_of_no_account():
    sampler = SequentialSampler()
    assert sampler.sample([4, 5, 6], 2, "ignored", dp_rank=3, other=1) == ([4, 5], [4, 5])
    assert not sampler.has_cached_result("", "", {"dp_rank": 3})


def test_the_lists_are_the_callers_own():
    ready = [1, 2, 3]
    sampled, consumed = SequentialSampler().sample(ready, 3)
    sampled.clear()
    assert (ready, consumed) == ([1, 2, 3], [1, 2, 3])


def test_ready_indexes_of_a_queue_are_sampled_as_a_list_is():
    ready = ReadyIndexes(BitMap64([8, 3, 5]))
    assert SequentialSampler().sample(ready, 2) == ([3, 5], [3, 5])
    assert SequentialSampler().sample(ready, 9) == ([3, 5, 8], [3, 5, 8])
