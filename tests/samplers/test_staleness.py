"""A bound on staleness: too old goes untrained and counted, the oldest within the bound first."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pyroaring import BitMap64
from tensordict import TensorDict

from persisting_torch import (
    BaseSampler,
    BatchMeta,
    GRPOGroupNSampler,
    MaxStaleness,
    PersistingDataset,
    Queue,
    RankAwareSampler,
    SchemaError,
    SeqlenBalancedSampler,
    SequentialSampler,
    ShuffleSampler,
)
from persisting_torch.queue.policies import FOLDER, publish
from persisting_torch.samplers.aged import AgedReady
from tests.samplers import asking
from tests.samplers.asking import dropped


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue("q", tmp_path) as opened:
        yield opened


def put(queue: Queue, *versions: Any, **fields: Any) -> list[int]:
    records = [
        {"x": 0, **fields, **({} if version is None else {"policy_version": version})}
        for version in versions
    ]
    return queue.sync.put(records).global_indexes


def announce(queue: Queue, version: int) -> None:
    """What PolicyPublisher does."""
    publish(Path(queue.engine.place.root) / FOLDER, {"w": torch.zeros(1)}, version)


def claim(queue: Queue, size: int, sampler: Any, task: str = "t", **asked: Any) -> list[int]:
    return queue.sync.get_meta(["x"], size, task, sampler=sampler, **asked).global_indexes


def form(queue: Queue, k: int, sampler: Any, size: int = 2, ranks: int = 1, **asked: Any) -> Any:
    asked = {"fields": ["x"], **asked}
    return asking.form(queue, k, sampler, size=size, ranks=ranks, **asked)


def within(max_staleness: int, inner: Any = None) -> MaxStaleness:
    return MaxStaleness(SequentialSampler() if inner is None else inner, max_staleness)


def test_what_is_too_old_is_dropped_and_counted_and_the_oldest_of_the_rest_goes_first(queue: Queue):
    put(queue, 3, 1, 2, 0, 2, 3)
    sampler = within(1)
    assert claim(queue, 3, sampler, policy_version=3) == [2, 4, 0]
    assert dropped(queue) == {"stale": [1, 3]}
    assert claim(queue, 3, sampler, policy_version=4) == [5]
    assert claim(queue, 3, sampler, policy_version=9) == []
    assert sampler.what_is_missing() == (
        "2 samples were dropped, 'policy_version' more than 1 behind"
    )


def test_before_a_version_is_announced_nothing_is_stale_and_then_the_newest_counts(queue: Queue):
    put(queue, 7, 5, 6, 5)
    sampler = within(1)
    assert claim(queue, 1, sampler) == [1]
    announce(queue, 7)
    assert claim(queue, 3, sampler) == [2, 0]
    assert dropped(queue) == {"stale": [3]}
    put(queue, 6, 7)
    assert claim(queue, 1, sampler, policy_version=lambda: 8) == [5]
    assert dropped(queue) == {"stale": [3, 4]}


def test_samples_without_a_version_are_never_stale_and_come_last(queue: Queue):
    put(queue, None, 1, None, 2)
    assert claim(queue, 4, within(0), policy_version=2) == [3, 0, 2]
    queue.sync.put([{"x": 1}] * 2, "unversioned")
    got = queue.sync.get_meta(["x"], 2, "t", "unversioned", sampler=within(0), policy_version=9)
    assert got.global_indexes == [4, 5]


def test_a_version_that_arrives_late_counts_from_then_on(queue: Queue):
    meta = queue.sync.put([{"x": 0}] * 3)
    sampler = within(0)
    assert claim(queue, 1, sampler, policy_version=5) == [0]
    queue.sync.put(
        [{"policy_version": 4}, {"policy_version": 5}], metadata=meta.select_samples([1, 2])
    )
    assert claim(queue, 2, sampler, policy_version=5) == [2]
    assert dropped(queue) == {"stale": [1]}


@pytest.mark.parametrize(
    "versions",
    [
        [2.5, 1.0, 2.0],
        [torch.tensor(3), torch.tensor(1), torch.tensor(2)],
        [torch.tensor(3.0), torch.tensor(1.0), torch.tensor(2.0)],
        [2**62, 1, 2],
    ],
)
def test_versions_may_be_any_numbers(queue: Queue, versions: list[Any]):
    put(queue, *versions)
    assert claim(queue, 3, within(1), policy_version=3) == [2, 0]


def test_versions_that_are_no_numbers_are_refused_with_queue_and_field(queue: Queue):
    put(queue, "a")
    with pytest.raises(SchemaError, match=r"'q': field 'policy_version' .* holds no numbers"):
        claim(queue, 1, within(1))
    assert claim(queue, 1, None) == [0]


def test_a_negative_bound_is_refused():
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        within(-1)


def test_directly_called_it_says_that_only_a_queue_can_tell_the_versions():
    with pytest.raises(ValueError, match="Give the sampler to get_meta"):
        within(1).sample([0, 1], 2)


def test_a_batch_once_given_is_replayed_however_old_it_has_become(queue: Queue, tmp_path: Path):
    put(queue, 1, 1, 2, 2)
    where = {"dp_rank": 0, "batch_index": 0}
    sampler = within(1, RankAwareSampler())
    assert claim(queue, 2, sampler, policy_version=2, **where) == [0, 1]
    assert form(queue, 0, within(1), sampling={"policy_version": 2}) == [[0, 1]]
    for opened in (queue, Queue("q", tmp_path)):
        assert claim(opened, 2, within(1), policy_version=9, **where) == [0, 1]
        assert form(opened, 0, within(1), sampling={"policy_version": 9}) == [[0, 1]]
    assert form(queue, 1, within(1), sampling={"policy_version": 9}) == "waits"
    assert dropped(queue, "fit") == {"stale": [2, 3]}
    opened.close()


def test_only_dropping_is_no_answer_to_a_rank(queue: Queue):
    put(queue, 1, 1)
    where: dict[str, Any] = {"dp_rank": 0, "batch_index": 0, "policy_version": 9}
    assert claim(queue, 2, within(1, RankAwareSampler()), **where) == []
    put(queue, 9, 9)
    assert claim(queue, 2, within(1, RankAwareSampler()), **where) == [2, 3]


def test_stale_samples_neither_fill_a_batch_nor_block_the_end(queue: Queue):
    put(queue, 0, 5, 0, 5, 0, 4)
    sampler = within(1)
    current = {"sampling": {"policy_version": 5}}
    assert form(queue, 0, sampler, size=4, **current) == "waits"
    queue.sync.seal()
    assert form(queue, 0, sampler, size=2, **current) == [[5, 1]]
    assert form(queue, 1, sampler, size=2, last="split", **current) == [[3]]
    assert form(queue, 2, sampler, size=2, last="split", **current) is None
    queue.engine.commit_cursor("fit", "default", 2)
    books = queue.engine.books_of("fit", "default")
    assert (books["once"], books["dropped"], books["never"]) == (3, 3, 0)


def test_a_dropped_sample_never_holds_up_a_resume(queue: Queue):
    put(queue, 1, 1, 0, 1)
    queue.sync.seal()

    def dataset(version: int) -> PersistingDataset:
        return PersistingDataset(
            queue,
            batch_size=1,
            fields=["_index"],
            sampler=within(0),
            policy_version=version,
            last="split",
            timeout=5,
        )

    first = dataset(1)
    batches = iter(first)
    assert [next(batches)["_index"].tolist() for _ in range(2)] == [[0], [1]]
    state = first.state_dict()
    del batches
    second = dataset(1)
    second.load_state_dict(state)
    assert [batch["_index"].tolist() for batch in second] == [[3]]
    assert dropped(queue, "train") == {"stale": [2]}
    assert queue.sync.stats()["tasks"]["train"]["default"]["available"] == 0


def test_the_versions_dataset_asks_for_the_current_version_when_a_batch_is_formed(queue: Queue):
    put(queue, 1, 2, 3, 4)
    queue.sync.seal()
    current = iter([1, 4])
    data = PersistingDataset(
        queue,
        batch_size=1,
        fields=["policy_version"],
        sampler=within(1),
        policy_version=lambda: next(current, 4),
        timeout=5,
    )
    assert [batch["policy_version"].tolist() for batch in data] == [[1], [3], [4]]


def test_a_policy_version_that_no_sampler_asks_for_is_refused(queue: Queue):
    with pytest.raises(ValueError, match="Give sampler=MaxStaleness"):
        PersistingDataset(queue, batch_size=1, policy_version=3)


# With groups


def prompts(queue: Queue, text: str, *versions: int) -> list[int]:
    records = [
        {"x": 0, "prompt": prompt, "policy_version": version}
        for prompt, version in zip(text, versions, strict=True)
    ]
    return queue.sync.put(records).global_indexes


def test_a_group_is_as_old_as_its_oldest_member_and_goes_as_a_whole(queue: Queue):
    prompts(queue, "aabbccdd", 3, 3, 1, 3, 2, 3, 3, 2)
    sampler = within(1, GRPOGroupNSampler(2, group_by="prompt"))
    assert claim(queue, 4, sampler, policy_version=3) == [4, 5, 6, 7]
    assert dropped(queue) == {"stale": [2, 3]}
    assert claim(queue, 2, sampler, policy_version=3) == [0, 1]


def test_members_of_an_incomplete_group_that_was_dropped_as_stale_are_late(queue: Queue):
    prompts(queue, "aab", 1, 3, 3)
    inner = GRPOGroupNSampler(3, group_by="prompt")
    assert claim(queue, 3, within(1, inner), policy_version=3) == []
    assert dropped(queue) == {"stale": [0, 1]}
    prompts(queue, "abb", 3, 3, 3)
    assert claim(queue, 3, within(1, inner), policy_version=3) == [2, 4, 5]
    assert dropped(queue) == {"stale": [0, 1], "late": [3]}
    prompts(queue, "aaa", 3, 3, 3)
    assert claim(queue, 3, within(1, inner), policy_version=3) == [6, 7, 8]


def test_a_late_member_counts_once_though_others_are_dropped_with_it(queue: Queue):
    prompts(queue, "aa", 1, 3)
    inner = GRPOGroupNSampler(4, group_by="prompt")
    assert claim(queue, 4, within(1, inner), policy_version=3) == []
    prompts(queue, "ab", 3, 1)
    assert claim(queue, 4, within(1, inner), policy_version=3) == []
    prompts(queue, "aaaaa", 3, 3, 3, 3, 3)
    assert claim(queue, 4, within(1, inner), policy_version=3) == [5, 6, 7, 8]
    assert dropped(queue) == {"stale": [0, 1, 3], "late": [2, 4]}


def test_an_older_short_group_goes_before_a_complete_one_of_the_same_value(queue: Queue):
    prompts(queue, "aaa", 3, 3, 2)
    inner = GRPOGroupNSampler(2, group_by="prompt", min_samples=1, straggler_timeout=0)
    assert claim(queue, 2, within(1, inner), policy_version=3) == [2]
    inner = GRPOGroupNSampler(2, group_by="prompt")
    assert claim(queue, 2, within(1, inner), policy_version=3) == [0, 1]
    prompts(queue, "a", 3)
    assert claim(queue, 2, within(1, inner), policy_version=3) == []
    assert dropped(queue) == {"late": [3]}


def test_consecutive_groups_are_dropped_whole_and_the_others_keep_their_places(queue: Queue):
    put(queue, 3, 3, 3, 1, 2, 3, 3, 3, 1, 3, 3)
    sampler = within(1, GRPOGroupNSampler(2))
    # groups 0-1, 2-3 (stale), 4-5, 6-7, 8-9 (stale); 10 waits for its group
    assert claim(queue, 4, sampler, policy_version=3) == [4, 5, 0, 1]
    assert dropped(queue) == {"stale": [2, 3, 8, 9]}
    put(queue, 3)
    assert claim(queue, 4, sampler, policy_version=3) == [6, 7, 10, 11]


def test_an_incomplete_consecutive_group_stays_until_it_is_complete(queue: Queue):
    put(queue, 1)
    sampler = within(1, GRPOGroupNSampler(2))
    assert claim(queue, 2, sampler, policy_version=3) == []
    put(queue, 3, 3, 3)
    assert claim(queue, 2, sampler, policy_version=3) == [2, 3]
    assert dropped(queue) == {"stale": [0, 1]}


def test_ranks_get_balanced_groups_of_what_is_not_stale(queue: Queue):
    records = [
        {"x": 0, "policy_version": version, "n": n}
        for version, n in [(1, 9), (1, 9), (3, 5), (3, 5), (3, 1), (3, 2), (2, 1), (2, 1), (3, 5)]
    ]
    queue.sync.put(records)
    sampler = within(1, SeqlenBalancedSampler(length_field="n"))
    got = form(queue, 0, sampler, ranks=2, sampling={"policy_version": 3})
    assert [sum(records[at]["n"] for at in part) for part in got] == [6, 6]
    assert sorted(at for part in got for at in part) == [2, 3, 6, 7]


# The inner sampler in all else


class Last(BaseSampler):
    """Takes from the end of what it is given, and remembers what it was asked."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.asked = kwargs
        chosen = [ready_indexes[at] for at in range(-batch_size, 0)]
        return chosen, chosen


