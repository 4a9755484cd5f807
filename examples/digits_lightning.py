"""Train on handwritten digits while they are still being made, lose the trainer, lose no digit.

Two producer processes put scikit-learn's handwritten digits and augmented copies of them, some
20,000 samples, into a queue. A Lightning Trainer in a third process, running from the start, trains
a small convolutional network from the queue. Half way it is killed with SIGKILL, and started again
from its last checkpoint. At the end the queue's own books, and a count that is part of the weights'
checkpoints, say how often each sample was trained.

    python examples/digits_lightning.py

Exits with 1 if any sample was trained twice or never, or the network has learnt too little.
"""

from __future__ import annotations

import logging
import multiprocessing
import shutil
import signal
import sys
import time
import warnings
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from scipy.ndimage import affine_transform
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensordict import TensorDict
from torch import Tensor, nn

from persisting_torch import PersistingDataModule, Queue

HERE = Path("demo_data")
STEPS, END = HERE / "steps", HERE / "end"

HELD_OUT = 360
COPIES = 13  # augmented ones of each training digit
BATCH = 64
STEPS_PER_CHECKPOINT = 25
ACCURACY_WANTED = 0.95

PUT_AT_ONCE = 25
PAUSE_SECONDS = 0.01  # a producer's after each put, so that training goes on while digits are made


# The digits


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images [n, 8, 8] and labels, held-out images and labels."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8).astype(np.float32) / 16
    train, held, train_labels, held_labels = train_test_split(
        images, labels, test_size=HELD_OUT, stratify=labels, random_state=0
    )
    return train, train_labels, held, held_labels


