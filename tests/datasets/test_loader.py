from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from persisting_torch import PersistingDataLoader, PersistingDataset, Queue, WaitTimeout
from tests.datasets.counting import committed, fill


@pytest.fixture(autouse=True, scope="module")
def quick_workers():
    """Workers whose imports are done before they start."""
    multiprocessing.set_forkserver_preload(["persisting_torch.datasets.loader"])


def loader_of(path: Path, *, dataset: dict[str, Any] | None = None, **options: Any):
    given = {"batch_size": 4, "fields": ["uid"], "timeout": 30.0} | (dataset or {})
    return PersistingDataLoader(PersistingDataset("q", storage_path=path, **given), **options)


def uids(batches) -> list[list[int]]:
    return [batch["uid"].tolist() for batch in batches]


def in_order(samples: int, batch_size: int = 4) -> list[list[int]]:
    return [
        list(range(first, min(samples, first + batch_size)))
        for first in range(0, samples, batch_size)
    ]


def prefetching() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "persisting_torch prefetch"]


THREADS = [{"prefetch_batches": 0}, {}, {"prefetch_batches": 7}]
HOWS = [*THREADS, {"num_workers": 2}]
FEWER = [*THREADS, pytest.param({"num_workers": 2}, marks=pytest.mark.slow)]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_the_order_is_the_same_however_batches_are_read_ahead(tmp_path, how):
    fill(tmp_path, 50)
    assert uids(loader_of(tmp_path, dataset={"last": "split"}, **how)) == in_order(50)
    assert committed(tmp_path) == 13


def test_three_workers_and_a_pass_without_consuming(tmp_path):
    fill(tmp_path, 30)
    options = {"consume": False, "shuffle_seed": 1}
    alone = loader_of(tmp_path, dataset=options)
    workers = loader_of(tmp_path, dataset=options, num_workers=3)
    first, second = uids(alone), uids(alone)
    assert sorted(chain.from_iterable(first)) == list(range(30))
    assert first != second
    workers.set_epoch(1)
    assert uids(workers) == second


def test_what_the_thread_reads_ahead_is_not_consumed(tmp_path):
    fill(tmp_path, 40)
    loader = loader_of(tmp_path, prefetch_batches=5)
    batches = iter(loader)
    next(batches)
    next(batches)
    time.sleep(0.1)
    assert committed(tmp_path) == 1
    loader.close()
    assert uids(loader_of(tmp_path))[0] == [4, 5, 6, 7]


def test_tensors_that_come_through_workers_are_whole(tmp_path):
    from tensordict import TensorDict

    data = TensorDict(
        {"a": torch.rand(8, 3), "nested": {"b": torch.arange(8)}, "h": torch.rand(8).bfloat16()},
        batch_size=[8],
    )
    with Queue("q", tmp_path) as queue:
        queue.sync.put(data)
        queue.sync.put([{"text": "x", "tags": ["u", "v"]}] * 4, "words")
        queue.sync.seal()
    batches = list(loader_of(tmp_path, dataset={"fields": None}, num_workers=1))
    batches[0]["new"] = torch.zeros(4)
    got = torch.cat([batch.select("a", "nested", "h") for batch in batches])
    assert (got == data).all()
    (words,) = loader_of(
        tmp_path, dataset={"fields": ["text", "tags"], "partition_id": "words"}, num_workers=1
    )
    assert words["text"] == ["x"] * 4
    assert words["tags"] == [["u", "v"]] * 4


# State


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_state_taken_in_the_loop_resumes_with_the_next_batch(tmp_path, how):
    fill(tmp_path, 40)
    loader = loader_of(tmp_path, **how)
    for batch in loader:
        last = batch
        if batch["uid"][0] == 8:
            state = loader.state_dict()
            break
    assert last["uid"].tolist() == [8, 9, 10, 11]
    assert state["k"] == 3
    again = loader_of(tmp_path, **how)
    again.load_state_dict(state)
    assert uids(again)[0] == [12, 13, 14, 15]


def test_a_state_survives_a_save_and_a_load_with_weights_only(tmp_path):
    fill(tmp_path, 40)
    loader = loader_of(tmp_path)
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == loader.state_dict()


@pytest.mark.parametrize("how", FEWER, ids=str)
def test_a_state_may_be_loaded_while_a_loop_runs(tmp_path, how):
    fill(tmp_path, 40)
    loader = loader_of(tmp_path, **how)
    batches = iter(loader)
    next(batches)
    next(batches)
    loader.load_state_dict(loader.state_dict() | {"k": 7})
    assert uids(batches) == in_order(40)[7:]


