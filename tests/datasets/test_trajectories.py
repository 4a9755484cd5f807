from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from tensordict import TensorDict

from persisting_torch import (
    EpisodeSampler,
    PersistingDataLoader,
    PersistingDataModule,
    PersistingDataset,
    PersistingError,
    Queue,
    WaitTimeout,
    WindowSampler,
    cut_episodes,
)
from tests.datasets.counting import Counting, fit
from tests.datasets.walks import MOST_STEPS, episode_of, interleaved, uids_of, walk

LENGTHS = [3, 1, 4, 2, 5, 2, 3, 4]


def fill(path: Path, *walks: list[dict[str, Any]], seal: bool = True, seed: int = 0) -> None:
    with Queue("q", path) as queue:
        queue.sync.put(interleaved(walks, seed))
        if seal:
            queue.sync.seal("default")


def fill_all(path: Path, **options: Any) -> None:
    fill(path, *(walk(n, length) for n, length in enumerate(LENGTHS)), **options)


def dataset_of(path: Path, **options: Any) -> PersistingDataset:
    given = {"batch_size": 2, "sampler": EpisodeSampler(), "timeout": 30.0} | options
    return PersistingDataset("q", storage_path=path, **given)


def uids(batches: Any) -> list[list[list[int]]]:
    return [uids_of(batch) for batch in batches]


def flat(batches: Any) -> list[int]:
    return list(chain.from_iterable(chain.from_iterable(batches)))


ALL = sorted(n * MOST_STEPS + step for n, length in enumerate(LENGTHS) for step in range(length))


# Batches


