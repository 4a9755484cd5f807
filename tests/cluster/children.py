"""Processes that own ledgers or use one, told what to do a line at a time: ledger_process.py."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cluster.processes import Process

SCRIPT = Path(__file__).with_name("ledger_process.py")


class Child(Process):
    """One process of ledger_process.py. What it says is heard at once, whenever it is asked for."""

    stderr = None

    def __init__(self, folder: Path, role: str, *rest: str) -> None:
        super().__init__(SCRIPT, folder, role, *rest)
        self._heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.address: str = self.said()["ready"]

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._heard.put(json.loads(line))

    def said(self, seconds: float = 30.0) -> Any:
        return self._heard.get(timeout=seconds)

    def ask(self, name: str, *arguments: Any) -> Any:
        self.tell([name, *arguments])
        answer = self.said()
        assert "answer" in answer, answer
        return answer["answer"]


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
