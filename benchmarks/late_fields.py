"""What fields cost that arrive after their samples: to put, to read before upkeep, and after it.

Each part prints a table. Times are lower quartiles, in which other work shows least, and ratios are
between times of one run: python benchmarks/late_fields.py [--scale 0.1] [--only put]
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent))
from common import arguments, in_turn, median, save, seconds, show

from persisting_torch import BatchMeta, Queue

Rows = list[dict[str, Any]]

BATCH = 256
PUT = 1000
EARLY = ["tokens", "prompt_len"]
LATE = ["advantages", "reward"]


def early(count: int) -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.randint(0, 50_000, (count, 120)),
        "prompt_len": torch.randint(0, 100, (count,)),
    }


def late(count: int) -> dict[str, torch.Tensor]:
    """A ragged field of 300 numbers on average, and a plain one."""
    rows = [torch.rand(int(n)) for n in torch.randint(200, 400, (count,))]
    return {
        "advantages": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "reward": torch.rand(count),
    }


def by_hand(queue: Queue) -> Queue:
    """Upkeep only when the benchmark calls it, so that it is known what was measured."""
    queue.engine.tending._begin = lambda what: False  # type: ignore[method-assign]
    return queue


class Bench:
    """The parts, with a folder of their own and sizes at a scale."""

    def __init__(self, directory: str, scale: float) -> None:
        self.directory = directory
        self.scale = scale
        self._names = itertools.count()

    def queue(self) -> AbstractContextManager[Queue]:
        return by_hand(Queue(f"q{next(self._names)}", self.directory))

    def size(self, full: int) -> int:
        return max(10 * PUT, int(full * self.scale) // PUT * PUT)

    # Reading

    def read(self) -> Rows:
        """256 rows with two early and two late fields, against all four written together."""
        count = self.size(40_000)
        chance = np.random.default_rng(0)
        in_order = np.arange(count).reshape(-1, PUT)
        scattered = chance.permutation(count).reshape(-1, PUT)
        few = chance.permutation(count)[: count // 20].reshape(-1, PUT // 20)
        rows: Rows = []
        with self.queue() as plain:
            for _ in range(count // PUT):
                plain.sync.put(TensorDict({**early(PUT), **late(PUT)}, [PUT]))
            plain.sync.flush()
            plain.engine.tending.tend()
            ways = {
                "late in order, both in one put": (in_order, [LATE]),
                "late in order, each in its own put": (in_order, [[name] for name in LATE]),
                "late scattered, both in one put": (scattered, [LATE]),
                "late scattered, each in its own put": (scattered, [[name] for name in LATE]),
                "all together, a twentieth replaced": (few, [LATE]),
            }
            for name, (batches, puts) in ways.items():
                with self.queue() as queue:
                    first = {**early(PUT), **late(PUT)} if batches is few else early(PUT)
                    for _ in range(count // PUT):
                        queue.sync.put(TensorDict(first, [PUT]))
                    queue.sync.flush()
                    for at in batches:
                        values = late(len(at))
                        for fields in puts:
                            part = TensorDict({f: values[f] for f in fields}, [len(at)])
                            queue.sync.put(part, metadata=BatchMeta(at.tolist(), "default"))
                    rows += self._compare(f"{name}; before upkeep", plain, queue, count)
                    took = seconds(queue.engine.tending.tend)
                    left = sum(run.count for run in queue.engine.books.late.values())
                    for row in rows[-2:]:
                        row |= {"upkeep s": took, "late rows left": left}
                    rows += self._compare(f"{name}; after it", plain, queue, count)
                    if left:
                        took = seconds(queue.engine.tending.fold_rest)
                        left = sum(run.count for run in queue.engine.books.late.values())
                        for row in rows[-2:]:
                            row |= {"upkeep s": took, "late rows left": left}
                        rows += self._compare(f"{name}; after a quiet time", plain, queue, count)
        return rows

    def _compare(self, name: str, plain: Queue, queue: Queue, count: int) -> Rows:
        rows: Rows = []
        for order in ("in order", "random"):
            times = in_turn(5, *(partial(self._read_time, q, count, order) for q in (plain, queue)))
            rows.append(
                {
                    "fields": name,
                    "read": order,
                    "together ms": times[0] * 1000,
                    "late ms": times[1] * 1000,
                    "ratio": times[1] / times[0],
                }
            )
        return rows

    def _read_time(self, queue: Queue, count: int, order: str) -> float:
        batches = 40
        if order == "in order":
            start = int(np.random.default_rng().integers(0, max(1, count // BATCH - batches)))
            at = [np.arange(n * BATCH, (n + 1) * BATCH) for n in range(start, start + batches)]
        else:
            at = [np.random.default_rng().integers(0, count, BATCH) for _ in range(batches)]
        at = [indexes for indexes in at if indexes[-1] < count]
        fields = [*EARLY, *LATE]

        times = [seconds(partial(queue.engine.read_batch, "default", i, fields)) for i in at]
        return float(np.quantile(times, 0.25))

    # Writing

    def put(self) -> Rows:
        """One late float32 field for 1,000 samples, in queues of growing size."""
        rows: Rows = []
        for full in (10_000, 100_000, 1_000_000):
            count = self.size(full)
            with self.queue() as queue:
                part = TensorDict({"x": torch.zeros(10 * PUT, 32)}, [10 * PUT])
                for _ in range(count // (10 * PUT)):
                    queue.sync.put(part)
                queue.sync.flush()
                queue.engine.tending.tend()
                for name in ("contiguous", "scattered"):
                    times, cpus = self._put_times(queue, count, name)
                    rows.append(
                        {
                            "samples in the queue": count,
                            "rows put": name,
                            "ms": float(np.quantile(times, 0.25)) * 1000,
                            "median ms": median(times) * 1000,
                            "p90 ms": float(np.quantile(times, 0.9)) * 1000,
                            "CPU ms": median(cpus) * 1000,
                            "first read of a new reader ms": self._first_read(queue) * 1000,
                        }
                    )
        return rows

    def _put_times(self, queue: Queue, count: int, name: str) -> tuple[list[float], list[float]]:
        times, cpus = [], []
        chance = np.random.default_rng(0)
        for step in range(64):
            at = np.arange(PUT) + int(chance.integers(0, count - PUT))
            if name == "scattered":
                at = chance.choice(count, PUT, replace=False)
            meta = BatchMeta(at.tolist(), "default")
            values = TensorDict({"reward": torch.rand(PUT)}, [PUT])
            cpu = time.process_time()
            times.append(seconds(partial(queue.sync.put, values, metadata=meta)))
            cpus.append(time.process_time() - cpu)
            if step % 32 == 31:
                queue.engine.tending.tend()
        return times, cpus

    def _first_read(self, queue: Queue) -> float:
        with Queue(queue.name, self.directory) as other:
            return seconds(lambda: other.engine.read_batch("default", [0], ["x"]))


def main() -> None:
    options = arguments(__doc__ or "")
    directory = options.directory or tempfile.mkdtemp(prefix="late-fields-")
    bench = Bench(directory, options.scale)
    tables: dict[str, Rows] = {}
    try:
        for name, title in {
            "put": "One late field for 1,000 samples",
            "read": f"{BATCH} rows with two early and two late fields",
        }.items():
            if not options.only or options.only in name:
                tables[name] = getattr(bench, name)()
                show(title, tables[name])
    finally:
        if not options.directory:
            shutil.rmtree(directory)
    if options.scale == 1 and not options.only:
        save("late_fields", tables)


if __name__ == "__main__":
    main()
