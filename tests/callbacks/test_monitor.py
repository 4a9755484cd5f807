"""QueueMonitor: the figures reach the loggers, mean what they say, and cost little."""

from __future__ import annotations

import csv
import math
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensordict import TensorDict

from persisting_torch import (
    MaxStaleness,
    PersistingDataLoader,
    PersistingDataModule,
    PersistingDataset,
    Queue,
    SequentialSampler,
)
from persisting_torch.callbacks import QueueMonitor
from persisting_torch.queue.depth import Depth, Gauge
from tests.datasets.counting import Counting, fill, fit, trainer

EVERYWHERE = {
    "queue/ready_samples",
    "queue/untaken_samples",
    "queue/assigned_samples",
    "queue/lag_samples",
    "queue/dropped_samples",
    "queue/put_samples_per_s",
    "queue/trained_samples_per_s",
    "queue/waiting_s",
    "queue/waiting_share",
    "queue/disk_bytes",
}
STALENESS = {"queue/staleness_mean_steps", "queue/staleness_max_steps"}


def data_of(path: Path, **options: Any) -> PersistingDataModule:
    return PersistingDataModule("q", str(path), **{"batch_size": 2, "timeout": 30.0} | options)


def logged(path: Path) -> list[dict[str, float]]:
    """The rows of the CSV file, without the columns that a row lacks."""
    with open(path / "csv" / "metrics.csv") as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


def csv_logger(path: Path) -> CSVLogger:
    return CSVLogger(path, name="", version="csv")


def watched(
    path: Path, *callbacks: Callback, samples: int = 40, model: Any = None, **options: Any
) -> list[dict[str, float]]:
    """Figures of a short training, logged at every step."""
    options = {"logger": csv_logger(path), "log_every_n_steps": 1} | options
    fit(model or Counting(samples), data_of(path), path, *callbacks, **options)
    return logged(path)


# Loggers


def test_the_figures_are_in_the_csv_file_under_the_steps_of_the_modules_own(
    tmp_path: Path,
) -> None:
    class Logs(Counting):
        def training_step(self, batch: TensorDict, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, batch_size=2)
            return loss

    fill(tmp_path, 40)
    rows = watched(tmp_path, QueueMonitor(every_n_steps=5), model=Logs(40))
    own = [row["step"] for row in rows if "loss" in row]
    ours = [row for row in rows if "queue/lag_samples" in row]
    assert own == list(range(20))
    assert [row["step"] for row in ours] == [4, 9, 14, 19]
    assert all(set(row) - {"step"} == EVERYWHERE for row in ours)


def test_the_figures_are_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fill(tmp_path, 20)
    logger = TensorBoardLogger(tmp_path, name="", version="board")
    options = {"logger": logger, "enable_checkpointing": False}
    fit(Counting(20), data_of(tmp_path), tmp_path, QueueMonitor(every_n_steps=2), **options)
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= EVERYWHERE
    lags = events.Scalars("queue/lag_samples")
    assert [(event.step, event.value) for event in lags] == [
        (1, 16.0),
        (3, 12.0),
        (5, 8.0),
        (7, 4.0),
        (9, 0.0),
    ]


def test_every_logger_of_the_trainer_gets_them_with_its_own_separator(tmp_path: Path) -> None:
    class Remembers(Logger):
        group_separator = "."
        name, version = "remembers", 0

        def __init__(self) -> None:
            super().__init__()
            self.names: set[str] = set()

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.names |= set(metrics)

        def log_hyperparams(self, params: Any) -> None:
            pass

    fill(tmp_path, 8)
    other = Remembers()
    rows = watched(tmp_path, QueueMonitor(), samples=8, logger=[csv_logger(tmp_path), other])
    assert set(rows[-1]) - {"step"} == EVERYWHERE
    assert {name for name in other.names if name.startswith("queue.")} == {
        name.replace("/", ".") for name in EVERYWHERE
    }


def test_a_trainer_without_a_logger_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    with pytest.raises(MisconfigurationException, match="has nowhere to log to"):
        fit(Counting(4), data_of(tmp_path), tmp_path, QueueMonitor())


# Figures


def test_depth_and_lag_follow_the_training(tmp_path: Path) -> None:
    fill(tmp_path, 40)
    keep = ModelCheckpoint(tmp_path / "steps", every_n_train_steps=4)
    rows = watched(tmp_path, QueueMonitor(), keep, max_steps=10)
    lag = [row["queue/lag_samples"] for row in rows]
    # Committed are the batches that a checkpoint on disk counts: from step 4 on 4, from 8 on 8.
    assert lag == [40, 40, 40, 40, 32, 32, 32, 32, 24, 24]
    for row in rows:
        assert row["queue/untaken_samples"] == row["queue/ready_samples"]
        assert (
            row["queue/untaken_samples"] + row["queue/assigned_samples"]
            == (row["queue/lag_samples"])
        )
        assert row["queue/disk_bytes"] > 0


