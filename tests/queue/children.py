"""Real processes that start in milliseconds: forks of one that has imported the package.

Each runs a script as its `__main__`, to a real end of the interpreter. The nursery itself never
opens a queue.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOBODY = 65534
LONGEST = 60.0

NURSERY = """
import atexit, gc, json, os, select, sys, threading, traceback
import torch
import persisting_torch.queue.kv, persisting_torch.queue.queue
import persisting_torch.queue.report, persisting_torch.samplers

gc.freeze()
folders = {}
while True:
    ready, _, _ = select.select([0], [], [], 0.005)
    while folders:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        path = os.path.join(folders.pop(pid), "status")
        with open(path + ".new", "w") as file:
            file.write(str(os.waitstatus_to_exitcode(status)))
        os.rename(path + ".new", path)
    if not ready:
        continue
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    order = json.loads(line)
    pid = os.fork()
    if not pid:
        break
    folders[pid] = order["folder"]
    print(pid, flush=True)

os.chdir(order["folder"])
for number, name in ((0, os.devnull), (1, "out"), (2, "err")):
    opened = os.open(name, os.O_RDWR | os.O_CREAT, 0o666)
    os.dup2(opened, number)
    os.close(opened)
sys.argv = [order["path"], *order["arguments"]]
for name in list(globals()):
    if not name.startswith("__") and name not in ("atexit", "os", "order", "sys", "traceback"):
        del globals()[name]
script = compile(open(order["path"]).read(), order["path"], "exec")
if order["whole_end"]:
    exec(script, globals())
    sys.exit()

# All that users can see of an interpreter's end, without its second of tearing down modules.
status = 0
try:
    exec(script, {"__name__": "__main__"})
except SystemExit as exit:
    status = exit.code or 0
except BaseException:
    status = 1
    traceback.print_exc()
import threading
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""


class Child:
    """One running script; its standard output and error go to files."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.folder = folder
        self.pid = pid

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        path = self.folder / "status"
        return int(path.read_text()) if path.exists() else None

    @property
    def out(self) -> str:
        return self._text("out")

    @property
    def err(self) -> str:
        return self._text("err")

    def _text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""  # killed before it made it

    @property
    def lines(self) -> list[Any]:
        """The whole lines of JSON that it has printed so far."""
        whole = self.out.rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def await_line(self, seconds: float = LONGEST) -> None:
        """Wait until it has printed something."""
        deadline = time.monotonic() + seconds
        while "\n" not in self.out:
            assert self.status is None, self.err
            assert time.monotonic() < deadline, "the child printed nothing"
            time.sleep(0.002)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = LONGEST) -> int:
        """Its exit status; the child is killed if it takes longer."""
        deadline = time.monotonic() + seconds
        while (status := self.status) is None:
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise AssertionError(f"the child did not end within {seconds} s; {self.err}")
            time.sleep(0.002)
        return status


@functools.cache
def _nursery() -> tuple[subprocess.Popen[str], Path]:
    folder = Path(tempfile.mkdtemp(prefix="children-"))
    folder.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", NURSERY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(process.kill)
    return process, folder


_numbers = itertools.count()


def start(script: str, *arguments: object, whole_end: bool = False) -> Child:
    """Run a script in a process of its own."""
    process, base = _nursery()
    folder = base / str(next(_numbers))
    folder.mkdir()
    folder.chmod(0o777)
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    order = {
        "folder": str(folder),
        "path": str(path),
        "arguments": list(map(str, arguments)),
        "whole_end": whole_end,
    }
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    return Child(folder, int(process.stdout.readline()))


def run(script: str, *arguments: object, status: int = 0, whole_end: bool = False) -> Child:
    """Run a script to its end, which has to have this exit status."""
    child = start(script, *arguments, whole_end=whole_end)
    assert child.wait() == status, child.err
    return child
