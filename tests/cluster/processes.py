"""Real processes for tests of the cluster: they die with the test, whatever becomes of it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.children import ROOT

LONGEST = 60.0

DIE_WITH_PARENT = """
import json, os, signal, sys
from tests.children import die_with_parent
die_with_parent()

def say(what):
    print(json.dumps(what), flush=True)

def hear():
    return json.loads(sys.stdin.readline() or "null")

"""


class Process:
    """A running script, which says lines of JSON by `say` and hears them by `hear`.

    A script in a file, so that its own children can import it, begins with DIE_WITH_PARENT itself.
    """

    stderr: int | None = subprocess.PIPE

    def __init__(self, script: str | Path, *arguments: object, **environment: str) -> None:
        if isinstance(script, str):
            start = ["-c", DIE_WITH_PARENT + textwrap.dedent(script)]
        else:
            start = [str(script)]
        self.popen = subprocess.Popen(
            [sys.executable, *start, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )
        self._said = b""

    def said(self, seconds: float = LONGEST) -> Any:
        """What it says next."""
        assert self.popen.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._said:
            ready, _, _ = select.select([self.popen.stdout], [], [], deadline - time.monotonic())
            assert ready, f"it said nothing for {seconds} s"
            piece = os.read(self.popen.stdout.fileno(), 1 << 16)
            assert piece, f"it ended: {self.errors()}"
            self._said += piece
        line, _, self._said = self._said.partition(b"\n")
        return json.loads(line)

    def tell(self, what: Any) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(what).encode() + b"\n")
        self.popen.stdin.flush()

    def send(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def errors(self) -> str:
        """What it has written to standard error, once it has ended."""
        assert self.popen.stderr is not None
        return self.popen.stderr.read().decode()

    def status(self, seconds: float = LONGEST) -> int:
        """Its exit status, negative for a signal."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGABRT)
            raise AssertionError(f"it did not end within {seconds} s: {self.errors()}") from None


@contextmanager
def running(*arguments: Any, **environment: str) -> Iterator[Process]:
    """A process that is killed at the end, if it still runs then."""
    process = Process(*arguments, **environment)
    try:
        yield process
    finally:
        process.kill()
        for stream in (process.popen.stdin, process.popen.stdout, process.popen.stderr):
            assert stream is not None
            stream.close()
