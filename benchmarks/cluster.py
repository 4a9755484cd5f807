"""A distributed queue beside what it is made of: plain Arrow Flight, and Pulsing's own transport.

Nodes, the plain Flight server and Pulsing's actor are processes of their own on this machine. Ours
is on disk when a put returns, and a get_batch claims what it reads, durably; theirs is in memory.
Rows are read and written where they lie, as all do who see the same storage; "far" has them sent by
Arrow Flight. "gathered" are puts that wait in memory for a flush at 16 MB, which is counted with
them. "Flight into Lance" appends what it is sent to a Lance dataset, and "Lance alone" does that in
this process, as plainly as can be. "Pulsing" sends and asks for the TensorDict itself, by plain
`ask`; "hastened" sends bytes as many, from an actor whose sockets we have set to send at once,
which Pulsing's do not: the most that can be got out of it. Each figure is a median of runs taken in
turn.

    python benchmarks/cluster.py [--scale 0.3] [--only gets]
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.flight as flight
import torch
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent))
from cluster_roles import HOLDERS
from common import arguments, in_turn, median, save, seconds, tables_of

from persisting_torch import Queue, cluster

TOKENS = 512
SHAPES = {"64 KB": 16, "1 MB": 256, "16 MB": 4096}
LARGEST = max(SHAPES.values())
OPTIONS = flight.FlightCallOptions(timeout=60)
SCALE = 1.0
FOLDER = Path()
_names = (f"queue-{number}" for number in itertools.count())


def runs(most: int) -> int:
    return max(3, round(most * SCALE))


# Processes


@contextmanager
def process(role: str, *seeds: str) -> Iterator[str]:
    """A process in this role while the block runs; its address."""
    command = [sys.executable, str(Path(__file__).with_name("cluster_roles.py")), role]
    started = subprocess.Popen([*command, *seeds], stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        address = started.stdout.readline().strip()
        assert address, f"{role} did not start"
        yield address
    finally:
        started.terminate()
        started.wait(20)


@contextmanager
def nodes(count: int) -> Iterator[str]:
    """So many nodes, and this process a member that owns nothing; the first one's address."""
    with process("node") as first:
        others = [process("node", first) for _ in range(count - 1)]
        for other in others:
            other.__enter__()
        try:
            asyncio.run(cluster.init(seeds=[first], owns_buckets=False))
            yield first
            asyncio.run(cluster.shutdown())
        finally:
            for other in others:
                other.__exit__(None, None, None)


# What is compared


def batch(rows: int) -> TensorDict:
    return TensorDict({"tokens": torch.randint(0, 50_000, (rows, TOKENS))}, batch_size=[rows])


