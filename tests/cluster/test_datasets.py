"""Training from a queue of a cluster: datasets, loaders with workers, the Trainer and callbacks."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from persisting_torch import PersistingDataLoader, PersistingDataset, Queue
from tests.cluster.nodes import Cluster, Member

SAMPLES = 50


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with Cluster() as cluster:
        cluster.grow(3)
        yield cluster


@pytest.fixture(scope="module")
def trainer(nodes: Cluster) -> Member:
    """A light member that trains."""
    return nodes.client()


@pytest.fixture(scope="module")
def producer(nodes: Cluster) -> Member:
    return nodes.client()


def put(path: str, samples: int = SAMPLES, first: int = 0, seal: bool = True) -> int:
    from tests.datasets.counting import fill

    fill(path, samples, first=first, seal=seal)
    with Queue("q", path) as queue:
        return queue.num_buckets


def committed(path: str) -> int:
    with Queue("q", path) as queue:
        return queue.engine.cursor("train", "default")


def in_order(samples: int = SAMPLES, size: int = 4) -> list[list[int]]:
    return [list(range(first, min(samples, first + size))) for first in range(0, samples, size)]


def load(path: str, workers: int, **options: Any) -> list[list[int]]:
    given = {"batch_size": 4, "fields": ["uid"], "timeout": 30.0, "last": "split"} | options
    dataset = PersistingDataset("q", storage_path=path, **given)
    return [batch["uid"].tolist() for batch in PersistingDataLoader(dataset, num_workers=workers)]


def iterate(path: str) -> list[list[int]]:
    with Queue("q", path) as queue:
        dataset = PersistingDataset(queue, batch_size=4, fields=["uid"], timeout=30.0, last="split")
        return [batch["uid"].tolist() for batch in dataset]


def test_a_dataset_gives_each_sample_once_in_order(producer, trainer, tmp_path: Path):
    assert producer.call(put, str(tmp_path)) == 4
    assert trainer.call(iterate, str(tmp_path)) == in_order()
    assert trainer.call(iterate, str(tmp_path)) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_each_sample_once_in_order(producer, trainer, tmp_path: Path, workers: int):
    producer.call(put, str(tmp_path))
    assert trainer.call(load, str(tmp_path), workers) == in_order()
    assert producer.call(committed, str(tmp_path)) == 13


def test_a_loader_waits_for_what_comes_yet(producer, trainer, tmp_path: Path):
    producer.call(put, str(tmp_path), 10, seal=False)
    pending = trainer.begin(load, str(tmp_path), 0)
    assert not pending.is_there(0.5)
    producer.call(put, str(tmp_path), 40, 10)
    assert pending.result() == in_order()


def break_off(path: str, workers: int, after: int) -> tuple[list[list[int]], dict[str, Any]]:
    dataset = PersistingDataset("q", storage_path=path, batch_size=4, fields=["uid"], timeout=30.0)
    loader = PersistingDataLoader(dataset, num_workers=workers)
    seen = []
    for batch in loader:
        seen.append(batch["uid"].tolist())
        if len(seen) == after:
            return seen, loader.state_dict()
    raise AssertionError("it ended too early")


def go_on(path: str, workers: int, state: dict[str, Any]) -> list[list[int]]:
    dataset = PersistingDataset("q", storage_path=path, batch_size=4, fields=["uid"], timeout=30.0)
    loader = PersistingDataLoader(dataset, num_workers=workers)
    loader.load_state_dict(state)
    return [batch["uid"].tolist() for batch in loader]


def test_a_loader_goes_on_in_another_process(nodes, producer, trainer, tmp_path: Path):
    producer.call(put, str(tmp_path), 48)
    seen, state = trainer.call(break_off, str(tmp_path), 0, 5)
    other = nodes.client()
    assert seen + other.call(go_on, str(tmp_path), 0, state) == in_order(48)
    other.kill()


def ranks(path: str, rank: int) -> list[list[int]]:
    options = {"dp_rank": rank, "dp_size": 2, "last": "drop"}
    return load(path, 0, **options)


def test_two_ranks_share_the_samples(producer, trainer, tmp_path: Path):
    producer.call(put, str(tmp_path), 48)
    pending = [
        member.begin(ranks, str(tmp_path), at) for at, member in enumerate((trainer, producer))
    ]
    first, second = (one.result() for one in pending)
    assert len(first) == len(second) == 6
    assert sorted(uid for batch in first + second for uid in batch) == list(range(48))


# Under a Trainer


def train(path: str, **options: Any) -> tuple[list[list[int]], list[float]]:
    """Fit; the batches that were seen, and how often each sample was trained."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from persisting_torch import PersistingDataModule
    from tests.datasets.counting import Counting, fit

    model = Counting(SAMPLES)
    data = PersistingDataModule(
        "q", path, batch_size=5, timeout=30.0, num_workers=options.pop("num_workers", 0)
    )
    save = ModelCheckpoint(f"{path}/checkpoints", save_last=True, every_n_train_steps=1)
    fit(model, data, path, save, **options)
    return model.seen, model.counts


