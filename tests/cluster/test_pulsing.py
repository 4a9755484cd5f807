"""Who starts Pulsing himself: his queues are distributed, with no other change to his code."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from persisting_torch import KVInterface, PersistingError, Queue, SequentialSampler
from persisting_torch.queue import LanceBackend, PersistingBackend
from tests.cluster.apart import Network
from tests.cluster.nodes import HELD, Cluster, Member, buckets_owned
from tests.cluster.work import await_so


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def process(nodes: Cluster) -> Iterator[Member]:
    with nodes.alone() as member:
        yield member


def start(*seeds: str) -> str:
    """pulsing.init as its users call it, listening everywhere; where it does."""
    import pulsing

    async def main() -> str:
        await pulsing.init(seeds=list(seeds)) if seeds else await pulsing.init()
        return str(pulsing.get_system().addr)

    return asyncio.run(main())


def members() -> int:
    """How many Pulsing knows, this process included."""
    import pulsing

    async def main() -> int:
        return len(await pulsing.get_system().members())

    return asyncio.run(main())


def stop() -> bool:
    """pulsing.shutdown; whether queues are distributed still."""
    import pulsing

    from persisting_torch import cluster

    asyncio.run(pulsing.shutdown())
    return cluster.is_active()


def tell(story: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    return asyncio.run(story(*arguments))


def told(text: list[str]) -> list[str]:
    """What persisting_torch logs from now on."""
    import logging

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text.append(record.getMessage())

    logging.getLogger("persisting_torch").addHandler(Listening())
    return text


def listening() -> list[tuple[str, int]]:
    """Where this process accepts connections by TCP."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as some:
                if some.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and some.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    host, at = some.getsockname()[:2]
                    found.append((host.removeprefix("::ffff:"), at))
        except OSError:
            continue
    return found


# From one process to many


async def on_one_machine(path: str) -> int:
    async with Queue("steps", path) as queue:
        await queue.put({"step": 1, "reward": 0.5})
        await queue.put({"step": 2, "reward": 0.75})
        return queue.num_buckets


async def the_same_calls(path: str) -> dict[str, Any]:
    async with Queue("steps", path) as queue:
        await queue.put({"step": 3, "reward": 1.0})
        return {
            "records": await queue.get(limit=100),
            "again": [record["step"] async for part in queue.stream() for record in part],
            "by rank": [[r["step"] for r in await queue.reader(rank, 2).get()] for rank in (0, 1)],
        }


def test_a_queue_of_one_machine_is_the_clusters_once_pulsing_runs(process: Member, tmp_path: Path):
    path = str(tmp_path)
    assert process.call(tell, on_one_machine, path) == 1
    assert process.call(start).startswith("0.0.0.0:")
    found = process.call(tell, the_same_calls, path)
    assert found["records"] == [
        {"step": 1, "reward": 0.5},
        {"step": 2, "reward": 0.75},
        {"step": 3, "reward": 1.0},
    ]
    assert found["again"] == [1, 2, 3]
    assert found["by rank"] == [[1, 3], [2]]
    assert process.call(buckets_owned) == [("steps", 0)]
    assert process.call(stop) is False
    process.end()
    assert process.status == 0


async def records(path: str) -> dict[str, Any]:
    async with Queue("new", path) as queue:
        await queue.put([{"id": f"n-{step}", "step": step} for step in range(40)])
        shares = [await queue.reader(rank, 2).get() for rank in (0, 1)]
        return {
            "buckets": queue.num_buckets,
            "all": sorted(record["step"] for record in await queue.get()),
            "shares": sorted(record["step"] for share in shares for record in share),
            "sizes": [len(share) for share in shares],
        }


def test_records_go_to_buckets_by_their_id_and_readers_share_the_buckets(
    process: Member, tmp_path: Path
):
    process.call(start)
    found = process.call(tell, records, str(tmp_path))
    assert found["buckets"] == 4
    assert found["all"] == found["shares"] == list(range(40))
    assert min(found["sizes"]) > 0


async def tensors(path: str) -> dict[str, Any]:
    """All ways to read and to mark that a trainer has, by the reader and by the queue."""
    queue = Queue("samples", path, zerocopy_mode="auto")
    ids = torch.arange(64 * 8).reshape(64, 8)
    data = TensorDict({"input_ids": ids, "labels": ids[:, 0].float()}, [64])
    await queue.put(data, partition_id="train_0")
    where: dict[str, Any] = {
        "task_name": "actor",
        "partition_id": "train_0",
        "sampler": SequentialSampler(),
    }
    reader = queue.reader()
    meta = await reader.get_meta(["input_ids", "labels"], 32, **where)
    first = await reader.get_data(meta, partition_id="train_0")
    second = await reader.get_batch(fields=["input_ids"], batch_size=32, **where)
    none = await queue.get_batch(["input_ids"], 32, **where)
    await queue.reset_consumption("actor", "train_0")
    await queue.mark_consumed("actor", meta.global_indexes[:4], "train_0")
    after = await queue.get_meta(["labels"], 64, **where)
    return {
        "first": torch.equal(first["input_ids"], ids[:32])
        and torch.equal(first["labels"], ids[:32, 0].float()),
        "second": torch.equal(second["input_ids"], ids[32:]),
        "names": [sorted(map(str, batch.keys())) for batch in (first, second)],
        "none": none.batch_size[0],
        "after": after.global_indexes == list(range(4, 64)),
    }