def augmented(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The image turned by up to 12 degrees and shifted by up to one pixel."""
    angle = np.deg2rad(rng.uniform(-12, 12))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    centre = np.array([3.5, 3.5])
    offset = centre - turn @ (centre + rng.uniform(-1, 1, size=2))
    return affine_transform(image, turn, offset, order=1)


def samples(images: list[np.ndarray], labels: list[int], names: list[int]) -> TensorDict:
    """A batch for the queue; `name` numbers the training samples from 0 on."""
    return TensorDict(
        {
            "image": torch.from_numpy(np.stack(images)).unsqueeze(1),
            "label": torch.tensor(labels),
            "name": torch.tensor(names),
        },
        batch_size=[len(images)],
    )


# Making them: two processes like this


def produce(producer: int, begin: Event) -> None:
    """Put every second training digit, first as it is and then in augmented copies."""
    images, labels, _, _ = digits()
    rng = np.random.default_rng(producer)
    mine = range(producer, len(images), 2)
    with Queue("digits", str(HERE)) as queue:
        begin.wait()
        with queue.producer(f"producer-{producer}"):
            for copy in range(1 + COPIES):
                for at in range(0, len(mine), PUT_AT_ONCE):
                    some = mine[at : at + PUT_AT_ONCE]
                    queue.sync.put(
                        samples(
                            [augmented(images[i], rng) if copy else images[i] for i in some],
                            [int(labels[i]) for i in some],
                            [i * (1 + COPIES) + copy for i in some],
                        ),
                        "train",
                    )
                    time.sleep(PAUSE_SECONDS)


# Training on them: one process


class Net(LightningModule):
    """A small convolutional network, and how often each sample has shaped its weights."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
        self.register_buffer("trained", torch.zeros(samples, dtype=torch.int64))
        self.register_buffer("accuracy", torch.zeros(()))
        self.right: list[Tensor] = []

    def training_step(self, batch: TensorDict, batch_idx: int) -> Tensor:
        self.trained += torch.bincount(batch["name"], minlength=len(self.trained))
        return nn.functional.cross_entropy(self.layers(batch["image"]), batch["label"])

    def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
        self.right.append(self.layers(batch["image"]).argmax(1) == batch["label"])

    def on_validation_epoch_end(self) -> None:
        self.accuracy.copy_(torch.cat(self.right).float().mean())
        self.right.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class Report(Callback):
    """Tells the parent process that the trainer runs, and which step it has reached."""

    def __init__(self, step: Synchronized[int]) -> None:
        self.step = step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step.value = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step.value = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.step.value = trainer.global_step


def train(samples: int, step: Synchronized[int], checkpoint: Path | None) -> None:
    """Train from the queue until it is sealed and empty."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    data = PersistingDataModule(
        "digits",
        str(HERE),
        batch_size=BATCH,
        fields=["image", "label", "name"],
        partition_id="train",
        val_partition_id="val",
        last="split",
        timeout=120,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[
            Report(step),
            ModelCheckpoint(
                STEPS, filename="{step}", every_n_train_steps=STEPS_PER_CHECKPOINT, save_top_k=-1
            ),
            ModelCheckpoint(END, filename="end"),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=HERE,
    )
    trainer.fit(Net(samples), data, ckpt_path=checkpoint)


# The play


def main() -> int:
    began = time.monotonic()
    shutil.rmtree(HERE, ignore_errors=True)
    images, _, held, held_labels = digits()
    total = len(images) * (1 + COPIES)

    with Queue("digits", str(HERE)) as queue:
        queue.sync.put(samples(list(held), held_labels.tolist(), [-1] * len(held)), "val")
        queue.sync.seal("val")
        say(f"{len(images):,} digits to train on, {len(held):,} held out for validation")
        play(queue, total)
        by_queue = queue.engine.books_of("train", "train")

    end = torch.load(END / "end.ckpt", weights_only=True)["state_dict"]
    by_weights = {
        "put": total,
        "once": int((end["trained"] == 1).sum()),
        "twice": int((end["trained"] > 1).sum()),
        "never": int((end["trained"] == 0).sum()),
    }
    accuracy = float(end["accuracy"])
    show(by_queue, by_weights, accuracy, time.monotonic() - began)
    exact = {"put": total, "once": total, "twice": 0, "never": 0}
    held = by_weights == exact and by_queue == {**exact, "dropped": 0}
    return 0 if held and accuracy > ACCURACY_WANTED else 1


def play(queue: Queue, total: int) -> None:
    """Make digits and train on them, with a kill half way, until all are put and trained."""
    context = multiprocessing.get_context("spawn")
    begin, step = context.Event(), context.Value("i", -1)
    producers = [context.Process(target=produce, args=(n, begin)) for n in range(2)]
    trainer = context.Process(target=train, args=(total, step, None))
    for process in (trainer, *producers):
        process.start()
    wait_for(lambda: step.value == 0, trainer)
    say(f"the trainer (process {trainer.pid}) is running and waits; two producers begin")
    begin.set()

    wait_for(lambda: half_way(step.value, total), trainer, *producers)
    trainer.kill()
    trainer.join()
    require(trainer.exitcode == -signal.SIGKILL, "the trainer ended before it could be killed")
    say(f"the trainer is killed at step {step.value}, with {put(queue):,} samples put so far")

    last = max(STEPS.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    step.value = -1
    trainer = context.Process(target=train, args=(total, step, last))
    trainer.start()
    wait_for(lambda: step.value > 0, trainer, *producers)
    say(f"a new trainer (process {trainer.pid}) goes on from {last}")

    for process in producers:
        process.join()
        require(process.exitcode == 0, "a producer failed")
    queue.sync.seal("train")
    say(f"all {put(queue):,} samples are put, and the partition is sealed")
    trainer.join()
    require(trainer.exitcode == 0, "the trainer failed")


def half_way(step: int, total: int) -> bool:
    """Half of the samples trained, and some steps since the last checkpoint to be repeated."""
    return step * BATCH > total / 2 and 5 <= step % STEPS_PER_CHECKPOINT <= 20


def put(queue: Queue) -> int:
    return len(queue.engine.snapshot("train"))


def wait_for(condition: Any, *processes: SpawnProcess) -> None:
    while not condition():
        require(all(process.exitcode in (None, 0) for process in processes), "a process failed")
        time.sleep(0.001)


def require(condition: bool, otherwise: str) -> None:
    if not condition:
        for process in multiprocessing.active_children():
            process.kill()
        sys.exit(f"{otherwise}; its message is above")


def say(line: str) -> None:
    print(f"  {line}", flush=True)


def show(books: dict[str, int], weights: dict[str, int], accuracy: float, seconds: float) -> None:
    """The table that says what happened."""
    lines = {
        "samples put": "put",
        "trained once": "once",
        "trained twice": "twice",
        "never": "never",
    }
    print(f"\n  {'':24}{'by the queue':>16}{'by the weights':>16}")
    for title, key in lines.items():
        print(f"  {title:24}{books[key]:>16,}{weights[key]:>16,}")
    print(f"  {'validation accuracy':24}{accuracy:>16.1%}")
    print(f"  {'time':24}{seconds:>14.0f} s")


if __name__ == "__main__":
    sys.exit(main())
