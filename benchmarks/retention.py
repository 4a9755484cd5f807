"""Does a long run stay flat? A producer and a trainer in two processes, and what they leave behind.

A million samples (64 int64 and a reward) go through a queue with `retention="consumed"`, and again
with "all". At every 5 % of them: bytes on disk and in the ledger, fragments, versions, and the
resident memory of both processes. Flat is what in the last fifth is no more than in the second.

    python benchmarks/retention.py            # a million samples
    python benchmarks/retention.py --quick    # fifty thousand
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

from common import in_turn, machine, save, show

FULL, QUICK = 1_000_000, 50_000
WIDTH = 64
PUT = 1000
BATCH = 250
CAPACITY = 20_000
STATE_EVERY = 20  # batches
STEPS = 20
SPEED, RUNS = 200_000, 3  # how fast it is, in shorter runs that take turns
MEASURED = ("disk MB", "ledger kB", "producer MB", "trainer MB", "fragments", "versions")


def produce(path: str, samples: int, retention: str) -> None:
    import torch
    from tensordict import TensorDict

    from persisting_torch import Queue

    with Queue("q", path, batch_size=PUT, capacity=CAPACITY, retention=retention) as queue:
        queue.sync.mark_consumed("train", [])
        print("ready", flush=True)
        for start in range(0, samples, PUT):
            tokens = torch.arange(start, start + PUT).unsqueeze(1).repeat(1, WIDTH)
            rows = {"tokens": tokens, "reward": tokens[:, 0].float()}
            queue.sync.put(TensorDict(rows, batch_size=[PUT]))
        queue.sync.seal()


def train(path: str, samples: int) -> None:
    import torch

    from persisting_torch import PersistingDataLoader, PersistingDataset

    dataset = PersistingDataset("q", storage_path=path, batch_size=BATCH, timeout=120)
    loader = PersistingDataLoader(dataset)
    every, seen, total = samples // STEPS, 0, 0
    checkpoint = os.path.join(path, "state.pt")
    torch.save(loader.state_dict(), checkpoint)
    for number, batch in enumerate(loader, start=1):
        total += int(batch["tokens"][:, 0].sum())
        seen += len(batch)
        if number % STATE_EVERY == 0:
            torch.save(loader.state_dict(), f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
            loader.saved(checkpoint)
        if seen % every < BATCH:
            storage = dataset.handle.queue.sync.stats()["storage"]
            print(json.dumps({"samples": seen, "time": time.time(), **storage}), flush=True)
    assert (seen, total) == (samples, samples * (samples - 1) // 2), (seen, total)


def start(role: str, path: str, samples: int, retention: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--role", role, "--directory", path]
    command += ["--samples", str(samples), "--retention", retention]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def resident(pid: int) -> float:
    """Megabytes of memory that a process has of its own, without what files it has mapped."""
    try:
        with open(f"/proc/{pid}/status") as file:
            (line,) = [line for line in file if line.startswith("RssAnon:")]
    except (FileNotFoundError, ValueError):
        return 0.0
    return int(line.split()[1]) / 1000


def measure(path: str, samples: int, retention: str) -> list[dict[str, Any]]:
    """One run: what was there at every 5 % of the samples."""
    producer = start("produce", path, samples, retention)
    assert producer.stdout is not None
    producer.stdout.readline()
    began = time.time()
    trainer = start("train", path, samples, retention)
    assert trainer.stdout is not None
    rows = []
    try:
        for line in trainer.stdout:
            told = json.loads(line)
            rows.append(
                {
                    "samples": told["samples"],
                    "seconds": told["time"] - began,
                    "disk MB": told["bytes"] / 1e6,
                    "ledger kB": told["ledger_bytes"] / 1e3,
                    "producer MB": resident(producer.pid) or rows[-1]["producer MB"],
                    "trainer MB": resident(trainer.pid) or rows[-1]["trainer MB"],
                    "fragments": told["fragments"],
                    "versions": told["versions"],
                    "deleted MB": told["deleted"]["bytes"] / 1e6,
                }
            )
        assert trainer.wait() == producer.wait() == 0
    finally:
        trainer.kill()
        producer.kill()
    return rows


def growth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How much more of each there is in the last fifth than in the second; 1 is flat."""
    fifth = len(rows) // 5

    def mean(of: list[dict[str, Any]], name: str) -> float:
        return statistics.mean(row[name] for row in of)

    second, last = rows[fifth : 2 * fifth], rows[-fifth:]
    return {name: mean(last, name) / max(1e-9, mean(second, name)) for name in MEASURED}


def speed(rows: list[dict[str, Any]]) -> float:
    """Samples per second between the first tenth and the end, beyond the start of the processes."""
    first, last = rows[1], rows[-1]
    return float((last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} samples")
    parser.add_argument("--samples", type=int, help=f"how many (default {FULL})")
    parser.add_argument("--directory", help="where the data goes (default: a temporary folder)")
    parser.add_argument("--retention", help="only with this one")
    parser.add_argument("--role", choices=["produce", "train"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    samples = given.samples or (QUICK if given.quick else FULL)
    if given.role == "produce":
        produce(given.directory, samples, given.retention)
    elif given.role == "train":
        train(given.directory, samples)
    else:
        compare(given, samples)


def compare(given: argparse.Namespace, samples: int) -> None:
    tables: dict[str, list[dict[str, Any]]] = {}
    summary = []

    def run(samples: int, retention: str) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(dir=given.directory) as path:
            return measure(path, samples, retention)

    settings = [given.retention] if given.retention else ["consumed", "all"]
    for retention in settings:
        rows = tables[f'retention="{retention}"'] = run(samples, retention)
        show(f'retention="{retention}", {samples:,} samples', rows)
        summary.append(
            {"retention": retention, **growth(rows), "disk at the end, MB": rows[-1]["disk MB"]}
        )
    if not given.quick and not given.samples:
        works = [partial(lambda of: speed(run(SPEED, of)), retention) for retention in settings]
        for row, median in zip(summary, in_turn(RUNS, *works), strict=True):
            row["samples/s"] = median
    show("growth: last fifth / second fifth", summary)
    if given.quick or given.samples:
        print(json.dumps({"summary": summary, "machine": machine()}))
    else:
        save("retention", {"summary": summary, **tables})


if __name__ == "__main__":
    main()
