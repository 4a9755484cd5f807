"""The data module from a LightningCLI's YAML file, with nothing else to write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from persisting_torch import Queue

pytest.importorskip("jsonargparse")

SCRIPT = """
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from persisting_torch import PersistingDataModule

class Model(LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch["x"]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

LightningCLI(Model, PersistingDataModule)
"""

CONFIG = """
trainer:
  max_epochs: 1
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
data:
  queue: rollouts
  storage_path: {path}
  batch_size: 8
  fields: [x]
  sampler:
    class_path: persisting_torch.ShuffleSampler
    init_args:
      seed: 7
  last: split
  pad: {{x: 0.0}}
"""


def test_lightning_cli_builds_the_data_module_from_yaml_and_trains_each_sample_once(
    tmp_path: Path,
) -> None:
    (tmp_path / "main.py").write_text(SCRIPT)
    (tmp_path / "run.yaml").write_text(CONFIG.format(path=tmp_path / "data"))
    with Queue("rollouts", tmp_path / "data") as queue:
        queue.sync.put(TensorDict({"x": torch.randn(44, 4)}, [44]))
        queue.sync.seal()
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "main.py", "fit", "--config", "run.yaml"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    with Queue("rollouts", tmp_path / "data") as queue:
        books = queue.engine.books_of("train", "default")
    assert books == {"put": 44, "once": 44, "twice": 0, "never": 0, "dropped": 0}
