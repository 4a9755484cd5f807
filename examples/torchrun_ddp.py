"""Train on two ranks under torchrun, lose them half way, lose no sample.

A plain torch DDP loop on two ranks trains from a queue. Half way both ranks are killed with
SIGKILL, and torchrun is started again; the ranks go on from their last checkpoint. Then the same
with a Lightning Trainer. At the end the queue's own books, and a count that is part of the
checkpoints beside the weights, say how often each sample was trained.

    python examples/torchrun_ddp.py

Exits with 1 if any sample was trained twice or never.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn

from persisting_torch import PersistingDataLoader, PersistingDataset, Queue

HERE = Path("ddp_data")
LOOPS = {"plain": "plain torch DDP", "lightning": "Lightning DDP"}

SAMPLES = 4_005  # the last 5 are split over the ranks, 3 and 2
RANKS = 2
BATCH = 16  # on each rank
STEPS_PER_CHECKPOINT = 10
STEP_SECONDS = 0.02  # a model that has something to do


class Net(nn.Module):
    """A small network, and how often each sample has shaped its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("trained", torch.zeros(SAMPLES, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def count(self, names: Tensor) -> None:
        """Count a batch, and those that the other ranks train in the same step."""
        counts = torch.bincount(names, minlength=SAMPLES)
        dist.all_reduce(counts)
        self.trained += counts


def report(step: int) -> None:
    """Tell the parent process, which reads what torchrun prints."""
    if dist.get_rank() == 0:
        print(f"step {step}\n", end="", flush=True)
    time.sleep(STEP_SECONDS)


# A rank: a plain torch loop


def train_plain() -> None:
    """Train until the queue is empty; the loader's state is in every checkpoint."""
    checkpoint = HERE / "plain.pt"
    dist.init_process_group("gloo")
    net = Net()
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    dataset = PersistingDataset(
        "samples", storage_path=HERE, batch_size=BATCH, task_name="plain", last="split", timeout=60
    )
    loader = PersistingDataLoader(dataset)
    parts, step = {"net": net, "optimizer": optimizer, "loader": loader}, 0

    def save() -> None:
        states = {name: part.state_dict() for name, part in parts.items()}
        if dist.get_rank() == 0:
            torch.save({**states, "step": step}, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)

    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        step = saved["step"]
    else:
        save()  # before the first batch
        dist.barrier()

    for batch in loader:
        nn.functional.mse_loss(ddp(batch["x"]), batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        net.count(batch["name"])
        step += 1
        if step % STEPS_PER_CHECKPOINT == 0:
            save()
        report(step)
    save()
    loader.state_dict()  # says that the last checkpoint is on disk
    dist.destroy_process_group()


# A rank: a Lightning Trainer


def train_lightning() -> None:
    """The same with a Trainer; the data module is all that exactly-once training takes."""
    import logging
    import warnings

    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from persisting_torch import PersistingDataModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: TensorDict, batch_idx: int) -> Tensor:
            self.net.count(batch["name"])
            return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    class Report(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
            report(trainer.global_step)

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=1,
        callbacks=[
            ModelCheckpoint(HERE, every_n_train_steps=STEPS_PER_CHECKPOINT, filename="steps"),
            ModelCheckpoint(HERE, filename="end"),
            Report(),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=HERE,
    )
    data = PersistingDataModule(
        "samples", str(HERE), batch_size=BATCH, task_name="lightning", last="split", timeout=60
    )
    last = HERE / "steps.ckpt"
    trainer.fit(Module(), data, ckpt_path=last if last.exists() else None)


# The play


def main() -> int:
    began = time.monotonic()
    shutil.rmtree(HERE, ignore_errors=True)
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    with Queue("samples", HERE) as queue:
        y = x.square().sum(1, keepdim=True)
        queue.sync.put(TensorDict({"x": x, "y": y, "name": torch.arange(SAMPLES)}, [SAMPLES]))
        queue.sync.seal()
        say(f"{SAMPLES:,} samples are put")
        for loop, title in LOOPS.items():
            killed_at = run(loop, kill_at=SAMPLES // (RANKS * BATCH) // 2 + 3)
            say(f"{title}: {RANKS} ranks killed with SIGKILL at step {killed_at}")
            steps = run(loop)
            say(f"{title}: {RANKS} new ranks have gone on to the end, step {steps}")
        columns, dropped = {}, 0
        for loop, title in LOOPS.items():
            books = queue.engine.books_of(loop, "default")
            dropped += books.pop("dropped")
            columns[title, "by the queue"] = books
            columns[title, "by the weights"] = by_weights(loop)
    show(columns, time.monotonic() - began)
    exact = {"put": SAMPLES, "once": SAMPLES, "twice": 0, "never": 0}
    return 0 if not dropped and all(column == exact for column in columns.values()) else 1


def run(loop: str, kill_at: int | None = None) -> int:
    """Run two ranks under torchrun, to their end or until they are killed; the last step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), __file__, loop]
    job = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if kill_at else None,  # torchrun tells at length of what was killed
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert job.stdout is not None
    ranks, step = [], 0
    try:
        for line in job.stdout:
            if line.startswith("rank"):
                ranks.append(int(line.split()[1]))
            elif line.startswith("step"):
                step = int(line.split()[1])
            if step == kill_at:
                for rank in ranks:
                    os.kill(rank, signal.SIGKILL)
                break
        _, told = job.communicate()
    finally:
        job.terminate()
    if (job.returncode == 0) == (kill_at is not None):
        sys.exit(f"torchrun ended with status {job.returncode}: {told or 'see above'}")
    return step


def by_weights(loop: str) -> dict[str, int]:
    """How often each sample has shaped the weights of the last checkpoint."""
    if loop == "plain":
        trained = torch.load(HERE / "plain.pt", weights_only=True)["net"]["trained"]
    else:
        trained = torch.load(HERE / "end.ckpt", weights_only=True)["state_dict"]["net.trained"]
    return {
        "put": SAMPLES,
        "once": int((trained == 1).sum()),
        "twice": int((trained > 1).sum()),
        "never": int((trained == 0).sum()),
    }


def say(line: str) -> None:
    print(f"  {line}", flush=True)


def show(columns: dict[tuple[str, str], dict[str, int]], seconds: float) -> None:
    """The table that says what happened."""
    print(f"\n  {'':16}" + "".join(f"{loop:>18}" for loop, _ in columns))
    print(f"  {'':16}" + "".join(f"{source:>18}" for _, source in columns))
    lines = {
        "samples put": "put",
        "trained once": "once",
        "trained twice": "twice",
        "never": "never",
    }
    for title, key in lines.items():
        print(f"  {title:16}" + "".join(f"{column[key]:>18,}" for column in columns.values()))
    print(f"  {'time':16}{seconds:>16.0f} s")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(f"rank {os.getpid()}\n", end="", flush=True)
        torch.set_num_threads(1)
        {"plain": train_plain, "lightning": train_lightning}[sys.argv[1]]()
    else:
        sys.exit(main())
