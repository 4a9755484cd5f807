"""The runs of resume_matrix.py: training of which the weights tell how often each sample was used.

`python resume_runs.py PACKAGE ...` imports these packages and then waits for lines, each a list of
jobs in JSON, one for each rank. A job runs in a fork, a process that has done nothing else; the
answer is the list of exit codes. The driver holds the other end of the pipes.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

SAMPLES = 48
BATCH = 4
LIMIT_SECONDS = 120
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """One rank of one run."""

    do: str
    """"fill" the source, or train with "trainer" or "loop"."""
    reader: str
    folder: str
    """Of this cell: checkpoints, the queue, results."""
    shared: str
    """Of all cells: what litdata reads."""
    workers: int = 0
    batch_size: int = BATCH
    epochs: int = 1
    limit: int | None = None
    """Batches an epoch; None for all."""
    accumulate: int = 1
    max_steps: int = -1
    estimates: bool = False
    saves: str = "steps"
    """When: every three "steps", at each "epoch" or the "end" of max_steps, after a "batch", on an
    "exception"."""
    resume: str | None = None
    kill_at: int | None = None
    """SIGKILL after this many batches of this run."""
    fail_at: int | None = None
    """An exception in the training step after this many batches of this run."""
    distributed: bool = False
    """Whether the row is about ranks, for readers that are used differently then."""
    rank: int = 0
    ranks: int = 1
    port: int = 0

    @property
    def checkpoints(self) -> Path:
        return Path(self.folder) / "checkpoints"


# The model


class Counting(torch.nn.Module):
    """Weight i grows by exactly 1 whenever an optimizer step covers sample i.

    `weight` undoes that ranks average their gradients and that accumulation divides the loss.
    """

    def __init__(self, weight: int) -> None:
        super().__init__()
        self.count = torch.nn.Parameter(torch.zeros(SAMPLES))
        self.weight = weight

    def forward(self, uid: torch.Tensor) -> torch.Tensor:
        return -self.count[uid].sum() * self.weight


class Module(LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.counting = Counting(job.accumulate * job.ranks)
        self.job = job
        self.batches = 0

    def train_dataloader(self) -> Any:
        # Called once the ranks are known, which litdata and torchdata's dataset ask for.
        return READERS[self.job.reader](self.job)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.job.estimates:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.batches == self.job.fail_at:
            raise RuntimeError("the training step failed")
        self.batches += 1
        return self.counting(batch["uid"])


# The readers, each as its documentation has it


class Samples(Dataset[dict[str, int]]):
    """Map-style."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"uid": index}


class Stream(IterableDataset[dict[str, int]]):
    """Iterable, cut for ranks and workers, with the state that torchdata asks a dataset for."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.position = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        worker = get_worker_info()
        share, shares = (0, 1) if worker is None else (worker.id, worker.num_workers)
        mine = range(self.rank * shares + share, SAMPLES, self.ranks * shares)
        while self.position < len(mine):
            self.position += 1
            yield {"uid": mine[self.position - 1]}
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def dataset(job: Job, *, consume: bool) -> Any:
    from persisting_torch import PersistingDataset

    how = {"batch_size": job.batch_size, "last": "split", "timeout": LIMIT_SECONDS / 2}
    return PersistingDataset("q", storage_path=job.folder, consume=consume, **how)


def queue(job: Job) -> Any:
    from persisting_torch import PersistingDataLoader

    return PersistingDataLoader(dataset(job, consume=True), num_workers=job.workers)


def data_module(job: Job) -> LightningDataModule | None:
    """The queue as a Trainer gets it; the other readers are loaders."""
    if job.reader != "persisting_torch":
        return None
    from persisting_torch import PersistingDataModule

    how: dict[str, Any] = {"batch_size": job.batch_size, "num_workers": job.workers}
    return PersistingDataModule("q", job.folder, last="split", timeout=LIMIT_SECONDS / 2, **how)


def queue_epochs(job: Job) -> Any:
    from persisting_torch import PersistingDataLoader

    return PersistingDataLoader(dataset(job, consume=False), num_workers=job.workers)


def litdata(job: Job) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset

    how = {"batch_size": job.batch_size, "num_workers": job.workers}
    # On several ranks litdata sets drop_last itself, and refuses to change it on resume.
    data = StreamingDataset(f"{job.shared}/litdata", drop_last=True if job.distributed else None)
    return StreamingDataLoader(data, **how)


def torchdata_map(job: Job) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return _mapped(job, StatefulDataLoader, StatefulDistributedSampler)


def torchdata_iterable(job: Job) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    how = {"batch_size": job.batch_size, "num_workers": job.workers}
    return StatefulDataLoader(Stream(job.rank, job.ranks), **how)


def plain(job: Job) -> Any:
    return _mapped(job, DataLoader, DistributedSampler)


def _mapped(job: Job, loader: Callable[..., Any], sampler: Callable[..., Any]) -> Any:
    """A loader of map-style samples; under a Trainer, Lightning adds the sampler for ranks."""
    data, how = Samples(), {"batch_size": job.batch_size, "num_workers": job.workers}
    if job.distributed and job.do == "loop":
        how["sampler"] = sampler(data, job.ranks, job.rank, shuffle=False)
    return loader(data, **how)


READERS: dict[str, Callable[[Job], Any]] = {
    "persisting_torch": queue,
    "consume=False": queue_epochs,
    "litdata": litdata,
    "torchdata map": torchdata_map,
    "torchdata iterable": torchdata_iterable,
    "DataLoader": plain,
}


def fill(job: Job) -> None:
    """Make what the reader reads."""
    if job.reader in ("persisting_torch", "consume=False"):
        from tensordict import TensorDict

        from persisting_torch import Queue

        with Queue("q", job.folder) as queue:
            queue.sync.put(TensorDict({"uid": torch.arange(SAMPLES)}, [SAMPLES]))
            queue.sync.seal()
    if job.reader == "litdata":
        from litdata import optimize

        optimize(
            fn=sample,
            inputs=list(range(SAMPLES)),
            output_dir=f"{job.shared}/litdata",
            chunk_size=8,
            num_workers=1,
            keep_data_ordered=True,
            start_method="fork",
        )


def sample(index: int) -> dict[str, int]:
    return {"uid": index}


# Training under a Lightning Trainer


class Interruption(Callback):
    """Saves after a batch, in the middle of accumulation, and kills, where the job says so."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.batches = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.batches += 1
        if self.job.saves == "batch" and self.batches == 6:
            trainer.save_checkpoint(self.job.checkpoints / "batch.ckpt")
        if self.batches == self.job.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def saver_of(job: Job) -> Callback | None:
    """The callback that writes the checkpoints, where Interruption does not."""
    if job.saves == "steps":
        return ModelCheckpoint(job.checkpoints, every_n_train_steps=3, save_top_k=-1)
    if job.saves == "epoch":
        return ModelCheckpoint(job.checkpoints)
    if job.saves == "end":
        return ModelCheckpoint(job.checkpoints, every_n_train_steps=job.max_steps)
    return OnExceptionCheckpoint(job.checkpoints) if job.saves == "exception" else None


