"""put, get_meta and get beside TransferQueue's, in one run: ours on disk, theirs in memory.

Each batch is put, claimed with get_meta and read, by either in turn, several times; the figures are
medians. Ours is on disk when put returns: "flush" survives the death of the process, "fsync" a loss
of power too. Theirs is the SimpleStorage of two storage units on Ray, which holds all in memory.
Before each batch the disk may finish what the earlier ones left to it, so that a put costs what it
costs in a loop that also trains; "file" is a plain write of the same bytes, on the same terms.
A second table has get_meta of 32 samples at a growing number of ready rows.

TransferQueue is installed beside the project, not in it; where it is missing, ours runs alone:

    python -m venv peers
    peers/bin/pip install -e . transferqueue==0.1.11
    peers/bin/python benchmarks/vs_transferqueue.py [--quick] [--only batches]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent))
from common import median, save, seconds, tables_of

from persisting_torch import Queue

Rows = list[dict[str, Any]]

BATCHES = ((32, 512, 4), (256, 512, 4), (1024, 1024, 8), (1024, 4096, 8))
READY = (10_000, 100_000, 1_000_000)
CLAIM = 32
CALLS = ("put", "get_meta", "get")
PARTITION = "train"

# How many times as long theirs is to take.
GOALS: dict[Any, float] = {("get", shape): 3 for shape in BATCHES}
GOALS |= {("put", (1024, 1024, 8)): 1, ("get_meta", 100_000): 20}


class Peer(Protocol):
    """One side: the three calls, and a clean slate between the parts."""

    def put(self, batch: TensorDict) -> None: ...

    def get_meta(self, fields: list[str], size: int, task: str) -> Any: ...

    def get(self, meta: Any) -> TensorDict: ...

    def clear(self) -> None: ...


class Ours:
    """A local queue that is on disk whenever put has returned."""

    def __init__(self, directory: str, durability: str) -> None:
        self.directory = directory
        self.durability: Any = durability
        self._names = itertools.count()
        self._open()

    def _open(self) -> None:
        name = f"{self.durability}{next(self._names)}"
        self.queue = Queue(name, self.directory, batch_size=1, durability=self.durability)

    def put(self, batch: TensorDict) -> None:
        self.queue.sync.put(batch, PARTITION)

    def get_meta(self, fields: list[str], size: int, task: str) -> Any:
        return self.queue.sync.get_meta(fields, size, task, PARTITION)

    def get(self, meta: Any) -> TensorDict:
        return self.queue.sync.get_data(meta)

    def clear(self) -> None:
        self.queue.close()
        shutil.rmtree(Path(self.directory) / self.queue.name)
        self._open()


class Theirs:
    """TransferQueue's client, with its controller and two storage units as actors of Ray."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def put(self, batch: TensorDict) -> None:
        self.client.put(data=batch, partition_id=PARTITION)

    def get_meta(self, fields: list[str], size: int, task: str) -> Any:
        return self.client.get_meta(
            data_fields=fields, batch_size=size, partition_id=PARTITION, task_name=task
        )

    def get(self, meta: Any) -> TensorDict:
        batch: TensorDict = self.client.get_data(meta)
        return batch

    def clear(self) -> None:
        self.client.clear_partition(PARTITION)


