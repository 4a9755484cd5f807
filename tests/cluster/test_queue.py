"""A queue of three nodes gives what a queue of one machine gives.

Each story is told twice: by a light member of a cluster, and by a process that has the queue on
its own machine. What they tell has to be the same.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from persisting_torch import (
    BatchMeta,
    BucketUnavailable,
    GRPOGroupNSampler,
    KVInterface,
    MaxStaleness,
    PersistingError,
    ProducerFailed,
    Queue,
    QueueFull,
    QueueSealed,
    RankAwareSampler,
    SchemaError,
    SeqlenBalancedSampler,
    SequentialSampler,
    ShuffleSampler,
    WaitTimeout,
)
from persisting_torch.queue.report import verify
from tests.cluster.nodes import HELD, Cluster, Member, buckets_owned


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """Three nodes that no test kills."""
    with Cluster() as cluster:
        cluster.grow(3)
        yield cluster


@pytest.fixture(scope="module")
def client(shared: Cluster) -> Member:
    return shared.client()


@pytest.fixture(scope="module")
def second(shared: Cluster) -> Member:
    return shared.client()


@pytest.fixture(scope="module")
def alone(shared: Cluster) -> Iterator[Member]:
    with shared.alone() as member:
        yield member


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """A cluster for a test that ends some of it."""
    with Cluster() as cluster:
        yield cluster


def plain(value: Any) -> Any:
    """A value as what == compares and pytest shows."""
    if isinstance(value, TensorDictBase):
        fields = {str(name): plain(value.get(name)) for name in value.keys()}  # noqa: SIM118
        return {"batch size": list(value.batch_size), **fields}
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return [plain(part) for part in value.unbind()]
        return str(value.dtype), value.tolist()
    if isinstance(value, BatchMeta):
        return value.to_dict()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def in_any_order(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of a flush stand in no promised order where there are several buckets."""
    return sorted(records, key=repr)


def refused(call: Callable[[], Any]) -> str:
    """The kind of error that the call raises."""
    try:
        call()
    except (PersistingError, KeyError, ValueError, TypeError) as error:
        return type(error).__name__
    return "nothing"


def tell(story: Callable[[Queue], Any], path: str, options: dict[str, Any]) -> tuple[int, Any]:
    """Told here: into how many buckets the queue is split, and the story."""
    with Queue("q", path, **options) as queue:
        told = plain(story(queue))
        assert verify(queue.engine) == []
        return queue.num_buckets, told


def both_tell(
    client: Member, alone: Member, path: Path, story: Callable[[Queue], Any], **options: Any
) -> Any:
    """What both tell, which is the same."""
    far = client.begin(tell, story, str(path / "far"), options)
    near = alone.begin(tell, story, str(path / "near"), options)
    assert far.is_there(60)
    assert near.is_there(60)
    (one, expected), (buckets, told) = near.result(), far.result()
    assert (buckets, one) == (4, 1)
    assert told == expected
    return told


# The stories


def puts_and_gets(queue: Queue) -> Any:
    sync = queue.sync
    told = [
        sync.put({"id": 1, "x": 1, "text": "one"}),
        sync.put([{"id": id, "x": id} for id in range(2, 9)]),
        sync.put(TensorDict({"id": torch.arange(20), "t": torch.rand(20, 3) > 2}, [20])),
        sync.put(TensorDict({"id": torch.tensor(99), "x": torch.tensor(3)}, [])),
        sync.put_batch([{"id": 7, "y": 0.5, "nested": {"a": [1, "b", None]}}], "other"),
        len(queue),
        in_any_order(plain(sync.get(1000))),
    ]
    sync.flush()
    told += [
        len(queue),
        in_any_order(plain(sync.get(1000))),
        [len(sync.get(limit, offset)) for limit, offset in [(5, 0), (5, 28), (0, 0), (5, 99)]],
        sync.get_data(BatchMeta([3, 0, 28, 7], "default", ["id"])),
        sync.get_batch(["id", "t"], 9),
        sync.get_batch(["id", "x"], 4, "b"),
        sync.get_meta(["id", "never"], 4).size,
        sync.get_batch(None, 3, "c"),
    ]
    whole = sync.get(1000)
    parts = [record for offset in range(0, 30, 7) for record in sync.get(7, offset)]
    assert plain(whole) == plain(parts)
    assert plain(whole) == plain([r for batch in sync.stream(None) for r in batch])
    return told


