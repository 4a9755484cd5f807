"""Global batches: formed once, the same for every rank and replay, every sample in one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from persisting_torch import (
    GRPOGroupNSampler,
    PersistingError,
    Queue,
    RankAwareSampler,
    SequentialSampler,
    ShuffleSampler,
    WaitTimeout,
)
from persisting_torch.queue.assignments import Assignment


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue("q", tmp_path) as queue:
        yield queue


def put(queue: Queue, count: int, partition: str = "train") -> list[int]:
    td = TensorDict({"x": torch.arange(count)}, [count])
    return queue.sync.put(td, partition).global_indexes


def ask(queue: Queue, k: int, **options: Any) -> Assignment | None:
    options = {"batch_size": 4, "dp_size": 1, "timeout": 0.0, **options}
    return queue.engine.await_assignment("fit", "train", k, **options)


def everything(queue: Queue, **options: Any) -> list[list[int]]:
    """Indexes of all global batches up to the end, padding left out."""
    found: list[list[int]] = []
    while (got := ask(queue, len(found), **options)) is not None:
        own = [part[: len(part) - pad] for part, pad in zip(got.slices, got.padding, strict=True)]
        found.append([index for part in own for index in part])
    return found


def test_a_batch_is_answered_identically_to_every_rank_and_after_a_restart(tmp_path: Path) -> None:
    with Queue("q", tmp_path) as first, Queue("q", tmp_path) as second:
        put(first, 40)
        answer = ask(first, 0, dp_size=2)
        assert answer is not None
        assert [len(part) for part in answer.slices] == [4, 4]
        put(first, 40)
        assert ask(second, 0, dp_size=2) == answer
    with Queue("q", tmp_path) as third:
        assert ask(third, 0, dp_size=2) == answer


def test_slices_of_successive_batches_are_disjoint_and_in_order(queue: Queue) -> None:
    indexes = put(queue, 24)
    found = [ask(queue, k, dp_size=3) for k in range(2)]
    assert [i for a in found if a for part in a.slices for i in part] == indexes


def test_a_rank_that_asks_ahead_forms_the_batches_before_it(queue: Queue) -> None:
    indexes = put(queue, 12)
    third = ask(queue, 2)
    assert third is not None
    assert list(third.slices[0]) == indexes[8:]
    first = ask(queue, 0)
    assert first is not None
    assert list(first.slices[0]) == indexes[:4]


def test_a_batch_is_given_out_only_when_every_rank_gets_its_part(queue: Queue) -> None:
    put(queue, 7)
    with pytest.raises(WaitTimeout, match=r"8 samples of q/train.*7 ready"):
        ask(queue, 0, dp_size=2)
    put(queue, 1)
    assert ask(queue, 0, dp_size=2) is not None


@pytest.mark.parametrize(
    ("last", "sizes"), [("drop", [8, 8]), ("split", [8, 8, 5]), ("pad", [8, 8, 5])]
)
def test_a_sealed_partition_ends_as_last_says(queue: Queue, last: Any, sizes: list[int]) -> None:
    indexes = put(queue, 21)
    queue.sync.seal("train")
    found = everything(queue, dp_size=2, last=last)
    assert [len(batch) for batch in found] == sizes
    assert [i for batch in found for i in batch] == indexes[: sum(sizes)]


def test_a_split_remainder_is_shared_by_all_ranks_or_left(queue: Queue) -> None:
    put(queue, 8 + 3)
    queue.sync.seal("train")
    last = ask(queue, 1, dp_size=2, last="split")
    assert last is not None
    assert [len(part) for part in last.slices] == [2, 1]
    assert ask(queue, 2, dp_size=2, last="split") is None


def test_a_remainder_smaller_than_the_number_of_ranks_cannot_be_split(queue: Queue) -> None:
    put(queue, 8 + 1)
    queue.sync.seal("train")
    assert ask(queue, 0, dp_size=2, last="split") is not None
    assert ask(queue, 1, dp_size=2, last="split") is None


def test_padding_repeats_samples_of_the_remainder_and_says_how_many(queue: Queue) -> None:
    indexes = put(queue, 3)
    queue.sync.seal("train")
    padded = ask(queue, 0, dp_size=2, last="pad")
    assert padded is not None
    assert [len(part) for part in padded.slices] == [4, 4]
    assert padded.padding == (1, 4)
    assert {i for part in padded.slices for i in part} == set(indexes)


@pytest.mark.parametrize("last", ["drop", "split", "pad"])
def test_a_sealed_and_empty_partition_has_no_batch(queue: Queue, last: Any) -> None:
    queue.sync.seal("train")
    assert ask(queue, 0, last=last) is None


def test_sealing_the_queue_ends_a_partition_that_never_got_a_sample(queue: Queue) -> None:
    queue.sync.seal()
    assert ask(queue, 0) is None


def test_a_sealed_partition_waits_for_fields_that_may_still_come(queue: Queue) -> None:
    meta = queue.sync.put([{"x": i} for i in range(6)], "train")
    queue.sync.put({"x": 6, "reward": 0.0}, "train")
    queue.sync.seal("train")
    with pytest.raises(WaitTimeout, match=r"1 ready, 6 lack reward"):
        ask(queue, 0, fields=["x", "reward"])
    queue.sync.put([{"reward": float(i)} for i in range(6)], metadata=meta)
    assert ask(queue, 0, fields=["x", "reward"]) is not None
    assert ask(queue, 1, fields=["x", "reward"]) is None


def test_a_field_that_no_sample_ever_had_ends_a_sealed_partition_at_once(queue: Queue) -> None:
    put(queue, 8)
    queue.sync.seal("train")
    assert ask(queue, 0, fields=["y"]) is None


@pytest.mark.parametrize("sampler", [None, SequentialSampler(), RankAwareSampler()])
def test_samplers_that_keep_the_order_give_the_same_batches(queue: Queue, sampler: Any) -> None:
    indexes = put(queue, 16)
    queue.sync.seal("train")
    found = everything(queue, dp_size=2, sampler=sampler)
    assert [i for batch in found for i in batch] == indexes


def test_groups_stay_whole_on_one_rank(queue: Queue) -> None:
    put(queue, 24)
    queue.sync.seal("train")
    for k in range(3):
        got = ask(queue, k, dp_size=2, sampler=GRPOGroupNSampler(4))
        assert got is not None
        for part in got.slices:
            assert list(part) == list(range(part[0], part[0] + 4))


def test_a_shuffled_order_takes_every_sample_once_and_is_the_same_in_a_second_run(
    tmp_path: Path,
) -> None:
    orders = []
    for name in ("one", "two"):
        with Queue(name, tmp_path) as queue:
            indexes = put(queue, 40)
            queue.sync.seal("train")
            batches = everything(queue, sampler=ShuffleSampler(seed=7))
            orders.append([i for batch in batches for i in batch])
            assert sorted(orders[-1]) == indexes
            assert orders[-1] != indexes
    assert orders[0] == orders[1]


@pytest.mark.parametrize(("batch_size", "dp_size"), [(4, 1), (4, 3), (2, 2), (16, 1)])
def test_a_run_that_resumes_with_other_sizes_trains_every_sample_once(
    queue: Queue, batch_size: int, dp_size: int
) -> None:
    indexes = put(queue, 64)
    queue.sync.seal("train")
    trained = [i for k in range(3) for i in _indexes(ask(queue, k, dp_size=2))]
    ask(queue, 5, dp_size=2)  # read ahead, and lost
    sizes = {"batch_size": batch_size, "dp_size": dp_size}
    queue.engine.recut("fit", "train", 3, **sizes)
    rest: list[int] = []
    k = 3
    while (got := ask(queue, k, last="split", **sizes)) is not None:
        assert len(got.slices) == dp_size
        rest += _indexes(got)
        k += 1
    left = (64 - len(trained)) % (batch_size * dp_size)
    lost = left if left < dp_size else 0
    assert sorted(trained + rest) == indexes[: 64 - lost]
    assert _indexes(ask(queue, 0, dp_size=2)) == indexes[:8]


def test_a_recut_below_the_cursor_moves_it_back_and_is_seen_by_other_handles(
    tmp_path: Path,
) -> None:
    with Queue("q", tmp_path) as queue, Queue("q", tmp_path) as other:
        put(queue, 32)
        for k in range(4):
            ask(queue, k)
        queue.engine.commit_cursor("fit", "train", 4)
        assert other.engine.cursor("fit", "train") == 4
        queue.engine.recut("fit", "train", 2, batch_size=8)
        assert other.engine.cursor("fit", "train") == 2
        assert _indexes(ask(other, 2, batch_size=8)) == list(range(8, 16))
        assert other.engine.books_of("fit", "train") == {
            "put": 32,
            "once": 8,
            "twice": 0,
            "never": 24,
            "dropped": 0,
        }


def test_a_recut_to_the_same_sizes_changes_nothing(queue: Queue) -> None:
    put(queue, 32)
    before = [ask(queue, k) for k in range(4)]
    queue.engine.recut("fit", "train", 1, batch_size=4)
    assert [ask(queue, k) for k in range(4)] == before


def test_recut_samples_are_not_lost_to_the_fold_of_claims(queue: Queue) -> None:
    put(queue, 32)
    for k in range(4):
        ask(queue, k)
    with queue.engine.ledger.transaction() as tx:
        queue.engine.claims.fold(tx, 0)
    queue.engine.recut("fit", "train", 1, batch_size=8)
    assert _indexes(ask(queue, 1, batch_size=8)) == list(range(4, 12))
    with queue.engine.ledger.transaction() as tx:
        queue.engine.claims.fold(tx, 0)
    assert _indexes(ask(queue, 3, batch_size=8)) == list(range(20, 28))


def test_two_runs_of_different_sizes_on_one_task_are_told_so(queue: Queue) -> None:
    put(queue, 32)
    ask(queue, 0, dp_size=2)
    with pytest.raises(PersistingError, match=r"formed for 2 ranks of 4.*asked for 1 ranks of 4"):
        ask(queue, 0)


def test_tasks_are_independent(queue: Queue) -> None:
    put(queue, 8)
    mine = queue.engine.await_assignment("a", "train", 0, batch_size=8, timeout=0.0)
    yours = queue.engine.await_assignment("b", "train", 0, batch_size=8, timeout=0.0)
    assert mine == yours


def test_books_count_only_what_is_committed(queue: Queue) -> None:
    put(queue, 16)
    ask(queue, 3)
    books = queue.engine.books_of
    assert books("fit", "train") == {"put": 16, "once": 0, "twice": 0, "never": 16, "dropped": 0}
    queue.engine.commit_cursor("fit", "train", 3)
    queue.engine.commit_cursor("fit", "train", 2)
    assert books("fit", "train") == {"put": 16, "once": 12, "twice": 0, "never": 4, "dropped": 0}


def test_claims_and_assignments_of_a_task_never_share_a_sample(queue: Queue) -> None:
    put(queue, 12)
    claimed = queue.sync.get_meta(["x"], 4, task_name="fit", partition_id="train").global_indexes
    assert claimed == [0, 1, 2, 3]
    assert _indexes(ask(queue, 0)) == [4, 5, 6, 7]


def test_all_ranks_end_together_though_a_process_flushes_after_the_seal(tmp_path: Path) -> None:
    with Queue("q", tmp_path) as queue, Queue("q", tmp_path) as late:
        put(queue, 8)
        for i in range(8):
            late.sync.put({"x": i}, "train")
        queue.sync.seal("train")
        assert ask(queue, 0, dp_size=2) is not None
        assert ask(queue, 1, dp_size=2) is None
        late.sync.flush()
        assert ask(late, 1, dp_size=2) is None
        assert len(late) == 16
        assert ask(late, 1, dp_size=2, last="split") is not None


def _indexes(assignment: Assignment | None) -> list[int]:
    assert assignment is not None
    return [index for part in assignment.slices for index in part]
