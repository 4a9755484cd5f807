"""Two ranks, DDP on the CPU: rollouts, published weights and predictions, each through a queue.

python tests/callbacks/ranks_process.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from persisting_torch import PersistingDataModule, Queue
from persisting_torch.callbacks import (
    PolicyPublisher,
    QueueMonitor,
    QueuePredictionWriter,
    RolloutCallback,
)
from tests.datasets.counting import trainer

BATCH = 2
STEPS = 3


class Policy(LightningModule):
    """Each step adds 1 to the weight; predicts twice the uid."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert batch["policy_version"].tolist() == [self.global_step] * BATCH
        assert batch["made_by"].tolist() == [float(self.global_step)] * BATCH
        return -self.weight

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"double": 2 * batch["uid"]}


def rollouts(count: int) -> Any:
    def generate(policy: Policy, trainer: Any) -> list[dict[str, Any]]:
        record = {"made_by": policy.weight.clone(), "rank": trainer.global_rank}
        return [record] * count

    return generate


def data_of(queue: str, path: Path, **options: Any) -> PersistingDataModule:
    Queue(queue, path).close()
    return PersistingDataModule(queue, str(path), batch_size=BATCH, timeout=60, **options)


class Sharded(LightningModule):
    """Each step takes 1 off every weight of `actor`, of which each rank holds half."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.zeros_(self.actor.weight)

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.actor, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.actor(torch.ones(1, 4)).sum()


def train_sharded(path: Path) -> None:
    for name, distributed in (("whole", False), ("shards", True)):
        strategy = ModelParallelStrategy(
            data_parallel_size=2,
            tensor_parallel_size=1,
            process_group_backend="gloo",
            save_distributed_checkpoint=distributed,
        )
        options = {"devices": 2, "strategy": strategy, "max_steps": STEPS}
        publisher = PolicyPublisher(name, storage_path=path, module="actor")
        run = trainer(path, publisher, enable_checkpointing=False, **options)
        run.fit(Sharded(), DataLoader(range(10)))  # type: ignore[arg-type]


def main() -> None:
    path = Path(sys.argv[1])
    if sys.argv[2:] == ["sharded"]:
        train_sharded(path)
        return
    two = {"devices": 2, "strategy": "ddp", "max_steps": STEPS, "enable_checkpointing": False}
    zero = trainer(
        path,
        RolloutCallback("zero", rollouts(2 * BATCH), storage_path=path),
        PolicyPublisher("zero", storage_path=path),
        QueueMonitor(every_n_steps=1),
        logger=CSVLogger(path, name="", version="csv"),
        **two,
    )
    zero.fit(Policy(), data_of("zero", path))

    every = RolloutCallback("all", rollouts(BATCH), storage_path=path, ranks="all")
    trainer(path, every, **two).fit(Policy(), data_of("all", path))

    data = data_of("given", path, predict_partition_id="default", fields=["uid", "_index"])
    writer = QueuePredictionWriter("predicted", storage_path=path)
    trainer(path, writer, **two).predict(Policy(), data, return_predictions=False)


if __name__ == "__main__":
    main()