def late_fields(queue: Queue) -> Any:
    sync = queue.sync
    meta = sync.put([{"id": id, "prompt": "p" * id} for id in range(40)])
    some = meta.select_samples(list(range(0, 40, 3)))
    told = [sync.put(TensorDict({"reward": torch.arange(14.0)}, [14]), metadata=some)]
    told.append(sync.get_batch(["prompt", "reward"], 5, "train"))
    other = [{"reward": 0.25, "note": f"n{at}"} for at in range(4)]
    told.append(sync.put(other, metadata=meta.select_samples([0, 1, 2, 39])))
    told.append(in_any_order(plain(sync.get(100))))
    told.append(sync.get_meta(["reward"], 100, "train"))
    told.append(sync.get_data(meta.select_samples([39, 0, 3]).select_fields(["id"])))
    told.append(
        [
            refused(lambda: sync.put([{"reward": 1.0}], metadata=meta)),
            refused(lambda: sync.put([{"reward": "a"}], metadata=meta.select_samples([5]))),
            refused(lambda: sync.put([{"reward": 1.0}], metadata=BatchMeta([999], "default"))),
            refused(lambda: sync.put({"id": "text"})),
            refused(lambda: sync.get_data(BatchMeta([999], "default", ["id"]))),
            refused(lambda: sync.get_data(BatchMeta([1], "default", ["nothing"]))),
        ]
    )
    return told


def all_async(queue: Queue) -> Any:
    async def story() -> Any:
        metas = [await queue.put({"id": id, "x": id}) for id in range(12)]
        metas.append(await queue.put([{"id": 12, "x": 12}]))
        metas.append(await queue.put_batch([{"id": 13, "x": 13}]))
        metas.append(await queue.put(TensorDict({"id": torch.arange(2)}, [2]), "p"))
        await queue.flush()
        meta = await queue.get_meta(["x"], 3)
        told: list[Any] = [metas, meta, await queue.get_data(meta)]
        told.append(await queue.put([{"y": x} for x in range(3)], metadata=meta))
        told.append(await queue.get_batch(["x", "y"], 8, "t"))
        told.append(in_any_order(plain(await queue.get(5, 0)))[:0])
        told.append(sum([len(batch) async for batch in queue.stream(limit=9)]))
        await queue.mark_consumed("t", [5, 6])
        told.append(await queue.get_meta(["x"], 100, "t"))
        await queue.reset_consumption("t")
        told.append(await queue.get_meta(["x"], 2, "t"))
        await queue.clear([0, 13])
        told.append(len(queue))
        await queue.seal()
        try:
            await queue.put({"id": 1})
        except QueueSealed:
            told.append("sealed")
        return told

    return asyncio.run(story())


def consumption(queue: Queue) -> Any:
    sync = queue.sync
    sync.put([{"id": id, "x": id} for id in range(50)])
    sync.put([{"id": id, "x": id} for id in range(10)], "side")
    sync.flush()
    told: list[Any] = [
        sync.get_meta(["x"], 7),
        sync.get_meta(["x"], 7),
        sync.get_meta(["x"], 3, "t"),
    ]
    sync.mark_consumed("t", [10, 12, 49])
    told.append(sync.get_meta(["x"], 100, "t"))
    told.append(sync.get_meta(["x"], 1, "t").size)
    sync.reset_consumption("t")
    told.append(sync.get_meta(["x"], 2, "t"))
    sync.reset_consumption(None)
    told.append(sync.get_meta(["x"], 2))
    sync.clear([4, 5, 48])
    told += [len(queue), sync.get_meta(["x"], 100).global_indexes]
    told += [refused(lambda: sync.clear([4, 999])), refused(lambda: sync.mark_consumed("t", [999]))]
    told += [
        sync.get_meta(["x"], 4, dp_rank=0, batch_index=3, partition_id="side") for _ in range(2)
    ]
    sync.seal("side")
    told += [refused(lambda: sync.put({"id": 1}, "side")), sync.put({"id": 1})]
    sync.seal()
    told.append(refused(lambda: sync.put({"id": 1}, "third")))
    formed = [
        queue.engine.await_assignment("run", "side", k, batch_size=2, dp_size=2, timeout=9)
        for k in range(3)
    ]
    queue.engine.commit_cursor("run", "side", 1)
    told += [formed and [one and one.slices for one in formed], queue.engine.cursor("run", "side")]
    stats = sync.stats()
    told += [
        stats[key] for key in ("total_count", "persisted_count", "fields", "partitions", "full")
    ]
    told += [stats["tasks"], stats["retention"], stats["name"]]
    json.dumps(stats)
    return told