def test_the_inner_sampler_is_asked_with_all_that_was_given(queue: Queue):
    put(queue, 2, 1, 2, None)
    inner = Last()
    assert claim(queue, 2, within(1, inner), policy_version=2, mood="odd") == [2, 3]
    assert inner.asked["mood"] == "odd"
    assert (inner.asked["task_name"], inner.asked["partition_id"]) == ("t", "default")
    assert "look" not in inner.asked


def test_what_the_queue_asks_of_a_sampler_is_answered_by_the_inner_one(queue: Queue):
    inner = GRPOGroupNSampler(2, group_by="prompt", min_samples=1, straggler_timeout=1.0)
    sampler = within(3, inner)
    assert (sampler.n_samples_per_prompt, sampler.recheck_seconds) == (2, 0.25)
    assert not hasattr(sampler, "shape")
    prompts(queue, "aab", 1, 1, 1)
    where = {"dp_rank": 1, "batch_index": 4}
    assert claim(queue, 2, sampler, **where) == [0, 1]
    assert sampler.has_cached_result("default", "t", where)
    other = within(3, GRPOGroupNSampler(2, group_by="prompt"))
    other.load_checkpoint(sampler.save_checkpoint())
    assert other.sample([], 2, task_name="t", partition_id="default", **where) == ([0, 1], [0, 1])
    assert claim(queue, 2, sampler) == []
    assert "the oldest, 'b', has 1 of 2" in sampler.what_is_missing()
    sampler.clear_cache("default")
    assert not inner.has_cached_result("default", "t", where)


