"""Real processes that start in milliseconds: forks of one, the nursery, that has imported much.

A nursery imports the modules that its children need, and uses none of them. Each child runs a
function, "module:name", in a folder of its own, where its standard output and error go to files.
The nursery ends with the tests, and its children end with it, whatever becomes of either.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
POLL_SECONDS = 0.002


def die_with_parent(parent: int | None = None) -> None:
    """Let this process be killed when its parent ends; now, if `parent` was that and has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent not in (None, os.getppid()):
        os._exit(1)


class Nursery:
    """What children are forked from; started with the first of them."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._numbers = itertools.count()
        self._turn = threading.Lock()

    @functools.cached_property
    def _process(self) -> subprocess.Popen[str]:
        program = "from tests import children; children.live(*__import__('sys').argv[1:])"
        process = subprocess.Popen(
            [sys.executable, "-c", program, *self._modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        atexit.register(process.kill)
        return process

    @functools.cached_property
    def _base(self) -> Path:
        base = Path(tempfile.mkdtemp(prefix="children-"))
        base.chmod(0o755)
        atexit.register(shutil.rmtree, base, ignore_errors=True)
        return base

    def folder(self) -> Path:
        """A folder for the next child, in which it may write as whatever user."""
        folder = self._base / str(next(self._numbers))
        folder.mkdir()
        folder.chmod(0o777)
        return folder

    def fork(self, **order: Any) -> int:
        """Have one more child begin; its process."""
        with self._turn:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        assert line, "the nursery died"
        return int(line)


class Child:
    """A function that runs in a process of its own, with arguments that JSON can carry.

    With `whole_end` the interpreter is taken down as always; without, all is done that users can
    see of that, and not the second that it takes to tear down modules.
    """

    patience = 60.0

    def __init__(
        self,
        nursery: Nursery,
        function: str,
        arguments: dict[str, Any],
        *,
        folder: Path | None = None,
        whole_end: bool = False,
    ) -> None:
        self.folder = folder or nursery.folder()
        self.pid = nursery.fork(
            function=function,
            arguments=arguments,
            folder=str(self.folder),
            whole_end=whole_end,
        )

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

    def says(self, text: str) -> None:
        """Wait until it has printed this."""
        self._await(lambda: text in self.out or self.status is not None, self.patience)
        assert text in self.out, self.err

    def await_line(self) -> None:
        """Wait until it has printed something."""
        self.says("\n")

    def send(self, number: int) -> None:
        """A signal, if it still runs."""
        if self.status is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float | None = None) -> int:
        """Its exit status; the child is killed if it takes longer."""
        self._await(lambda: self.status is not None, seconds or self.patience)
        assert self.status is not None
        return self.status

    def _await(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise AssertionError(f"not within {seconds} s; it wrote: {self.out} {self.err}")
            time.sleep(POLL_SECONDS)


# What happens in the nursery, and in the processes that are forked from it


def live(*modules: str) -> None:
    """The life of a nursery; it comes to an end in each child."""
    for module in modules:
        importlib.import_module(module)
    warnings.filterwarnings("ignore", "lance is not fork-safe")  # it was not used here
    gc.freeze()
    order = _next_order()
    os.chdir(order["folder"])
    for number, name in ((0, os.devnull), (1, "out"), (2, "err")):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    module, name = order["function"].split(":")
    function = getattr(importlib.import_module(module), name)
    if order["whole_end"]:
        function(**order["arguments"])
        sys.exit()
    status = 0
    try:
        function(**order["arguments"])
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        status = 1
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _next_order() -> dict[str, Any]:
    """Fork for each order that comes, and note how children end; returns in each of them."""
    nursery, folders = os.getpid(), dict[int, str]()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    ending = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 12)
        while folders:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            path = os.path.join(folders.pop(pid), "status")
            with open(f"{path}.new", "w") as file:
                file.write(str(os.waitstatus_to_exitcode(status)))
            os.rename(f"{path}.new", path)
        if 0 not in ready:
            continue
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        order: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if not pid:
            die_with_parent(nursery)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, ending)
            os.close(woken)
            os.close(wake)
            return order
        folders[pid] = order["folder"]
        print(pid, flush=True)