def partitions(queue: Queue) -> Any:
    sync = queue.sync
    for partition in ("a", "b"):
        meta = sync.put([{"id": id, "x": id} for id in range(6)], partition)
    sync.flush()
    meta.update_custom_meta([{"n": at} for at in range(6)])
    sync.set_custom_meta(meta)
    sync.put([{"y": 1}, {"y": 2}], metadata=meta.select_samples([1, 4]))
    told: list[Any] = [
        sync.get_partition_list(),
        sync.get_meta(["x"], 4, "t", "b"),
        sync.peek_meta(["x"], "b"),
        sync.get_consumption_status("t", "b"),
        sync.check_consumption_status("t", "b"),
        sync.get_production_status(["x", "y"], "b"),
        sync.check_production_status(["x"], "b"),
    ]
    sync.clear_partition("a")
    return [*told, len(queue), refused(lambda: sync.get_data(BatchMeta([0], "a", ["x"])))]


def keys_and_tags(queue: Queue) -> Any:
    async def story() -> Any:
        kv = KVInterface(queue)
        keys = [f"k{number}" for number in range(30)]
        await kv.kv_batch_put(keys, TensorDict({"x": torch.arange(30)}, [30]), "p", [{"n": 1}] * 30)
        await kv.kv_put("k3", {"x": -3, "y": "three"}, "p", {"n": 3})
        await kv.kv_put("k4", None, "p", {"n": 4})
        await kv.kv_put("new", {"x": 77}, "p")
        told: list[Any] = [
            await kv.kv_batch_get(["k29", "k3", "new"], "p", ["x"]),
            await kv.kv_batch_get(["k3"], "p"),
            sorted(await kv.kv_list("p"), key=repr),
            await kv.kv_meta(["k3", "k4"], "p"),
            await kv.kv_keys([0, 3, 30], "p"),
        ]
        await kv.kv_clear(["k0", "k29"], "p")
        told.append(len(await kv.kv_list("p")))
        for ask in (kv.kv_batch_get(["k0", "k1"], "p"), kv.kv_clear("nobody", "p")):
            try:
                await ask
            except KeyError as error:
                told.append(str(error))
        return [*told, queue.sync.get_meta(["x"], 99, "t", "p")]

    return asyncio.run(story())


