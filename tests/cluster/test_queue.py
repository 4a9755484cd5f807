"""A queue of three nodes gives what a queue of one machine gives.

Each story is told twice: by a light member of a cluster, and by a process that has the queue on
its own machine. What they tell has to be the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from persisting_torch import BatchMeta, KVInterface, PersistingError, Queue, SchemaError
from persisting_torch.cluster.remote import NEAR_BYTES
from persisting_torch.queue.report import verify
from tests.cluster.nodes import HELD, Cluster, Member, buckets_owned, hold, let_go, spread
from tests.cluster.stories import STORIES, bounds, late_fields, refused, tell


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


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_cluster_tells_what_one_machine_tells(client, alone, tmp_path: Path, story):
    both_tell(client, alone, tmp_path, story)


def test_small_flushes_change_nothing(client, alone, tmp_path: Path):
    both_tell(client, alone, tmp_path, late_fields, batch_size=3)


def test_a_capacity_holds_for_the_cluster(client, alone, tmp_path: Path):
    told = both_tell(client, alone, tmp_path, bounds, capacity=10, when_full="raise")
    assert told[0] == told[2] == "QueueFull"


# Several at once


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
    assert median(delay for _, delay in seen) < 0.3


def tell_late() -> None:
    """Let this node wait before it tells others of changes."""
    from persisting_torch.cluster import service

    service.NEWS_SECONDS = 0.3


def put_and_look(path: str, width: int) -> tuple[list[int], list[int], list[int]]:
    """How often puts had to ask for news, and what is there right after each of them."""
    from persisting_torch.cluster.head import Head

    follow, asked = Head.follow, []

    def counting(head: Head, log: str, number: int, wait: float) -> Any:
        if not wait:
            asked.append(number)
        return follow(head, log, number, wait)

    Head.follow = counting  # type: ignore[method-assign]
    needed, streamed, claimed = [], [], []
    with Queue("q", path, num_buckets=2, batch_size=1) as queue:
        queue.engine.tick = lambda: 1.0  # type: ignore[method-assign]  # which asks, too
        for number in range(3):
            queue.sync.put(batch_of(number, width))
            asked.clear()
            queue.sync.put(batch_of(number + 10, width))
            needed.append(len(asked))
            streamed.append(sum(map(len, queue.sync.stream(limit=None))))
            queue.sync.put(batch_of(number + 20, width))
            claimed.append(queue.sync.get_meta(["id"], 1000, "task").size)
    return needed, streamed, claimed


def batch_of(number: int, width: int) -> TensorDict:
    ids = torch.arange(10) + number * 10
    return TensorDict({"id": ids, "x": ids[:, None].expand(10, width)}, batch_size=[10])


@pytest.mark.parametrize("width", [8, NEAR_BYTES], ids=["sent", "written"])
def test_who_has_put_sees_it_at_once_though_the_put_waits_for_no_news(tmp_path: Path, width: int):
    with Cluster() as nodes:
        nodes.grow(2)
        for node in nodes.nodes:
            node.call(tell_late)
        needed, streamed, claimed = nodes.client().call(put_and_look, str(tmp_path), width)
    assert needed == [0, 0, 0]
    assert streamed == [20, 50, 80]
    assert claimed == [30, 30, 30]


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


@pytest.mark.slow
def test_members_and_nodes_at_once_lose_double_and_mix_nothing(shared, client, second, tmp_path):
    path = spread(tmp_path, 3)
    members = [client, second, shared[0], shared[2]]
    pending = [member.begin(work, path, at) for at, member in enumerate(members)]
    told = [one.result() for one in pending]
    put = {index: x for own, _ in told for index, x in own.items()}
    took = [pair for _, own in told for pair in own]
    assert len(put) == 800
    assert len(took) == 800
    assert dict(took) == put
    records, faults, count = client.call(all_records, path)
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
        deadline = time.monotonic() + 30
        tend()
        while rows() > 70 and time.monotonic() < deadline:  # an owner may not have heard of it yet
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


def put_keys(path: str, field: str) -> None:
    with Queue("q", path) as queue:
        kv = KVInterface(queue).sync
        for number in range(20):
            kv.kv_put(f"k{number}", {field: number}, "p", {field: number})


def keys_there(path: str) -> tuple[int, list[Any], list[Any]]:
    with Queue("q", path) as queue:
        kv = KVInterface(queue).sync
        records = [(record["a"], record["b"]) for record in queue.sync.get(100)]
        return len(queue), kv.kv_list("p"), records


def test_members_that_put_the_same_new_keys_at_once_make_each_sample_once(client, second, tmp_path):
    pending = [one.begin(put_keys, str(tmp_path), f) for one, f in ((client, "a"), (second, "b"))]
    for one in pending:
        one.result()
    count, keys, records = client.call(keys_there, str(tmp_path))
    assert count == len(keys) == 20
    assert {key for key, _ in keys} == {f"k{number}" for number in range(20)}
    assert sorted(records) == [(number, number) for number in range(20)]


def put_first(path: str, value: Any, at: float) -> list[str]:
    """Put the first value of a field in ten queues, at about the same times as others do."""
    said = []
    for number in range(10):
        with Queue(f"q{number}", path) as queue:
            time.sleep(max(0.0, at + number * 0.3 - time.time()))
            said.append(refused(lambda queue=queue: queue.sync.put({"v": value})))
    return said


def test_of_two_kinds_of_value_that_come_at_once_one_is_refused(client, second, tmp_path: Path):
    at = time.time() + 0.5
    pending = [
        one.begin(put_first, str(tmp_path), v, at) for one, v in ((client, 1), (second, "a"))
    ]
    for outcomes in zip(*(one.result() for one in pending), strict=True):
        assert sorted(outcomes) == ["SchemaError", "nothing"]


def large(queue: Queue) -> Any:
    data = torch.arange(16 * 1_000_000, dtype=torch.float32).reshape(16, -1)
    meta = queue.sync.put(TensorDict({"id": torch.arange(16), "big": data}, [16]))
    late = queue.sync.put(TensorDict({"late": data * 2}, [16]), metadata=meta)
    found = queue.sync.get_data(late)
    return [torch.equal(found["big"], data), torch.equal(found["late"], data * 2)]


@pytest.mark.slow
def test_large_tensors_come_as_they_went(client, alone, tmp_path: Path):
    assert both_tell(client, alone, tmp_path, large) == [True, True]


def put_one(name: str, field: str) -> BatchMeta:
    return HELD[name].sync.put([{"id": 1, field: 1}] * 10)


def data_of(name: str, meta: BatchMeta) -> Any:
    return HELD[name].sync.get_data(meta)["id"].tolist()


def test_what_one_member_has_put_another_finds_at_once(client, second, tmp_path: Path):
    for member in (client, second):
        member.call(hold, str(tmp_path), batch_size=1)
    for turn in range(20):
        meta = client.call(put_one, "q", f"field{turn}")
        assert second.call(data_of, "q", meta) == [1] * 10
    for member in (client, second):
        member.call(let_go)


def publish_once(path: str) -> tuple[int | None, int]:
    from lightning.pytorch import LightningModule, Trainer

    from persisting_torch.callbacks import PolicyPublisher, policy

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    trainer = Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PolicyPublisher("published", storage_path=path)],
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(4, 1)))
    with Queue("published", path) as queue:
        return policy(queue).version, queue.num_buckets


def test_a_policy_published_before_there_is_a_queue_makes_one_of_the_clusters(client, tmp_path):
    assert client.call(publish_once, str(tmp_path)) == (1, 4)
