"""Training while what it has consumed is deleted: every checkpoint on disk can be resumed from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from persisting_torch import PersistingDataLoader, PersistingDataModule, PersistingDataset, Queue
from persisting_torch.errors import PersistingError
from persisting_torch.queue import retention
from tests.datasets.counting import Counting, fill, fit

SAMPLES = 400
FLUSH = 20
BATCH = 10


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No round of retention but those that a test makes."""
    monkeypatch.setattr(retention.Keeper, "due", lambda self: False)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue("q", tmp_path, retention="consumed") as queue:
        for first in range(0, SAMPLES, FLUSH):
            fill(tmp_path, FLUSH, first=first, seal=first + FLUSH == SAMPLES)
        yield queue


def left_in(queue: Queue) -> list[int]:
    return [int(record["uid"]) for record in queue.sync.get(limit=SAMPLES)]


class Retaining(Callback):
    """A round of retention after each batch, as another process may make it at any time."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.least: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        assert self.queue.engine.tending.retain()
        self.least.append(min(left_in(self.queue), default=SAMPLES))


def module(path: Path) -> PersistingDataModule:
    return PersistingDataModule("q", str(path), batch_size=BATCH, timeout=30.0)


def top(path: Path, count: int) -> ModelCheckpoint:
    return ModelCheckpoint(
        path / "kept",
        filename="{step}",
        every_n_train_steps=4,
        save_top_k=count,
        monitor="step",
        mode="max",
    )


def test_under_a_trainer_all_from_the_oldest_kept_checkpoint_on_stays(
    queue: Queue, tmp_path: Path
) -> None:
    model, retaining = Counting(SAMPLES), Retaining(queue)
    fit(model, module(tmp_path), tmp_path, top(tmp_path, 2), retaining, max_steps=30)
    kept = sorted((tmp_path / "kept").iterdir())
    assert [path.stem for path in kept] == ["step=24", "step=28"]
    assert retaining.least[3] == 0
    assert max(retaining.least) == 24 * BATCH
    assert queue.engine.tending.retain()
    assert min(left_in(queue)) == 24 * BATCH

    again = Counting(SAMPLES)
    fit(again, module(tmp_path), tmp_path, Retaining(queue), ckpt_path=kept[0])
    assert again.seen[:4] == model.seen[24:28]
    assert again.counts == [1.0] * SAMPLES
    for path in kept:
        path.unlink()
    assert queue.engine.tending.retain()
    assert left_in(queue) == []


def test_a_checkpoint_that_is_gone_cannot_be_resumed_from_and_the_error_says_why(
    queue: Queue, tmp_path: Path
) -> None:
    fit(Counting(SAMPLES), module(tmp_path), tmp_path, top(tmp_path, 3), max_steps=22)
    first = tmp_path / "kept" / "step=12.ckpt"
    first.rename(tmp_path / "elsewhere.ckpt")
    assert queue.engine.tending.retain()
    with pytest.raises(PersistingError, match=r"batch 12 of task 'train' on q/default is gone"):
        fit(Counting(SAMPLES), module(tmp_path), tmp_path, ckpt_path=tmp_path / "elsewhere.ckpt")


def test_whoever_writes_a_checkpoint_it_is_known_and_one_of_weights_alone_is_none(
    queue: Queue, tmp_path: Path
) -> None:
    class Saving(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
            if trainer.global_step == 7:
                trainer.save_checkpoint(tmp_path / "seven.ckpt")
                trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    run = fit(Counting(SAMPLES), module(tmp_path), tmp_path, top(tmp_path, 1), Saving())
    assert "save_checkpoint" not in vars(run)
    with queue.engine.ledger.reading() as tx:
        known = dict(tx.execute("SELECT path, k FROM checkpoints"))
    assert known[str(tmp_path / "seven.ckpt")] == 7
    assert str(tmp_path / "weights.ckpt") not in known


def test_a_checkpoint_that_a_kill_kept_from_being_noted_is_noted_by_the_run_that_resumes(
    queue: Queue, tmp_path: Path
) -> None:
    fit(Counting(SAMPLES), module(tmp_path), tmp_path, top(tmp_path, 1), max_steps=8)
    with queue.engine.ledger.transaction() as tx:
        tx.execute("DELETE FROM checkpoints")
    (kept,) = (tmp_path / "kept").iterdir()
    elsewhere = tmp_path / "eight.ckpt"
    elsewhere.write_bytes(kept.read_bytes())
    model, retaining = Counting(SAMPLES), Retaining(queue)
    fit(model, module(tmp_path), tmp_path, top(tmp_path, 1), retaining, ckpt_path=elsewhere)
    assert max(retaining.least) == 8 * BATCH


@pytest.mark.slow
def test_checkpoints_written_behind_the_training_keep_all_until_fit_ends(
    queue: Queue, tmp_path: Path
) -> None:
    retaining = Retaining(queue)
    fit(
        Counting(SAMPLES),
        module(tmp_path),
        tmp_path,
        top(tmp_path, 1),
        retaining,
        plugins=[AsyncCheckpointIO()],
        max_steps=20,
    )
    assert max(retaining.least) == 0
    assert queue.engine.tending.retain()
    assert min(left_in(queue)) == 20 * BATCH


# Plain loops


def loader_of(path: Path) -> PersistingDataLoader:
    dataset = PersistingDataset("q", storage_path=path, batch_size=BATCH, timeout=30.0)
    return PersistingDataLoader(dataset)


def test_of_a_plain_loop_the_two_newest_states_can_be_resumed_from(
    queue: Queue, tmp_path: Path
) -> None:
    loader, states, seen = loader_of(tmp_path), [], []
    states.append(loader.state_dict())
    for batch in loader:
        seen.append(batch["uid"].tolist())
        if len(seen) % 4 == 0:
            states.append(loader.state_dict())
        assert queue.engine.tending.retain()
        if len(seen) == 14:
            break
    loader.close()
    assert [state["k"] for state in states] == [0, 4, 8, 12]
    assert min(left_in(queue)) == 8 * BATCH
    for state in states[-2:]:
        again = loader_of(tmp_path)
        again.load_state_dict(state)
        batches = iter(again)
        for k in range(state["k"], 14):
            assert next(batches)["uid"].tolist() == seen[k]
            assert queue.engine.tending.retain()
        again.dataset.close()
    again = loader_of(tmp_path)
    again.load_state_dict(states[1])
    with pytest.raises(PersistingError, match="batch 4 of task 'train' on q/default is gone"):
        next(iter(again))
    again.dataset.close()


def test_a_plain_loop_keeps_what_the_files_need_that_it_says_it_has_saved(
    queue: Queue, tmp_path: Path
) -> None:
    loader, seen = loader_of(tmp_path), []
    with pytest.raises(ValueError, match="before state_dict"):
        loader.saved("none")
    for batch in loader:
        seen.append(batch["uid"].tolist())
        if len(seen) % 5 == 0:
            path = tmp_path / f"{len(seen)}.pt"
            torch.save(loader.state_dict(), path)
            loader.saved(path)
        assert queue.engine.tending.retain()
        if len(seen) == 20:
            break
    loader.close()
    assert min(left_in(queue)) == 5 * BATCH
    os.remove(tmp_path / "5.pt")
    assert queue.engine.tending.retain()
    assert min(left_in(queue)) == 10 * BATCH
    again = loader_of(tmp_path)
    again.load_state_dict(torch.load(tmp_path / "10.pt"))
    batches = iter(again)
    assert [next(batches)["uid"].tolist() for _ in range(10)] == seen[10:]
    again.dataset.close()


def test_without_checkpoints_only_the_batch_in_hand_and_what_follows_stay(
    queue: Queue, tmp_path: Path
) -> None:
    loader = loader_of(tmp_path)
    for number, batch in enumerate(loader):
        assert queue.engine.tending.retain()
        assert batch["uid"].tolist() == list(range(BATCH * number, BATCH * (number + 1)))
        assert min(left_in(queue)) == BATCH * number
        if number == 11:
            break
    loader.dataset.close()
