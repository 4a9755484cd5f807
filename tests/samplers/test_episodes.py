from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from persisting_torch import EpisodeSampler, PersistingDataset, Queue, SchemaError, WindowSampler
from persisting_torch.samplers.pieces import Pieces
from persisting_torch.samplers.staleness import MaxStaleness
from tests.datasets.walks import episode_of, interleaved, uids_of, walk


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue("q", tmp_path) as opened:
        yield opened


def taken(queue: Queue, sampler: EpisodeSampler, batch_size: int = 1) -> list[list[int]]:
    """The uids of the next episodes or windows, [] where the sampler gives none."""
    meta = queue.sync.get_meta(["uid", "step"], batch_size, sampler=sampler)
    return uids_of(sampler.shape(queue.sync.get_data(meta))) if meta.size else []


def all_taken(queue: Queue, sampler: EpisodeSampler) -> list[list[int]]:
    found: list[list[int]] = []
    while new := taken(queue, sampler):
        found += new
    return found


def dropped(queue: Queue, task: str = "default") -> dict[str, list[int]]:
    """The uids of what a task dropped, by reason."""
    engine = queue.engine
    with engine.ledger.reading() as tx:
        engine.books.refresh(tx)
        known = engine.books.tasks.get((task, "default"))
        reasons = {} if known is None else {r: list(m) for r, m in known.dropped.items() if m}
    return {
        reason: sorted(engine.read_batch("default", indexes, ["uid"])["uid"].tolist())
        for reason, indexes in reasons.items()
    }


def put(queue: Queue, *records: dict[str, Any]) -> list[int]:
    return list(queue.sync.put(list(records)).global_indexes)


# Whole episodes


def test_episodes_come_whole_in_the_order_in_which_they_were_completed(queue):
    a, b = walk(1, 3), walk(2, 2)
    put(queue, a[0], b[0], a[1], b[1])
    sampler = EpisodeSampler()
    assert taken(queue, sampler) == [[200, 201]]
    assert taken(queue, sampler) == []
    put(queue, a[2])
    assert taken(queue, sampler) == [[100, 101, 102]]


def test_steps_may_come_in_any_order(queue):
    a = walk(1, 4)
    put(queue, a[3], a[1])
    put(queue, a[2])
    sampler = EpisodeSampler()
    assert taken(queue, sampler) == []
    put(queue, a[0])
    assert taken(queue, sampler) == [[100, 101, 102, 103]]


def test_a_batch_is_given_whole_or_not_at_all_until_no_more_can_come(queue):
    put(queue, *walk(1, 2), *walk(2, 1))
    sampler = EpisodeSampler()
    assert taken(queue, sampler, 3) == []
    queue.sync.seal()
    assert taken(queue, sampler, 3) == [[100, 101], [200]]


def test_the_fields_that_make_an_episode_may_arrive_late(queue):
    a = walk(1, 2)
    ends = [record.pop("done") for record in a]
    meta = queue.sync.put(a)
    sampler = EpisodeSampler()
    assert taken(queue, sampler) == []
    queue.sync.put(TensorDict({"done": torch.tensor(ends)}, [2]), metadata=meta)
    assert taken(queue, sampler) == [[100, 101]]


def test_an_episode_waits_for_a_step_that_lacks_a_field_of_the_batch(queue):
    a = walk(1, 2)
    uid = a[1].pop("uid")
    put(queue, a[0])
    late = queue.sync.put(a[1])
    queue.sync.seal()
    sampler = EpisodeSampler()
    assert taken(queue, sampler) == []
    queue.sync.put(TensorDict({"uid": uid[None]}, [1]), metadata=late)
    assert taken(queue, sampler) == [[100, 101]]


@pytest.mark.parametrize("name", ["worker-3/7", b"\x00\x01", 12, torch.tensor(12), 1.5])
def test_an_episode_is_named_by_a_number_or_text(queue, name):
    for step in (1, 0):
        put(queue, {"e": name, "t": torch.tensor(step), "end": step == 1, "uid": step})
    meta = queue.sync.get_meta(["uid"], 1, sampler=EpisodeSampler("e", "t", "end"))
    assert queue.sync.get_data(meta)["uid"].tolist() == [0, 1]