def test_ready_samples_have_all_the_fields_that_the_training_asks_for(tmp_path: Path) -> None:
    fill(tmp_path, 12, seal=False)
    with Queue("q", tmp_path) as queue:
        queue.sync.put([{"reward": 1.0}] * 5)
    data = PersistingDataModule("q", str(tmp_path), batch_size=2, fields=["uid"], timeout=30)
    options = {"logger": csv_logger(tmp_path), "log_every_n_steps": 1, "limit_train_batches": 2}
    fit(Counting(12), data, tmp_path, QueueMonitor(), **options)
    for row in logged(tmp_path):
        assert row["queue/untaken_samples"] - row["queue/ready_samples"] == 5


def test_rates_count_what_was_put_and_trained_in_the_time_between(tmp_path: Path) -> None:
    class Puts(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            with Queue("q", tmp_path) as queue:
                queue.sync.put([{"uid": torch.tensor(0)}] * 6)
            time.sleep(0.05)

    fill(tmp_path, 4, seal=False)
    rows = watched(tmp_path, QueueMonitor(), Puts(), samples=4, max_steps=4)
    for row in rows:
        assert 0 < row["queue/put_samples_per_s"] < 6 / 0.05
        assert row["queue/put_samples_per_s"] == pytest.approx(
            3 * row["queue/trained_samples_per_s"]
        )


def test_waiting_is_the_time_that_the_loop_waits_for_its_batches(tmp_path: Path) -> None:
    def slow(batch: TensorDict) -> TensorDict:
        time.sleep(0.2)
        return batch

    fill(tmp_path, 12)
    data = data_of(tmp_path, transform=slow, prefetch_batches=0)
    options = {"logger": csv_logger(tmp_path), "log_every_n_steps": 1, "max_steps": 4}
    fit(Counting(12), data, tmp_path, QueueMonitor(), **options)
    slept = logged(tmp_path)
    assert all(row["queue/waiting_s"] >= 0.19 for row in slept)
    assert all(0.5 < row["queue/waiting_share"] <= 1 for row in slept)


def test_a_loop_whose_batches_are_there_does_not_wait(tmp_path: Path) -> None:
    class Slow(Counting):
        def training_step(self, batch: TensorDict, batch_idx: int) -> torch.Tensor:
            time.sleep(0.1)
            return super().training_step(batch, batch_idx)

    fill(tmp_path, 20)
    rows = watched(tmp_path, QueueMonitor(), model=Slow(20), max_steps=6)
    shares = sorted(row["queue/waiting_share"] for row in rows)
    assert shares[len(shares) // 2] < 0.3


def test_validation_is_not_part_of_the_time(tmp_path: Path) -> None:
    class Validated(Counting):
        def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
            time.sleep(0.5)

    fill(tmp_path, 8)
    fill(tmp_path, 2, partition="val")
    data = data_of(tmp_path, val_partition_id="val")
    options = {
        "logger": csv_logger(tmp_path),
        "log_every_n_steps": 1,
        "val_check_interval": 1,
        "limit_train_batches": 4,
        "num_sanity_val_steps": 0,
    }
    fit(Validated(8), data, tmp_path, QueueMonitor(), **options)
    trained = sorted(row["queue/trained_samples_per_s"] for row in logged(tmp_path))
    assert trained[-1] > 2 / 0.5


def test_staleness_is_the_steps_between_the_policy_and_its_training(tmp_path: Path) -> None:
    with Queue("q", tmp_path) as queue:
        versions = [0, 0, 0, 1, 0, 2, -3, 3]
        queue.sync.put(
            [{"uid": torch.tensor(n), "policy_version": v} for n, v in enumerate(versions)]
        )
        queue.sync.seal()
    rows = watched(tmp_path, QueueMonitor(every_n_steps=2), samples=8, max_steps=4)
    assert [row["queue/staleness_mean_steps"] for row in rows] == [0.25, 2.0]
    assert [row["queue/staleness_max_steps"] for row in rows] == [1.0, 6.0]
    assert set(rows[0]) - {"step"} == EVERYWHERE | STALENESS


def test_samples_without_a_version_have_no_staleness_and_those_of_some_are_skipped(
    tmp_path: Path,
) -> None:
    with Queue("q", tmp_path) as queue:
        queue.sync.put([{"uid": torch.tensor(0)}, {"uid": torch.tensor(1), "policy_version": 0}])
        queue.sync.put([{"uid": torch.tensor(n), "policy_version": 0} for n in (2, 3)])
        queue.sync.seal()
    rows = watched(tmp_path, QueueMonitor(), samples=4, max_steps=2)
    assert ["queue/staleness_max_steps" in row for row in rows] == [False, True]


def test_samples_that_were_too_old_are_counted_with_their_reason(tmp_path: Path) -> None:
    with Queue("q", tmp_path) as queue:
        queue.sync.put([{"uid": torch.tensor(n), "policy_version": n} for n in range(8)])
        queue.sync.seal()
    data = data_of(tmp_path, sampler=MaxStaleness(SequentialSampler(), 1), policy_version=4)
    options = {"logger": csv_logger(tmp_path), "log_every_n_steps": 1, "max_steps": 2}
    fit(Counting(8), data, tmp_path, QueueMonitor(), **options)
    for row in logged(tmp_path):
        assert row["queue/dropped_samples"] == row["queue/dropped_stale_samples"] == 3
    with Queue("q", tmp_path) as queue:
        assert queue.sync.stats()["tasks"]["train"]["default"]["dropped"] == {"stale": 3}


# Whose


def test_a_queue_given_with_task_and_partition_is_watched_beside_the_trainers_own(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 8)
    fill(tmp_path, 6, queue="other", partition="p")
    with Queue("other", tmp_path) as other:
        other.sync.get_meta(["uid"], 2, "critic", "p")
        watch = QueueMonitor(other, "critic", "p", prefix="other")
        rows = watched(tmp_path, watch, QueueMonitor(), samples=8, max_steps=1)
    training = ("trained_samples_per_s", "waiting_s", "waiting_share")
    others, own = rows
    assert set(own) - {"step"} == EVERYWHERE
    assert set(others) - {"step"} == {
        name.replace("queue", "other") for name in EVERYWHERE if not name.endswith(training)
    }
    assert others["other/untaken_samples"] == others["other/lag_samples"] == 4


def test_a_loader_given_to_the_trainer_is_found(tmp_path: Path) -> None:
    fill(tmp_path, 8)
    loader = PersistingDataLoader(
        PersistingDataset("q", storage_path=tmp_path, batch_size=2, task_name="mine")
    )
    run = trainer(
        tmp_path, QueueMonitor(), logger=csv_logger(tmp_path), log_every_n_steps=1, max_steps=3
    )
    run.fit(Counting(8), loader)
    assert len(logged(tmp_path)) == 3


def test_a_trainer_without_a_queue_is_refused(tmp_path: Path) -> None:
    class Plain(LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def configure_optimizers(self) -> None:
            pass

    run = trainer(tmp_path, QueueMonitor(), logger=csv_logger(tmp_path))
    with pytest.raises(ValueError, match="has no PersistingDataLoader"):
        run.fit(Plain(), torch.utils.data.DataLoader([1, 2, 3]))


# Cost


def test_the_depth_of_a_task_counts_its_batches_without_padding(tmp_path: Path) -> None:
    fill(tmp_path, 7)
    with Queue("q", tmp_path) as queue:
        gauge = Gauge(queue.engine, "train", "default", ["uid"])
        assert gauge.read() == Depth(put=7, ready=7, untaken=7)
        assert Gauge(queue.engine, "train", "nowhere").read() == Depth()
        for k in range(2):
            queue.engine.await_assignment("train", "default", k, batch_size=4, last="pad")
        assert gauge.read() == Depth(put=7, assigned=7)
        queue.engine.commit_cursor("train", "default", 1)
        assert gauge.read() == Depth(put=7, assigned=3)
        queue.sync.clear([6])
        assert gauge.read().put == 7


def test_figures_cost_less_than_the_batch_of_a_step(tmp_path: Path) -> None:
    fill(tmp_path, 100)
    with Queue("q", tmp_path) as queue:
        gauge = Gauge(queue.engine, "train", "default", ["uid"])
        figures, batches = [], []
        for k in range(25):
            began = time.perf_counter()
            found = queue.engine.await_assignment("train", "default", k, batch_size=4)
            queue.engine.read_batch("default", found.slices[0], ["uid"])
            queue.engine.commit_cursor("train", "default", k + 1)
            batches.append(time.perf_counter() - began)
            began = time.perf_counter()
            gauge.read()
            figures.append(time.perf_counter() - began)
        assert statistics.median(figures) < statistics.median(batches)


def test_the_loader_counts_its_waiting_and_its_batches(tmp_path: Path) -> None:
    fill(tmp_path, 6)
    dataset = PersistingDataset("q", storage_path=tmp_path, batch_size=2)
    assert len(list(PersistingDataLoader(dataset))) == dataset.batches_given == 3
    assert 0 < dataset.waited_seconds < math.inf


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        QueueMonitor(every_n_steps=0)
