"""Groups by the value of a field: whole, however their members come, and nothing waits for ever."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tensordict import TensorDict

from persisting_torch import (
    BatchMeta,
    GRPOGroupNSampler,
    PersistingDataset,
    Queue,
    SchemaError,
    WaitTimeout,
)
from tests.queue import children
from tests.samplers import asking
from tests.samplers.asking import dropped


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue("q", tmp_path) as opened:
        yield opened


def put(queue: Queue, prompts: Any, **fields: Any) -> list[int]:
    records = [{"prompt": prompt, **fields} for prompt in prompts]
    return queue.sync.put(records).global_indexes


def claim(queue: Queue, size: int, sampler: Any, task: str = "t", **asked: Any) -> list[int]:
    return queue.sync.get_meta(["prompt"], size, task, sampler=sampler, **asked).global_indexes


def form(queue: Queue, k: int, sampler: Any, size: int = 4, ranks: int = 1, **asked: Any) -> Any:
    asked = {"fields": ["prompt"], **asked}
    return asking.form(queue, k, sampler, size=size, ranks=ranks, **asked)


def by_prompt(n: int, **options: Any) -> GRPOGroupNSampler:
    return GRPOGroupNSampler(n, group_by="prompt", **options)


# Forming groups


def test_groups_are_whole_and_go_in_the_order_of_their_completion(queue: Queue):
    #                    0123456789
    put(queue, "abacbbcaabb")
    sampler = by_prompt(3)
    assert claim(queue, 3, sampler) == [1, 4, 5]
    assert claim(queue, 3, sampler) == [0, 2, 7]
    assert claim(queue, 3, sampler) == []
    put(queue, "ca")
    assert claim(queue, 6, sampler) == []
    put(queue, "b")
    assert claim(queue, 6, sampler) == [3, 6, 11, 9, 10, 13]


def test_members_that_get_their_fields_late_complete_their_group_when_they_have_them(queue: Queue):
    meta = queue.sync.put([{"prompt": prompt} for prompt in "aabb"])
    sampler = by_prompt(2)

    def rewarded() -> list[int]:
        asked = queue.sync.get_meta(["prompt", "reward"], 2, sampler=sampler)
        return asked.global_indexes

    assert rewarded() == []
    for late in (3, 1, 2, 0):
        queue.sync.put([{"reward": 1.0}], metadata=meta.select_samples([late]))
        if late == 2:
            assert rewarded() == [2, 3]
    assert rewarded() == [0, 1]


def test_a_sample_is_in_a_group_once_it_gets_its_value(queue: Queue):
    meta = queue.sync.put([{"x": 1}, {"x": 2}, {"x": 3, "prompt": "a"}])
    sampler = by_prompt(2)
    ask: dict[str, Any] = {"sampler": sampler, "fields": ["x"], "batch_size": 2}
    assert queue.sync.get_meta(**ask).size == 0
    assert sampler.what_is_missing() == (
        "1 group of 'prompt' incomplete; the oldest, 'a', has 1 of 2 samples;"
        " 2 ready samples have no 'prompt' and are in no group"
    )
    queue.sync.put([{"prompt": "a"}], metadata=meta.select_samples([1]))
    assert queue.sync.get_meta(**ask).global_indexes == [1, 2]


def test_a_field_that_was_never_put_groups_nothing(queue: Queue):
    queue.sync.put([{"x": n} for n in range(4)])
    sampler = by_prompt(2)
    assert queue.sync.get_meta(["x"], 2, sampler=sampler).size == 0
    assert sampler.what_is_missing() == "4 ready samples have no 'prompt' and are in no group"


def test_more_than_n_samples_of_a_value_are_further_groups(queue: Queue):
    put(queue, "aaaaabb")
    assert claim(queue, 6, by_prompt(2)) == [0, 1, 2, 3, 5, 6]


@pytest.mark.parametrize(
    "values",
    [
        [3, 3, 4, 4],
        [2**62, 2**62, -1, -1],
        ["x", "x", "", ""],
        [b"\0", b"\0", b"", b""],
        [True, True, False, False],
        [0.5, 0.5, 1.0, 1.0],
        [1, 1.0, 2.5, 2.5],
        [torch.tensor(7), torch.tensor(7), torch.tensor(8), torch.tensor(8)],
    ],
)
def test_numbers_text_and_bytes_name_groups_that_went_short_as_well(queue: Queue, values: Any):
    put(queue, [values[0], values[2], values[1]])
    sampler = by_prompt(2, min_samples=1, straggler_timeout=0)
    assert claim(queue, 4, sampler) == [0, 2, 1]
    put(queue, [values[3]])
    assert claim(queue, 2, by_prompt(2, min_samples=1, straggler_timeout=0)) == []
    assert dropped(queue) == {"late": [3]}


@pytest.mark.parametrize("value", [torch.ones(2), [1, 2], {"a": 1}, float("nan")])
def test_values_that_name_no_group_are_refused_with_sample_and_field(queue: Queue, value: Any):
    put(queue, [value])
    with pytest.raises(SchemaError, match=r"'q': sample 0 of partition 'default' has .*'prompt'"):
        claim(queue, 2, by_prompt(2))
    assert queue.sync.get_meta(["prompt"], 1).size == 1


def test_tasks_partitions_and_queues_have_groups_of_their_own(tmp_path: Path):
    sampler = by_prompt(2)
    with Queue("one", tmp_path) as one, Queue("two", tmp_path) as two:
        put(one, "ab")
        put(two, "ba")
        one.sync.put([{"prompt": "a"}, {"prompt": "a"}], "other")
        for queue in (one, two):
            assert claim(queue, 2, sampler, "s") == claim(queue, 2, sampler, "t") == []
        put(one, "b")
        put(two, "b")
        assert claim(one, 2, sampler, "s") == [1, 4]
        assert claim(two, 2, sampler, "t") == [0, 2]
        assert claim(one, 2, sampler, "t") == [1, 4]
        assert one.sync.get_meta([], 2, "t", "other", sampler=sampler).global_indexes == [2, 3]


def test_a_batch_is_given_whole_or_not_at_all(queue: Queue):
    put(queue, "aabb")
    sampler = by_prompt(2)
    assert claim(queue, 6, sampler) == []
    assert claim(queue, 4, sampler) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="must be a multiple of n_samples_per_prompt 2"):
        claim(queue, 3, sampler)
    with pytest.raises(ValueError, match="must be a multiple of n_samples_per_prompt 2"):
        form(queue, 0, sampler, size=3, ranks=2)


def test_the_answer_to_a_rank_stays_in_every_process(queue: Queue, tmp_path: Path):
    put(queue, "abab")
    where = {"dp_rank": 0, "batch_index": 0}
    assert claim(queue, 2, by_prompt(2), **where) == [0, 2]
    with Queue("q", tmp_path) as other:
        assert claim(other, 2, by_prompt(2), **where) == [0, 2]
        assert claim(other, 2, by_prompt(2), dp_rank=1, batch_index=0) == [1, 3]


def test_directly_called_it_says_that_only_a_queue_can_tell_the_values():
    with pytest.raises(ValueError, match="Give the sampler to get_meta"):
        by_prompt(2).sample([0, 1], 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"min_samples": 2}, "Name the field in group_by"),
        ({"straggler_timeout": 1.0}, "Name the field in group_by"),
        ({"group_by": "p", "min_samples": 5}, "from 1 to n_samples_per_prompt 4, got 5"),
        ({"group_by": "p", "min_samples": 0}, "from 1 to n_samples_per_prompt 4, got 0"),
        ({"group_by": "p", "straggler_timeout": -1.0}, "seconds from 0, got -1"),
        ({"group_by": "p", "straggler_timeout": float("nan")}, "seconds from 0, got nan"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        GRPOGroupNSampler(4, **options)


# Groups that go incomplete


def test_a_group_whose_time_is_up_goes_as_it_is_if_it_has_enough_samples(queue: Queue):
    put(queue, "aaabbbbc")
    sampler = by_prompt(4, min_samples=3, straggler_timeout=0.3)
    assert claim(queue, 4, sampler) == [3, 4, 5, 6]
    assert claim(queue, 4, sampler) == []
    time.sleep(0.3)
    assert claim(queue, 4, sampler) == [0, 1, 2]
    assert sampler.what_is_missing() == (
        "1 group of 'prompt' incomplete; the oldest, 'c', has 1 of 4 samples"
    )


def test_a_group_whose_time_was_up_goes_when_it_has_enough_samples(queue: Queue):
    put(queue, "a")
    sampler = by_prompt(4, min_samples=3, straggler_timeout=0.01)
    assert claim(queue, 4, sampler) == []
    time.sleep(0.02)
    put(queue, "a")
    assert claim(queue, 4, sampler) == []
    put(queue, "a")
    assert claim(queue, 4, sampler) == [0, 1, 2]


def test_a_member_that_comes_before_its_group_has_gone_goes_with_it(queue: Queue):
    put(queue, "aa")
    sampler = by_prompt(4, min_samples=2, straggler_timeout=0)
    assert claim(queue, 8, sampler) == []
    put(queue, "ab")
    assert claim(queue, 8, sampler) == []
    put(queue, "b")
    assert claim(queue, 8, sampler) == [0, 1, 2, 3, 4]
    put(queue, "cc")
    assert claim(queue, 8, sampler) == []
    put(queue, "c")
    assert claim(queue, 4, sampler) == [5, 6, 7]


def test_late_members_are_dropped_and_counted_and_then_the_value_begins_a_new_group(queue: Queue):
    put(queue, "aa")
    sampler = by_prompt(4, min_samples=2, straggler_timeout=0)
    assert claim(queue, 4, sampler) == [0, 1]
    put(queue, "a")
    assert claim(queue, 4, sampler) == []
    assert dropped(queue) == {"late": [2]}
    put(queue, "aaaaa")
    assert claim(queue, 4, by_prompt(4)) == [4, 5, 6, 7]
    assert dropped(queue) == {"late": [2, 3]}
    assert queue.engine.books_of("t", "default")["dropped"] == 2
    assert queue.sync.stats()["tasks"]["t"]["default"]["available"] == 0


def test_late_members_of_a_group_that_another_process_let_go_are_known_everywhere(
    queue: Queue, tmp_path: Path
):
    impatient = {"min_samples": 2, "straggler_timeout": 0.0}
    put(queue, "aab")
    with Queue("q", tmp_path) as other:
        mine, theirs = by_prompt(3, **impatient), by_prompt(3, **impatient)
        assert claim(other, 6, theirs) == claim(queue, 6, mine) == []
        assert claim(other, 3, theirs) == [0, 1]
        put(queue, "ab")
        assert claim(queue, 3, mine) == [2, 4]
        assert dropped(other) == {"late": [3]}


def test_a_sealed_partition_lets_groups_with_enough_samples_go_at_once(queue: Queue):
    put(queue, "aaabbc")
    sampler = by_prompt(3, min_samples=2)
    assert claim(queue, 3, sampler) == [0, 1, 2]
    assert claim(queue, 3, sampler) == []
    queue.sync.seal()
    assert claim(queue, 3, sampler) == [3, 4]
    assert claim(queue, 3, sampler) == []


def test_a_sealed_partition_whose_samples_await_fields_lets_no_group_go_short(queue: Queue):
    meta = queue.sync.put([{"prompt": prompt} for prompt in "aab"])
    queue.sync.put([{"reward": 1.0}], metadata=meta.select_samples([0]))
    queue.sync.seal()
    sampler = by_prompt(2, min_samples=1)
    ask: dict[str, Any] = {"fields": ["reward"], "batch_size": 2, "sampler": sampler}
    assert queue.sync.get_meta(**ask).size == 0
    assert form(queue, 0, sampler, size=2, fields=["reward"]) == "waits"
    queue.sync.put([{"reward": 1.0}], metadata=meta.select_samples([1]))
    assert queue.sync.get_meta(**ask).global_indexes == [0, 1]
    assert form(queue, 0, sampler, size=2, fields=["reward"]) == [[0, 1]]


def test_cleared_and_marked_members_leave_the_others_a_group_of_their_own(queue: Queue):
    put(queue, "aaaabb")
    sampler = by_prompt(3)
    assert claim(queue, 9, sampler) == []
    queue.sync.clear([1])
    queue.sync.mark_consumed("t", [4])
    assert claim(queue, 6, sampler) == []
    assert claim(queue, 3, sampler) == [0, 2, 3]
    put(queue, "bb")
    assert claim(queue, 3, sampler) == [5, 6, 7]
    assert dropped(queue) == {}


def test_a_reset_task_gets_its_groups_again(queue: Queue):
    put(queue, "aabbb")
    sampler = by_prompt(3, min_samples=2, straggler_timeout=0)
    assert claim(queue, 6, sampler) == [2, 3, 4, 0, 1]
    put(queue, "a")
    assert claim(queue, 3, sampler) == []
    queue.sync.reset_consumption("t")
    assert claim(queue, 6, sampler) == [2, 3, 4, 0, 1, 5]


# In training


def test_every_rank_gets_whole_groups_and_short_ones_make_shorter_slices(queue: Queue):
    put(queue, "aabbccdd")
    sampler = by_prompt(4, min_samples=2, straggler_timeout=0)
    assert form(queue, 0, sampler, size=4, ranks=2) == [[0, 1], [2, 3]]
    put(queue, "aaeeee")
    assert form(queue, 1, sampler, size=4, ranks=2) == [[4, 5], [6, 7]]
    assert form(queue, 2, sampler, size=4, ranks=2) == "waits"
    assert dropped(queue, "fit") == {"late": [8, 9]}
    assert form(queue, 1, by_prompt(4), size=4, ranks=2) == [[4, 5], [6, 7]]


def test_datasets_of_two_ranks_train_whole_groups_of_which_some_are_short(queue: Queue):
    put(queue, "aabbbcccaddd", x=1.0)
    queue.sync.seal()
    got: dict[int, list[list[str]]] = {}
    for rank in (1, 0):
        data = PersistingDataset(
            queue,
            batch_size=3,
            fields=["prompt", "_index"],
            sampler=by_prompt(3, min_samples=2),
            dp_rank=rank,
            dp_size=2,
            timeout=5,
        )
        got[rank] = ["".join(batch["prompt"].tolist()) for batch in data]
    assert got == {0: ["bbb", "aaa"], 1: ["ccc", "ddd"]}


def test_a_waiting_trainer_notices_that_a_stragglers_time_is_up(queue: Queue):
    put(queue, "aaa")
    data = PersistingDataset(
        queue,
        batch_size=4,
        fields=["prompt"],
        sampler=by_prompt(4, min_samples=3, straggler_timeout=0.3),
        timeout=30,
    )
    started = time.monotonic()
    assert len(next(iter(data))) == 3
    assert 0.3 <= time.monotonic() - started < 10


def test_a_wait_that_was_too_long_tells_the_oldest_incomplete_group(queue: Queue):
    put(queue, [17, 17, 17, *range(11)])
    with pytest.raises(
        WaitTimeout, match="12 groups of 'prompt' incomplete; the oldest, 17, has 3"
    ):
        next(iter(PersistingDataset(queue, batch_size=4, sampler=by_prompt(4), timeout=0.05)))


@pytest.mark.parametrize("last", ["drop", "split", "pad"])
def test_groups_with_too_few_samples_are_never_given_and_do_not_block_the_end(
    queue: Queue, last: Any
):
    put(queue, "aabbbcd")
    queue.sync.seal()
    sampler = by_prompt(3, min_samples=2)
    assert form(queue, 0, sampler, size=3, last=last) == [[2, 3, 4]]
    assert form(queue, 1, sampler, size=3, last=last) == [[0, 1]]
    assert form(queue, 2, sampler, size=3, last=last) is None


def test_the_groups_of_a_remainder_are_split_and_padded_whole(queue: Queue):
    put(queue, "aabbbcc")
    queue.sync.seal()
    sampler = by_prompt(3, min_samples=2)
    ask: dict[str, Any] = {"size": 6, "ranks": 2}
    assert form(queue, 0, sampler, last="split", **ask) == [[2, 3, 4, 0, 1], [5, 6]]
    queue.sync.reset_consumption("fit")
    assert form(queue, 0, sampler, last="pad", **ask) == [[2, 3, 4, 0, 1], [5, 6, 2, 3, 4]]


def test_a_remainder_that_is_not_given_leaves_no_trace(queue: Queue):
    put(queue, "aabb")
    queue.sync.seal()
    sampler = by_prompt(5, min_samples=2)
    assert form(queue, 0, sampler, size=5, ranks=5, last="split") is None
    assert form(queue, 0, by_prompt(5, min_samples=2), size=5, ranks=2) == [[0, 1], [2, 3]]


def test_an_undone_batch_gives_its_short_groups_back_as_they_were(queue: Queue):
    put(queue, "aabb")
    sampler = by_prompt(3, min_samples=2, straggler_timeout=0)
    assert form(queue, 0, sampler, size=6) == [[0, 1, 2, 3]]
    put(queue, "ab")
    assert form(queue, 1, sampler, size=3) == "waits"
    assert dropped(queue, "fit") == {"late": [4, 5]}
    put(queue, "cc")
    queue.engine.recut("fit", "default", 0, batch_size=3)
    fresh = by_prompt(3, min_samples=2, straggler_timeout=0)
    assert form(queue, 0, fresh, size=3) == [[0, 1]]
    assert form(queue, 1, fresh, size=3) == [[2, 3]]


def test_an_undone_batch_leaves_its_short_groups_no_late_members(queue: Queue):
    put(queue, "aabb")
    sampler = by_prompt(3, min_samples=2, straggler_timeout=0)
    assert form(queue, 0, sampler, size=6) == [[0, 1, 2, 3]]
    queue.engine.recut("fit", "default", 0, batch_size=3)
    put(queue, "a")
    patient = by_prompt(3, min_samples=2, straggler_timeout=1000)
    assert form(queue, 0, patient, size=3) == [[0, 1, 4]]
    assert form(queue, 1, patient, size=3) == [[2, 3]]
    assert dropped(queue, "fit") == {}


def test_a_batch_that_could_not_be_entered_leaves_its_groups_to_the_next(queue: Queue):
    put(queue, "aaabb")
    sampler = by_prompt(3, min_samples=2, straggler_timeout=0)

    class Stumbles(GRPOGroupNSampler):
        def deal(self, *args: Any, **kwargs: Any) -> list[list[int]]:
            sampler.deal(*args, **kwargs)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        form(queue, 0, Stumbles(3, group_by="prompt"), size=3)
    assert form(queue, 0, sampler, size=3) == [[0, 1, 2]]
    assert form(queue, 1, sampler, size=3) == [[3, 4]]
    put(queue, "b")
    assert form(queue, 2, sampler, size=3) == "waits"
    assert dropped(queue, "fit") == {"late": [5]}


CLAIMS = """
import sys
from persisting_torch import GRPOGroupNSampler, Queue
queue = Queue("q", sys.argv[1])
short = GRPOGroupNSampler(3, group_by="prompt", min_samples=2, straggler_timeout=0)
while queue.sync.get_meta(["prompt"], 3, "t", sampler=short).size:
    print(1, flush=True)
