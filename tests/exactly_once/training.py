"""One training run, as a process of its own makes it; what befalls it is part of its order."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from tensordict import TensorDict

from persisting_torch import (
    ConsumptionCheckpoint,
    PersistingDataLoader,
    PersistingDataModule,
    PersistingDataset,
    Queue,
)
from tests.exactly_once.model import Net, numbered

FAILED = 3


class Fate(Callback):
    """What happens at the end of this run's n-th batch."""

    def __init__(self, folder: Path, event: str, at: int) -> None:
        self.folder = folder
        self.event = event
        self.at = at

    def on_train_start(self, trainer: Trainer, pl_module: Net) -> None:
        print("started\n", end="", flush=True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Net, *_: Any) -> None:
        print(f"batch {pl_module.began}\n", end="", flush=True)
        if pl_module.began != self.at:
            return
        if self.event == "stop":
            trainer.should_stop = True
        elif self.event == "save and stop":
            trainer.save_checkpoint(self.folder / "stopped.ckpt")
            trainer.should_stop = True
        elif self.event == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.event == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)


def fit(
    folder: str,
    *,
    samples: int,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    keep: list[dict[str, Any]] | None = None,
    on_exception: bool = False,
    asynchronous: bool = False,
    consume: bool = True,
    event: tuple[str, int] = ("", 0),
    resume: str | None = None,
    weights: str | None = None,
    end: str = "end.ckpt",
    weights_only: bool = False,
    tell_worker: bool = False,
    sharded: bool = False,
) -> None:
    """Fit from queue "q" in the folder; at the end, write a checkpoint to `end` there.

    `keep` are the arguments of ModelCheckpoints. Exits with FAILED when the event "raise" came, and
    with 0 but no `end` when Lightning ended for SIGTERM.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    home = Path(folder)
    net = Net(samples, sharded=sharded, **(model or {}))
    if event[0] == "raise":
        net.fails_at = event[1]
    if weights is not None:
        net.load_state_dict(torch.load(weights, weights_only=True)["state_dict"])
    callbacks: list[Callback] = [Fate(home, *event)]
    callbacks += [ModelCheckpoint(**{"dirpath": home} | each) for each in keep or []]
    if on_exception:
        callbacks.append(OnExceptionCheckpoint(home))
    if not consume:
        callbacks.append(ConsumptionCheckpoint())
    run = Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "enable_checkpointing": bool(keep) or on_exception,
            "default_root_dir": home,
            "callbacks": callbacks,
            "plugins": [AsyncCheckpointIO()] if asynchronous else None,
        }
        | (trainer or {})
        | ({"strategy": _sharding()} if sharded else {})
    )
    options = {"batch_size": 4, "last": "split", "timeout": 30.0} | (data or {})
    if tell_worker:
        options["transform"] = tell
    if consume:
        source: Any = {"datamodule": PersistingDataModule("q", folder, **options)}
    else:
        workers = options.pop("num_workers", 0)
        dataset = PersistingDataset("q", storage_path=folder, consume=False, **options)
        source = {"train_dataloaders": PersistingDataLoader(dataset, num_workers=workers)}
    try:
        run.fit(net, ckpt_path=resume, **source)
    except RuntimeError as error:
        if str(error) != "the training step failed":
            raise
        sys.exit(FAILED)
    run.save_checkpoint(home / end, weights_only)
    if net.validated:
        print(f"validated {len(net.validated)} {len(set(net.validated))}\n", end="", flush=True)


def _sharding() -> ModelParallelStrategy:
    """Each rank holds a part of the parameters, gradients and optimizer's state."""
    return ModelParallelStrategy(
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend="gloo",
        save_distributed_checkpoint=False,
    )


def tell(batch: TensorDict) -> TensorDict:
    """A transform that says which process it is in."""
    print(f"worker {os.getpid()}\n", end="", flush=True)
    return batch


def produce(
    folder: str,
    *,
    first: int,
    count: int,
    at_once: int = 7,
    pause: float = 0.01,
    seal: bool = False,
) -> None:
    """Put samples into queue "q", some at a time."""
    with Queue("q", folder) as queue:
        with queue.producer(f"producer-{first}"):
            for at in range(first, first + count, at_once):
                queue.sync.put(numbered(at, min(at_once, first + count - at)))
                queue.sync.flush()
                print("put\n", end="", flush=True)
                time.sleep(pause)
        if seal:
            queue.sync.seal("default")
