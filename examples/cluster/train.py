"""A rank of the trainer, started by torchrun: Lightning DDP, whole groups, every sample once.

    torchrun --standalone --nproc-per-node 2 train.py --seeds 127.0.0.1:7701,127.0.0.1:7702

All that differs from training on one machine is that the process joins the cluster first. Started
again after a crash, it goes on from its last checkpoint.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from member import light_member, open_queue
from settings import (
    BATCH,
    GROUP,
    SAMPLES,
    STEP_SECONDS,
    STEPS_PER_CHECKPOINT,
    TASK,
    TRAIN,
    parser,
)
from tensordict import TensorDict
from torch import Tensor, nn

from persisting_torch import GRPOGroupNSampler, PersistingDataModule


class Critic(LightningModule):
    """Learns what an answer is worth, and counts how often each has shaped its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("trained", torch.zeros(SAMPLES, dtype=torch.int64))

    def training_step(self, batch: TensorDict, batch_idx: int) -> Tensor:
        groups = batch["prompt_id"].unflatten(0, (-1, GROUP))
        if not (groups == groups[:, :1]).all():
            raise ValueError(f"a group was torn apart: {groups.tolist()}")
        counts = torch.bincount(batch["name"], minlength=SAMPLES)
        dist.all_reduce(counts)  # those that the other ranks train in this step, too
        self.trained += counts
        return nn.functional.mse_loss(self.layers(batch["answer"]).squeeze(1), batch["reward"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class Report(Callback):
    """Says how far the training has come."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.is_global_zero:
            # In one piece, which torchrun's unbuffered Python would else write in two: others
            # write into the same pipe.
            print(f"trainer has done step {trainer.global_step}\n", end="", flush=True)
        time.sleep(STEP_SECONDS)


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    ranks, ranks_here = (int(os.environ[key]) for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    folder = Path(options.storage) / "checkpoints"
    last = folder / "last.ckpt"
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks_here,
        num_nodes=ranks // ranks_here,
        strategy="ddp",
        max_epochs=1,
        callbacks=[
            Report(),
            ModelCheckpoint(
                folder,
                filename="last",
                every_n_train_steps=STEPS_PER_CHECKPOINT,
                enable_version_counter=False,
            ),
            ModelCheckpoint(folder, filename="end"),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=options.storage,
    )
    with light_member(options), open_queue(options, ranks) as queue:
        data = PersistingDataModule(
            queue,
            batch_size=BATCH,
            fields=["prompt_id", "answer", "reward", "name"],
            task_name=TASK,
            partition_id=TRAIN,
            sampler=GRPOGroupNSampler(GROUP, group_by="prompt_id"),
            last="split",
            timeout=120,
        )
        trainer.fit(Critic(), data, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
