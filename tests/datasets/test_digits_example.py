from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_digits_example_trains_every_sample_once_through_a_kill(tmp_path):
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "digits_lightning.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    table = dict(line.strip().rsplit(maxsplit=2)[:2] for line in run.stdout.splitlines()[-6:-2])
    assert table == {
        "samples put": "20,118",
        "trained once": "20,118",
        "trained twice": "0",
        "never": "0",
    }
    assert "is killed at step" in run.stdout
    assert run.stderr == ""