@contextmanager
def transfer_queue() -> Iterator[Theirs | None]:
    """TransferQueue on a Ray of its own, or None where it is not installed."""
    if importlib.util.find_spec("transfer_queue") is None:
        print("TransferQueue is not installed here: ours alone.")
        yield None
        return
    cores = os.cpu_count() or 1
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "TQ_NUM_THREADS": str(cores)}
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    import ray
    import transfer_queue

    # Its three actors ask Ray for a core each; what they get is what the machine has.
    ray.init(
        namespace="vs_transferqueue",
        num_cpus=max(cores, 4),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        transfer_queue.init()
        yield Theirs(transfer_queue.get_client())
        transfer_queue.close()
    finally:
        ray.shutdown()


class Bench:
    """The parts, for whoever is there."""

    def __init__(self, peers: dict[str, Peer], directory: str, quick: bool) -> None:
        self.peers = peers
        self.directory = directory
        self.quick = quick
        self._tasks = itertools.count()

    # Whole batches

    def batches(self) -> Rows:
        """put, get_meta and get of one batch of float32, ms; ratio: theirs to ours (flush)"""
        rows: Rows = []
        for shape in ((8, 16, 2),) if self.quick else BATCHES:
            times = self._rounds(shape)
            samples, width, fields = shape
            for call in CALLS:
                row: dict[str, Any] = {
                    "batch": f"{samples} x {width} x {fields}",
                    "MB": samples * width * fields * 4 / 1e6,
                    "call": call,
                }
                for peer in [*self.peers, "file"]:
                    if (peer, call) in times:
                        row[f"{peer} ms"] = 1e3 * median(times[peer, call])
                rows.append(self._compared(row, GOALS.get((call, shape))))
        return rows

    def _rounds(self, shape: tuple[int, int, int]) -> dict[tuple[str, str], list[float]]:
        """Seconds of each call, by either in turn; the first round is only for warmth."""
        samples, width, fields = shape
        rounds = 2 if self.quick else 7 if samples * width * fields > 2**24 else 12
        times: dict[tuple[str, str], list[float]] = {
            (peer, call): [] for peer in self.peers for call in CALLS
        }
        times["file", "put"] = []
        for number in range(rounds):
            batch = TensorDict(
                {f"f{n}": torch.rand(samples, width) for n in range(fields)}, [samples]
            )
            for name, peer in self.peers.items():
                os.sync()
                taken, got = self._round(peer, batch)
                _check_same(batch, got, name)
                for call, time in zip(CALLS, taken, strict=True):
                    if number:
                        times[name, call].append(time)
            os.sync()
            times["file", "put"].append(self._write(batch))
        for peer in self.peers.values():
            peer.clear()
        return times

    def _round(self, peer: Peer, batch: TensorDict) -> tuple[list[float], TensorDict]:
        answers: list[Any] = []
        fields = list(batch.keys())

        def keep(call: Callable[[], Any]) -> float:
            return seconds(lambda: answers.append(call()))

        taken = [
            keep(lambda: peer.put(batch)),
            keep(lambda: peer.get_meta(fields, len(batch), "train")),
            keep(lambda: peer.get(answers[1])),
        ]
        return taken, answers[2]

    def _write(self, batch: TensorDict) -> float:
        """Seconds to write the bytes of a batch to a file."""

        def write() -> None:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                for value in batch.values():
                    file.write(value.numpy().data)

        return seconds(write)

    # Claims of a growing queue

    def claims(self) -> Rows:
        """get_meta of 32, ms, at a growing number of ready rows; ratio: theirs to ours (flush)"""
        rows: Rows = []
        written = 0
        for ready in (100, 1_000) if self.quick else READY:
            while written < ready:
                step = min(50_000, ready - written)
                ids = torch.arange(written, written + step).unsqueeze(1)
                for peer in self.peers.values():
                    peer.put(TensorDict({"id": ids}, [step]))
                written += step
            task = f"claims{next(self._tasks)}"
            rounds = 2 if self.quick else 12
            times: dict[str, list[float]] = {name: [] for name in self.peers}
            for number in range(rounds):
                for name, peer in self.peers.items():
                    taken = seconds(lambda peer=peer, task=task: peer.get_meta(["id"], CLAIM, task))
                    if number:
                        times[name].append(taken)
            row: dict[str, Any] = {"ready rows": ready}
            for name in self.peers:
                row[f"{name} ms"] = 1e3 * median(times[name])
            rows.append(self._compared(row, GOALS.get(("get_meta", ready))))
        for peer in self.peers.values():
            peer.clear()
        return rows

    def _compared(self, row: dict[str, Any], goal: float | None) -> dict[str, Any]:
        """The row with how many times as long theirs takes, and whether that is the goal."""
        if "theirs" in self.peers:
            row["ratio"] = row["theirs ms"] / row["ours ms"]
            verdict = "" if goal is None else "yes" if row["ratio"] >= goal else "NO"
            row["goal"] = verdict and f"{goal:g}: {verdict}"
        return row


def _check_same(batch: TensorDict, got: TensorDict, peer: str) -> None:
    """Either side has to give back what was put; theirs gives jagged tensors."""
    for name, value in batch.items():
        found = got[name]
        dense = torch.stack(list(found.unbind())) if found.is_nested else found
        assert torch.equal(dense, value), f"{peer} gave back something else for {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--only", help="run only the parts whose name contains this")
    parser.add_argument("--directory", help="where the data goes (default: a temporary folder)")
    options = parser.parse_args()
    torch.manual_seed(0)
    directory = options.directory or tempfile.mkdtemp(prefix="vs_transferqueue-")
    with transfer_queue() as theirs:
        peers: dict[str, Peer] = {
            "ours": Ours(directory, "flush"),
            "ours fsync": Ours(directory, "fsync"),
        }
        if theirs is not None:
            peers["theirs"] = theirs
        bench = Bench(peers, directory, options.quick)
        parts = (bench.batches, bench.claims)
        tables = tables_of(parts, options.only)
    if not options.directory:
        shutil.rmtree(directory)
    if theirs is not None and not options.quick and not options.only:
        save("vs_transferqueue", tables, ("transferqueue", "ray", "pyzmq"))


if __name__ == "__main__":
    main()
