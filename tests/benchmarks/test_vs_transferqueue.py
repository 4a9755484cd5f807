"""The comparison with TransferQueue runs without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
WITHOUT_PEER = """
import runpy, sys
sys.modules["transfer_queue"] = None
sys.argv = ["vs_transferqueue.py", "--quick"]
runpy.run_path(r"{path}", run_name="__main__")
"""


def test_ours_is_measured_alone_where_transferqueue_is_not_installed(tmp_path: Path) -> None:
    path = REPOSITORY / "benchmarks" / "vs_transferqueue.py"
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_PEER.format(path=path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "not installed here: ours alone" in run.stdout
    for call in ("put", "get_meta", "get"):
        assert f" {call} " in run.stdout
    assert "1,000" in run.stdout
    assert "theirs ms" not in run.stdout
    assert list(tmp_path.iterdir()) == []
