"""Runs, sets and the mirror of the ledger, each against something plain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from persisting_torch import Queue
from persisting_torch.queue.runs import Runs
from persisting_torch.queue.sets import pack_list, pack_set, set_of, unpack_list, unpack_set


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.booleans()), max_size=200),
    st.randoms(),
)
def test_runs_map_indexes_to_rows_and_back_as_a_dict_does(
    appended: list[tuple[int, int, bool]], chance
):
    runs, rows, row, index = Runs(), {}, 0, 0
    entered: list[tuple[int, int, int]] = []
    for gap, count, longer in appended:
        if longer and entered and gap == 0:
            first, already, first_row = entered[-1]
            entered[-1] = (first, already + count, first_row)
        else:
            index += gap + 1
            entered.append((index, count, row))
        runs.add(*entered[-1])
        for _ in range(count):
            rows[index] = row
            index, row = index + 1, row + 1
    assert len(runs) == len(entered)
    asked = [chance.randrange(-2, index + 3) for _ in range(50)]
    assert runs.rows_of(asked).tolist() == [rows.get(index, -1) for index in asked]
    indexes = {row: index for index, row in rows.items()}
    wanted = np.array([chance.randrange(-2, row + 3) for _ in range(50)], dtype=np.int64)
    assert runs.indexes_of(wanted).tolist() == [indexes.get(int(row), -1) for row in wanted]


def test_runs_may_come_in_any_order_of_indexes():
    runs = Runs()
    for number in reversed(range(300)):
        runs.add(number * 10, 3, (299 - number) * 3)
    assert runs.rows_of([0, 2, 3, 2990]).tolist() == [897, 899, -1, 0]
    assert runs.indexes_of(np.array([0, 899, 900])).tolist() == [2990, 2, -1]


indexes = st.integers(0, 2**63 - 1) | st.integers(0, 50)


@given(st.sets(indexes))
def test_a_set_comes_back_from_its_columns(members: set[int]):
    assert unpack_set(*pack_set(BitMap64(members))) == BitMap64(members)


@example([2**63 - 2, 2**63 - 512])  # at the end of int64, where a range has no integer to stop at
@given(st.lists(indexes))
def test_a_list_comes_back_from_its_columns_in_its_order(members: list[int]):
    assert unpack_list(*pack_list(members)) == members


@pytest.mark.parametrize(
    "steps", [range(0), range(5), range(7, 9), range(2, 20, 3), range(9, 2, -1)]
)
def test_ranges_are_sets_and_lists_like_others(steps: range):
    assert unpack_list(*pack_list(steps)) == list(steps)
    assert set(set_of(steps)) == set(steps)
    assert unpack_set(*pack_set(set_of(steps))) == BitMap64(list(steps))


def test_consecutive_indexes_cost_two_numbers_in_the_ledger():
    assert pack_set(set_of(range(5, 10**6))) == (5, 10**6 - 5, None)
    assert pack_list(range(5, 10**6)) == (5, 10**6 - 5, None)
    assert pack_list([3, 4, 5]) == (3, 3, None)


def test_a_view_follows_what_arrives_is_taken_and_is_cleared(tmp_path: Path):
    with Queue("q", tmp_path) as one, Queue("q", tmp_path) as two:

        def available(*fields: str) -> list[int]:
            return [
                queue.engine.claims.available("t", "default", frozenset(fields))
                for queue in (one, two)
            ]

        meta = one.sync.put([{"x": n} for n in range(10)])
        one.sync.flush()
        assert available("x") == [10, 10]
        assert available("x", "y") == [0, 0]
        two.sync.put([{"y": n} for n in range(4)], metadata=meta.select_samples(range(4)))
        assert available("x", "y") == [4, 4]
        assert one.sync.get_meta(["x"], 2, "t").size == 2
        assert available("x", "y") == [2, 2]
        two.sync.clear(meta.global_indexes[3:6])
        assert available("x", "y") == [1, 1]
        assert available("x") == [5, 5]
        one.sync.reset_consumption("t")
        assert available("x", "y") == [3, 3]
        assert available("x") == [7, 7]


def test_folded_claims_and_arrivals_say_the_same_to_old_and_new_handles(tmp_path: Path):
    with Queue("q", tmp_path) as one, Queue("q", tmp_path) as two:
        for n in range(8):
            one.sync.put([{"x": n}, {"y": n}, {"x": n}])
            one.sync.put({"x": n}, "other")
            one.sync.flush()
            one.sync.get_meta(["x"], 1, "t")
        two.sync.get_meta(["x"], 1, "t")
        with one.engine.ledger.transaction() as tx:
            one.engine.claims.fold(tx, 2)
            from persisting_torch.queue.commit import fold_arrivals

            fold_arrivals(tx, 2)
            assert tx.execute("SELECT count(*) FROM claims").fetchone() == (0,)
        one.sync.put([{"x": 8}])
        one.sync.flush()
        two.sync.get_meta(["x"], 1, "t")
        with Queue("q", tmp_path) as three:
            for queue in (one, two, three):
                view = queue.engine.claims.available("t", "default", frozenset(["x"]))
                assert view == 8 * 2 + 1 - 8 - 2
            taken = [queue.engine.books.tasks["t", "default"].taken for queue in (one, two, three)]
            assert taken[0] == taken[1] == taken[2]