async def keys(path: str) -> dict[str, Any]:
    kv = KVInterface(Queue("keys", path))
    one, two = torch.ones(3), torch.arange(6.0).reshape(2, 3)
    await kv.kv_put("a", TensorDict({"h": one}, []), "prod", tag={"done": True})
    await kv.kv_batch_put(["b", "c"], TensorDict({"h": two}, [2]), "prod")
    got = await kv.kv_batch_get(["a", "c"], "prod")
    await kv.kv_clear(["a"], "prod")
    return {"got": got["h"].tolist(), "left": await kv.kv_list("prod")}


def test_tensors_and_keys_work_as_on_one_machine(nodes: Cluster, process: Member, tmp_path: Path):
    process.call(start)
    with nodes.alone() as alone:
        for story in (tensors, keys):
            far = process.call(tell, story, str(tmp_path / "far"))
            assert far == alone.call(tell, story, str(tmp_path / "near"))
            if story is tensors:
                assert far.pop("none") == 0
                assert far.pop("names") == [["input_ids", "labels"], ["input_ids"]]
                assert set(far.values()) == {True}
            else:
                assert far["got"] == [[1.0, 1.0, 1.0], [3.0, 4.0, 5.0]]
                assert sorted(key for key, _ in far["left"]) == ["b", "c"]


# Who may reach it


def hold(path: str) -> tuple[list[str], list[tuple[str, int]]]:
    """Open a queue and keep it; what was logged, and where this process listens."""
    text = told([])
    HELD["q"] = Queue("q", path)
    return text, listening()


def put(step: int) -> int:
    HELD["q"].sync.put({"step": step})
    HELD["q"].sync.flush()
    return len(HELD["q"])


def test_nothing_more_is_open_to_the_network_than_pulsing_itself(process: Member, tmp_path: Path):
    port = int(process.call(start).rpartition(":")[2])
    text, listens = process.call(hold, str(tmp_path))
    assert [at for at in listens if at[0] != "127.0.0.1"] == [("0.0.0.0", port)]
    assert len(listens) > 1
    (warning,) = text
    assert f"listens at 0.0.0.0:{port}" in warning
    assert "Queues are served at 127.0.0.1" in warning
    assert "cluster.init(addr, seeds, passphrase)" in warning


def test_processes_of_one_machine_share_queues_by_pulsing_init_alone(
    nodes: Cluster, process: Member, tmp_path: Path
):
    seed = process.call(start).replace("0.0.0.0", "127.0.0.1")
    process.call(hold, str(tmp_path))
    assert process.call(put, 1) == 1
    with nodes.alone() as other:
        other.call(start, seed)
        other.call(hold, str(tmp_path))
        assert other.call(put, 2) == 2
        assert process.call(put, 3) == 3


def test_what_other_machines_would_not_reach_is_refused_at_once(tmp_path: Path):
    with Network() as network:
        one, other = Member(), Member()
        network.others += [one, other]
        at = network.machine(one)
        network.machine(other)
        port = one.call(start).rpartition(":")[2]
        other.call(start, f"{at}:{port}")
        for member in (one, other):
            await_so(lambda member=member: member.call(members) == 2, 20, "to meet")
        began = time.monotonic()
        with pytest.raises(PersistingError, match=f"{at}:{port} are members, too"):
            other.call(hold, str(tmp_path))
        with pytest.raises(PersistingError, match="For several machines call persisting_torch"):
            one.call(hold, str(tmp_path))
        assert time.monotonic() - began < 20


# Pulsing's own queue, with our storage under it


async def by_pulsing(path: str, kind: str, restart: bool) -> list[dict[str, Any]]:
    import pulsing
    from pulsing.streaming import read_queue, register_backend, write_queue

    register_backend("lance", LanceBackend)
    register_backend("persisting", PersistingBackend)
    await pulsing.init("127.0.0.1:0")
    at = {"storage_path": path, "backend": kind, "num_buckets": 2}
    system = pulsing.get_system()
    if not restart:
        writer = await write_queue(system, "topic", batch_size=4, **at)
        await writer.put([{"id": str(number), "value": number} for number in range(20)])
        await writer.flush()
    reader = await read_queue(system, "topic", **at)
    found: list[dict[str, Any]] = await reader.get(limit=100)
    await pulsing.shutdown()
    return found


@pytest.mark.parametrize("kind", ["lance", "persisting"])
def test_our_storage_serves_pulsings_own_queue_and_outlives_its_processes(
    nodes: Cluster, process: Member, tmp_path: Path, kind: str
):
    put = process.call(tell, by_pulsing, str(tmp_path), kind, False)
    assert sorted(record["value"] for record in put) == list(range(20))
    process.kill()
    with nodes.alone() as other:
        assert other.call(tell, by_pulsing, str(tmp_path), kind, True) == put
