"""What a local queue costs, beside plain Lance in the same run.

Each part prints a table; ratios are between medians of one run on one machine. Run it with nothing
else going on: python benchmarks/queue_local.py [--scale 0.1] [--only put]
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import torch
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent))
from common import arguments, in_turn, median, save, seconds, tables_of

from persisting_torch import BatchMeta, Queue

Rows = list[dict[str, Any]]


class Bench:
    """The parts, with a folder of their own and sizes at a scale."""

    def __init__(self, directory: str, scale: float) -> None:
        self.directory = directory
        self.scale = scale
        self._names = itertools.count()

    def queue(self, **options: Any) -> Queue:
        return Queue(f"q{next(self._names)}", self.directory, **options)

    def path(self) -> str:
        return f"{self.directory}/plain{next(self._names)}.lance"

    def size(self, full: int, least: int = 1) -> int:
        return max(least, int(full * self.scale))

    # Small records, one by one

    def put_records(self) -> Rows:
        """Records of three small fields, put one by one and flushed at the end."""
        rows: Rows = []
        first: dict[int, float] = {}
        for batch_size in (100, 1000, 10_000):
            for full in (10_000, 100_000, 1_000_000):
                count = self.size(full, 10_000)
                if batch_size == 100 and full > 100_000:
                    continue
                rate = median([self._put_rate(batch_size, count) for _ in range(3)])
                first.setdefault(batch_size, rate)
                rows.append(
                    {
                        "batch_size": batch_size,
                        "records": count,
                        "records/s": rate,
                        "of the first": rate / first[batch_size],
                    }
                )
        return rows

    def _put_rate(self, batch_size: int, count: int) -> float:
        with self.queue(batch_size=batch_size) as queue:
            put = queue.sync.put

            def work() -> None:
                for i in range(count):
                    put({"id": i, "reward": 0.5, "text": "hello"})
                queue.sync.flush()

            return count / seconds(work)

    # Tensors

    def put_tensors(self) -> Rows:
        """TensorDicts of one int64 field, put and flushed, beside Lance appends of the same."""
        rows: Rows = []
        for megabytes, batches in ((1, 200), (16, 30)):
            samples = megabytes * 2**20 // (512 * 8)
            count = self.size(batches, 10)
            td = TensorDict({"tokens": torch.randint(0, 50_000, (samples, 512))}, [samples])
            ours, plain = in_turn(
                3,
                lambda td=td, count=count: self._put_tds(td, count),
                lambda td=td, count=count: self._append_tables(td, count),
            )
            size = td["tokens"].nbytes * count / 2**20
            rows.append(
                {
                    "MB a put": megabytes,
                    "queue MB/s": size / ours,
                    "lance append MB/s": size / plain,
                    "ratio": plain / ours,
                }
            )
        return rows

    def _put_tds(self, td: TensorDict, count: int) -> float:
        with self.queue(batch_size=1) as queue:
            return seconds(lambda: [queue.sync.put(td) for _ in range(count)])

    def _append_tables(self, td: TensorDict, count: int) -> float:
        path = self.path()
        values = pa.array(td["tokens"].numpy().reshape(-1))
        table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(values, 512)})

        def work() -> None:
            for _ in range(count):
                lance.write_dataset(table, path, mode="append")

        return seconds(work)

    # Reading

    def read_batches(self) -> Rows:
        """get_batch of 256 x 512 int64, beside scanners of a plain dataset and of our files."""
        samples = self.size(50_000, 5_000) // 256 * 256
        tokens = torch.randint(0, 50_000, (samples, 512))
        plain = self._plain_dataset(tokens)
        with self.queue(batch_size=4096) as queue:
            for start in range(0, samples, 1024):
                part = tokens[start : start + 1024]
                queue.sync.put(TensorDict({"tokens": part}, [len(part)]))
            queue.sync.flush()
            queue.engine.tending.tend()
            own = queue.engine.rows.path
            tasks = itertools.count()

            def ours() -> float:
                task = f"t{next(tasks)}"
                return seconds(
                    lambda: [
                        queue.sync.get_batch(["tokens"], 256, task_name=task)["tokens"]
                        for _ in range(samples // 256)
                    ]
                )

            little = {"batch_readahead": 2, "fragment_readahead": 1}
            readers = {
                "queue get_batch": ours,
                "scanner of a plain dataset": lambda: _scan(plain),
                "scanner of a plain dataset, little readahead": lambda: _scan(plain, **little),
                "scanner of the queue's own files": lambda: _scan(own),
                "scanner of the queue's own files, little readahead": lambda: _scan(own, **little),
            }
            times = in_turn(5, *readers.values())
        return [
            {
                "reader, batches of 256": name,
                "samples/s": samples / taken,
                "MB/s": samples * 4.1e-3 / taken,
                "queue to this": taken / times[0],
            }
            for name, taken in zip(readers, times, strict=True)
        ]

    def _plain_dataset(self, tokens: torch.Tensor) -> str:
        """The same rows as Lance writes them by default."""
        path = self.path()
        values = pa.array(tokens.numpy().reshape(-1))
        lance.write_dataset(
            pa.table({"tokens": pa.FixedSizeListArray.from_arrays(values, 512)}), path
        )
        return path

    # Claims and size

    def big_queue(self) -> Rows:
        """get_meta of 32, flush of 100 and opening, at a growing number of ready rows."""
        rows: Rows = []
        name, written = f"big{next(self._names)}", 0
        for full in (1_000, 100_000, 10_000_000):
            count = self.size(full, 1_000)
            with Queue(name, self.directory, batch_size=100_000) as queue:
                while written < count:
                    n = min(100_000, count - written)
                    queue.sync.put(TensorDict({"id": torch.arange(written, written + n)}, [n]))
                    written += n
            opened = []
            for _ in range(5):
                start = time.perf_counter()
                queue = Queue(name, self.directory)
                queue.sync.get_meta(["id"], 1, task_name="opener")
                opened.append(time.perf_counter() - start)
                queue.close()
            with Queue(name, self.directory, batch_size=100) as queue:
                rows.append(
                    {
                        "ready rows": count,
                        "get_meta median ms": 1e3 * median(self._claims(queue, f"c{count}")),
                        "flush of 100 median ms": 1e3 * median(self._flushes(queue)),
                        "open + first claim ms": 1e3 * median(opened),
                    }
                )
                written += 30 * 100
        for row in rows:
            first = rows[0]["get_meta median ms"]
            row["get_meta to first"] = row["get_meta median ms"] / first
            row["flush to first"] = (
                row["flush of 100 median ms"] / rows[0]["flush of 100 median ms"]
            )
        return rows

    def _claims(self, queue: Queue, task: str) -> list[float]:
        def claim() -> BatchMeta:
            return queue.sync.get_meta(["id"], 32, task_name=task)

        claim()
        return [seconds(claim) for _ in range(25)]

    def _flushes(self, queue: Queue) -> list[float]:
        found = []
        for _ in range(30):
            for i in range(99):
                queue.sync.put({"id": i})
            found.append(seconds(lambda: queue.sync.put({"id": 99})))
        return found

    def memory(self) -> Rows:
        """Resident memory over many small get_batch calls."""
        batches = self.size(100_000, 5_000)
        rows: Rows = []
        with self.queue(batch_size=100_000) as queue:
            for start in range(0, batches * 32, 100_000):
                n = min(100_000, batches * 32 - start)
                queue.sync.put(TensorDict({"id": torch.arange(start, start + n)}, [n]))
            queue.sync.flush()
            for step in range(10):
                for _ in range(batches // 10):
                    queue.sync.get_batch(["id"], 32)
                rows.append({"batches": (step + 1) * (batches // 10), "resident MB": _resident()})
        rows = [rows[0], rows[len(rows) // 2], rows[-1]]
        for row in rows:
            row["growth MB since the first tenth"] = row["resident MB"] - rows[0]["resident MB"]
        return rows


def _scan(path: str, **options: Any) -> float:
    scanner = lance.dataset(path).scanner(["tokens"], batch_size=256, **options)

    def work() -> None:
        for batch in scanner.to_batches():
            torch.from_dlpack(batch["tokens"].flatten()).view(-1, 512)

    return seconds(work)


def _resident() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    torch.manual_seed(0)
    np.random.seed(0)
    directory = options.directory or tempfile.mkdtemp(prefix="queue_local-")
    os.makedirs(directory, exist_ok=True)
    bench = Bench(directory, options.scale)
    parts = (
        bench.put_records,
        bench.put_tensors,
        bench.read_batches,
        bench.big_queue,
        bench.memory,
    )
    tables = tables_of(parts, options.only)
    if not options.directory:
        shutil.rmtree(directory)
    if options.scale == 1.0 and not options.only:
        save("queue_local", tables)


if __name__ == "__main__":
    main()
