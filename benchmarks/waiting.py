"""How long training waits for data: under a Trainer beside a producer, and through the loader.

`trainer`: a model of 20 ms a batch, and a producer process 1.5 times as fast as the same model was
on a queue that had all samples before. The model's time is a sleep: that is what a step on an
accelerator is to the host, while real work on the cores of a small machine would measure the
machine. The producer keeps to a timetable, so what its puts cost does not slow its pace. Waiting is
what the loader counts (`waited_seconds`), from the second batch on.

`loader`: batches of 1 MB in 8 fields, on disk before, whose making takes 8 ms after they are read
(`transform`), and a loop that takes 8 ms for each. The limit is that loop without any data: making
and using overlap wholly, and reading costs nothing. Both times are sleeps, as is to Python native
code that holds no lock.

Run it with nothing else going on: python benchmarks/waiting.py [--scale 0.1] [--only loader]
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from common import arguments, in_turn, median, save, seconds, tables_of

from persisting_torch import PersistingDataLoader, PersistingDataModule, PersistingDataset, Queue

Rows = list[dict[str, Any]]

STEP_SECONDS = 0.020
BATCH = 32
LEAD = 1.5
BATCH_SECONDS = 0.008
PR_SET_PDEATHSIG = 1


def samples(batch: int) -> TensorDict:
    """Rollouts of 512 tokens and a reward: 131 kB in a batch of 32."""
    return TensorDict(
        {"tokens": torch.zeros(batch, 512).long(), "reward": torch.ones(batch)}, [batch]
    )


# Under a Trainer


def produce(name: str, directory: str, period: float, puts: Any) -> None:
    """Put a batch every `period` seconds until this process is ended, or its parent has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    batch = samples(BATCH)
    with Queue(name, directory, batch_size=BATCH) as queue:
        began = time.perf_counter()
        while True:
            queue.sync.put(batch)
            puts.value += 1
            time.sleep(max(0.0, began + puts.value * period - time.perf_counter()))


def train(batches: int, data: PersistingDataModule | DataLoader[Any], puts: Any = None) -> Any:
    """Figures of a Trainer's run, from its second batch on: see `Watch`."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(STEP_SECONDS)
            return (self.weight - batch["reward"]).pow(2).mean()

    class Watch(Callback):
        """Time, the loader's waiting, and the producer's puts, at the second batch and the end."""

        marks: list[tuple[float, float, int]]

        def mark(self, trainer: Trainer) -> None:
            dataset = getattr(trainer.train_dataloader, "dataset", None)
            waited = getattr(dataset, "waited_seconds", 0.0)
            self.marks.append((time.perf_counter(), waited, puts.value if puts else 0))

        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                self.marks = []
                self.mark(trainer)

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == batches:
                self.mark(trainer)

    watch = Watch()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=batches,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), data)
    (began, waited, had), (ended, waited_then, had_then) = watch.marks
    return {
        "batch ms": 1e3 * (ended - began) / (batches - 1),
        "waited ms": 1e3 * (waited_then - waited) / (batches - 1),
        "waiting share": (waited_then - waited) / (ended - began),
        "producer to model": (had_then - had) / (batches - 1),
    }


class Bench:
    """The parts, with a folder of their own and sizes at a scale."""

    def __init__(self, directory: str, scale: float) -> None:
        self.directory = directory
        self.scale = scale
        self._names = itertools.count()

    def size(self, full: int, least: int) -> int:
        return max(least, int(full * self.scale))

    def trainer(self) -> Rows:
        """A Trainer's batch of 20 ms: data in memory, all there before, and beside a producer."""
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="lightning.pytorch")
        batches = self.size(500, 50)
        names = ("in memory", "queue, all there before", f"queue, producer {LEAD} times as fast")
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(3):
            ready = [{"reward": samples(BATCH)["reward"]}] * batches
            memory = train(batches, DataLoader(ready, batch_size=None))
            before = self._before(batches)
            runs = (memory, before, self._beside(batches, before["batch ms"] / 1e3 / LEAD))
            for name, run in zip(names, runs, strict=True):
                found[name].append(run)
        return [
            {"data": name, "batches": batches}
            | {figure: median([run[figure] for run in runs]) for figure in runs[0]}
            for name, runs in found.items()
        ]

    def _before(self, batches: int) -> dict[str, float]:
        name = f"before{next(self._names)}"
        with Queue(name, self.directory) as queue:
            for _ in range(batches):
                queue.sync.put(samples(BATCH))
            queue.sync.seal()
        return train(batches, PersistingDataModule(name, self.directory, batch_size=BATCH))

    def _beside(self, batches: int, period: float) -> dict[str, float]:
        name = f"beside{next(self._names)}"
        Queue(name, self.directory).close()
        context = multiprocessing.get_context("spawn")
        puts = context.Value("q", 0)
        producer = context.Process(
            target=produce, args=(name, self.directory, period, puts), daemon=True
        )
        producer.start()
        try:
            data = PersistingDataModule(name, self.directory, batch_size=BATCH, timeout=60)
            return train(batches, data, puts)
        finally:
            producer.kill()
            producer.join()

    # Through the loader

    def loader(self) -> Rows:
        """Batches of 1 MB that take 8 ms to make and 8 ms to use, beside their overlap's limit."""
        batches = self.size(200, 40)
        with Queue("made", self.directory, batch_size=BATCH * 8) as queue:
            for _ in range(batches):
                fields = {f"field{i}": torch.rand(BATCH, 1024) for i in range(8)}
                queue.sync.put(TensorDict(fields, [BATCH]))
            queue.sync.seal()
        ways: dict[str, dict[str, int]] = {
            "inline": {"prefetch_batches": 0},
            "thread": {},
            "1 worker": {"num_workers": 1},
            "2 workers": {"num_workers": 2},
        }
        alone, *times = in_turn(
            3,
            lambda: seconds(lambda: [use(None) for _ in range(batches)]) / batches,
            *(lambda how=how: self._pass(batches, **how) for how in ways.values()),
        )
        return [
            {
                "loader": name,
                "batches/s": 1 / taken,
                "limit": 1 / alone,
                "of the limit": alone / taken,
            }
            for name, taken in zip(ways, times, strict=True)
        ]

    def _pass(self, batches: int, **how: int) -> float:
        """Seconds a batch, from the second on."""
        dataset = PersistingDataset(
            "made",
            storage_path=self.directory,
            batch_size=BATCH,
            task_name=f"task{next(self._names)}",
            transform=make,
        )
        loader, began = PersistingDataLoader(dataset, **how), 0.0
        for number, batch in enumerate(loader):
            if number == 1:
                began = time.perf_counter()
            use(batch)
        return (time.perf_counter() - began) / (batches - 1)


def use(batch: Any) -> None:
    """What a step costs."""
    time.sleep(BATCH_SECONDS)


def make(batch: TensorDictBase) -> TensorDictBase:
    """What a transform of native code costs."""
    time.sleep(BATCH_SECONDS)
    return batch


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    directory = options.directory or tempfile.mkdtemp(prefix="waiting-")
    os.makedirs(directory, exist_ok=True)
    bench = Bench(directory, options.scale)
    parts = (bench.trainer, bench.loader)
    tables = tables_of(parts, options.only)
    if not options.directory:
        shutil.rmtree(directory)
    if options.scale == 1.0 and not options.only:
        save("waiting", tables)


if __name__ == "__main__":
    main()
