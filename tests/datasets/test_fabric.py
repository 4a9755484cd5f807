"""Lightning Fabric around a PersistingDataLoader trains each sample exactly once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from tensordict import TensorDict
from torch import nn

from persisting_torch import PersistingDataLoader, PersistingDataset, Queue
from tests.datasets.counting import fill
from tests.datasets.runs import Runs, Weights, die_if

SAMPLES = 46
BATCHES = 12  # of 4, the last of 2


@pytest.fixture(scope="module")
def run() -> Iterator[Runs]:
    with Runs(__name__) as runs:
        yield runs


def loader_of(path: str | Path, batch_size: int = 4) -> PersistingDataLoader:
    dataset = PersistingDataset(
        "q", storage_path=path, batch_size=batch_size, last="split", timeout=60
    )
    return PersistingDataLoader(dataset)


def train(path: str, *, ranks: int = 1, batch_size: int = 4, dies: str = "") -> None:
    """Resume from the checkpoint, or else begin with one, and train to the queue's end."""
    strategy = "auto" if ranks == 1 else "ddp_fork"
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch(_train, path, batch_size, dies)


def _train(fabric: Fabric, path: str, batch_size: int, dies: str) -> None:
    model = Weights(SAMPLES)
    model, optimizer = fabric.setup(model, model.optimizer())
    loader = fabric.setup_dataloaders(loader_of(path, batch_size))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
    checkpoint = Path(path) / "checkpoint.ckpt"

    def save() -> None:
        new = checkpoint.with_suffix(".new")
        fabric.save(new, state)
        die_if(dies == f"written {state['step']}")
        if fabric.is_global_zero:
            os.replace(new, checkpoint)
        fabric.barrier()

    if checkpoint.exists():
        fabric.load(checkpoint, state)
    else:
        save()
    for batch in loader:
        # DDP averages the gradients of the ranks, and each rank has its own samples.
        fabric.backward(model(batch["uid"])["loss"] * fabric.world_size)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        die_if(dies == f"stepped {state['step']}")
        if state["step"] % 3 == 0:
            save()
    save()


def saved_in(path: Path) -> dict[str, Any]:
    return torch.load(path / "checkpoint.ckpt", weights_only=True)


def test_after_sigkills_the_weights_are_those_of_an_uninterrupted_run(
    run: Runs, tmp_path: Path
) -> None:
    for name, moments in (("once", ()), ("killed", ("stepped 2", "written 6", "stepped 8"))):
        path = tmp_path / name
        fill(path, SAMPLES)
        for moment in moments:
            run("train", path=str(path), dies=moment)
        run("train", path=str(path))
        assert saved_in(path)["model"]["count"].tolist() == [1.0] * SAMPLES
        assert saved_in(path)["loader"]["k"] == saved_in(path)["step"] == BATCHES
    trails = [saved_in(tmp_path / name)["model"]["trail"] for name in ("once", "killed")]
    assert torch.equal(*trails)


def test_two_ranks_share_each_global_batch_and_all_samples_count_once(
    run: Runs, tmp_path: Path
) -> None:
    fill(tmp_path, 44)
    run("train", path=str(tmp_path), batch_size=2, ranks=2)
    assert saved_in(tmp_path)["model"]["count"].tolist() == [1.0] * 44 + [0.0] * 2
    assert saved_in(tmp_path)["loader"]["k"] == 11


def test_a_resume_on_another_number_of_ranks_trains_what_is_left_once(
    run: Runs, tmp_path: Path
) -> None:
    fill(tmp_path, SAMPLES)
    run("train", path=str(tmp_path), batch_size=2, dies="stepped 4")
    assert saved_in(tmp_path)["loader"]["k"] == 3
    run("train", path=str(tmp_path), batch_size=2, ranks=2)
    assert saved_in(tmp_path)["model"]["count"].tolist() == [1.0] * SAMPLES


def test_fabric_takes_the_loader_as_it_is(tmp_path: Path) -> None:
    fill(tmp_path, 12)
    given = loader_of(tmp_path)
    fabric = Fabric(accelerator="cpu", devices=1)
    loader = fabric.setup_dataloaders(given)
    assert loader._dataloader is given
    seen = []
    for batch in loader:
        seen.append(batch["uid"].tolist())
        state = given.state_dict()
        if len(seen) == 2:
            break
    assert state["k"] == 2
    again = loader_of(tmp_path)
    again.load_state_dict(state)
    assert [batch["uid"].tolist() for batch in fabric.setup_dataloaders(again)] == [[8, 9, 10, 11]]


# Precision


class Reports(nn.Module):
    """Says what its forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.given: Any = None

    def forward(self, given: Any) -> torch.Tensor:
        self.given = given
        return self.layer(given["x"] if isinstance(given, TensorDict) else given)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_in_every_precision_the_loop_has_whole_batches_and_the_model_converted_tensors(
    tmp_path: Path, precision: Any
) -> None:
    with Queue("q", tmp_path) as queue:
        data = {"x": torch.rand(8, 3), "nested": {"y": torch.rand(8, 2)}}
        queue.sync.put(TensorDict(data, batch_size=[8]))
        queue.sync.seal()
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model = fabric.setup_module(Reports())
    (first, _) = batches = list(fabric.setup_dataloaders(loader_of(tmp_path)))
    for batch in batches:
        assert batch.batch_size == batch["nested"].batch_size == torch.Size([4])
        model(batch["x"])
        assert model.given.dtype == (torch.float32 if precision == "32-true" else torch.bfloat16)
    # A TensorDict given to the model whole is rebuilt by Fabric's conversion, without batch size.
    model(first)
    assert model.given.batch_size == torch.Size([4] if precision == "32-true" else [])
    assert model.given.auto_batch_size_(1).batch_size == torch.Size([4])
