"""Real processes for tests of the cluster, told what to do a line at a time."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("ledger_process.py")


class Child:
    """One process of ledger_process.py."""

    def __init__(self, folder: Path, role: str, *rest: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), role, *rest],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.address: str = self.hear()["ready"]

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(json.loads(line))

    def tell(self, name: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()

    def hear(self, limit: float = 30.0) -> dict[str, Any]:
        return self.said.get(timeout=limit)

    def ask(self, name: str, *arguments: Any) -> Any:
        self.tell(name, *arguments)
        answer = self.hear()
        assert "answer" in answer, answer
        return answer["answer"]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Family:
    """The processes of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[Child] = []

    def start(self, role: str, *rest: str) -> Child:
        child = Child(self.folder, role, *rest)
        self.children.append(child)
        return child


def gathered(folder: Path) -> Iterator[Family]:
    """For a fixture: processes that end with the test."""
    found = Family(folder)
    try:
        yield found
    finally:
        for child in found.children:
            child.kill()
