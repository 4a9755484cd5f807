from __future__ import annotations

import logging
import multiprocessing
import pickle
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from persisting_torch import (
    PersistingDataset,
    PersistingError,
    Queue,
    SequentialSampler,
    WaitTimeout,
)
from persisting_torch.datasets.reading import identity
from tests.datasets.counting import committed, fill


def dataset_of(path: Path, **options: Any) -> PersistingDataset:
    given = {"batch_size": 4, "fields": ["uid"], "timeout": 30.0} | options
    return PersistingDataset("q", storage_path=path, **given)


def uids(batches) -> list[list[int]]:
    return [batch["uid"].tolist() for batch in batches]


# Consuming


def test_it_yields_tensordicts_of_the_named_fields(tmp_path):
    with Queue("q", tmp_path) as queue:
        put = TensorDict(
            {"image": torch.rand(8, 3, 2), "label": torch.arange(8), "unused": torch.zeros(8)}, [8]
        )
        queue.sync.put(put)
        queue.sync.seal("default")
        first, second = PersistingDataset(queue, batch_size=4, fields=["image", "label", "_index"])
    assert first.batch_size == second.batch_size == (4,)
    assert set(first.keys()) == {"image", "label", "_index"}
    assert torch.equal(second["image"], put["image"][4:])
    assert second["_index"].tolist() == [4, 5, 6, 7]


def test_without_fields_it_yields_all(tmp_path):
    fill(tmp_path, 4)
    (batch,) = dataset_of(tmp_path, fields=None)
    assert set(batch.keys()) == {"uid"}


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("drop", [[0, 1, 2, 3]]),
        ("split", [[0, 1, 2, 3], [4, 5]]),
        ("pad", [[0, 1, 2, 3], [4, 5, 4, 5]]),
    ],
)
def test_the_remainder_of_a_sealed_partition_is_dropped_split_or_padded(tmp_path, last, expected):
    fill(tmp_path, 6)
    assert uids(dataset_of(tmp_path, last=last)) == expected


def test_ranks_get_the_slices_of_the_same_global_batches(tmp_path):
    fill(tmp_path, 18)
    ranks = [dataset_of(tmp_path, dp_rank=r, dp_size=2, last="split") for r in range(2)]
    assert [uids(pair) for pair in zip(*ranks, strict=True)] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 10, 11], [12, 13, 14, 15]],
        [[16], [17]],
    ]
    assert committed(tmp_path) == 3


def test_tasks_consume_independently(tmp_path):
    fill(tmp_path, 8)
    assert uids(dataset_of(tmp_path)) == uids(dataset_of(tmp_path, task_name="other"))


def test_a_batch_counts_as_consumed_when_the_next_one_is_asked_for(tmp_path):
    fill(tmp_path, 16)
    batches = iter(dataset_of(tmp_path))
    cursors = []
    for _ in batches:
        cursors.append(committed(tmp_path))
    assert cursors == [0, 1, 2, 3]
    assert committed(tmp_path) == 4


def test_a_process_that_starts_anew_begins_with_the_batch_that_the_last_had_in_hand(tmp_path):
    fill(tmp_path, 16)
    for batch in dataset_of(tmp_path):
        if batch["uid"][0] == 8:
            break
    assert uids(dataset_of(tmp_path)) == [[8, 9, 10, 11], [12, 13, 14, 15]]


def test_a_second_loop_of_the_same_dataset_goes_on_after_the_first(tmp_path):
    fill(tmp_path, 16)
    dataset = dataset_of(tmp_path)
    for batch in dataset:
        if batch["uid"][0] == 4:
            break
    assert uids(dataset) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert uids(dataset) == []


def test_a_consumers_new_loop_ends_its_old_one(tmp_path):
    fill(tmp_path, 16)
    dataset = dataset_of(tmp_path)
    old = iter(dataset)
    next(old)
    assert uids(dataset)[0] == [4, 5, 6, 7]
    assert uids(old) == []


