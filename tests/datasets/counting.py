"""A model whose weights count how often each sample was trained, and quiet Trainers for it."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from tensordict import TensorDict

from persisting_torch import Queue

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning.pytorch")


def fill(
    path: Path | str, samples: int, *, first: int = 0, seal: bool = True, **names: str
) -> None:
    """Put samples with uid first, first + 1, ... into partition "default" of queue "q"."""
    with Queue(names.get("queue", "q"), path) as queue:
        partition = names.get("partition", "default")
        if samples:
            uids = torch.arange(first, first + samples)
            queue.sync.put(TensorDict({"uid": uids}, batch_size=[samples]), partition)
        if seal:
            queue.sync.seal(partition)


def committed(path: Path | str) -> int:
    """The cursor that the queue itself keeps for task "train"."""
    with Queue("q", path) as queue:
        return queue.engine.cursor("train", "default")


class Counting(LightningModule):
    """Weight i grows by exactly 1 whenever an optimizer step covers sample i.

    The loss is minus the sum of the batch's weights and the learning rate 1 (or, since Lightning
    divides the loss of each of n accumulated batches by n, n).
    """

    def __init__(self, samples: int, *, accumulate: int = 1, fail_at: int | None = None) -> None:
        super().__init__()
        self.count = torch.nn.Parameter(torch.zeros(samples))
        self.accumulate = accumulate
        self.fail_at = fail_at
        self.seen: list[list[int]] = []
        self.validated = 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=float(self.accumulate))

    def training_step(self, batch: TensorDict, batch_idx: int) -> torch.Tensor:
        if self.fail_at is not None and len(self.seen) == self.fail_at:
            raise RuntimeError("the training step failed")
        self.seen.append(batch["uid"].tolist())
        return -self.count[batch["uid"]].sum()

    def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
        self.validated += len(batch)

    def predict_step(self, batch: TensorDict, batch_idx: int) -> torch.Tensor:
        return batch["uid"]

    test_step = validation_step

    @property
    def counts(self) -> list[int]:
        return [round(float(c), 4) for c in self.count.detach()]


def trainer(tmp_path: Path | str, *callbacks: Callback, **options: Any) -> Trainer:
    """A Trainer for the CPU that writes under tmp_path and prints nothing."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": bool(callbacks),
        "default_root_dir": tmp_path,
        "callbacks": list(callbacks),
    }
    return Trainer(**defaults | options)


def fit(
    model: LightningModule,
    data: LightningDataModule,
    tmp_path: Path | str,
    *callbacks: Callback,
    ckpt_path: str | Path | None = None,
    **options: Any,
) -> Trainer:
    """Fit, quietly; the Trainer afterwards."""
    run = trainer(tmp_path, *callbacks, **options)
    run.fit(model, data, ckpt_path=ckpt_path)
    return run
