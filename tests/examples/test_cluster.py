from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_cluster_example_trains_every_sample_once_though_the_ledgers_node_is_killed(tmp_path):
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "cluster" / "demo.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    told = re.findall(r"^  (\S.*?)  +([\d,.]+)(?: +([\d,]+)| s)$", run.stdout, re.MULTILINE)
    table = {title: (first, second) for title, first, second in told}
    assert table["samples put"] == table["trained once"] == ("1,280", "1,280")
    assert table["trained twice"] == table["lost"] == ("0", "0")
    assert "which owns bucket 0, is killed at step" in run.stdout
    assert "has taken bucket 0 over" in run.stdout
    assert float(table["takeover"][0]) < 30
    assert "Traceback" not in run.stderr