def test_a_dataset_of_episodes_yields_jagged_batches(tmp_path):
    fill_all(tmp_path)
    batches = list(dataset_of(tmp_path))
    assert [batch.batch_size for batch in batches] == [(2,)] * 4
    assert batches[0]["x"].layout == torch.jagged
    assert set(batches[0].keys()) == {"episode", "step", "done", "uid", "x"}
    assert sorted(flat(uids(batches))) == ALL
    assert all(episode_of(e)[1:] == (0, LENGTHS[e[0] // 100]) for e in chain(*uids(batches)))


def test_a_dataset_of_windows_yields_batches_of_so_many_steps(tmp_path):
    fill_all(tmp_path)
    batches = list(dataset_of(tmp_path, sampler=WindowSampler(2)))
    assert {batch.batch_size for batch in batches} == {(2, 2)}
    assert batches[0]["x"].shape == (2, 2, 2)
    windows = [episode_of(window) for window in chain(*uids(batches))]
    assert len(set(windows)) == len(windows) == 10
    assert all(start % 2 == 0 and length == 2 for _, start, length in windows)


def test_only_the_named_fields_are_there(tmp_path):
    fill_all(tmp_path)
    batch = next(iter(dataset_of(tmp_path, fields=["uid", "_index"])))
    assert set(batch.keys()) == {"uid", "_index"}
    assert batch["_index"].layout == torch.jagged
    batch = next(iter(dataset_of(tmp_path, fields=["uid", "step"], task_name="other")))
    assert set(batch.keys()) == {"uid", "step"}


def test_the_field_that_only_the_form_needs_may_be_nested(tmp_path):
    with Queue("q", tmp_path) as queue:
        steps = {"meta": {"t": torch.tensor([0, 1])}, "e": torch.zeros(2), "end": torch.ones(2)}
        queue.sync.put(TensorDict({**steps, "uid": torch.arange(2)}, [2]))
        sampler = EpisodeSampler("e", "meta.t", "end")
        batch = next(iter(PersistingDataset(queue, fields=["uid"], sampler=sampler, batch_size=1)))
        assert set(batch.keys()) == {"uid"}


def test_padded_fields_come_with_a_mask(tmp_path):
    fill_all(tmp_path)
    batch = next(iter(dataset_of(tmp_path, fields=["uid", "x"], pad={"x": 9.0})))
    lengths = [len(each) for each in uids_of(batch)]
    assert batch["x"].shape == (2, max(lengths), 2)
    assert batch["mask"].sum(1).tolist() == lengths
    assert (batch["x"][~batch["mask"]] == 9.0).all()


def test_transform_gets_the_batch_in_its_form(tmp_path):
    fill_all(tmp_path)
    sizes = list(dataset_of(tmp_path, transform=lambda batch: batch["x"].is_nested))
    assert sizes == [True] * 4


# Ranks, and the rest


def side_by_side(ranks: Iterable[PersistingDataset]) -> list[list[list[list[int]]]]:
    """The batches of each rank, all of which advance together."""
    return [
        list(own) for own in zip(*(uids(pair) for pair in zip(*ranks, strict=True)), strict=True)
    ]


def test_each_rank_gets_as_many_episodes_of_whatever_length(tmp_path):
    fill_all(tmp_path)
    ranks = side_by_side(dataset_of(tmp_path, dp_rank=rank, dp_size=2) for rank in range(2))
    assert [[len(batch) for batch in batches] for batches in ranks] == [[2, 2], [2, 2]]
    assert sorted(flat(ranks[0]) + flat(ranks[1])) == ALL


@pytest.mark.parametrize(("last", "expected"), [("drop", [2]), ("split", [2, 1]), ("pad", [2, 2])])
def test_the_remainder_counts_episodes_and_tears_none(tmp_path, last, expected):
    fill(tmp_path, *(walk(n, 3) for n in range(6)))
    ranks = side_by_side(
        dataset_of(tmp_path, dp_rank=rank, dp_size=2, last=last) for rank in range(2)
    )
    for batches in ranks:
        assert [len(batch) for batch in batches] == expected
        assert all(episode_of(each)[1:] == (0, 3) for each in chain(*batches))
    counts = Counter(each[0] for batches in ranks for each in chain(*batches))
    assert len(counts) == (4 if last == "drop" else 6)
    with Queue("q", tmp_path) as queue:
        books = queue.engine.books_of("train", "default")
    assert books["once"] == len(counts) * 3
    assert books["twice"] == 0


def test_fewer_episodes_than_ranks_are_not_split(tmp_path):
    fill(tmp_path, walk(1, 4))
    for rank in range(2):
        assert uids(dataset_of(tmp_path, dp_rank=rank, dp_size=2, last="split")) == []


def test_what_is_unfinished_does_not_keep_a_sealed_partition_from_its_end(tmp_path):
    fill(tmp_path, walk(1, 2), walk(2, 3, ends=False), walk(3, 1))
    assert sorted(flat(uids(dataset_of(tmp_path)))) == [100, 101, 300]
    kept = dataset_of(
        tmp_path, sampler=EpisodeSampler(unfinished="keep"), last="split", task_name="other"
    )
    assert sorted(flat(uids(kept))) == [100, 101, 200, 201, 202, 300]
    with Queue("q", tmp_path) as queue:
        assert queue.engine.books_of("train", "default")["dropped"] == 3


# Waiting


def test_a_wait_wakes_when_an_episode_is_abandoned(tmp_path):
    fill(tmp_path, walk(1, 2, ends=False), seal=False)
    sampler = EpisodeSampler(unfinished="keep", abandon_after=0.3)
    (batch,) = [next(iter(dataset_of(tmp_path, sampler=sampler, batch_size=1)))]
    assert uids_of(batch) == [[100, 101]]


def test_a_window_is_trained_while_its_episode_goes_on(tmp_path):
    fill(tmp_path, walk(1, 3, ends=False), seal=False)
    batches = iter(dataset_of(tmp_path, sampler=WindowSampler(2), batch_size=1))
    assert uids_of(next(batches)) == [[100, 101]]
    with Queue("q", tmp_path) as queue:
        timer = threading.Timer(0.2, queue.sync.put, ([walk(1, 4)[3]],))
        timer.start()
        timer.join()
        queue.sync.flush()
    assert uids_of(next(batches)) == [[102, 103]]


def test_a_wait_beyond_the_limit_names_the_unfinished_episodes(tmp_path):
    fill(tmp_path, walk(1, 2), walk(2, 3, ends=False), seal=False)
    expected = (
        r"waited 0\.2 s for 2 episodes of q/default with fields done, episode, step, uid for task"
        r" 'train'; 5 samples ready; episodes complete: 1, unfinished: 1 \(episode 2 has not ended"
        r" at step 2\)"
    )
    with pytest.raises(WaitTimeout, match=expected):
        next(iter(dataset_of(tmp_path, timeout=0.2, fields=["uid"])))


def test_a_wrong_field_of_the_sampler_is_told(tmp_path):
    fill_all(tmp_path)
    with pytest.raises(PersistingError, match=r"all of the fields \['step', 'game', 'done'\]"):
        list(dataset_of(tmp_path, sampler=EpisodeSampler("game")))


def test_too_few_episodes_for_a_batch_are_told(tmp_path, caplog):
    fill(tmp_path, walk(1, 2))
    assert list(dataset_of(tmp_path)) == []
    assert "2 samples ready, which make no global batch of 2 episodes" in caplog.text


def test_batches_that_another_sampler_formed_are_not_taken_for_windows(tmp_path):
    fill_all(tmp_path)
    next(iter(dataset_of(tmp_path)))
    with pytest.raises(ValueError, match="give this one another task_name"):
        list(dataset_of(tmp_path, sampler=WindowSampler(2)))


# Exactly once


def test_a_process_that_starts_anew_gets_the_batch_in_hand_again(tmp_path):
    fill_all(tmp_path)
    seen = []
    for batch in dataset_of(tmp_path):
        seen.append(uids_of(batch))
        if len(seen) == 2:
            break
    assert uids(dataset_of(tmp_path)) == [seen[1], *uids(dataset_of(tmp_path, task_name="b"))[2:]]


def test_a_state_resumes_exactly_whatever_came_meanwhile(tmp_path):
    fill_all(tmp_path, seal=False)
    loader = PersistingDataLoader(dataset_of(tmp_path, sampler=WindowSampler(2)))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    expected = [uids_of(next(batches)), uids_of(next(batches))]
    loader.close()
    fill(tmp_path, *(walk(n, 3) for n in range(20, 24)))
    loader = PersistingDataLoader(dataset_of(tmp_path, sampler=WindowSampler(2)))
    loader.load_state_dict(state)
    again = uids(loader)
    assert again[:2] == expected
    assert {window[0] // MOST_STEPS for window in chain(*again)} >= {20, 21, 22}


def test_workers_give_the_same_batches_whose_fields_go_together(tmp_path):
    fill_all(tmp_path)
    alone = uids(dataset_of(tmp_path))
    with_workers = PersistingDataLoader(dataset_of(tmp_path, task_name="other"), num_workers=2)
    batches = list(with_workers)
    with_workers.close()
    assert uids(batches) == alone
    for batch in batches:
        assert (batch["uid"] - batch["episode"] * MOST_STEPS - batch["step"]).values().sum() == 0


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 6), min_size=3, max_size=10),
    unended=st.sets(st.integers(0, 9), max_size=2),
    length=st.sampled_from([None, 1, 2, 3]),
    runs=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3)), min_size=1, max_size=4
    ),
    seed=st.integers(0, 1000),
)
def test_every_step_is_trained_once_through_restarts_with_other_ranks(
    tmp_path_factory, lengths, unended, length, runs, seed
):
    """Runs of (ranks, batch size, batches before the kill), steps arriving between them."""
    path = tmp_path_factory.mktemp("run")
    walks = [walk(n, steps, ends=n not in unended) for n, steps in enumerate(lengths)]
    arriving = interleaved(walks, seed)
    pieces: list[list[int]] = []
    state: dict[str, Any] | None = None

    def datasets(ranks: int, batch_size: int) -> list[PersistingDataset]:
        sampler = partial(EpisodeSampler) if length is None else partial(WindowSampler, length)
        options = {} if length is None else {"tail": "keep"}
        found = [
            dataset_of(
                path,
                sampler=sampler(**options),
                batch_size=batch_size,
                dp_rank=rank,
                dp_size=ranks,
                last="split",
                timeout=0.05,
            )
            for rank in range(ranks)
        ]
        for dataset in found:
            if state is not None:
                dataset.load_state_dict(state)
        return found

    share = -(-len(arriving) // len(runs))
    for number, (ranks, batch_size, most) in enumerate(runs):
        fill(path, arriving[number * share : (number + 1) * share], seal=False)
        opened = datasets(ranks, batch_size)
        iterators = [iter(each) for each in opened]
        for _ in range(most):
            try:
                batches = [next(each) for each in iterators]
            except WaitTimeout:
                break
            pieces += chain(*uids(batches))
            state = opened[0].state_dict()
        for each in opened:
            each.end_delivery()
            each.close()
    with Queue("q", path) as queue:
        queue.sync.seal()
    for batch in datasets(1, 1)[0]:
        pieces += uids_of(batch)
    where = [episode_of(piece) for piece in pieces]
    most_steps = length or MOST_STEPS
    assert all(start % most_steps == 0 and count <= most_steps for _, start, count in where)
    trained = Counter(chain.from_iterable(pieces))
    assert set(trained.values()) == {1} or not trained
    expected = set()
    for n, steps in enumerate(lengths):
        whole = steps if n not in unended else 0 if length is None else steps - steps % length
        expected |= {n * MOST_STEPS + step for step in range(whole)}
    assert set(trained) == expected


def test_producers_that_put_at_once_lose_and_repeat_nothing(tmp_path):
    walks = [walk(n, 1 + n % 7) for n in range(60)]
    Queue("q", tmp_path).close()

    def produce(own: list[list[dict[str, Any]]], seed: int) -> None:
        with Queue("q", tmp_path, batch_size=7) as queue:
            for record in interleaved(own, seed):
                queue.sync.put(record)

    threads = [threading.Thread(target=produce, args=(walks[n::3], n)) for n in range(3)]
    for thread in threads:
        thread.start()

    def seal() -> None:
        for thread in threads:
            thread.join()
        with Queue("q", tmp_path) as queue:
            queue.sync.seal()

    threading.Thread(target=seal).start()
    sampler = WindowSampler(3, tail="keep")
    found = uids(dataset_of(tmp_path, sampler=sampler, batch_size=4, last="split"))
    assert Counter(flat(found)) == Counter(int(r["uid"]) for each in walks for r in each)
    assert all(episode_of(window) for window in chain(*found))


# Under a Trainer


class CountingSteps(Counting):
    """Weight i grows by 1 whenever an optimizer step covers the step with uid i."""

    def training_step(self, batch: TensorDict, batch_idx: int) -> torch.Tensor:
        if self.fail_at is not None and len(self.seen) == self.fail_at:
            raise RuntimeError("the training step failed")
        uid = batch["uid"].values() if batch["uid"].is_nested else batch["uid"]
        self.seen.append(uid.flatten().tolist())
        there = batch["mask"].flatten() if "mask" in batch.keys() else slice(None)  # noqa: SIM118
        return -self.count[uid.flatten()[there]].sum()

    def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
        self.validated += batch.batch_size[0]


@pytest.mark.parametrize("sampler", [EpisodeSampler(), WindowSampler(2, tail="pad")])
def test_a_trainer_that_fails_and_resumes_trains_every_step_once(tmp_path, sampler):
    fill_all(tmp_path)
    with Queue("q", tmp_path) as queue:
        queue.sync.put([record for n in range(3) for record in walk(n, 2)], "val")
    size = MOST_STEPS * len(LENGTHS)

    def data() -> PersistingDataModule:
        return PersistingDataModule(
            "q", str(tmp_path), batch_size=1, sampler=sampler, last="split", val_partition_id="val"
        )

    def saving() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=2, save_last=True)

    with pytest.raises(RuntimeError, match="training step failed"):
        fit(CountingSteps(size, fail_at=5), data(), tmp_path, saving())
    model = CountingSteps(size)
    fit(model, data(), tmp_path, saving(), ckpt_path=tmp_path / "ckpt" / "last.ckpt")
    assert [n for n, count in enumerate(model.counts) if count == 1] == ALL
    assert set(model.counts) == {0, 1}
    assert model.validated == 3