def test_it_waits_for_samples_that_are_still_to_come(tmp_path):
    fill(tmp_path, 4, seal=False)
    threading.Timer(0.2, fill, (tmp_path, 4), {"first": 4}).start()
    assert uids(dataset_of(tmp_path)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_wait_beyond_the_limit_says_what_is_missing(tmp_path):
    fill(tmp_path, 3, seal=False)
    with pytest.raises(WaitTimeout, match=r"waited 0\.2 s for 4 samples of q/default.*3 ready"):
        next(iter(dataset_of(tmp_path, timeout=0.2)))


def test_a_long_wait_says_in_the_log_what_is_missing(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("persisting_torch.queue.demand.FIRST_NOTICE_SECONDS", 0.1)
    monkeypatch.setattr("persisting_torch.queue.producers.CHECK_SECONDS", 0.1)
    fill(tmp_path, 3, seal=False)
    threading.Timer(0.5, fill, (tmp_path, 1), {"first": 3}).start()
    assert uids(dataset_of(tmp_path, timeout=None)) == [[0, 1, 2, 3]]
    assert "still waiting: waited 0.1 s for 4 samples of q/default" in caplog.text


def test_transform_makes_the_batch(tmp_path):
    fill(tmp_path, 8)
    dataset = dataset_of(tmp_path, transform=lambda batch: int(batch["uid"].sum()))
    assert list(dataset) == [6, 22]


def test_a_shuffle_seed_draws_the_same_batches_whoever_reads_them(tmp_path):
    fill(tmp_path, 40)
    drawn = [
        uids(dataset_of(tmp_path, task_name=task, shuffle_seed=seed))
        for task, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(chain.from_iterable(drawn[0])) == list(range(40))
    assert drawn[0] != [list(range(i, i + 4)) for i in range(0, 40, 4)]


def test_a_sampler_decides_the_order(tmp_path):
    class Newest(SequentialSampler):
        def sample(self, ready_indexes, batch_size, *args, **kwargs):
            chosen = list(ready_indexes)[-batch_size:]
            return chosen, chosen

    fill(tmp_path, 8)
    assert uids(dataset_of(tmp_path, sampler=Newest())) == [[4, 5, 6, 7], [0, 1, 2, 3]]


# State


def test_a_state_taken_in_the_body_counts_the_batch_in_hand(tmp_path):
    fill(tmp_path, 16)
    dataset = dataset_of(tmp_path)
    next(iter(dataset))
    state = dataset.state_dict()
    assert state == {"k": 1, "queue": "q", "partition": "default", "task": "train"}
    again = dataset_of(tmp_path)
    again.load_state_dict(state)
    assert uids(again)[0] == [4, 5, 6, 7]


def test_the_state_of_a_fresh_dataset_is_the_queues_cursor(tmp_path):
    fill(tmp_path, 16)
    assert dataset_of(tmp_path).state_dict()["k"] == 0
    for _ in dataset_of(tmp_path):
        pass
    assert dataset_of(tmp_path).state_dict()["k"] == 4


def test_once_states_are_taken_a_batch_is_committed_when_a_later_state_follows(tmp_path):
    fill(tmp_path, 40)
    dataset = dataset_of(tmp_path)
    cursors = []
    for k, _ in enumerate(dataset):
        if k % 3 == 2:
            dataset.state_dict()
        cursors.append(committed(tmp_path))
    assert cursors == [0, 1, 2, 2, 2, 3, 3, 3, 6, 6]


def test_a_loaded_state_counts_as_saved(tmp_path):
    fill(tmp_path, 16)
    dataset = dataset_of(tmp_path)
    dataset.load_state_dict({"k": 3, "queue": "q", "partition": "default", "task": "train"})
    next(iter(dataset))
    assert committed(tmp_path) == 3


def test_the_state_of_another_task_is_refused(tmp_path):
    state = {"k": 3, "queue": "q", "partition": "default", "task": "other"}
    with pytest.raises(ValueError, match="the state is of task 'other'"):
        dataset_of(tmp_path).load_state_dict(state)


# Without consuming


def test_without_consuming_every_pass_has_everything_and_marks_nothing(tmp_path):
    fill(tmp_path, 6)
    dataset = dataset_of(tmp_path, consume=False)
    assert uids(dataset) == uids(dataset) == [[0, 1, 2, 3], [4, 5]]
    with Queue("q", tmp_path) as queue:
        assert len(queue.sync.get_meta(["uid"], 10, "train").global_indexes) == 6


def test_a_pass_has_what_was_ready_when_it_began(tmp_path):
    fill(tmp_path, 8, seal=False)
    dataset = dataset_of(tmp_path, consume=False)
    batches = iter(dataset)
    next(batches)
    fill(tmp_path, 8, first=8)
    assert uids(batches) == [[4, 5, 6, 7]]
    assert len(uids(dataset)) == 4


def test_a_shuffle_seed_gives_each_epoch_its_own_order_that_can_be_had_again(tmp_path):
    fill(tmp_path, 40)
    options = {"consume": False, "shuffle_seed": 3}
    one, two = dataset_of(tmp_path, **options), dataset_of(tmp_path, **options)
    epochs = [uids(one), uids(one), uids(one)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert all(sorted(chain.from_iterable(epoch)) == list(range(40)) for epoch in epochs)
    two.set_epoch(2)
    assert uids(two) == epochs[2]
    two.set_epoch(0)
    assert uids(two) == epochs[0]


def test_ranks_get_equal_numbers_of_batches(tmp_path):
    fill(tmp_path, 9)
    ranks = [uids(dataset_of(tmp_path, consume=False, dp_rank=r, dp_size=2)) for r in range(2)]
    assert ranks == [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7], [0]]]


def test_an_empty_partition_gives_no_batch_and_a_line_in_the_log(tmp_path, caplog):
    fill(tmp_path, 4)
    assert uids(dataset_of(tmp_path, consume=False, partition_id="vla")) == []
    assert "partition 'vla' of queue 'q' has no samples yet" in caplog.text


# Mistakes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 2.5}, TypeError, "batch_size must be an int"),
        ({"batch_size": True}, TypeError, "batch_size must be an int"),
        ({"fields": "uid"}, TypeError, "fields must be a list of names"),
        ({"fields": []}, ValueError, "fields is empty"),
        ({"last": "keep"}, ValueError, "last must be one of drop, pad, split"),
        ({"timeout": -1}, ValueError, "timeout must be None or seconds"),
        ({"consume": False, "sampler": SequentialSampler()}, ValueError, "nothing to choose"),
        ({"shuffle_seed": 1, "sampler": SequentialSampler()}, ValueError, "both decide the order"),
        ({"dp_rank": 2, "dp_size": 2}, ValueError, "dp_rank must be from 0"),
        ({"dp_size": 2}, ValueError, "belong together"),
        ({"partition_id": 3}, ValueError, "partition_id must be a string"),
    ],
)
def test_bad_arguments_are_refused_at_once(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        dataset_of(tmp_path, **options)


def test_a_queue_that_is_no_queue_is_refused():
    with pytest.raises(TypeError, match="queue must be a Queue or the name of one"):
        PersistingDataset(3, batch_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("consume", [True, False])
def test_a_missing_queue_is_named_with_those_that_are_there(tmp_path, consume):
    fill(tmp_path, 4, queue="rollouts")
    with pytest.raises(PersistingError, match=r"there is no queue 'q' under .*It holds 'rollouts'"):
        next(iter(dataset_of(tmp_path, consume=consume)))
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("consume", [True, False])
def test_a_field_that_no_sample_has_is_named(tmp_path, consume):
    fill(tmp_path, 4)
    with pytest.raises(PersistingError, match=r"none of the 4 samples .*\['uidd'\]"):
        next(iter(dataset_of(tmp_path, consume=consume, fields=["uidd"])))


def test_too_few_samples_for_one_batch_are_said_in_the_log(tmp_path, caplog):
    fill(tmp_path, 3)
    with caplog.at_level(logging.WARNING):
        assert uids(dataset_of(tmp_path)) == []
    assert "is sealed with 3 samples ready, which make no global batch of 4" in caplog.text


# Other processes


def test_it_pickles_without_handles_and_with_its_rank(tmp_path, monkeypatch):
    fill(tmp_path, 8)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Queue("q", tmp_path) as queue:
        dataset = PersistingDataset(queue, batch_size=2)
        next(iter(dataset))
        copy = pickle.loads(pickle.dumps(dataset))
    monkeypatch.setenv("RANK", "0")
    assert copy.ranks.rank == 1
    assert uids(copy) == [[2, 3], [6, 7]]


def test_a_plain_dataloader_works_without_workers(tmp_path):
    fill(tmp_path, 8)
    loader = DataLoader(dataset_of(tmp_path), batch_size=None, collate_fn=identity)
    assert uids(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_worker_of_a_plain_dataloader_is_told_to_use_ours(tmp_path):
    fill(tmp_path, 8)
    loader = DataLoader(
        dataset_of(tmp_path),
        batch_size=None,
        collate_fn=identity,
        num_workers=1,
        multiprocessing_context="forkserver",
    )
    with pytest.raises(PersistingError, match="Use PersistingDataLoader"):
        next(iter(loader))


@pytest.mark.slow
def test_without_consuming_workers_of_a_plain_dataloader_share_the_pass(tmp_path):
    fill(tmp_path, 14)
    loader = DataLoader(
        dataset_of(tmp_path, consume=False),
        batch_size=None,
        collate_fn=identity,
        num_workers=2,
        multiprocessing_context="forkserver",
    )
    assert uids(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]


def read_one(dataset, answers):
    try:
        answers.put(uids([next(iter(dataset))]))
    except PersistingError as error:
        answers.put(str(error))


def test_a_fork_is_told_what_to_use_instead(tmp_path):
    fill(tmp_path, 8)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=read_one, args=(dataset_of(tmp_path), answers))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert "multiprocessing_context='forkserver'" in answers.get()
