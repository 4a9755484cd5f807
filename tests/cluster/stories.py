"""What is done with a queue, told so that what a cluster and one machine tell can be compared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from persisting_torch import (
    BatchMeta,
    GRPOGroupNSampler,
    KVInterface,
    MaxStaleness,
    PersistingError,
    Queue,
    QueueSealed,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    ShuffleSampler,
)
from persisting_torch.queue.report import verify
from tests.producers import hold_to_be_dead


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


def work_that_was_lost(queue: Queue) -> Any:
    """A producer is held to be dead, and lives again, amid a put of what it had claimed."""
    queue.sync.put([{"id": id} for id in range(4)])
    queue.sync.flush()
    reads = queue.engine.reads
    check = reads.check_indexes

    def amid_the_put(*arguments: Any) -> None:
        hold_to_be_dead(queue, "mine")
        queue.engine.producers.beat()
        check(*arguments)

    with queue.producer("mine"):
        meta = queue.sync.get_meta(["id"], 4, "t")
        reads.check_indexes = amid_the_put  # type: ignore[method-assign]
        said = refused(lambda: queue.sync.put([{"y": 1}] * 4, metadata=meta))
        reads.check_indexes = check  # type: ignore[method-assign]
        again = queue.sync.get_meta(["id"], 4, "t")
        queue.sync.put([{"y": 2}] * 4, metadata=again)
    assert said == "StaleOwner"
    assert sorted(again.global_indexes) == sorted(meta.global_indexes)
    return in_any_order(plain(queue.sync.get()))


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
    work_that_was_lost,
    nothing,
]