@pytest.mark.slow
def test_a_new_world_of_workers_changes_nothing_in_the_order(tmp_path):
    fill(tmp_path, 60)
    seen, state = [], None
    for workers in (2, 0, 3):
        loader = loader_of(tmp_path, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            seen.append(batch["uid"].tolist())
            if len(seen) % 5 == 0:
                state = loader.state_dict()
                break
        loader.close()
    assert seen == in_order(60)


@pytest.mark.parametrize("how", FEWER, ids=str)
def test_a_pass_without_consuming_resumes_in_mid_epoch_with_the_same_samples(tmp_path, how):
    options = {"consume": False, "shuffle_seed": 5}
    fill(tmp_path, 30, seal=False)
    straight = loader_of(tmp_path, dataset=options)
    epochs = [uids(straight), uids(straight)]
    loader = loader_of(tmp_path, dataset=options, **how)
    states, seen = [], []
    for _ in range(2):
        for batch in loader:
            seen.append(batch["uid"].tolist())
            states.append(loader.state_dict())
    assert seen == [*epochs[0], *epochs[1]]
    fill(tmp_path, 10, first=30)
    assert [(state["epoch"], state["k"]) for state in states[6:9]] == [(0, 7), (1, 0), (1, 1)]
    for at in (2, 7, 11):
        again = loader_of(tmp_path, dataset=options, **how)
        again.load_state_dict(states[at])
        assert again.state_dict() == states[at]
        rest = uids(again)
        assert rest == seen[at + 1 :][: 7 - at % 8] if at != 7 else len(rest) == 10


def test_a_pass_that_cannot_be_listed_again_says_so(tmp_path, caplog):
    fill(tmp_path, 30)
    loader = loader_of(tmp_path, dataset={"consume": False})
    next(iter(loader))
    state = loader.state_dict()
    with Queue("q", tmp_path) as queue:
        queue.sync.clear([3], "default")
    again = loader_of(tmp_path, dataset={"consume": False})
    again.load_state_dict(state)
    next(iter(again))
    assert "had 30 samples when its state was taken and has 29 now" in caplog.text


# Threads and processes


def test_the_thread_ends_with_a_break_an_exception_and_the_end(tmp_path):
    fill(tmp_path, 80)
    loader = loader_of(tmp_path)
    for _ in loader:
        assert len(prefetching()) == 1
        break
    gc.collect()
    assert prefetching() == []
    with suppress(RuntimeError):
        for _ in loader:
            raise RuntimeError
    gc.collect()
    assert prefetching() == []
    assert len(uids(loader)) == 18
    assert prefetching() == []


def test_close_ends_a_thread_that_waits_for_samples(tmp_path):
    fill(tmp_path, 4, seal=False)
    loader = loader_of(tmp_path)
    batches = iter(loader)
    next(batches)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 10
    assert prefetching() == []
    assert uids(batches) == []


@pytest.mark.parametrize("how", FEWER, ids=str)
def test_a_timeout_comes_out_of_the_loop_with_its_message(tmp_path, how):
    fill(tmp_path, 6, seal=False)
    batches = iter(loader_of(tmp_path, dataset={"timeout": 0.3}, **how))
    assert next(batches)["uid"].tolist() == [0, 1, 2, 3]
    with pytest.raises(WaitTimeout, match=r"waited 0\.3 s for 4 samples of q/default"):
        next(batches)


def test_an_error_waits_for_the_first_batch_to_be_asked_for(tmp_path):
    batches = iter(loader_of(tmp_path))
    with pytest.raises(Exception, match="there is no queue 'q'"):
        next(batches)


def test_what_transform_raises_comes_out_of_the_loop(tmp_path):
    def transform(batch):
        if batch["uid"][0] == 8:
            raise ZeroDivisionError("in the transform")
        return batch

    fill(tmp_path, 40)
    batches = iter(loader_of(tmp_path, dataset={"transform": transform}))
    assert [next(batches)["uid"][0], next(batches)["uid"][0]] == [0, 4]
    with pytest.raises(ZeroDivisionError, match="in the transform"):
        next(batches)


def test_workers_that_wait_for_samples_end_at_once_with_their_loader(tmp_path):
    fill(tmp_path, 4, seal=False)
    loader = loader_of(tmp_path, num_workers=2)
    batches = iter(loader)
    next(batches)
    children = psutil.Process().children(recursive=True)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 4
    assert multiprocessing.active_children() == []
    assert children


@pytest.mark.slow
def test_workers_that_wait_for_samples_end_when_their_trainer_is_killed(tmp_path):
    fill(tmp_path, 4, seal=False)
    code = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from persisting_torch import PersistingDataLoader, PersistingDataset

        if __name__ == "__main__":
            dataset = PersistingDataset("q", storage_path={str(tmp_path)!r}, batch_size=4)
            batches = iter(PersistingDataLoader(dataset, num_workers=2))
            next(batches)
            print("waiting", flush=True)
            next(batches)
        """
    )
    (tmp_path / "trainer.py").write_text(code)
    with subprocess.Popen(
        [sys.executable, tmp_path / "trainer.py"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waiting\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        os.kill(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=15)
        for left in alive:
            left.kill()
        assert alive == []


@pytest.mark.slow
def test_persistent_workers_stay_where_the_next_loop_goes_on(tmp_path):
    fill(tmp_path, 60)
    loader = loader_of(tmp_path, num_workers=2, persistent_workers=True)
    seen = []
    families = []
    for _ in range(3):
        for batch in loader:
            seen.append(batch["uid"].tolist())
            families.append({child.pid for child in multiprocessing.active_children()})
            if len(seen) % 5 == 0:
                break
    assert seen == in_order(60)
    assert len(set(map(frozenset, families[:-3]))) == 1
    loader.close()
    assert multiprocessing.active_children() == []


# Mistakes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 8}, ValueError, "the dataset makes its batches itself"),
        ({"prefetch_batches": -1}, ValueError, "prefetch_batches must be 0 or more"),
        ({"in_order": False}, ValueError, "lose count"),
        ({"num_workers": 1, "multiprocessing_context": "fork"}, ValueError, "survive a fork"),
        ({"shuffle": True}, ValueError, "shuffle"),
        ({"num_workers": -1}, ValueError, "num_workers"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        loader_of(tmp_path, **options)


def test_another_kind_of_dataset_is_refused():
    with pytest.raises(TypeError, match="dataset must be a PersistingDataset"):
        PersistingDataLoader([1, 2, 3])  # type: ignore[arg-type]