def test_one_of_several_end_fields_ends_an_episode(queue):
    sampler = EpisodeSampler(end_field=("terminated", "truncated"))
    for episode, ends in [(1, (True, False)), (2, (False, True)), (3, (False, False))]:
        record = walk(episode, 1)[0] | dict(zip(("terminated", "truncated"), ends, strict=True))
        put(queue, record)
    assert all_taken(queue, sampler) == [[100], [200]]


def test_of_a_step_that_was_put_twice_the_newer_counts(queue):
    first, second = walk(1, 2, ends=False), walk(1, 3)
    for record in second:
        record["uid"] = record["uid"] + 50
    put(queue, *first, *second)
    assert taken(queue, EpisodeSampler()) == [[150, 151, 152]]
    assert dropped(queue) == {"repeated": [100, 101]}


def test_a_step_beyond_the_end_is_dropped(queue):
    sampler = EpisodeSampler()
    put(queue, *walk(1, 4, ends=False)[2:], walk(1, 2)[1])
    assert taken(queue, sampler) == []
    put(queue, walk(1, 2)[0])
    assert taken(queue, sampler) == [[100, 101]]
    assert dropped(queue) == {"beyond the end": [102, 103]}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step": 1.5}, r"has 1\.5 in field 'step', where a whole number from 0 is needed"),
        ({"step": -1}, r"sample 0 of q/default has -1 in field 'step'"),
        ({"step": torch.tensor([1])}, r"in field 'step', where a whole number from 0"),
        ({"episode": [1, 2]}, r"has \[1, 2\] in field 'episode', where a number or text is needed"),
    ],
)
def test_a_sample_that_is_no_step_is_told(queue, wrong, message):
    put(queue, walk(1, 1)[0] | wrong)
    with pytest.raises(SchemaError, match=message):
        taken(queue, EpisodeSampler())


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match="length must be at least 1"):
        WindowSampler(0)
    with pytest.raises(ValueError, match="tail must be 'drop', 'pad' or 'keep'"):
        WindowSampler(2, tail="cut")
    with pytest.raises(ValueError, match="unfinished must be"):
        EpisodeSampler(unfinished="cut")
    with pytest.raises(ValueError, match="abandon_after must be positive"):
        EpisodeSampler(abandon_after=0)
    with pytest.raises(ValueError, match="only a queue can call it"):
        EpisodeSampler().sample([1, 2], 2)


# Episodes that do not end


def test_what_is_unfinished_is_dropped_or_kept_when_the_partition_is_sealed(queue):
    put(queue, *walk(1, 3, ends=False), *walk(2, 2), walk(3, 3)[0], walk(3, 3)[2], walk(4, 2)[1])
    queue.sync.seal()
    keep, drop = EpisodeSampler(unfinished="keep"), EpisodeSampler()
    assert all_taken(queue, drop) == [[200, 201]]
    assert dropped(queue) == {"unfinished": [100, 101, 102, 300, 302, 401]}
    queue.sync.reset_consumption("default")
    assert sorted(all_taken(queue, keep)) == [[100, 101, 102], [200, 201], [300]]
    assert dropped(queue) == {"unfinished": [302, 401]}


def test_an_episode_without_a_new_step_for_long_is_abandoned(queue):
    put(queue, walk(1, 3)[0])
    sampler = EpisodeSampler(abandon_after=0.3)
    assert taken(queue, sampler) == []
    time.sleep(0.2)
    put(queue, walk(1, 3)[1])
    time.sleep(0.2)
    assert taken(queue, sampler) == []
    assert dropped(queue) == {}
    time.sleep(0.35)
    assert taken(queue, sampler) == []
    assert dropped(queue) == {"unfinished": [100, 101]}
    put(queue, walk(1, 3)[2])
    assert taken(queue, sampler) == []


def test_what_is_missing_names_the_unfinished(queue):
    put(queue, *walk(1, 3, ends=False), walk(2, 3)[2], *walk(3, 1))
    sampler = EpisodeSampler()
    assert sampler.what_is_missing() == ""
    taken(queue, sampler, 2)
    assert sampler.what_is_missing() == (
        "episodes complete: 1, unfinished: 2"
        " (episode 1 has not ended at step 2; episode 2 lacks step 0)"
    )
    put(queue, *(walk(n, 2)[1] for n in range(5, 9)))
    taken(queue, sampler, 2)
    assert sampler.what_is_missing().endswith("episode 5 lacks step 0; and 3 more)")
    windows = WindowSampler(3)
    queue.sync.get_meta(["uid"], 5, "other", sampler=windows)
    assert "window 0 of episode 2 lacks step 0" in windows.what_is_missing()


