from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from persisting_torch.queue.ready import ReadyIndexes
from persisting_torch.samplers import ShuffleSampler

TEN_MILLION = 10_000_000


def drain(sampler, ready, batch_size, **where):
    """Batches until nothing is ready, each consumed before the next is drawn."""
    left, batches = BitMap64(ready), []
    while left:
        where_now = {**where, "batch_index": len(batches)} if where else {}
        sampled, consumed = sampler.sample(ReadyIndexes(left), batch_size, **where_now)
        batches.append(sampled)
        left = left - BitMap64(consumed)
    return batches


@given(
    st.sets(st.integers(0, 2**40), max_size=60),
    st.integers(1, 20),
    st.none() | st.integers(1, 30),
    st.booleans(),
)
def test_draws_until_the_end_give_every_sample_once(indexes, batch_size, window, numbered):
    where = {"partition_id": "p"} if numbered else {}
    batches = drain(ShuffleSampler(5, window), indexes, batch_size, **where)
    assert Counter(index for batch in batches for index in batch) == Counter(indexes)
    assert all(len(batch) == batch_size for batch in batches[:-1])


@given(st.sets(st.integers(0, 2**40), max_size=60), st.integers(0, 70), st.integers(0, 99))
def test_a_draw_depends_on_the_ready_samples_and_not_on_their_container(indexes, size, batch):
    ready = ReadyIndexes(BitMap64(indexes))
    drawn = ShuffleSampler(1).sample(ready, size, batch_index=batch)
    assert drawn == ShuffleSampler(1).sample(sorted(indexes), size, batch_index=batch)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == min(size, len(indexes))


def test_a_replay_draws_the_same_and_everything_else_draws_another():
    ready = range(1000)
    where = {"partition_id": "p", "dp_rank": 0, "batch_index": 3}
    drawn, _ = ShuffleSampler(7).sample(ready, 16, **where)
    sampler = ShuffleSampler(7)
    sampler.sample(ready, 16, **{**where, "batch_index": 2})
    assert sampler.sample(ready, 16, **where) == (drawn, drawn)
    others = [
        ShuffleSampler(8).sample(ready, 16, **where)[0],
        *(
            sampler.sample(ready, 16, **{**where, name: value})[0]
            for name, value in [("partition_id", "q"), ("dp_rank", 1), ("batch_index", 4)]
        ),
    ]
    assert len({tuple(batch) for batch in [drawn, *others]}) == 5


def test_a_draw_is_the_same_in_every_release():
    where = {"partition_id": "train_0", "dp_rank": 1, "batch_index": 2}
    drawn, _ = ShuffleSampler(seed=7).sample(range(100, 200), 5, **where)
    assert drawn == [108, 146, 174, 139, 130]


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_a_draw_is_the_same_in_another_process_whatever_its_hash_seed(hash_seed):
    where = "partition_id='train_0', dp_rank=1, batch_index=2"
    code = (
        "from persisting_torch.samplers import ShuffleSampler\n"
        f"print(ShuffleSampler(7, 500).sample(range(1000), 8, {where})[0])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = ShuffleSampler(7, 500).sample(
        range(1000), 8, partition_id="train_0", dp_rank=1, batch_index=2
    )
    assert printed.strip() == str(here[0])


def test_a_draw_reaches_no_further_than_the_window_and_over_all_of_it():
    sampler = ShuffleSampler(3, window=50)
    drawn = Counter(
        index
        for batch in range(400)
        for index in sampler.sample(range(1000), 8, batch_index=batch)[0]
    )
    assert set(drawn) == set(range(50))
    assert max(drawn.values()) < 3 * min(drawn.values())


def test_a_window_smaller_than_the_batch_still_gives_a_whole_batch():
    sampled, _ = ShuffleSampler(3, window=2).sample(range(100), 8, batch_index=0)
    assert sorted(sampled) == list(range(8))
    assert sampled != sorted(sampled)


def test_samples_that_arrive_behind_the_window_change_nothing():
    sampler = ShuffleSampler(3, window=50)
    before = sampler.sample(range(50), 8, batch_index=1)
    assert sampler.sample(range(5000), 8, batch_index=1) == before


def test_without_a_batch_index_draws_follow_what_is_ready():
    sampler = ShuffleSampler(3, window=50)
    assert sampler.sample(range(100), 8) == ShuffleSampler(3, window=50).sample(range(100), 8)
    positions = {
        tuple(i - shift for i in sampler.sample(range(shift, 100 + shift), 8)[0])
        for shift in range(20)
    }
    assert len(positions) == 20


@pytest.mark.parametrize("numbered", [True, False])
def test_no_sample_is_left_behind_while_new_ones_keep_coming(numbered):
    sampler = ShuffleSampler(11, window=40)
    ready, coming = BitMap64(range(80)), 80
    waited = 0
    for batch in range(500):
        where = {"batch_index": batch} if numbered else {}
        _, consumed = sampler.sample(ReadyIndexes(ready), 10, **where)
        ready = (ready - BitMap64(consumed)) | BitMap64(range(coming, coming + 10))
        coming += 10
        waited = max(waited, coming - ready.min())
    assert len(ready) == 80
    assert waited < 1000


def test_fewer_ready_than_asked_gives_what_there_is():
    sampled, consumed = ShuffleSampler(3).sample([4, 5, 6], 8, batch_index=0)
    assert sorted(sampled) == [4, 5, 6]
    assert consumed == sampled
    assert ShuffleSampler(3).sample([], 8, batch_index=0) == ([], [])
    assert ShuffleSampler(3).sample([], 8) == ([], [])
    assert ShuffleSampler(3).sample([4, 5], 0) == ([], [])


def test_the_lists_are_the_callers_own():
    sampled, consumed = ShuffleSampler(3).sample([4, 5, 6], 2)
    assert sampled is not consumed


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_is_not_positive_is_refused(window):
    with pytest.raises(ValueError, match=f"window must be positive, got {window}"):
        ShuffleSampler(1, window=window)


def test_a_seed_that_is_no_integer_and_a_negative_batch_size_are_refused():
    with pytest.raises(TypeError):
        ShuffleSampler("seed")
    with pytest.raises(ValueError, match="batch_size must not be negative, got -1"):
        ShuffleSampler(1).sample([1, 2], -1)


@pytest.mark.parametrize("window", [None, 1000])
def test_drawing_from_ten_million_reads_only_what_is_drawn(window):
    ready = ReadyIndexes(BitMap64(range(0, 2 * TEN_MILLION, 2)))
    sampler = ShuffleSampler(1, window)
    started = time.perf_counter()
    for batch in range(100):
        assert len(sampler.sample(ready, 32, batch_index=batch)[0]) == 32
    assert time.perf_counter() - started < 10
