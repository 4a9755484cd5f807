"""Who loses or repeats samples on resume: the readers' columns, the scenarios' rows.

Each cell is a training run in processes of its own that ends in the way of its row, mostly by
SIGKILL, and a second run that resumes from the newest checkpoint. The model is a counter for each
sample, so the weights that survive tell how often each sample was used: a cell says how many
samples were trained more often than intended, and how many less ("twice / never").

48 samples in batches of 4, in order. A checkpoint is written every three optimizer steps where the
row says no other. Intended is once for each sample: an epoch of most readers is all samples, from
the front. Where a row has two epochs, the readers that go over the same samples in each are meant
to use each twice, and the queue, which is a stream, has epochs of half its samples. The rows
"stream in epochs" (`limit_train_batches`, in a loop a break) train four times the next 3 batches,
which the readers whose epochs begin at the front are not made for.

Under a Trainer, checkpoints are Lightning's, which keeps the state of a loader that has
`state_dict`; in a plain loop the checkpoint holds the states of model, optimizer and loader, taken
after a step. The readers:

    persisting_torch: PersistingDataModule, in a loop PersistingDataLoader
    consume=False: ours too, PersistingDataLoader, for data that is gone over in every epoch
    litdata: StreamingDataLoader over a StreamingDataset made by `optimize`
    torchdata map: StatefulDataLoader over a Dataset; for ranks, its StatefulDistributedSampler
    torchdata iterable: StatefulDataLoader over an IterableDataset that has a state
    DataLoader: torch's own, which has no state, so that a plain loop begins its epoch again

Two ranks have the environment that torchrun gives, and gloo; the run that resumes on one has twice
the batch size, since litdata asks for the same global one. The other readers are installed beside
the project, not in it:

    python -m venv peers
    peers/bin/pip install litdata torchdata lightning torch==2.13.0
    python benchmarks/resume_matrix.py --peers-python peers/bin/python
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import save, show

SAMPLES = 48
OURS = ("persisting_torch", "consume=False")
PEERS = ("litdata", "torchdata map", "torchdata iterable", "DataLoader")
STREAMS = ("persisting_torch", "torchdata iterable")
ROOT = Path(__file__).parents[1]

Run = dict[str, Any]

SCENARIOS: dict[str, tuple[Run, Run | None]] = {
    "mid-epoch, SIGKILL": ({"kill_at": 5}, {}),
    "epoch end, SIGKILL in the next": (
        {"epochs": 2, "saves": "epoch", "kill_at": "2 after the first epoch"},
        {"epochs": 2, "saves": "epoch"},
    ),
    "stream in epochs of 3 batches": ({"epochs": 4, "limit": 3, "saves": "epoch"}, None),
    "stream in epochs of 3 batches, SIGKILL": (
        {"epochs": 4, "limit": 3, "saves": "epoch", "kill_at": 8},
        {"epochs": 4, "limit": 3, "saves": "epoch"},
    ),
    "num_workers 0 -> 2": ({"kill_at": 5}, {"workers": 2}),
    "num_workers 2 -> 0": ({"kill_at": 5, "workers": 2}, {}),
    "2 ranks -> 1": (
        {"kill_at": 5, "distributed": True, "ranks": 2},
        {"batch_size": 8, "distributed": True},
    ),
    "mid-accumulation, SIGKILL": (
        {"accumulate": 4, "saves": "batch", "kill_at": 7},
        {"accumulate": 4},
    ),
    "estimated_stepping_batches": (
        {"limit": 12, "estimates": True, "kill_at": 5},
        {"limit": 12, "estimates": True},
    ),
    "exception checkpoint": ({"saves": "exception", "fail_at": 5}, {}),
    "max_steps, then more": ({"saves": "end", "max_steps": 4}, {}),
}
IN_A_LOOP = list(SCENARIOS)[:7]


class Processes:
    """An interpreter with its packages imported, whose forks run jobs."""

    def __init__(self, python: str, packages: list[str]) -> None:
        program = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'benchmarks')]!r}"
        # Not a file, which workers would import once more.
        program += "; import resume_runs; resume_runs.main(sys.argv[1:])"
        self._pipes = subprocess.Popen(
            [python, "-W", "ignore", "-c", program, *packages],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions: dict[str, str] = self._answer()

    def run(self, jobs: list[Run]) -> list[int]:
        """The exit codes of the ranks of one run."""
        assert self._pipes.stdin is not None
        self._pipes.stdin.write(json.dumps(jobs) + "\n")
        self._pipes.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipes.stdout is not None
        return json.loads(self._pipes.stdout.readline())

    def close(self) -> None:
        self._pipes.communicate()


class Failed(Exception):
    """A run that did not end as its row says."""


class Cell:
    """One reader in one scenario."""

    def __init__(self, processes: Processes, do: str, reader: str, shared: Path) -> None:
        self.processes = processes
        self.folder = Path(tempfile.mkdtemp(dir=shared))
        self.job = {"do": do, "reader": reader, "folder": str(self.folder), "shared": str(shared)}

    def play(self, first: Run, second: Run | None) -> Run:
        """The twice and never of what the last run leaves, or the error."""
        first, second = self._fitted(first), second and self._fitted(second)
        began = time.perf_counter()
        try:
            if self.job["reader"] in OURS:
                self._run({"do": "fill"})
            result = self._run(first)
            if second is not None:
                resumed = sorted(self.folder.glob("checkpoints/*.ckpt"), key=_written)
                if not resumed:
                    raise Failed("no checkpoint was written")
                result = self._run({**second, "resume": str(resumed[-1])})
            found = _counted(result["counts"], self._intended(second or first))
        except Failed as failed:
            found = {"error": str(failed)}
        return {**found, "seconds": round(time.perf_counter() - began, 1)}

    def _fitted(self, run: Run) -> Run:
        """Epochs of half the stream for the reader that has a stream, where there are two."""
        run = dict(run)
        halves = self.job["reader"] == "persisting_torch" and run.get("epochs") == 2
        if halves:
            run["limit"] = 6
        if isinstance(run.get("kill_at"), str):
            run["kill_at"] = (6 if halves else 12) + 2
        return run

    def _intended(self, last: Run) -> int:
        return 2 if self.job["reader"] != "persisting_torch" and last.get("epochs") == 2 else 1

    def _run(self, run: Run) -> Run:
        ranks, port = run.get("ranks", 1), _free_port()
        (self.folder / "result.json").unlink(missing_ok=True)
        jobs = [{**self.job, **run, "rank": rank, "port": port} for rank in range(ranks)]
        codes = self.processes.run(jobs)
        if -signal.SIGALRM in codes:
            raise Failed("does not end")
        intended = -signal.SIGKILL if run.get("kill_at") else 0
        result: Run = {}
        if (self.folder / "result.json").exists():
            result = json.loads((self.folder / "result.json").read_text())
        if "error" in result:
            raise Failed(result["error"])
        if set(codes) != {intended}:
            raise Failed(f"ended with {codes}")
        return result


def _written(path: Path) -> float:
    return path.stat().st_mtime


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _counted(counts: list[float], intended: int) -> Run:
    times = [round(count) for count in counts]
    assert all(abs(count - time) < 1e-4 for count, time in zip(counts, times, strict=True))
    return {
        "twice": sum(time > intended for time in times),
        "never": sum(time < intended for time in times),
        "times, sample by sample": " ".join(map(str, times)),
    }


def text_of(found: Run) -> str:
    if "error" in found:
        return found["error"].split(":")[0]
    return f"{found['twice']} / {found['never']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers-python", help="an interpreter that has the other readers")
    parser.add_argument("--only", default="", help="only the rows whose name contains this")
    parser.add_argument("--reader", default="", help="only the columns whose name contains this")
    options = parser.parse_args()
    groups = {OURS: Processes(sys.executable, ["torch", "lightning", "persisting_torch"])}
    if options.peers_python:
        packages = ["torch", "lightning", "litdata", "torchdata"]
        groups[PEERS] = Processes(options.peers_python, packages)
    readers = [reader for reader in (*OURS, *PEERS) if options.reader in reader]
    rows: list[Run] = []
    cells: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="resume_matrix-") as shared:
        if PEERS in groups and "litdata" in readers:
            Cell(groups[PEERS], "fill", "litdata", Path(shared))._run({})
        for do, scenario in [("trainer", s) for s in SCENARIOS] + [("loop", s) for s in IN_A_LOOP]:
            name = f"{do}: {scenario}"
            if options.only not in name:
                continue
            row: Run = {"scenario": name}
            for reader in readers:
                processes = groups.get(OURS if reader in OURS else PEERS)
                if "stream" in scenario and reader not in STREAMS:
                    row[reader] = "n/a"
                elif processes is None:
                    row[reader] = "not installed"
                else:
                    cell = Cell(processes, do, reader, Path(shared))
                    found = cell.play(*SCENARIOS[scenario])
                    cells.append({"scenario": name, "reader": reader, **found})
                    row[reader] = text_of(found)
            rows.append(row)
            print("  ".join(row.values()), flush=True)
    for processes in groups.values():
        processes.close()
    show("Samples trained twice / never", rows)
    for cell in cells:
        if "error" in cell:
            print(f"\n  {cell['scenario']}, {cell['reader']}: {cell['error'][:300]}")
    if options.peers_python and not options.only and not options.reader:
        versions = [{"package": k, "version": v} for k, v in groups[PEERS].versions.items()]
        save("resume_matrix", {"table": rows, "cells": cells, "peers": versions})


if __name__ == "__main__":
    main()
