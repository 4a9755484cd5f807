from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROCESSES = {"trainer", "reward", "advantage", "rollout-0", "rollout-1"}


@pytest.mark.slow
def test_the_grpo_loop_loses_and_repeats_no_rollout_though_each_process_is_killed(tmp_path):
    pytest.importorskip("matplotlib")
    run = subprocess.run(
        [
            sys.executable,
            ROOT / "examples" / "grpo" / "arithmetic.py",
            "--steps=30",
            "--wanted=0",
            f"--folder={tmp_path / 'run'}",
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert set(re.findall(r"(\S+) is killed at step", run.stdout)) == PROCESSES
    table = {
        title: float(number.replace(",", ""))
        for title, number in re.findall(r"^  (\S.*?)  +([\d.,]+)$", run.stdout, re.MULTILINE)
    }
    assert table["rollouts put"] == (
        table["trained once"]
        + table["dropped as too old"]
        + table["left untrained when training stopped"]
    )
    assert table["trained once"] == table["trained once, by the weights"] == 30 * 32 * 16
    assert table["trained twice"] == table["trained twice, by the weights"] == 0
    assert table["lost after their flush"] == table["left without reward or advantage"] == 0
    assert (tmp_path / "run" / "run.png").stat().st_size > 10_000
    assert "Traceback" not in run.stderr