# Windows


def test_windows_come_as_soon_as_their_steps_are_there(queue):
    a = walk(1, 5)
    put(queue, *a[:3])
    sampler = WindowSampler(2)
    assert taken(queue, sampler) == [[100, 101]]
    assert taken(queue, sampler) == []
    put(queue, a[3])
    assert taken(queue, sampler) == [[102, 103]]


def test_a_new_sampler_goes_on_in_the_middle_of_an_episode(queue):
    a = walk(1, 6)
    put(queue, *a[:3])
    assert taken(queue, WindowSampler(2)) == [[100, 101]]
    put(queue, *a[3:])
    assert all_taken(queue, WindowSampler(2)) == [[102, 103], [104, 105]]


@pytest.mark.parametrize(
    ("tail", "expected", "reasons"),
    [
        ("drop", [[100, 101]], {"tail": [102, 200]}),
        ("keep", [[100, 101], [102], [200]], {}),
    ],
)
def test_the_tail_of_an_episode_is_dropped_or_kept(queue, tail, expected, reasons):
    put(queue, *walk(1, 3), *walk(2, 1))
    assert all_taken(queue, WindowSampler(2, tail=tail)) == expected
    assert dropped(queue) == reasons


def test_the_tail_of_an_episode_is_padded_with_a_mask(queue):
    put(queue, *walk(1, 3))
    sampler = WindowSampler(2, tail="pad")
    batch = sampler.shape(queue.sync.get_batch(["uid", "x", "step"], 2, sampler=sampler))
    assert batch["uid"].tolist() == [[100, 101], [102, 0]]
    assert batch["mask"].tolist() == [[True, True], [True, False]]
    assert batch["x"].shape == (2, 2, 2)


