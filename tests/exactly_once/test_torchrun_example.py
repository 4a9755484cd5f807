from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_torchrun_example_trains_every_sample_once_through_two_kills(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "torchrun_ddp.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    table = dict(line.strip().rsplit(maxsplit=4)[::4] for line in run.stdout.splitlines()[-5:-1])
    assert table == {
        "samples put": "4,005",
        "trained once": "4,005",
        "trained twice": "0",
        "never": "0",
    }
    assert run.stdout.count("killed with SIGKILL at step") == 2
    assert run.stderr == ""
