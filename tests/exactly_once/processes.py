"""Training runs in real processes that start in milliseconds: forks of one that imported Lightning.

The nursery itself never opens a queue. It ends with the tests, and its forks end with it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LONGEST = 90.0

NURSERY = """
import atexit, ctypes, gc, importlib, json, os, select, signal, sys, threading, traceback
import tests.exactly_once.training

gc.freeze()
folders = {}
while True:
    ready, _, _ = select.select([0], [], [], 0.01)
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

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
for number, name in ((0, os.devnull), (1, "out"), (2, "err")):
    opened = os.open(os.path.join(order["folder"], name), os.O_RDWR | os.O_CREAT)
    os.dup2(opened, number)
    os.close(opened)
status = 0
try:
    module, name = order["function"].split(":")
    getattr(importlib.import_module(module), name)(**order["arguments"])
except SystemExit as exit:
    status = exit.code or 0
except BaseException:
    status = 1
    traceback.print_exc()
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""


class Child:
    """A function that runs in a process of its own."""

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
        return path.read_text() if path.exists() else ""

    def says(self, text: str) -> None:
        """Wait until it has printed this."""
        self._wait_for(lambda: text in self.out or self.status is not None, LONGEST)
        assert text in self.out, self.err

    def send(self, number: int) -> None:
        if self.status is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = LONGEST) -> int:
        """Its exit status; the child is killed if it takes longer."""
        self._wait_for(lambda: self.status is not None, seconds)
        assert self.status is not None
        return self.status

    def _wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise AssertionError(f"not within {seconds} s; {self.out} {self.err}")
            time.sleep(0.005)


@functools.cache
def _nursery() -> tuple[subprocess.Popen[str], Path]:
    folder = Path(tempfile.mkdtemp(prefix="exactly-once-"))
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


def start(function: str, /, **arguments: Any) -> Child:
    """Run "module:function" with arguments that JSON can carry."""
    process, base = _nursery()
    folder = Path(tempfile.mkdtemp(dir=base))
    order = {
        "folder": str(folder),
        "function": function,
        "arguments": arguments,
    }
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    return Child(folder, int(process.stdout.readline()))
