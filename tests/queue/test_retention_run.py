"""A run in two processes, as the benchmark makes it: a producer, and a trainer beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_run_with_retention_ends_with_less_on_disk_than_went_through_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/retention.py", "--quick", "--directory", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])["summary"]
    consumed, everything = (row["disk at the end, MB"] for row in found)
    assert everything > 20
    assert consumed < 0.8 * everything
