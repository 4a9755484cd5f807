from __future__ import annotations

import pickle
import random
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyroaring import BitMap64

from persisting_torch.queue.ready import ReadyIndexes

TEN_MILLION = 10_000_000

elements = st.one_of(st.integers(0, 300), st.integers(65_500, 65_600), st.integers(0, 2**63 - 1))
index_sets = st.one_of(
    st.sets(elements, max_size=60),
    st.sets(st.integers(0, 400), max_size=400),
    st.tuples(st.integers(0, 2**40), st.integers(0, 500)).map(lambda s: set(range(s[0], sum(s)))),
)
bounds = st.none() | st.integers(-520, 520)
steps = st.none() | st.integers(-520, 520).filter(bool)


def ready_of(indexes: object) -> ReadyIndexes:
    return ReadyIndexes(BitMap64(indexes))


@given(index_sets, bounds, bounds, steps)
@example(set(range(500)), None, None, -100)
@example(set(range(500)), None, None, 100)
@example(set(range(500)), 490, 3, -7)
def test_every_slice_is_the_slice_of_the_sorted_list(indexes, start, stop, step):
    assert ready_of(indexes)[start:stop:step] == sorted(indexes)[start:stop:step]


@given(index_sets.filter(bool), st.data())
def test_every_position_holds_what_the_sorted_list_holds_there(indexes, data):
    position = data.draw(st.integers(-len(indexes), len(indexes) - 1))
    assert ready_of(indexes)[position] == sorted(indexes)[position]
    assert ready_of(indexes)[np.int64(position)] == sorted(indexes)[position]


@given(index_sets, st.integers(0, 70))
def test_the_first_n_are_the_smallest_n_or_all_there_are(indexes, n):
    assert ready_of(indexes).first(n) == sorted(indexes)[:n]


@given(index_sets)
def test_length_order_and_reverse_are_those_of_the_sorted_list(indexes):
    ready, expected = ready_of(indexes), sorted(indexes)
    assert len(ready) == len(expected)
    assert bool(ready) is bool(expected)
    assert list(ready) == expected
    assert sorted(ready) == expected
    assert list(reversed(ready)) == expected[::-1]


@given(index_sets, elements, bounds, bounds)
def test_index_finds_what_a_list_finds_between_the_same_bounds(indexes, value, start, stop):
    expected = sorted(indexes)
    searched = () if start is None else (start,) if stop is None else (start, stop)
    try:
        position = expected.index(value, *searched)
    except ValueError:
        with pytest.raises(ValueError, match="not among the ready indexes"):
            ready_of(indexes).index(value, *searched)
    else:
        assert ready_of(indexes).index(value, *searched) == position
    assert ready_of(indexes).count(value) == expected.count(value)
    assert (value in ready_of(indexes)) is (value in expected)


@pytest.mark.parametrize("stranger", [-1, 2**64, 2**70, "3", None, 3.5])
def test_what_no_bitmap_can_hold_is_simply_not_in_it(stranger):
    assert stranger not in ready_of([1, 2, 3])


@given(index_sets, index_sets)
def test_equality_with_lists_and_views_is_equality_of_elements(left, right):
    assert (ready_of(left) == sorted(right)) is (left == right)
    assert (ready_of(left) == ready_of(right)) is (left == right)
    assert (ready_of(left) != sorted(right)) is (left != right)


def test_a_view_equals_a_list_but_no_tuple_as_a_list_does():
    assert ready_of([1, 2]) == [1, 2]
    assert ready_of([1, 2]) != [2, 1]
    assert ready_of([1, 2]) != (1, 2)


@pytest.mark.parametrize("position", [3, -4, 10**6])
def test_a_position_out_of_range_is_an_index_error_that_says_how_many_are_ready(position):
    with pytest.raises(IndexError, match=f"position {position} is out of range: 3 indexes"):
        ready_of([4, 5, 6])[position]


def test_a_position_that_is_no_integer_is_a_type_error():
    with pytest.raises(TypeError):
        ready_of([1, 2, 3])["1"]


def test_elements_are_plain_integers():
    ready = ready_of([2**40, 7])
    assert {type(index) for index in [*ready, ready[0], *ready[:], *ready.first(1)]} == {int}


def test_a_view_cannot_be_changed():
    ready = ready_of([1, 2, 3])
    with pytest.raises(TypeError):
        ready[0] = 9
    with pytest.raises(TypeError):
        del ready[0]
    with pytest.raises(TypeError):
        hash(ready)


@given(index_sets)
def test_numpy_gets_an_int64_array_of_the_elements(indexes):
    array = np.asarray(ready_of(indexes))
    assert array.dtype == np.int64
    assert array.tolist() == sorted(indexes)


def test_the_repr_stays_short_whatever_the_length():
    assert repr(ready_of(range(TEN_MILLION))) == "ReadyIndexes(10000000 from 0 to 9999999)"
    assert repr(ready_of([])) == "ReadyIndexes(empty)"


def test_a_view_survives_pickling():
    ready = ready_of([1, 5, 2**40])
    assert pickle.loads(pickle.dumps(ready)) == ready


@given(index_sets, st.integers(1, 9))
def test_in_runs_of_keeps_exactly_the_members_of_long_enough_runs(indexes, length):
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    expected = [index for run in runs if len(run) >= length for index in run]
    assert ready_of(indexes).in_runs_of(length) == expected


def test_reading_a_few_of_ten_million_builds_none_of_the_others():
    ready = ready_of(range(0, 2 * TEN_MILLION, 2))
    started = time.perf_counter()
    for _ in range(100):
        assert ready.first(2) == [0, 2]
        assert ready[5_000_000:5_000_003] == [10_000_000, 10_000_002, 10_000_004]
        assert ready[-1:-3:-1] == [19_999_998, 19_999_996]
        assert ready[:: -TEN_MILLION // 2] == [19_999_998, 9_999_998]
        assert ready.index(8_000_000) == 4_000_000
        assert len(random.sample(ready, 32)) == 32
    assert time.perf_counter() - started < 10