# Against a model in memory


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[int], int | None]:
    """Steps in the order of their arrival, some missing; how many at a time; a window's length."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    unended = draw(st.sets(st.integers(0, 5), max_size=2))
    walks = [walk(n, steps, ends=n not in unended) for n, steps in enumerate(lengths)]
    records = [record for each in walks for record in each]
    order = draw(
        st.one_of(st.permutations(records), st.builds(interleaved, st.just(walks), st.integers()))
    )
    lost = draw(st.sets(st.integers(0, len(order) - 1), max_size=2))
    arriving = [record for at, record in enumerate(order) if at not in lost]
    cuts = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    return arriving, cuts, draw(st.sampled_from([None, 1, 2, 3]))


class Model:
    """What EpisodeSampler and WindowSampler promise, in the plainest words."""

    def __init__(self, length: int | None) -> None:
        self.length = length
        self.arrived: list[dict[str, Any]] = []
        self.given: set[int] = set()

    def complete(self) -> list[list[int]]:
        """Uids of the complete episodes or windows that were not given, by order of completion."""
        pieces: dict[tuple[int, int], list[tuple[int, int, int, bool]]] = {}
        for age, record in enumerate(self.arrived):
            uid, step = int(record["uid"]), record["step"]
            window = 0 if self.length is None else step // self.length
            if uid not in self.given:
                piece = pieces.setdefault((record["episode"], window), [])
                piece.append((step, uid, age, record["done"]))
        found = []
        for (_, window), members in pieces.items():
            members.sort()
            start = 0 if self.length is None else window * self.length
            steps = [step for step, *_ in members]
            full = self.length is not None and len(steps) == self.length
            if steps == list(range(start, start + len(steps))) and (full or members[-1][3]):
                found.append(
                    (max(age for _, _, age, _ in members), [uid for _, uid, *_ in members])
                )
        return [uids for _, uids in sorted(found)]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(stories(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_whatever_comes_in_whatever_order_a_model_in_memory_says_what_is_given(
    tmp_path_factory, story, batch_size, luck
):
    arriving, cuts, length = story
    path = tmp_path_factory.mktemp("story")
    model = Model(length)

    def new_sampler() -> EpisodeSampler:
        return EpisodeSampler() if length is None else WindowSampler(length, tail="keep")

    queue, sampler = Queue("q", path), new_sampler()
    try:
        steps = iter(arriving)
        for cut in [*cuts, len(arriving)]:
            batch = list(islice(steps, cut))
            if batch:
                put(queue, *batch)
            model.arrived += batch
            if luck.random() < 0.3:
                sampler = (
                    pickle.loads(pickle.dumps(sampler)) if luck.random() < 0.5 else new_sampler()
                )
            if luck.random() < 0.2:
                queue.close()
                queue = Queue("q", path)
            expected = model.complete()
            found = taken(queue, sampler, batch_size)
            assert found == (expected[:batch_size] if len(expected) >= batch_size else [])
            model.given.update(uid for uids in found for uid in uids)
        queue.sync.seal()
        rest = model.complete()
        left = taken(queue, sampler, 100)
        assert left == rest
        model.given.update(uid for uids in left for uid in uids)
        everything = {int(record["uid"]) for record in arriving}
        lost = dropped(queue).get("unfinished", []) if arriving else []
        assert model.given.isdisjoint(lost)
        assert model.given | set(lost) == everything
        assert all(episode_of(uids) for uids in left)
    finally:
        queue.close()


# Cost


def test_memory_holds_what_is_unfinished_and_no_more(queue):
    sampler = EpisodeSampler()
    put(queue, *walk(99, 3, ends=False))
    for round_ in range(5):
        put(queue, *(record for n in range(20) for record in walk(100 + 20 * round_ + n, 5)))
        for _ in range(20):
            assert taken(queue, sampler)
    assert taken(queue, sampler) == []
    pieces = sampler._memories.latest
    assert len(pieces) == 3
    assert not pieces.whole
    assert len(pieces.open) == 1


def test_a_long_queue_is_read_no_further_than_a_batch_needs(queue, monkeypatch):
    monkeypatch.setattr("persisting_torch.samplers.episodes.READ_AT_ONCE", 10)
    put(queue, *(record for n in range(50) for record in walk(n, 4)))
    sampler = EpisodeSampler()
    assert taken(queue, sampler, 3) == [[0, 1, 2, 3], [100, 101, 102, 103], [200, 201, 202, 203]]
    pieces = sampler._memories.latest
    assert len(pieces) <= 20
    assert len(all_taken(queue, sampler)) == 47


def test_the_sampler_of_a_dataset_pickles(queue):
    put(queue, *walk(1, 2))
    sampler = EpisodeSampler()
    next(iter(PersistingDataset(queue, sampler=sampler, batch_size=1, timeout=5)))
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy.needs == sampler.needs
    assert taken(queue, copy) == [[100, 101]]


def test_a_look_that_was_broken_off_spoils_nothing(queue, monkeypatch):
    put(queue, *walk(1, 3), *walk(2, 2))
    sampler = EpisodeSampler()
    entered = Pieces.add

    def broken_off(self: Pieces, indexes: list[int], episodes: Any, steps: Any, *rest: Any) -> None:
        def ctrl_c() -> Iterator[int]:
            yield from steps[:2]
            raise KeyboardInterrupt

        entered(self, indexes, episodes, ctrl_c(), *rest)

    monkeypatch.setattr(Pieces, "add", broken_off)
    with pytest.raises(KeyboardInterrupt):
        taken(queue, sampler)
    monkeypatch.undo()
    assert all_taken(queue, sampler) == [[100, 101, 102], [200, 201]]
    assert dropped(queue) == {}


# Staleness


def with_versions(steps: list[dict[str, Any]], *versions: int) -> list[dict[str, Any]]:
    return [
        record | {"policy_version": version}
        for record, version in zip(steps, versions, strict=True)
    ]


def test_an_episode_is_as_old_as_its_oldest_step(queue):
    put(queue, *with_versions(walk(1, 3), 1, 2, 3), *with_versions(walk(2, 2), 2, 3))
    sampler = MaxStaleness(EpisodeSampler(), max_staleness=1)
    asked = {"sampler": sampler, "policy_version": 3}
    meta = queue.sync.get_meta(["uid"], 1, **asked)
    assert queue.sync.get_data(meta)["uid"].tolist() == [200, 201]
    assert dropped(queue) == {"stale": [100, 101, 102]}


def test_a_dataset_gives_fresh_windows_in_their_form(queue):
    put(queue, *with_versions(walk(1, 6), 1, 1, 1, 2, 2, 3))
    queue.sync.seal()
    sampler = MaxStaleness(WindowSampler(2), max_staleness=1)
    dataset = PersistingDataset(queue, sampler=sampler, batch_size=1, policy_version=3)
    assert [batch["uid"].tolist() for batch in dataset] == [[[104, 105]]]
    assert dropped(queue, "train") == {"stale": [100, 101, 102, 103]}