def samplers(queue: Queue) -> Any:
    sync = queue.sync
    for id in range(24):
        tokens = torch.arange(1 + id * 7 % 11)
        sync.put([{"id": id // 4, "tokens": tokens, "policy_version": id // 8}])
    sync.flush()

    def claims(task: str, sampler: Any, size: int, times: int, **sampling: Any) -> Any:
        return [
            sync.get_meta(["tokens", "id"], size, task, sampler=sampler, **sampling).global_indexes
            for _ in range(times)
        ]

    return [
        claims("sequential", SequentialSampler(), 7, 5),
        claims("shuffle", ShuffleSampler(3), 7, 5),
        claims("window", ShuffleSampler(3, window=8), 5, 5),
        [
            sync.get_meta(
                ["id"], 4, "ranks", sampler=RankAwareSampler(), dp_rank=rank, batch_index=batch
            ).global_indexes
            for batch in range(2)
            for rank in (1, 0)
        ],
        claims("consecutive", GRPOGroupNSampler(4), 8, 4),
        claims("groups", GRPOGroupNSampler(4, group_by="id"), 8, 4),
        claims(
            "balanced",
            SeqlenBalancedSampler(4, 2, group_by="id", length_field="tokens"),
            8,
            2,
            dp_rank=0,
            batch_index=0,
        ),
        claims("fresh", MaxStaleness(SequentialSampler(), 0), 5, 3, policy_version=2),
        claims("stale", MaxStaleness(ShuffleSampler(1), 1), 5, 4, policy_version=2),
        sync.stats()["tasks"],
    ]


def writers_and_producers(queue: Queue) -> Any:
    async def story() -> Any:
        async with queue.writer() as writer:
            first = await writer.put({"id": 0, "x": 0})
            await writer.put_batch([{"id": 1, "x": 1}])
        with queue.producer("mine"):
            meta = await queue.put([{"id": 2, "x": 2}])
            states = queue.sync.stats()["producers"]["mine"]["state"]
            held = await queue.get_meta(["x"], 2, "t")
            leased = queue.sync.stats()["tasks"]["t"]["default"]["leased"]
            await queue.put([{"y": 1}], metadata=held.select_samples([0]))
        async with queue.reader(0, 1) as reader:
            got = await reader.get(100)
            assert await reader.get(100) == []
        return [first, meta, states, held, leased, in_any_order(plain(got))]

    return asyncio.run(story())


def bounds(queue: Queue) -> Any:
    queue.sync.put([{"id": id} for id in range(10)])
    told = [refused(lambda: queue.sync.put({"id": 1}))]
    queue.sync.get_meta(["id"], 4)
    told.append(queue.sync.put([{"id": 1}, {"id": 2}]))
    return [*told, refused(lambda: [queue.sync.put({"id": 1}) for _ in range(9)])]


def nothing(queue: Queue) -> Any:
    sync = queue.sync
    return [
        len(queue),
        sync.get(),
        list(sync.stream()),
        list(sync.stream(wait=True, timeout=0.1)),
        sync.get_meta(["x"], 3),
        sync.get_batch(["x"], 3),
        sync.put([]),
        sync.get_partition_list(),
        sync.stats()["total_count"],
    ]


STORIES = [
    puts_and_gets,
    late_fields,
    all_async,
    consumption,
    partitions,
    keys_and_tags,
    samplers,
    writers_and_producers,
    nothing,
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_cluster_tells_what_one_machine_tells(client, alone, tmp_path: Path, story):
    both_tell(client, alone, tmp_path, story)


def test_small_flushes_change_nothing(client, alone, tmp_path: Path):
    both_tell(client, alone, tmp_path, late_fields, batch_size=3)


def test_a_capacity_holds_for_the_cluster(client, alone, tmp_path: Path):
    told = both_tell(client, alone, tmp_path, bounds, capacity=10, when_full="raise")
    assert told[0] == told[2] == "QueueFull"


# Several at once


def hold(path: str, name: str = "q", **options: Any) -> int:
    """Open a queue and keep it open."""
    HELD[name] = Queue(name, path, **options)
    return HELD[name].num_buckets


def let_go(name: str = "q") -> None:
    HELD.pop(name).close()


def put_slowly(path: str, pause: float) -> None:
    with Queue("q", path) as queue:
        for x in range(6):
            time.sleep(pause)
            queue.sync.put([{"id": x, "x": x, "at": time.time()}])
            queue.sync.flush()
        time.sleep(pause)
        queue.sync.put([{"id": 6, "x": 6, "at": time.time()}])


def follow_along(path: str) -> list[tuple[int, float]]:
    with Queue("q", path) as queue:
        return [
            (record["x"], time.time() - record["at"])
            for records in queue.sync.stream(limit=7, wait=True, timeout=20)
            for record in records
        ]


def follow_along_async(path: str) -> list[tuple[int, float]]:
    async def follow() -> list[tuple[int, float]]:
        async with Queue("q", path) as queue:
            return [
                (record["x"], time.time() - record["at"])
                async for records in queue.stream(limit=7, wait=True, timeout=20)
                for record in records
            ]

    return asyncio.run(follow())


@pytest.mark.parametrize("follow", [follow_along, follow_along_async])
def test_who_waits_gets_what_another_member_puts_at_once(client, second, tmp_path: Path, follow):
    pending = second.begin(follow, str(tmp_path))
    client.call(put_slowly, str(tmp_path), 0.1)
    seen = pending.result()
    assert [x for x, _ in seen] == list(range(7))
    assert min(delay for _, delay in seen) < 0.1


def work(path: str, number: int) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Put 200 samples, and meanwhile claim whatever comes; what was put, what was taken."""
    put: dict[int, int] = {}
    took: list[tuple[int, int]] = []
    with Queue("q", path, batch_size=[1, 7, 30][number % 3]) as queue:

        def claim() -> int:
            meta = queue.sync.get_meta(["x"], 11, "t")
            if meta.size:
                xs = queue.sync.get_data(meta)["x"].tolist()
                took.extend(zip(meta.global_indexes, xs, strict=True))
            return meta.size

        for x in range(number * 1000, number * 1000 + 200, 5):
            meta = queue.sync.put([{"id": x % 13, "x": x + at} for at in range(5)])
            put |= dict(zip(meta.global_indexes, range(x, x + 5), strict=True))
            if x % 3 == 0:
                queue.sync.put([{"late": x + at} for at in range(5)], metadata=meta)
            claim()
        queue.sync.flush()
        while claim():
            pass
    return put, took


def all_records(path: str) -> tuple[list[dict[str, Any]], list[str], int]:
    with Queue("q", path) as queue:
        return queue.sync.get(100_000), verify(queue.engine), len(queue)


def test_members_and_nodes_at_once_lose_double_and_mix_nothing(shared, client, second, tmp_path):
    members = [client, second, shared[0], shared[2]]
    pending = [member.begin(work, str(tmp_path), at) for at, member in enumerate(members)]
    told = [one.result() for one in pending]
    put = {index: x for own, _ in told for index, x in own.items()}
    took = [pair for _, own in told for pair in own]
    assert len(put) == 800
    assert len(took) == 800
    assert dict(took) == put
    records, faults, count = client.call(all_records, str(tmp_path))
    assert faults == []
    assert count == 800
    assert sorted(record["x"] for record in records) == sorted(put.values())
    assert all(record["late"] in (None, record["x"]) for record in records)
    owners = {
        bucket: node.name
        for node in shared.nodes
        for queue, bucket in node.call(buckets_owned)
        if queue == "q"
    }
    assert len(set(owners.values())) > 1, "one node owns all"


def two_queues(path: str) -> list[Any]:
    with Queue("one", path) as one, Queue("two", path, num_buckets=2) as two:
        for x in range(30):
            one.sync.put({"id": x, "x": x})
            two.sync.put({"id": x, "y": -x})
        moved = one.sync.get_meta(["x"], 10)
        two.sync.put(one.sync.get_data(moved).rename_key_("x", "z"))
        with Queue("one", path) as again:
            seen = len(again)
        return [len(one), len(two), seen, two.num_buckets, sorted(two.sync.stats()["fields"])]


def test_two_queues_at_once_do_not_mix(client, tmp_path: Path):
    assert client.call(two_queues, str(tmp_path)) == [30, 40, 30, 2, ["id", "y", "z"]]


def fill_up(path: str) -> list[float]:
    """Put until a put has waited for room; when each of the puts returned."""
    with Queue("q", path, capacity=20, put_timeout=20) as queue:
        times = []
        for x in range(10):
            queue.sync.put([{"id": x * 5 + at} for at in range(5)])
            times.append(time.time())
        return times


def make_room(path: str, tries: int) -> tuple[float, int]:
    began = 0.0
    taken = 0
    with Queue("q", path) as queue:
        while len(queue) < 20:
            time.sleep(0.01)
        time.sleep(0.3)
        began = time.time()
        for _ in range(tries):
            taken += queue.sync.get_meta(["id"], 5).size
            time.sleep(0.02)
    return began, taken


def test_a_put_waits_for_the_room_that_another_member_makes(client, second, tmp_path: Path):
    pending = client.begin(fill_up, str(tmp_path))
    began, taken = second.call(make_room, str(tmp_path), 20)
    times = pending.result()
    assert taken >= 30
    assert sum(at < began for at in times) == 4
    assert min(at - began for at in times if at >= began) < 1.0


def refusals(path: str) -> list[str]:
    """What is said to wrong calls."""
    said = []
    with Queue("q", path, num_buckets=3, bucket_column="prompt") as queue:
        calls: list[Callable[[], Any]] = [
            lambda: queue.sync.put([{"prompt": 1}, {"x": 1}]),
            lambda: queue.sync.put(TensorDict({"x": torch.ones(2)}, [2])),
            lambda: Queue("q", path, num_buckets=5),
            lambda: Queue("q", path, bucket_column="id"),
            queue.to_lance,
        ]
        for call in calls:
            try:
                call()
            except (SchemaError, PersistingError) as error:
                said.append(str(error))
        queue.sync.put([{"prompt": x} for x in range(9)])
        assert len(queue) == 9
    with Queue("q", path) as queue:
        assert (queue.num_buckets, queue.bucket_column) == (3, "prompt")
    return said


def test_what_a_cluster_refuses_it_explains(client, tmp_path: Path):
    said = client.call(refusals, str(tmp_path))
    for text, part in zip(
        said,
        [
            "record 1 has no 'prompt'",
            "'prompt'",
            "num_buckets=3",
            "bucket_column='prompt'",
            "bucket-",
        ],
        strict=True,
    ):
        assert "queue 'q'" in text
        assert part in text


def shares(path: str, world: int) -> tuple[list[list[int]], list[int]]:
    async def read() -> tuple[list[list[int]], list[int]]:
        async with Queue("q", path) as queue:
            readers = [queue.reader(rank, world) for rank in range(world)]
            await queue.put([{"id": x % 20, "x": x} for x in range(60)])
            found = [[r["x"] for r in await reader.get(25)] for reader in readers]
            await queue.put([{"id": x % 20, "x": x} for x in range(60, 80)])
            for own, reader in zip(found, readers, strict=True):
                async for batch in reader.stream():
                    own += [record["x"] for record in batch]
            readers[0].reset()
            return found, [r["x"] for r in await readers[0].get(100)]

    return asyncio.run(read())


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_the_readers_of_all_ranks_share_the_records(client, tmp_path: Path, world: int):
    found, again = client.call(shares, str(tmp_path), world)
    assert sorted(x for own in found for x in own) == list(range(80))
    assert again == found[0]
    assert all(found)
    if 1 < world <= 4:  # of each bucket there is one reader: values stay together
        owner = {x % 20: rank for rank, own in enumerate(found) for x in own}
        assert all(owner[x % 20] == rank for rank, own in enumerate(found) for x in own)


def upkeep(path: str) -> list[Any]:
    """Clear some, and consume the rest of a queue that keeps nothing; rows left in the files."""
    import glob

    import lance

    def rows() -> int:
        return sum(lance.dataset(one).count_rows() for one in glob.glob(f"{path}/q/*/data.lance"))

    def tend() -> None:
        for _ in range(3):
            for appender in queue.engine.committer.appenders:
                appender.bucket.ask("tend", {}, seconds=30)

    with Queue("q", path) as queue:
        queue.sync.put([{"id": x, "x": x} for x in range(100)])
        meta = queue.sync.put([{"id": x, "x": x} for x in range(100, 120)])
        meta = queue.sync.put([{"y": x} for x in range(20)], metadata=meta)
        queue.sync.clear(list(range(50)))
        tend()
        told: list[Any] = [len(queue), rows(), sorted(r["x"] for r in queue.sync.get(1000))]
        queue.sync.put([{"y": -x} for x in range(20)], metadata=meta)
        tend()
        told.append([queue.sync.get_data(meta)["y"].tolist(), verify(queue.engine)])
        return told


def test_owners_remove_what_is_cleared_and_fold_what_came_late(client, tmp_path: Path):
    count, rows, xs, (late, faults) = client.call(upkeep, str(tmp_path))
    assert (count, rows, xs) == (70, 70, list(range(50, 120)))
    assert late == [-x for x in range(20)]
    assert faults == []


def consume(path: str) -> tuple[int, int]:
    with Queue("q", path, retention="consumed") as queue:
        queue.sync.put([{"id": x} for x in range(100)])
        queue.sync.seal()
        for k in range(6):
            queue.engine.await_assignment("t", "default", k, batch_size=10, timeout=20)
        queue.engine.commit_cursor("t", "default", 6)
        deadline = time.monotonic() + 30
        while len(queue) > 40 and time.monotonic() < deadline:
            time.sleep(0.05)
        return len(queue), queue.sync.stats()["storage"]["deleted"]["samples"]


def test_owners_delete_what_is_consumed_without_being_told(client, tmp_path: Path):
    left, deleted = client.call(consume, str(tmp_path))
    assert left == 40
    assert deleted in (0, 60) or deleted > 0


# From one machine to a cluster and back


def fill_local(path: str) -> list[int]:
    with Queue("q", path) as queue:
        meta = queue.sync.put([{"id": x, "x": x} for x in range(30)])
        queue.sync.put([{"y": x} for x in range(5)], metadata=meta.select_samples(range(5)))
        KVInterface(queue).sync.kv_put("key", {"x": 99}, "kv")
        return queue.sync.get_meta(["x"], 10, "t").global_indexes


def go_on_with_it(path: str, num_buckets: int) -> list[Any]:
    with Queue("q", path) as queue:
        assert queue.num_buckets == num_buckets
        told = [
            len(queue),
            sorted(int(record["x"]) for record in queue.sync.get(1000)),
            queue.sync.get_meta(["x"], 5, "t").global_indexes,
            queue.sync.put([{"id": x, "x": x} for x in range(100, 105)]).global_indexes[0] > 30,
            queue.sync.get_data(BatchMeta([4, 0], "default", ["x", "y"]))["y"].tolist(),
            len(KVInterface(queue).sync.kv_list("kv")),
        ]
        queue.sync.flush()
        assert verify(queue.engine) == []
        return told


def refused_here(path: str) -> str:
    began = time.monotonic()
    try:
        Queue("q", path).close()
    except BucketUnavailable as error:
        assert time.monotonic() - began < 10
        return str(error)
    return "opened"


def test_a_queue_moves_to_the_cluster_and_back_and_forgets_nothing(nodes, tmp_path: Path):
    path = str(tmp_path)
    with nodes.alone() as alone:
        assert alone.call(fill_local, path) == list(range(10))
    nodes.grow(2)
    client = nodes.client()
    first = client.call(go_on_with_it, path, 1)
    assert first == [31, [*range(30), 99], list(range(10, 15)), True, [4, 0], 1]
    with nodes.alone() as alone:
        said = alone.call(refused_here, path)
        assert "belongs to a cluster" in said
        assert "node-" in said
    client.leave()
    for node in nodes.nodes:
        node.leave()
    with nodes.alone() as alone:
        assert alone.call(go_on_with_it, path, 1)[:3] == [
            36,
            sorted([*range(30), 99, *range(100, 105)]),
            list(range(15, 20)),
        ]


def test_a_queue_of_a_cluster_is_read_here_once_its_nodes_are_dead(nodes, tmp_path: Path):
    path = str(tmp_path)
    nodes.grow(3)
    client = nodes.client()
    client.call(fill_local, path)
    for member in [*nodes.nodes, client]:
        member.kill()
    with nodes.alone() as alone:
        told = alone.call(go_on_with_it, path, 4)
        assert told == [31, [*range(30), 99], list(range(10, 15)), True, [4, 0], 1]
    again = Cluster()
    with again:
        again.grow(2)
        assert again.client().call(go_on_with_it, path, 4)[0] == 36


def hold_local(path: str) -> None:
    hold(path)
    HELD["q"].sync.put([{"id": 1}])


def test_a_cluster_does_not_take_what_a_process_has_open_alone(shared, client, tmp_path: Path):
    path = str(tmp_path)
    with shared.alone() as alone:
        alone.call(hold_local, path)
        pending = client.begin(hold, path)
        assert not pending.is_there(2.0)
        alone.call(let_go)
        assert pending.result() == 1
        client.call(let_go)


def test_a_passphrase_changes_nothing(tmp_path: Path):
    with Cluster(passphrase="a secret of tests") as cluster:
        cluster.grow(2)
        assert cluster.client().call(fill_local, str(tmp_path)) == list(range(10))
        told = cluster.client().call(go_on_with_it, str(tmp_path), 4)
        assert told == [31, [*range(30), 99], list(range(10, 15)), True, [4, 0], 1]


# Producers


def produce(path: str, claims: int) -> list[int]:
    """Register, claim some, and stay registered."""
    queue = HELD["queue"] = Queue("q", path)
    HELD["block"] = queue.producer("rollouts")
    HELD["block"].__enter__()
    return queue.sync.get_meta(["x"], claims, "t").global_indexes


def wait_for_more(path: str) -> str:
    with Queue("q", path) as queue:
        try:
            for _ in queue.sync.stream(limit=None, wait=True, timeout=50):
                pass
        except ProducerFailed as error:
            return str(error)
    return "no error"


def test_who_waits_is_told_of_a_killed_producer_and_its_claims_come_back(shared, client, tmp_path):
    path = str(tmp_path)
    client.call(work_once, path)
    producer = shared.client()
    held = producer.call(produce, path, 4)
    assert held == [0, 1, 2, 3]
    pending = client.begin(wait_for_more, path)
    time.sleep(0.5)
    assert not pending.is_there()
    producer.kill()
    said = pending.result(40)
    assert "rollouts" in said
    assert client.call(claim_all, path) == list(range(10))


def work_once(path: str) -> None:
    with Queue("q", path) as queue:
        queue.sync.put([{"id": x, "x": x} for x in range(10)])


def claim_all(path: str) -> list[int]:
    with Queue("q", path) as queue:
        return queue.sync.get_meta(["x"], 100, "t").global_indexes
