"""A plain torch loop trains each sample exactly once, through any SIGKILL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from persisting_torch import PersistingDataLoader, PersistingDataset
from tests.datasets.counting import committed, fill
from tests.datasets.runs import Runs, Weights, die_if

SAMPLES = 46
BATCHES = 12  # of 4, the last of 2


@pytest.fixture(scope="module")
def run() -> Iterator[Runs]:
    with Runs(__name__) as runs:
        yield runs


def loader_of(path: str | Path, batch_size: int = 4, **how: Any) -> PersistingDataLoader:
    dataset = PersistingDataset(
        "q", storage_path=path, batch_size=batch_size, fields=["uid"], last="split", timeout=60
    )
    return PersistingDataLoader(dataset, **how)


# With checkpoints


def train(path: str, *, accumulate: int = 1, every: int = 3, dies: str = "", **how: Any) -> None:
    """Resume from the checkpoint, or else begin with one, and train to the queue's end."""
    model = Weights(SAMPLES)
    optimizer = model.optimizer()
    loader = loader_of(path, **how)
    checkpoint, step, held = Path(path) / "checkpoint.pt", 0, 0

    def save() -> None:
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "step": step}, checkpoint.with_suffix(".new"))
        die_if(dies == f"written {step}")
        os.replace(checkpoint.with_suffix(".new"), checkpoint)
        die_if(dies == f"saved {step}")

    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
    else:
        save()

    for batch in loader:
        die_if(dies == f"got {step + 1}")
        model(batch["uid"])["loss"].backward()
        held += 1
        die_if(dies == f"held {held}")
        if held % accumulate:
            continue
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        die_if(dies == f"stepped {step}")
        if step % every == 0:
            save()
    if held % accumulate:
        optimizer.step()
        step += 1
    save()


def saved_in(path: Path) -> dict[str, Any]:
    return torch.load(path / "checkpoint.pt", weights_only=True)


