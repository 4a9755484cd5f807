"""The trainer of the loop: a LightningModule whose loss is GRPO's, fed by the queue."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from processes import QUEUE, TRAIN, newest
from task import Task
from tensordict import TensorDict
from torch import Tensor

from persisting_torch import MaxStaleness, PersistingDataModule, Queue, SequentialSampler
from persisting_torch.callbacks import PolicyPublisher, QueueMonitor

CLIP_BELOW, CLIP_ABOVE = 0.2, 0.28
STEPS_PER_CHECKPOINT = 10
STEPS_PER_EVALUATION = 10


class GRPO(LightningModule):
    """A policy, and which rollouts have shaped its weights."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.policy = task.policy()
        self.used: list[Tensor] = []

    def training_step(self, batch: TensorDict, batch_idx: int) -> Tensor:
        made = self.task.choices(self.policy, batch)
        ratio = (made.logprobs - made.logprobs_before).exp()
        advantage = batch["advantage"][made.rollout]
        clipped = ratio.clamp(1 - CLIP_BELOW, 1 + CLIP_ABOVE)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        self.log("reward", batch["reward"].mean(), batch_size=len(batch))
        self.log("entropy", made.entropy.mean(), batch_size=len(batch))
        self.used.append(batch["_index"])
        return -(gain + self.task.entropy_bonus * made.entropy).mean()

    def on_train_batch_end(self, *_: object) -> None:
        if self.global_step % STEPS_PER_EVALUATION == 0:
            score = self.task.evaluate(self.policy)
            for logger in self.loggers:
                logger.log_metrics({"score": score}, step=self.global_step)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        rate, decay = self.task.learning_rate, self.task.weight_decay
        optimizer = torch.optim.AdamW(self.parameters(), lr=rate, weight_decay=decay)
        falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, self.task.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        checkpoint["used"] = torch.cat(self.used)

    def on_load_checkpoint(self, checkpoint: dict[str, Tensor]) -> None:
        self.used = [checkpoint["used"]]


def trainer(task: Task, folder: Path) -> None:
    """Train from the last checkpoint on, publish each step's weights, seal the partition."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    data = PersistingDataModule(
        QUEUE,
        str(folder),
        batch_size=task.batch_size,
        fields=[*task.trained, "reward", "advantage", "policy_version", "_index"],
        partition_id=TRAIN,
        sampler=MaxStaleness(SequentialSampler(), task.max_staleness),
        pad=task.pad,
        prefetch_batches=1,
        timeout=120,
    )
    checkpoints = folder / "checkpoints"
    fit = Trainer(
        accelerator="cpu",
        max_steps=task.steps,
        gradient_clip_val=1.0,
        callbacks=[
            PolicyPublisher(QUEUE, storage_path=folder, module="policy"),
            QueueMonitor(every_n_steps=1),
            ModelCheckpoint(
                checkpoints, filename="{step}", every_n_train_steps=STEPS_PER_CHECKPOINT
            ),
        ],
        logger=CSVLogger(folder, name="logs", flush_logs_every_n_steps=10),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    fit.fit(GRPO(task), data, ckpt_path=newest(checkpoints))
    with Queue(QUEUE, str(folder)) as queue:
        queue.sync.seal(TRAIN)
