"""How the queue and the training that it feeds are doing, in every logger of the Trainer."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from tensordict import TensorDictBase
from torch import Tensor
from torch.utils._pytree import tree_leaves

from persisting_torch.datasets.dataset import PersistingDataset
from persisting_torch.datasets.handle import QueueHandle
from persisting_torch.datasets.loader import PersistingDataLoader
from persisting_torch.queue.depth import Depth, Gauge
from persisting_torch.queue.place import Place

if TYPE_CHECKING:
    from persisting_torch.queue import Queue
    from persisting_torch.queue.engine import Engine

DISK_SECONDS = 60.0


class QueueMonitor(Callback):
    """Logs depth, lag, rates, waiting and staleness to every logger of the Trainer.

    Every `every_n_steps` optimizer steps (default: the Trainer's `log_every_n_steps`), on global
    rank zero, as `queue/<figure>`:

    ready_samples: untaken samples with all fields that the training asks for.
    untaken_samples: samples that the task has not taken, whatever fields they lack.
    assigned_samples: taken, but not yet consumed for good: read ahead, in training, or in batches
        that no checkpoint on disk counts yet.
    lag_samples: untaken and assigned ones: how far the training is behind the producers.
    dropped_samples: let go untrained since the task began, and of these, once there are any,
        dropped_stale_samples (MaxStaleness), dropped_late_samples (members of groups that had gone)
        and so on for every other reason.
    put_samples_per_s: samples that all producers flushed, per second.
    trained_samples_per_s: samples that all ranks trained, per second.
    waiting_s: seconds in which the loop of rank zero waited for its next batch.
    waiting_share: the same as a part of the time, 0 to 1.
    staleness_mean_steps, staleness_max_steps: optimizer steps between the policy that made a
        trained sample, which its field `version_field` tells, and the one that trained on it; of
        rank zero's samples, where they have that field.
    disk_bytes: the queue's size on disk, looked up at most once a minute.

    Rates, waiting and staleness are of the time since they were last logged (first, since training
    began), validation left out. Samples count once they are flushed.

    Args:
        queue, task_name, partition_id: whose figures; by default those of the Trainer's
            PersistingDataModule or PersistingDataLoader, the first if there are several. Training
            figures are logged where a loader of the Trainer has that queue, task and partition.
        storage_path: of a queue given by its name.
        version_field: the samples' field of the policy's version; None logs no staleness.
        prefix: what the figures' names begin with, to tell several monitors apart.

    Raises MisconfigurationException where the Trainer has no logger; ValueError where no queue is
    given and the Trainer has none.
    """

    def __init__(
        self,
        queue: Queue | str | None = None,
        task_name: str | None = None,
        partition_id: str | None = None,
        every_n_steps: int | None = None,
        *,
        storage_path: str | os.PathLike[str] = "./data",
        version_field: str | None = "policy_version",
        prefix: str = "queue",
    ) -> None:
        super().__init__()
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}.")
        self._given = None if queue is None else QueueHandle(queue, storage_path)
        self.task_name = task_name
        self.partition_id = partition_id
        self.every_n_steps = every_n_steps
        self.version_field = version_field
        self.prefix = prefix
        self._gauge: Gauge | None = None
        self._disk: _Disk | None = None
        self._interval = _Interval()
        self._step = 0
        self._paused_at = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not trainer.loggers:
            raise MisconfigurationException(
                "QueueMonitor has nowhere to log to: the Trainer has logger=False. Give it a"
                " logger, or leave the monitor out."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        dataset = self._dataset(trainer)
        engine = self._engine(dataset)
        named = (dataset.task_name, dataset.partition_id) if dataset else ("train", "default")
        self._gauge = Gauge(
            engine,
            self.task_name or named[0],
            self.partition_id or named[1],
            dataset.fields if dataset else None,
        )
        self._disk = _Disk(engine.place)
        self._step = trainer.global_step
        self._interval = _Interval(self._gauge.read().put, dataset)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and self.version_field is not None:
            versions = _field_of(batch, self.version_field)
            if versions is not None:
                self._interval.ages.append(trainer.global_step - versions)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        dataset = self._dataset(trainer)
        if dataset is not None:
            rows = len(batch) if isinstance(batch, TensorDictBase) else dataset.batch_size
            self._interval.trained += rows * dataset.ranks.size
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        before, self._step = self._step, trainer.global_step
        if every and self._step // every > before // every:
            self._log(trainer, dataset)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interval.paused += time.perf_counter() - self._paused_at

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._release()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    def _log(self, trainer: Trainer, dataset: PersistingDataset | None) -> None:
        assert self._gauge is not None
        assert self._disk is not None
        depth = self._gauge.read()
        figures: dict[str, float] = {
            "ready_samples": depth.ready,
            "untaken_samples": depth.untaken,
            "assigned_samples": depth.assigned,
            "lag_samples": depth.lag,
            "dropped_samples": sum(depth.dropped.values()),
            **{f"dropped_{why}_samples": count for why, count in depth.dropped.items()},
            **self._interval.figures(depth, dataset),
            "disk_bytes": self._disk.size(),
        }
        self._interval = _Interval(depth.put, dataset)
        # The step under which Lightning itself logs what the module logs in this batch.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in trainer.loggers:
            start = f"{self.prefix}{logger.group_separator}"
            logger.log_metrics({start + name: value for name, value in figures.items()}, step=step)

    def _dataset(self, trainer: Trainer) -> PersistingDataset | None:
        """The dataset, of those that the Trainer trains from, that the figures are of."""
        for loader in tree_leaves(trainer.train_dataloader):
            if isinstance(loader, PersistingDataLoader):
                name, partition, task = loader.dataset.identity
                if (
                    (self._given is None or self._given.name == name)
                    and self.task_name in (None, task)
                    and self.partition_id in (None, partition)
                ):
                    return loader.dataset
        return None

    def _engine(self, dataset: PersistingDataset | None) -> Engine:
        if self._given is not None:
            return self._given.engine
        if dataset is not None:
            return dataset.handle.engine
        raise ValueError(
            "QueueMonitor: the Trainer has no PersistingDataLoader of this task and partition to"
            " take the queue from. Give QueueMonitor the queue."
        )

    def _release(self) -> None:
        self._gauge = None
        if self._given is not None:
            self._given.close()


class _Interval:
    """What has happened since the last figures."""

    def __init__(self, put: int = 0, dataset: PersistingDataset | None = None) -> None:
        self.began = time.perf_counter()
        self.paused = 0.0
        self.put = put
        self.dataset = dataset
        self.waited = 0.0 if dataset is None else dataset.waited_seconds
        self.trained = 0
        self.ages: list[Tensor] = []

    def figures(self, depth: Depth, dataset: PersistingDataset | None) -> dict[str, float]:
        seconds = max(time.perf_counter() - self.began - self.paused, 1e-9)
        found = {"put_samples_per_s": (depth.put - self.put) / seconds}
        if dataset is not None:
            before = self.waited if dataset is self.dataset else 0.0
            waited = dataset.waited_seconds - before
            found["trained_samples_per_s"] = self.trained / seconds
            found["waiting_s"] = waited
            found["waiting_share"] = min(1.0, waited / seconds)
        if self.ages:
            ages = torch.cat(self.ages)
            found["staleness_mean_steps"] = float(ages.mean())
            found["staleness_max_steps"] = float(ages.max())
        return found


class _Disk:
    """A queue's size, looked up now and then."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._due = 0.0
        self._size = 0

    def size(self) -> int:
        if time.monotonic() >= self._due:
            self._size = self.place.files.size(self.place.root)
            self._due = time.monotonic() + DISK_SECONDS
        return self._size


def _field_of(batch: Any, name: str) -> Tensor | None:
    """The values of a field of numbers, one for each sample, where the batch has it."""
    if not isinstance(batch, TensorDictBase | Mapping):
        return None
    values = batch.get(name, None)
    if not isinstance(values, Tensor) or not values.numel():
        return None
    return values.detach().double().flatten()
