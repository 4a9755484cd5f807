"""torchdata's StatefulDataLoader around a PersistingDataset, in a plain loop: exactly once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from persisting_torch import PersistingDataset
from persisting_torch.errors import PersistingError
from tests.datasets.counting import committed, fill
from tests.datasets.runs import Runs, Weights, die_if

stateful = pytest.importorskip("torchdata.stateful_dataloader")

SAMPLES = 46
BATCHES = 12  # of 4, the last of 2


@pytest.fixture(scope="module")
def run() -> Iterator[Runs]:
    with Runs(__name__) as runs:
        yield runs


def identity(batch: Any) -> Any:
    return batch


def loader_of(path: str | Path, **options: Any) -> Any:
    dataset = PersistingDataset("q", storage_path=path, batch_size=4, last="split", timeout=60)
    return stateful.StatefulDataLoader(
        dataset, **{"batch_size": None, "collate_fn": identity} | options
    )


def train(path: str, *, dies: str = "") -> None:
    """Resume from the checkpoint, or else begin with one, and train to the queue's end."""
    model = Weights(SAMPLES)
    optimizer = model.optimizer()
    loader = loader_of(path)
    checkpoint, step = Path(path) / "checkpoint.pt", 0

    def save() -> None:
        state = {"model": model.state_dict(), "loader": loader.state_dict(), "step": step}
        torch.save(state, checkpoint.with_suffix(".new"))
        die_if(dies == f"written {step}")
        os.replace(checkpoint.with_suffix(".new"), checkpoint)

    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
    else:
        save()
    for batch in loader:
        die_if(dies == f"got {step + 1}")
        model(batch["uid"])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        die_if(dies == f"stepped {step}")
        if step % 3 == 0:
            save()
    save()


def test_after_sigkills_the_weights_are_those_of_an_uninterrupted_run(
    run: Runs, tmp_path: Path
) -> None:
    trails = []
    moments = ("got 1", "stepped 2", "written 6", "stepped 8", "got 12")
    for name, kills in (("once", ()), ("killed", moments)):
        path = tmp_path / name
        fill(path, SAMPLES)
        for moment in kills:
            run("train", path=str(path), dies=moment)
        run("train", path=str(path))
        saved = torch.load(path / "checkpoint.pt", weights_only=True)
        assert saved["model"]["count"].tolist() == [1.0] * SAMPLES
        assert saved["step"] == BATCHES
        trails.append(saved["model"]["trail"])
    assert torch.equal(*trails)


def test_its_state_counts_the_batch_in_hand(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    seen = []
    state = loader_of(tmp_path).state_dict()
    for _ in range(BATCHES):
        loader = loader_of(tmp_path)
        loader.load_state_dict(state)
        for batch in loader:
            seen.extend(batch["uid"].tolist())
            state = loader.state_dict()
            break
    assert seen == list(range(SAMPLES))
    ended = loader_of(tmp_path)
    ended.load_state_dict(state)
    assert list(ended) == []


def test_without_states_a_batch_counts_when_the_next_one_is_asked_for(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    batches = iter(loader_of(tmp_path))
    for k in range(3):
        next(batches)
        assert committed(tmp_path) == k


def test_in_its_workers_a_dataset_that_consumes_refuses_and_names_the_loader_that_can(
    tmp_path: Path,
) -> None:
    fill(tmp_path, SAMPLES)
    loader = loader_of(tmp_path, num_workers=1)
    with pytest.raises(PersistingError, match="Use PersistingDataLoader, which can"):
        next(iter(loader))
    assert committed(tmp_path) == 0