@pytest.mark.slow
def test_a_run_trains_each_sample_once_and_resumes_elsewhere(nodes, producer, trainer, tmp_path):
    path = str(tmp_path)
    producer.call(put, path)
    seen, _ = trainer.call(train, path, max_steps=4)
    assert seen == in_order(20, 5)
    other = nodes.client()
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    more, counts = other.call(train, path, ckpt_path=last)
    assert seen + more == in_order(SAMPLES, 5)
    assert counts == [1.0] * SAMPLES
    other.kill()


@pytest.mark.slow
def test_a_run_with_workers_trains_each_sample_once(producer, trainer, tmp_path: Path):
    producer.call(put, str(tmp_path))
    _, counts = trainer.call(train, str(tmp_path), num_workers=2)
    assert counts == [1.0] * SAMPLES


def train_with_callbacks(path: str) -> list[float]:
    import torch
    from lightning.pytorch.loggers import CSVLogger

    from persisting_torch import PersistingDataModule
    from persisting_torch.callbacks import PolicyPublisher, QueueMonitor
    from tests.datasets.counting import Counting, fit

    model = Counting(SAMPLES)
    data = PersistingDataModule("q", path, batch_size=5, timeout=30.0)
    logger = CSVLogger(path, name="", version="csv")
    with Queue("q", path) as queue:
        callbacks = QueueMonitor(every_n_steps=2), PolicyPublisher(queue, every_n_steps=5)
        options = {"logger": logger, "log_every_n_steps": 1, "enable_checkpointing": False}
        fit(model, data, path, *callbacks, **options)
    assert torch.equal(model.count, torch.ones(SAMPLES))
    return model.counts


def newest_policy(path: str) -> tuple[int | None, float]:
    from persisting_torch.callbacks import policy

    with Queue("q", path) as queue:
        found = policy(queue).latest()
        assert found is not None
        return found.version, float(found.state_dict["count"].sum())


def test_monitor_and_policies_work_with_a_cluster(producer, trainer, tmp_path: Path):
    path = str(tmp_path)
    producer.call(put, path)
    assert trainer.call(train_with_callbacks, path) == [1.0] * SAMPLES
    with open(tmp_path / "csv" / "metrics.csv") as file:
        lags = [
            float(row["queue/lag_samples"])
            for row in csv.DictReader(file)
            if row["queue/lag_samples"]
        ]
    assert lags == [40, 30, 20, 10, 0]
    assert producer.call(newest_policy, path) == (10, SAMPLES)


def predict(path: str) -> None:
    from persisting_torch import PersistingDataModule
    from persisting_torch.callbacks import QueuePredictionWriter
    from tests.datasets.counting import Counting, trainer

    data = PersistingDataModule(
        "q", path, batch_size=5, fields=["uid", "_index"], predict_partition_id="default"
    )
    writer = QueuePredictionWriter("out", storage_path=path)
    trainer(path, writer, enable_checkpointing=False).predict(
        Counting(SAMPLES), data, return_predictions=False
    )


def predictions(path: str) -> list[int]:
    with Queue("out", path) as queue:
        return [int(record["prediction"]) for record in queue.sync.get(1000)]


def test_predictions_go_to_a_queue_of_the_cluster(producer, trainer, tmp_path: Path):
    producer.call(put, str(tmp_path))
    trainer.call(predict, str(tmp_path))
    assert sorted(producer.call(predictions, str(tmp_path))) == list(range(SAMPLES))
