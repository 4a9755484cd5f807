"""Training runs in processes of their own, and weights that tell how often each sample was used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]

NURSERY = """
import importlib, json, os, sys, traceback

module = importlib.import_module(sys.argv[1])
while (line := sys.stdin.readline()) not in ("", "end\\n"):
    name, arguments = json.loads(line)
    pid = os.fork()
    if pid:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    os.dup2(2, 1)  # whatever it prints is no answer
    try:
        getattr(module, name)(**arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
os._exit(0)
"""


class Runs:
    """Runs functions of a module in processes of their own, which start in milliseconds.

    They are forks of a process that has imported the module and done nothing else.
    """

    def __init__(self, module: str) -> None:
        self._nursery = subprocess.Popen(
            [sys.executable, "-c", NURSERY, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def __call__(self, name: str, *, dies: str = "", **arguments: Any) -> None:
        """Run the function to its end, or until it has killed itself at the moment `dies`."""
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.write(json.dumps([name, {**arguments, "dies": dies}]) + "\n")
        self._nursery.stdin.flush()
        assert int(self._nursery.stdout.readline()) == (-signal.SIGKILL if dies else 0)

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        # Said, since a process forked meanwhile may hold the pipe open.
        self._nursery.communicate("end\n")


def die_if(now: bool) -> None:
    """End this process as the kernel ends one for want of memory: at once and with no last word."""
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


class Weights(nn.Module):
    """Weight i grows by exactly 1 in each optimizer step whose batch has sample i.

    `trail` depends on the order of the batches too. Where the loss of each of n accumulated batches
    is divided by n, `accumulate` is n.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(samples))
        self.trail = nn.Parameter(torch.zeros(()))

    def forward(self, uid: Tensor) -> dict[str, Tensor]:
        drawn_to = uid.float().mean()
        return {"loss": (self.trail - drawn_to) ** 2 - self.count[uid].sum()}

    def optimizer(self, accumulate: int = 1) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": [self.count]}, {"params": [self.trail], "lr": 0.1 * accumulate}],
            lr=float(accumulate),
        )

    @property
    def counts(self) -> list[float]:
        return self.count.tolist()
