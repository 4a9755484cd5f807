"""A model that carries, beside its weights, the record of what those weights were trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from persisting_torch import Queue

NOTHING, STEP = -1, -2  # in the record: room that is left, the end of an optimizer step


def numbered(first: int, count: int) -> TensorDict:
    """Samples first, first + 1, ... whose features follow from their number alone."""
    uid = torch.arange(first, first + count)
    x = torch.sin(uid.unsqueeze(1) * torch.arange(1.0, 9.0))
    return TensorDict({"uid": uid, "x": x, "y": x.sum(1, keepdim=True)}, [count])


def fill(path: Path, count: int, *, partition: str = "default", seal: bool = True) -> None:
    with Queue("q", path) as queue:
        if count:
            queue.sync.put(numbered(0, count), partition)
        if seal:
            queue.sync.seal(partition)


class Recorder(nn.Module):
    """How often each sample was in an optimizer step, and in which order; the same on all ranks."""

    def __init__(self, samples: int, epochs: int = 1) -> None:
        super().__init__()
        self.register_buffer("trained", torch.zeros(samples, dtype=torch.int64))
        self.register_buffer("record", torch.full((3 * samples * epochs,), NOTHING))
        self.register_buffer("length", torch.zeros((), dtype=torch.int64))
        self.pending: list[int] = []

    def batch(self, uid: Tensor) -> None:
        """A batch whose gradient is there, and in no step yet."""
        self.pending += uid.tolist()

    def step(self) -> None:
        """An optimizer step has covered all batches since the last one."""
        for rank in self._of_all_ranks():
            uids = torch.tensor(rank, dtype=torch.int64)
            self.trained += torch.bincount(uids, minlength=len(self.trained))
            self._write([*rank])
        self._write([STEP])
        self.pending = []

    def _of_all_ranks(self) -> list[list[int]]:
        if not dist.is_initialized():
            return [self.pending]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.pending)
        return gathered

    def _write(self, values: list[int]) -> None:
        at = int(self.length)
        self.record[at : at + len(values)] = torch.tensor(values)
        self.length += len(values)


class Net(LightningModule):
    """A linear layer; `manual` optimization makes a step of every `accumulate` batches."""

    def __init__(
        self,
        samples: int,
        *,
        epochs: int = 1,
        manual: bool = False,
        accumulate: int = 1,
        one_cycle: bool = False,
        momentum: float = 0.9,
        pace: float = 0.0,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 1)
        self.recorder = Recorder(samples, epochs)
        self.automatic_optimization = not manual
        self.accumulate = accumulate
        self.one_cycle = one_cycle
        self.momentum = momentum
        self.pace = pace
        self.sharded = sharded
        self.began = 0
        self.fails_at: int | None = None
        self.validated: list[int] = []

    def configure_model(self) -> None:
        if self.sharded and not isinstance(self.layer, FSDPModule):
            assert self.device_mesh is not None
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: TensorDict, batch_idx: int) -> Tensor:
        self.began += 1
        if self.began == self.fails_at:
            raise RuntimeError("the training step failed")
        time.sleep(self.pace)
        loss = (self.layer(batch["x"]) - batch["y"]).square().mean()
        self.recorder.batch(batch["uid"])
        if not self.automatic_optimization:
            self.manual_backward(loss / self.accumulate)
            if (batch_idx + 1) % self.accumulate == 0 or self.trainer.is_last_batch:
                optimizer = self.optimizers()
                optimizer.step()
                optimizer.zero_grad()
                self.recorder.step()
        self.log("loss", loss.detach().float(), batch_size=len(batch["uid"]))
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.recorder.step()

    def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
        self.validated += batch["uid"].tolist()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.05, momentum=self.momentum)
        if not self.one_cycle:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


@dataclass(frozen=True)
class Lineage:
    """What the weights in a checkpoint have been trained on."""

    trained: list[int]
    """How often, by sample."""
    steps: list[list[int]]
    """Samples of each optimizer step."""
    weights: dict[str, Tensor]

    @property
    def order(self) -> list[int]:
        return [uid for step in self.steps for uid in step]

    @classmethod
    def of(cls, state: dict[str, Tensor]) -> Lineage:
        own = {
            name.removeprefix("recorder."): value.tolist()
            for name, value in state.items()
            if name.startswith("recorder.")
        }
        weights = {name: value for name, value in state.items() if name.startswith("layer.")}
        return cls(own["trained"], split(own["record"][: own["length"]]), weights)

    @classmethod
    def in_file(cls, path: Path) -> Lineage:
        return cls.of(torch.load(path, weights_only=True)["state_dict"])


def split(record: Sequence[int]) -> list[list[int]]:
    steps: list[list[int]] = [[]]
    for value in record:
        if value == STEP:
            steps.append([])
        else:
            steps[-1].append(value)
    return steps[:-1]