def test_a_random_order_is_drawn_of_what_is_not_stale(queue: Queue):
    put(queue, *[n % 4 for n in range(40)])
    got = claim(queue, 20, within(1, ShuffleSampler(3)), policy_version=3)
    assert {at % 4 for at in got} == {2, 3}
    assert got != sorted(got)


def test_aged_indexes_are_a_sequence():
    aged = AgedReady(BitMap64([1, 2, 3, 4, 8]), [BitMap64([3, 9]), BitMap64([1, 4])])
    order = [3, 1, 4, 2, 8]
    assert list(aged) == order
    assert [aged[at] for at in range(-5, 5)] == order + order
    for part in (slice(2), slice(1, 4), slice(None, None, -1), slice(-2, None), slice(0, 5, 2)):
        assert aged[part] == order[part]
    assert (8 in aged, 9 in aged, "x" in aged, len(aged)) == (True, False, False, 5)
    with pytest.raises(IndexError):
        aged[5]


def test_a_batch_of_a_million_ready_samples_reads_their_versions_once(queue: Queue):
    count = 1_000_000
    versions = torch.arange(count) // 1000
    queue.sync.put(TensorDict({"x": versions, "policy_version": versions}, [count]))
    sampler = within(900)
    claim(queue, 32, sampler, policy_version=999)
    started = time.perf_counter()
    for _ in range(20):
        assert len(claim(queue, 32, sampler, policy_version=999)) == 32
    assert time.perf_counter() - started < 4