# Passes that consume nothing


def test_a_pass_without_consumption_has_all_complete_episodes_in_their_form(tmp_path):
    fill(tmp_path, walk(1, 3), walk(2, 2), walk(3, 4, ends=False), walk(4, 1), seal=False)
    dataset = dataset_of(tmp_path, consume=False)
    first = uids(dataset)
    assert uids(dataset) == first
    assert [len(batch) for batch in first] == [2, 1]
    assert sorted(flat(first)) == [100, 101, 102, 200, 201, 400]
    assert uids(dataset_of(tmp_path, consume=False, sampler=WindowSampler(2))) != first


def test_a_seed_draws_the_episodes_of_each_pass_anew(tmp_path):
    fill_all(tmp_path)
    dataset = dataset_of(tmp_path, consume=False, shuffle_seed=3)
    epochs = [uids(dataset) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert all(sorted(flat(epoch)) == ALL for epoch in epochs)
    again = dataset_of(tmp_path, consume=False, shuffle_seed=3)
    batches = iter(again)
    next(batches)
    resumed = dataset_of(tmp_path, consume=False, shuffle_seed=3, batch_size=1)
    resumed.load_state_dict(again.state_dict())
    assert [each for (each,) in uids(resumed)] == list(chain(*epochs[0]))[2:]


# Episodes that are one sample each


def put_whole(path: Path, lengths: list[int]) -> None:
    with Queue("q", path) as queue:
        for n, length in enumerate(lengths):
            steps = walk(n, length)
            queue.sync.put(
                {
                    "uid": torch.stack([step["uid"] for step in steps]),
                    "x": torch.stack([step["x"] for step in steps]),
                    "prize": float(n),
                }
            )
        queue.sync.seal()


def test_episodes_put_whole_come_as_jagged_batches(tmp_path):
    put_whole(tmp_path, LENGTHS)
    batches = list(dataset_of(tmp_path, sampler=None))
    assert batches[0]["x"].layout == torch.jagged
    assert sorted(flat(uids(batches))) == ALL
    assert [episode_of(e)[1:] for e in chain(*uids(batches))] == [(0, n) for n in LENGTHS]


def test_episodes_put_whole_are_cut_into_windows_by_a_transform(tmp_path):
    put_whole(tmp_path, LENGTHS)
    cut = partial(cut_episodes, length=2, fields=["uid", "x"], tail="pad")
    batches = list(dataset_of(tmp_path, sampler=None, transform=cut))
    for batch in batches:
        assert batch["x"].shape[1:] == (2, 2)
        assert batch["prize"].shape == batch.batch_size
        assert torch.equal(batch["prize"].long(), batch["uid"][:, 0] // MOST_STEPS)
    trained = [int(uid) for batch in batches for uid in batch["uid"][batch["mask"]]]
    assert sorted(trained) == ALL