def in_messages(given: TensorDict) -> pa.Table:
    """A batch as Arrow has it, without a copy, in pieces of a megabyte, which stream fastest."""
    flat = pa.array(given["tokens"].numpy().reshape(-1))
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, TOKENS)})
    step = max(1, (1 << 20) // (TOKENS * 8))
    return pa.Table.from_batches(table.to_batches(max_chunksize=step), schema=table.schema)


class Plain:
    """A client of the plain Flight server, from TensorDicts and to them, as ours is."""

    def __init__(self, address: str) -> None:
        self.client = flight.FlightClient(f"grpc://{address}")

    def put(self, given: TensorDict) -> None:
        table = in_messages(given)
        writer, _ = self.client.do_put(
            flight.FlightDescriptor.for_command(b""), table.schema, OPTIONS
        )
        with writer:
            for part in table.to_batches():
                writer.write_batch(part)
            writer.done_writing()

    def get(self) -> TensorDict:
        table = self.client.do_get(flight.Ticket(b""), OPTIONS).read_all()
        flat = pa.concat_arrays(table["tokens"].chunks).flatten().to_numpy()
        tokens = torch.from_numpy(flat).view(-1, TOKENS)
        return TensorDict({"tokens": tokens}, batch_size=[len(tokens)])


class Pulsing:
    """A client of one of the actors that keep what they are given."""

    def __init__(self, role: str) -> None:
        from persisting_torch.cluster.runtime import current

        self.holder = HOLDERS[role]
        self.loop = current()._loop

    def ask(self, *message: Any) -> Any:
        return self.loop.call(self._ask(message))

    async def _ask(self, message: tuple[Any, ...]) -> Any:
        from pulsing import Message, get_system

        reference = await get_system().resolve_named(self.holder)
        reply = await reference.ask(message)
        if isinstance(reply, Message):
            reply = pickle.loads(reply.payload)
        return reply[1]


@contextmanager
def holders(seed: str) -> Iterator[tuple[Pulsing, Pulsing]]:
    """Pulsing's transport as it comes, and hastened."""
    with process("pulsing", seed), process("hastened", seed):
        yield Pulsing("pulsing"), Pulsing("hastened")


def queue_of(num_buckets: int = 1, batch_size: int = 100) -> Queue:
    return Queue(next(_names), FOLDER, num_buckets=num_buckets, batch_size=batch_size)


def far(queue: Queue) -> None:
    """Have rows sent, both ways, as if this process did not see the storage."""
    for store in (*queue.engine.rows.stores, *queue.engine.late.store.stores):  # type: ignore[attr-defined]
        store._near, store._asked = None, True


# The parts


def gets() -> list[dict[str, Any]]:
    """get_batch through a remote bucket; goals: 0.7 of a plain Flight get, 4 times Pulsing"""
    rows = []
    with nodes(1) as seed, process("flight") as server, holders(seed) as (pulsing, hastened):
        plain = Plain(server)
        for name, size in SHAPES.items():
            count = runs(9 if size > 1000 else 25)
            near, away = queue_of(), queue_of()
            for queue in (near, away):
                for _ in range(count + 2):
                    queue.sync.put(batch(size))
            far(away)
            plain.put(batch(size))
            pulsing.ask("put", batch(size))
            hastened.ask("put", bytes(size * TOKENS * 8))
            for work in (
                plain.get,
                lambda q=near, n=size: take(q, n),
                lambda q=away, n=size: take(q, n),
            ):
                work()
            times = in_turn(
                count,
                lambda: seconds(plain.get),
                lambda q=near, n=size: seconds(lambda: take(q, n)),
                lambda q=away, n=size: seconds(lambda: take(q, n)),
                lambda: seconds(lambda: pulsing.ask("get")),
                lambda: seconds(lambda: hastened.ask("get")),
            )
            rows.append(compared(name, times))
            near.close()
            away.close()
    return rows


def take(queue: Queue, size: int) -> None:
    got = queue.sync.get_batch(["tokens"], size)
    assert got["tokens"].shape == (size, TOKENS)


def puts() -> list[dict[str, Any]]:
    """put through a remote bucket, durable; goals: 0.7 of a plain Flight put, 4 times Pulsing"""
    rows = []
    with (
        nodes(1) as seed,
        process("flight") as server,
        process("lance", str(FOLDER)) as appends,
        holders(seed) as (pulsing, hastened),
    ):
        plain, durable = Plain(server), Plain(appends)
        for name, size in SHAPES.items():
            queue, given = queue_of(batch_size=size), batch(size)
            away, patient = queue_of(batch_size=size), queue_of(batch_size=LARGEST)
            payload = bytes(size * TOKENS * 8)
            for work in (plain.put, durable.put, append_alone):
                work(given)
            for one in (queue, away, patient):
                one.sync.put(given)
                one.sync.flush()
            far(away)
            times = in_turn(
                runs(9 if size > 1000 else 25),
                lambda b=given: seconds(lambda: plain.put(b)),
                lambda q=queue, b=given: seconds(lambda: q.sync.put(b)),
                lambda q=away, b=given: seconds(lambda: q.sync.put(b)),
                lambda b=given: seconds(lambda: pulsing.ask("put", b)),
                lambda p=payload: seconds(lambda: hastened.ask("put", p)),
                lambda b=given: seconds(lambda: durable.put(b)),
                lambda q=patient, b=given: gathered(q, b),
                lambda b=given: seconds(lambda: append_alone(b)),
            )
            row = compared(name, times[:5])
            row |= {
                "gathered ms": times[6] * 1e3,
                "plain / gathered": times[0] / times[6],
                "Pulsing / gathered": times[3] / times[6],
                "hastened / gathered": times[4] / times[6],
                "Flight into Lance ms": times[5] * 1e3,
                "into Lance / ours": times[5] / times[1],
                "Lance alone ms": times[7] * 1e3,
                "plain / Lance alone": times[0] / times[7],
            }
            rows.append(row)
            for one in (queue, away, patient):
                one.close()
    return rows


def append_alone(given: TensorDict) -> None:
    """What any put has to do that keeps its rows in Lance, with nothing around it."""
    lance.write_dataset(in_messages(given), FOLDER / "alone.lance", mode="append")


def gathered(queue: Queue, given: TensorDict) -> float:
    """Seconds of a put, of as many as make a flush."""
    count = LARGEST // len(given)

    def put_all() -> None:
        for _ in range(count):
            queue.sync.put(given)
        queue.sync.flush()

    return seconds(put_all) / count


def compared(name: str, times: list[float]) -> dict[str, Any]:
    plain, near, away, pulsing, hastened = times
    return {
        "batch": name,
        "plain Flight ms": plain * 1e3,
        "ours ms": near * 1e3,
        "plain / ours": plain / near,
        "Pulsing / ours": pulsing / near,
        "hastened / ours": hastened / near,
        "Pulsing / plain": pulsing / plain,
        "hastened / plain": hastened / plain,
        "far ms": away * 1e3,
        "plain / far": plain / away,
        "Pulsing / far": pulsing / away,
    }


def claims() -> list[dict[str, Any]]:
    """get_meta, durable, against one plain ask of Flight and of Pulsing (goal: at most 2)"""
    with nodes(1) as seed, holders(seed) as (_, hastened):
        queue = queue_of()
        queue.sync.put([{"x": n} for n in range(20_000)])
        bucket = queue.engine.committer.appenders[0].bucket  # type: ignore[attr-defined]
        hastened.ask("put", b"")
        ours, flights, pulsings = in_turn(
            runs(300),
            lambda: seconds(lambda: queue.sync.get_meta(["x"], 32)),
            lambda: seconds(lambda: bucket.ask("alive")),
            lambda: seconds(lambda: hastened.ask("get")),
        )
        queue.close()
    return [
        {
            "get_meta ms": ours * 1e3,
            "Flight ask ms": flights * 1e3,
            "Pulsing ask ms": pulsings * 1e3,
            "ours / Flight ask": ours / flights,
            "ours / Pulsing ask": ours / pulsings,
        }
    ]


def records() -> list[dict[str, Any]]:
    """put_batch of 1000 records to 4 buckets, against Pulsing's own queue (goal: 3)"""
    with nodes(3):
        queue, given = queue_of(4), [{"id": n, "text": "x" * 50} for n in range(1000)]
        queue.sync.put_batch(given)
        theirs = pulsing_queue()
        times = in_turn(
            runs(7),
            lambda: seconds(lambda: queue.sync.put_batch(given)),
            lambda: theirs(given[:100]) * 10,
        )
        queue.close()
    return [
        {
            "ours records/s": 1000 / times[0],
            "Pulsing's queue records/s": 1000 / times[1],
            "ours / theirs": times[1] / times[0],
        }
    ]


def pulsing_queue() -> Callable[[list[dict[str, Any]]], float]:
    """Seconds that a put of records takes through Pulsing's own queue, which is in memory."""
    from persisting_torch.cluster.runtime import current

    loop = current()._loop

    async def opened() -> Any:
        from pulsing import get_system
        from pulsing.streaming import write_queue

        return await write_queue(get_system(), "theirs", num_buckets=4)

    writer = loop.call(opened(), 60.0)
    deadline = time.monotonic() + 30
    while True:  # it does not wait for its buckets to be known everywhere
        try:
            loop.call(writer.put([{"id": n, "text": ""} for n in range(8)]), 60.0)
            break
        except RuntimeError as error:
            if "not_found" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    return lambda given: seconds(lambda: loop.call(writer.put(given), 60.0))


def owners() -> list[dict[str, Any]]:
    """Four writers, each putting batches of 4 MB, with 1, 2 and 3 processes that own the buckets"""
    rows: list[dict[str, Any]] = []
    for count in (1, 2, 3):
        with nodes(count):
            rates = []
            for _ in range(runs(3)):
                queue = queue_of(6)
                given = [batch(1024) for _ in range(4)]
                queue.sync.put(given[0])
                rates.append(written(queue, given, runs(4)))
                queue.close()
        rows.append({"owners": count, "MB/s": median(rates)})
    for row in rows:
        row["ratio to one"] = row["MB/s"] / rows[0]["MB/s"]
    return rows


def written(queue: Queue, given: list[TensorDict], times: int) -> float:
    def write(one: TensorDict) -> None:
        for _ in range(times):
            queue.sync.put(one)

    threads = [threading.Thread(target=write, args=(one,)) for one in given]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    megabytes = len(given) * times * 1024 * TOKENS * 8 / 1e6
    return megabytes / (time.perf_counter() - began)


def main() -> None:
    global SCALE, FOLDER
    given = arguments(__doc__ or "")
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    SCALE, FOLDER = given.scale, Path(given.directory or tempfile.mkdtemp(prefix="cluster-"))
    try:
        tables = tables_of((gets, puts, claims, records, owners), given.only)
    finally:
        shutil.rmtree(FOLDER)
    if given.scale >= 1 and not given.only:
        save("cluster", tables, ("pulsing",))


if __name__ == "__main__":
    main()