# Against a model


class AgesUnderWay(RuleBasedStateMachine):
    """Two tasks, one by get_meta and one by global batches, while samples and versions come."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.queue = Queue("q", self.folder.name)
        self.version: dict[int, int | None] = {}
        self.current: int | None = None
        self.cleared: set[int] = set()
        self.taken: dict[str, set[int]] = {"t": set(), "fit": set()}
        self.stale: dict[str, set[int]] = {"t": set(), "fit": set()}
        self.batches: list[list[int]] = []
        self.samplers = {"t": within(1), "fit": within(1)}

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            self.queue.close()
            self.folder.cleanup()

    def expected(self, task: str) -> list[int]:
        """What the task may take, oldest first; what is stale goes."""
        free = self.version.keys() - self.cleared - self.taken[task] - self.stale[task]
        if self.current is not None:
            old = {
                at for at in free if (v := self.version[at]) is not None and v < self.current - 1
            }
            self.stale[task] |= old
            free -= old
        first = {at: (v is None, v or 0, at) for at in free for v in [self.version[at]]}
        return sorted(free, key=first.__getitem__)

    @rule(versions=st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=1, max_size=5))
    def put(self, versions: list[int | None]) -> None:
        self.version.update(zip(put(self.queue, *versions), versions, strict=True))

    @precondition(lambda self: None in self.version.values())
    @rule(version=st.integers(0, 5))
    def tell_a_version_late(self, version: int) -> None:
        index = next(at for at, known in self.version.items() if known is None)
        if index not in self.cleared:
            meta = BatchMeta([index], "default")
            self.queue.sync.put([{"policy_version": version}], metadata=meta)
            self.version[index] = version

    @rule(step=st.integers(0, 2))
    def announce(self, step: int) -> None:
        self.current = (self.current or 0) + step
        announce(self.queue, self.current)

    @precondition(lambda self: self.version.keys() - self.cleared)
    @rule(seed=st.integers(0, 99))
    def clear(self, seed: int) -> None:
        chosen = random.Random(seed).choice(sorted(self.version.keys() - self.cleared))
        self.queue.sync.clear([chosen])
        self.cleared.add(chosen)

    @rule(task=st.sampled_from(["t", "fit"]))
    def start_anew(self, task: str) -> None:
        self.samplers[task] = within(1)

    @rule()
    def reset(self) -> None:
        self.queue.sync.reset_consumption("t")
        self.taken["t"], self.stale["t"] = set(), set()

    @rule(size=st.integers(1, 4))
    def claim(self, size: int) -> None:
        got = claim(self.queue, size, self.samplers["t"])
        assert got == self.expected("t")[:size]
        self.taken["t"] |= set(got)

    @rule()
    def train(self) -> None:
        got = form(self.queue, len(self.batches), self.samplers["fit"])
        expected = self.expected("fit")[:2]
        assert got == ([expected] if len(expected) == 2 else "waits")
        if got != "waits":
            self.batches += got
            self.taken["fit"] |= set(got[0])

    @precondition(lambda self: self.batches)
    @rule(seed=st.integers(0, 99))
    def replay(self, seed: int) -> None:
        k = random.Random(seed).randrange(len(self.batches))
        assert form(self.queue, k, within(1)) == [self.batches[k]]

    @invariant()
    def what_was_dropped_is_counted(self) -> None:
        self.queue.engine.books.follow()
        for task, stale in self.stale.items():
            known = self.queue.engine.books.tasks.get((task, "default"))
            if known is not None:
                assert set(known.dropped.get("stale", [])) == stale

    def drain(self) -> None:
        self.queue.sync.seal()
        sampler = within(1)
        while (got := form(self.queue, len(self.batches), sampler, last="split")) is not None:
            assert got == [self.expected("fit")[:2]]
            self.batches += got
            self.taken["fit"] |= set(got[0])
        assert not self.expected("fit")


TestAgesUnderWay = AgesUnderWay.TestCase
TestAgesUnderWay.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