def trainer(job: Job) -> list[float]:
    saver = saver_of(job)
    callbacks = [Interruption(job), *([saver] if saver else [])]
    if job.reader == "consume=False":
        from persisting_torch import ConsumptionCheckpoint

        callbacks.insert(0, ConsumptionCheckpoint())
    run = Trainer(
        accelerator="cpu",
        devices=job.ranks,
        strategy="ddp" if job.ranks > 1 else "auto",
        max_epochs=job.epochs,
        max_steps=job.max_steps,
        limit_train_batches=job.limit,
        accumulate_grad_batches=job.accumulate,
        callbacks=callbacks,
        default_root_dir=job.folder,
        enable_checkpointing=saver is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(job)
    run.fit(module, datamodule=data_module(job), ckpt_path=job.resume)
    return module.counting.count.tolist()


# Training in a plain loop


def loop(job: Job) -> list[float]:
    model: torch.nn.Module = Counting(job.ranks)
    parts: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 1.0)}
    if job.ranks > 1:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    loader = READERS[job.reader](job)
    if hasattr(loader, "state_dict"):
        parts["loader"] = loader
    first, batches = 0, 0

    def save(name: str, epoch: int) -> None:
        states = {name: part.state_dict() for name, part in parts.items()}
        if job.rank == 0:
            job.checkpoints.mkdir(exist_ok=True)
            torch.save({**states, "epoch": epoch}, job.checkpoints / "new")
            os.replace(job.checkpoints / "new", job.checkpoints / f"{name}.ckpt")

    if job.resume:
        saved = torch.load(job.resume, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first = saved["epoch"]
    else:
        save("start", 0)
    for epoch in range(first, job.epochs):
        for batch in itertools.islice(loader, job.limit):
            model(batch["uid"]).backward()
            parts["optimizer"].step()
            parts["optimizer"].zero_grad()
            batches += 1
            if job.saves == "steps" and batches % 3 == 0:
                save(f"batch {batches}", epoch)
            if batches == job.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        save(f"epoch {epoch}", epoch + 1)
    return parts["model"].count.tolist()


# Processes


def run(job: Job) -> None:
    """What the fork does: the job, and what came of it in a file."""
    result: dict[str, Any] = {}
    try:
        if job.do == "fill":
            fill(job)
        else:
            result["counts"] = (trainer if job.do == "trainer" else loop)(job)
    except Exception as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
        if job.fail_at is not None and "training step failed" in str(error):
            result = {}
    if job.rank == 0:
        (Path(job.folder) / "result.json").write_text(json.dumps(result))


def start(job: Job) -> int:
    """The process that runs this job; it dies with this one, or of its limit."""
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(LIMIT_SECONDS)
    log = os.open(f"{job.folder}/log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if job.ranks > 1:
        torchrun = {"RANK": job.rank, "LOCAL_RANK": job.rank, "WORLD_SIZE": job.ranks}
        torchrun |= {"LOCAL_WORLD_SIZE": job.ranks, "GROUP_RANK": 0, "MASTER_PORT": job.port}
        os.environ |= {name: str(value) for name, value in torchrun.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "resume_matrix"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run(job)
    sys.stdout.flush()
    os._exit(0)


def main(packages: list[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    versions = {package: import_module(package).__version__ for package in packages}
    print(json.dumps(versions, default=str), flush=True)
    known = {field.name for field in fields(Job)}
    for line in sys.stdin:
        jobs = [Job(**{k: v for k, v in given.items() if k in known}) for given in json.loads(line)]
        pids = [start(job) for job in jobs]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
