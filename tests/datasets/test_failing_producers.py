"""A producer's failure comes out of the training loop, wherever the wait for samples is."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from persisting_torch import (
    PersistingDataLoader,
    PersistingDataModule,
    PersistingDataset,
    ProducerFailed,
    Queue,
)

HOW = [{"prefetch_batches": 0}, {"prefetch_batches": 2}, {"num_workers": 2}]
NAMES = ["in the loop", "in the thread", "in workers"]


def fail_later(path: Path) -> threading.Thread:
    """A producer that puts two batches and fails a while later, when the trainer waits."""
    ready = threading.Event()

    def produce() -> None:
        with (
            Queue("q", path) as queue,
            contextlib.suppress(ZeroDivisionError),
            queue.producer("rollout-7"),
        ):
            queue.sync.put([{"x": torch.tensor(float(n))} for n in range(4)])
            queue.sync.flush()
            ready.set()
            time.sleep(1)
            raise ZeroDivisionError("division by zero")

    thread = threading.Thread(target=produce)
    thread.start()
    ready.wait(30)
    return thread


@pytest.mark.parametrize("how", HOW, ids=NAMES)
def test_a_loop_that_waits_gets_the_batches_and_then_the_failure(
    tmp_path: Path, how: dict[str, Any]
):
    thread = fail_later(tmp_path)
    dataset = PersistingDataset("q", storage_path=tmp_path, batch_size=2)
    loader = PersistingDataLoader(dataset, **how)
    batches = iter(loader)
    assert [next(batches)["x"].tolist() for _ in range(2)] == [[0.0, 1.0], [2.0, 3.0]]
    began = time.monotonic()
    with pytest.raises(ProducerFailed, match=r"rollout-7.*ZeroDivisionError: division by zero"):
        next(batches)
    assert time.monotonic() - began < 20
    loader.close()
    dataset.handle.close()
    thread.join()


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.weight - batch["x"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "how", [HOW[1], pytest.param(HOW[2], marks=pytest.mark.slow)], ids=NAMES[1:]
)
def test_a_trainer_ends_with_the_failure(tmp_path: Path, how: dict[str, Any]):
    thread = fail_later(tmp_path)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(ProducerFailed, match=r"rollout-7.*ZeroDivisionError"):
        trainer.fit(Model(), PersistingDataModule("q", str(tmp_path), batch_size=2, **how))
    assert trainer.global_step >= 1  # the Trainer asks for the next batch before a step
    thread.join()
