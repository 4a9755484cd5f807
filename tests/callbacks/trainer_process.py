"""A training run of its own process, which says each step, to be killed and started again."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from persisting_torch import PersistingDataModule
from tests.datasets.counting import Counting, trainer


class Narrator(Callback):
    """Prints the optimizer's step after each batch, slowly enough to be killed at a chosen one."""

    def on_train_batch_end(self, trainer, *_) -> None:  # type: ignore[no-untyped-def]
        # In one write, since ranks share the output.
        print(f"step {trainer.global_step}\n", end="", flush=True)
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=-1)
    given = parser.parse_args()

    data = PersistingDataModule(
        "q", str(given.path), batch_size=4, last="split", num_workers=given.workers, timeout=60
    )
    # Ranks average their gradients, as accumulation does.
    model = Counting(given.samples, accumulate=given.accumulate * given.devices)
    steps = ModelCheckpoint(given.path / "steps", every_n_train_steps=3, save_top_k=-1)
    end = ModelCheckpoint(given.path / "end", filename="end")
    run = trainer(
        given.path,
        Narrator(),
        steps,
        end,
        accumulate_grad_batches=given.accumulate,
        devices=given.devices,
        max_steps=given.max_steps,
    )
    run.fit(model, data, ckpt_path=given.resume)


if __name__ == "__main__":
    main()