"""


def test_a_killed_claim_takes_its_groups_and_notes_what_they_lack_or_does_neither(tmp_path: Path):
    prompts = range(400)
    with Queue("q", tmp_path) as queue:
        put(queue, [*prompts, *prompts])
        child = children.start(CLAIMS, tmp_path)
        while len(child.lines) < 20:
            assert child.status is None, child.err
            time.sleep(0.001)
        child.send(signal.SIGKILL)
        child.wait()
        put(queue, prompts)
        whole = []
        while got := claim(queue, 3, by_prompt(3)):
            whole.append(got)
        late = dropped(queue)["late"]
        assert 20 <= len(late) < len(prompts)
        assert len(late) + len(whole) == len(prompts)
        assert not set(late) & {at for group in whole for at in group}
        assert queue.sync.stats()["tasks"]["t"]["default"]["available"] == 0


# The cost


def test_a_batch_of_a_million_ready_samples_reads_only_what_it_takes(queue: Queue):
    count = 1_000_000
    prompts = torch.arange(count) // 4
    queue.sync.put(TensorDict({"prompt": prompts}, [count]))
    sampler = by_prompt(4)
    claim(queue, 32, sampler)
    started = time.perf_counter()
    for _ in range(20):
        assert len(claim(queue, 32, sampler)) == 32
    assert time.perf_counter() - started < 4
    assert len(sampler._memories.latest.gathered) < 10_000


# Against models


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("abcd", min_size=1, max_size=5), max_size=8), st.integers(1, 3))
def test_whatever_the_arrivals_the_order_is_that_of_completion(arrivals: list[str], n: int):
    members: dict[str, list[int]] = {}
    expected: list[list[int]] = []
    for index, prompt in enumerate("".join(arrivals)):
        members.setdefault(prompt, []).append(index)
        if len(members[prompt]) == n:
            expected.append(members.pop(prompt))
    with TemporaryDirectory() as folder, Queue("q", folder) as queue:
        got: list[list[int]] = []
        sampler = by_prompt(n)
        for prompts in arrivals:
            put(queue, prompts)
            while group := claim(queue, n, sampler):
                got.append(group)
        assert got == expected
        whole = [at for group in expected for at in group]
        fresh = claim(queue, len(whole), by_prompt(n), task="other") if whole else []
        assert fresh == whole


N = 3


class GroupsUnderWay(RuleBasedStateMachine):
    """Samples come, get rewards, are cleared and marked; two tasks take groups, in two ways.

    The model says of each task what it may take, what it took, and how many members its groups
    lacked; that is enough to hold every answer against.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.queue = Queue("q", self.folder.name)
        self.prompt: dict[int, str | None] = {}
        self.rewarded: set[int] = set()
        self.gone: set[int] = set()
        self.taken: dict[str, set[int]] = {"claims": set(), "fit": set()}
        self.lacked: dict[str, Counter[str | None]] = {"claims": Counter(), "fit": Counter()}
        self.batches: list[list[list[int]]] = []
        self.samplers: dict[str, GRPOGroupNSampler] = {}
        self.sealed = False

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            self.queue.close()
            self.folder.cleanup()

    def sampler(self, task: str, least: int, patience: float | None) -> GRPOGroupNSampler:
        if task not in self.samplers:
            self.samplers[task] = by_prompt(N, min_samples=least, straggler_timeout=patience)
        return self.samplers[task]

    def free(self, task: str) -> list[int]:
        """What the task could take, what is late included."""
        return sorted(self.rewarded - self.gone - self.taken[task] - self.late(task))

    def late(self, task: str) -> set[int]:
        self.queue.engine.books.follow()
        known = self.queue.engine.books.tasks.get((task, "default"))
        return set() if known is None else set(known.dropped.get("late", []))

    def account(self, task: str, groups: list[list[int]], least: int) -> None:
        for group in groups:
            assert len({self.prompt[at] for at in group}) == 1
            assert self.prompt[group[0]] is not None
            assert least <= len(group) <= N
            self.lacked[task][self.prompt[group[0]]] += N - len(group)
            assert not self.taken[task] & set(group)
            assert set(group) <= self.rewarded - self.gone
            self.taken[task] |= set(group)

    def complete(self, free: list[int]) -> int:
        counts = Counter(self.prompt[at] for at in free if self.prompt[at] is not None)
        return sum(count // N for count in counts.values())

    @precondition(lambda self: not self.sealed)
    @rule(prompts=st.text("ab-", min_size=1, max_size=6), rewarded=st.booleans())
    def put(self, prompts: str, rewarded: bool) -> None:
        values = [None if prompt == "-" else prompt for prompt in prompts]
        reward = {"reward": 1.0} if rewarded else {}
        records = [{"x": 0, **({"prompt": v} if v else {}), **reward} for v in values]
        indexes = self.queue.sync.put(records).global_indexes
        self.prompt.update(zip(indexes, values, strict=True))
        self.rewarded |= set(indexes) if rewarded else set()

    @precondition(lambda self: self.prompt.keys() - self.rewarded - self.gone)
    @rule(seed=st.integers(0, 99))
    def reward(self, seed: int) -> None:
        waiting = sorted(self.prompt.keys() - self.rewarded - self.gone)
        chosen = random.Random(seed).sample(waiting, min(3, len(waiting)))
        self.queue.sync.put([{"reward": 1.0}] * len(chosen), metadata=BatchMeta(chosen, "default"))
        self.rewarded |= set(chosen)

    @precondition(lambda self: self.rewarded - self.gone)
    @rule(seed=st.integers(0, 99))
    def clear(self, seed: int) -> None:
        chosen = random.Random(seed).choice(sorted(self.rewarded - self.gone))
        self.queue.sync.clear([chosen])
        self.gone.add(chosen)

    @precondition(lambda self: self.free("claims"))
    @rule(seed=st.integers(0, 99))
    def mark(self, seed: int) -> None:
        chosen = random.Random(seed).choice(self.free("claims"))
        self.queue.sync.mark_consumed("claims", [chosen])
        self.taken["claims"].add(chosen)

    @rule(task=st.sampled_from(["claims", "fit"]))
    def start_anew(self, task: str) -> None:
        self.samplers.pop(task, None)

    @rule(count=st.integers(1, 2), least=st.integers(1, N), patience=st.sampled_from([None, 0.0]))
    def claim(self, count: int, least: int, patience: float | None) -> None:
        sampler = self.sampler("claims", least, patience)
        got = self.queue.sync.get_meta(["reward"], count * N, "claims", sampler=sampler)
        groups = self.cut(got.global_indexes)
        assert len(groups) in (0, count)
        self.account("claims", groups, 1)
        if not groups:
            assert self.complete(self.free("claims")) < count

    @rule(least=st.integers(1, N), patience=st.sampled_from([None, 0.0]))
    def train(self, least: int, patience: float | None) -> None:
        slices = form(self.queue, len(self.batches), self.sampler("fit", least, patience), **FIT)
        if slices in ("waits", None):
            assert self.complete(self.free("fit")) < 2
            return
        assert len(slices) == 2
        assert all(slices)
        self.account("fit", slices, 1)
        self.batches.append(slices)

    @precondition(lambda self: self.batches)
    @rule(seed=st.integers(0, 99))
    def replay(self, seed: int) -> None:
        k = random.Random(seed).randrange(len(self.batches))
        assert form(self.queue, k, by_prompt(N), **FIT) == self.batches[k]

    @invariant()
    def late_members_are_no_more_than_groups_lacked(self) -> None:
        for task, lacked in self.lacked.items():
            late = Counter(self.prompt[at] for at in self.late(task))
            assert late <= lacked
            assert not self.late(task) & self.taken[task]

    def cut(self, indexes: list[int]) -> list[list[int]]:
        """The groups of an answer: its samples ascend within a group."""
        groups: list[list[int]] = []
        for at in indexes:
            new = not groups or self.prompt[groups[-1][-1]] != self.prompt[at]
            if new or at < groups[-1][-1] or len(groups[-1]) == N:
                groups.append([])
            groups[-1].append(at)
        return groups

    def drain(self) -> None:
        """A sealed queue ends, and leaves only what makes no group of two."""
        waiting = sorted(self.prompt.keys() - self.rewarded - self.gone)
        if waiting:
            meta = BatchMeta(waiting, "default")
            self.queue.sync.put([{"reward": 1.0}] * len(waiting), metadata=meta)
            self.rewarded |= set(waiting)
        self.queue.sync.seal()
        sampler = by_prompt(N, min_samples=2)
        while (slices := form(self.queue, len(self.batches), sampler, **FIT)) is not None:
            self.account("fit", slices, 2)
            self.batches.append(slices)
        left = Counter(self.prompt[at] for at in self.free("fit") if self.prompt[at] is not None)
        assert sum(count > 1 for count in left.values()) < 2


FIT: dict[str, Any] = {"size": N, "ranks": 2, "fields": ["reward"]}

TestGroupsUnderWay = GroupsUnderWay.TestCase
TestGroupsUnderWay.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