@pytest.fixture(scope="module")
def uninterrupted(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("uninterrupted")
    fill(path, SAMPLES)
    run("train", path=str(path))
    return saved_in(path)


def test_seven_sigkills_between_steps_and_checkpoints_leave_the_weights_of_none(
    run: Runs, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    fill(tmp_path, SAMPLES)
    for moment in ("saved 0", "got 1", "stepped 2", "written 3", "stepped 5", "got 9", "written 9"):
        run("train", path=str(tmp_path), dies=moment)
    run("train", path=str(tmp_path))
    saved = saved_in(tmp_path)
    assert saved["model"]["count"].tolist() == [1.0] * SAMPLES
    assert torch.equal(saved["model"]["trail"], uninterrupted["model"]["trail"])
    assert saved["step"] == saved["loader"]["k"] == BATCHES


@pytest.mark.parametrize("how", [{"prefetch_batches": 0}, {"prefetch_batches": 5}], ids=str)
def test_what_was_read_ahead_of_a_sigkill_is_trained_after_it(
    run: Runs, tmp_path: Path, how: dict[str, Any]
) -> None:
    fill(tmp_path, SAMPLES)
    run("train", path=str(tmp_path), dies="stepped 4", **how)
    assert saved_in(tmp_path)["loader"]["k"] == 3
    run("train", path=str(tmp_path), **how)
    assert saved_in(tmp_path)["model"]["count"].tolist() == [1.0] * SAMPLES


def test_a_sigkill_in_mid_accumulation_repeats_what_no_step_had_covered(
    run: Runs, tmp_path: Path
) -> None:
    fill(tmp_path, SAMPLES)
    run("train", path=str(tmp_path), accumulate=4, every=1, dies="held 7")
    assert saved_in(tmp_path)["loader"]["k"] == 4
    run("train", path=str(tmp_path), accumulate=4, every=1)
    assert saved_in(tmp_path)["model"]["count"].tolist() == [1.0] * SAMPLES


def test_a_checkpoint_older_than_the_newest_resumes_as_exactly(
    run: Runs, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    fill(tmp_path, SAMPLES)
    run("train", path=str(tmp_path), dies="saved 3")
    older = (tmp_path / "checkpoint.pt").read_bytes()
    run("train", path=str(tmp_path), dies="saved 9")
    (tmp_path / "checkpoint.pt").write_bytes(older)
    run("train", path=str(tmp_path))
    saved = saved_in(tmp_path)
    assert saved["model"]["count"].tolist() == [1.0] * SAMPLES
    assert torch.equal(saved["model"]["trail"], uninterrupted["model"]["trail"])


def test_a_resume_with_another_batch_size_trains_what_is_left_once(
    run: Runs, tmp_path: Path
) -> None:
    fill(tmp_path, SAMPLES)
    run("train", path=str(tmp_path), dies="stepped 5")
    run("train", path=str(tmp_path), batch_size=10, dies="stepped 5")
    assert saved_in(tmp_path)["loader"]["k"] == 3
    run("train", path=str(tmp_path), batch_size=7, dies="stepped 7")
    assert saved_in(tmp_path)["loader"]["k"] == 6
    run("train", path=str(tmp_path), batch_size=2)
    assert saved_in(tmp_path)["model"]["count"].tolist() == [1.0] * SAMPLES


def test_until_its_first_state_a_loop_counts_as_one_without_checkpoints(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    batches = iter(loader := loader_of(tmp_path))
    next(batches)
    next(batches)
    assert committed(tmp_path) == 1
    assert loader.state_dict()["k"] == 2
    next(batches)
    assert committed(tmp_path) == 1


def test_the_queue_counts_as_consumed_only_what_a_finished_checkpoint_counts(
    run: Runs, tmp_path: Path
) -> None:
    fill(tmp_path, SAMPLES)
    run("train", path=str(tmp_path), dies="written 6")
    assert saved_in(tmp_path)["loader"]["k"] == 3
    assert committed(tmp_path) == 3


# Without checkpoints


def train_in_place(path: str, *, dies: str = "") -> None:
    """Train weights that live in a file, so that they survive without any checkpoint."""
    model = Weights(SAMPLES)
    model.count.data = torch.from_file(f"{path}/count", shared=True, size=SAMPLES)
    optimizer = model.optimizer()
    for k, batch in enumerate(loader_of(path), start=committed(path) + 1):
        with open(f"{path}/seen", "a") as seen:
            print(*batch["uid"].tolist(), file=seen)
        die_if(dies == f"got {k}")
        model(batch["uid"])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        die_if(dies == f"stepped {k}")


def counts_in(path: Path) -> list[float]:
    return torch.from_file(f"{path}/count", size=SAMPLES).tolist()


def test_without_checkpoints_a_batch_in_hand_at_a_sigkill_comes_again_and_all_count_once(
    run: Runs, tmp_path: Path
) -> None:
    fill(tmp_path, SAMPLES)
    (tmp_path / "count").write_bytes(bytes(4 * SAMPLES))
    for moment in ("got 1", "got 4", "got 5", "got 12"):
        run("train_in_place", path=str(tmp_path), dies=moment)
    run("train_in_place", path=str(tmp_path))
    assert counts_in(tmp_path) == [1.0] * SAMPLES
    seen = (tmp_path / "seen").read_text().splitlines()
    again = [first for first, second in pairwise(seen) if first == second]
    assert [line.split()[0] for line in again] == ["0", "12", "16", "44"]
    assert len(seen) == BATCHES + 4


def test_without_checkpoints_only_the_batch_whose_successor_was_not_asked_for_is_repeated(
    run: Runs, tmp_path: Path
) -> None:
    fill(tmp_path, SAMPLES)
    (tmp_path / "count").write_bytes(bytes(4 * SAMPLES))
    run("train_in_place", path=str(tmp_path), dies="stepped 3")
    run("train_in_place", path=str(tmp_path))
    assert counts_in(tmp_path) == [1.0] * 8 + [2.0] * 4 + [1.0] * (SAMPLES - 12)
