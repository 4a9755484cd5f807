"""A queue of several buckets, opened without a cluster, is as a queue of one."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from persisting_torch import KVInterface, PersistingError, Queue, SchemaError
from persisting_torch.queue import retention
from persisting_torch.queue.place import Split, open_place
from persisting_torch.queue.report import verify
from tests.queue import children
from tests.queue.same import same


def split(path: Path, column: str | None = None, name: str = "q", count: int = 3) -> None:
    """Make a queue of several buckets, as a cluster does."""
    open_place(name, path, Split(count, column, distributed=True))


def opened(path: Path, column: str | None = None, **options: Any) -> Queue:
    split(path, column)
    return Queue("q", path, **options)


def buckets_of(queue: Queue, indexes: list[int]) -> list[int]:
    """Which bucket's file holds each of these samples."""
    queue.sync.flush()
    where = {}
    for bucket, store in enumerate(queue.engine.rows.stores):
        if store.exists():
            store.refresh()
            rows = store.table()
            numbers = np.concatenate([rows.positions[at].in_order() for at in rows.ids])
            for index in store.read(numbers, ["_index"])["_index"].to_pylist():
                assert index not in where, "a sample is stored twice"
                where[index] = bucket
    return [where[index] for index in indexes]


def rows_stored(queue: Queue) -> int:
    """Rows that are in the buckets' files, whether the ledger knows them or not."""
    count = 0
    for store in queue.engine.rows.stores:
        if store.exists():
            store.refresh()
            count += store.dataset().count_rows()
    return count


# As a queue of one bucket


def test_what_was_put_is_read_in_the_order_in_which_it_was_committed(tmp_path: Path):
    with opened(tmp_path, batch_size=1000) as queue:
        assert queue.num_buckets == 3
        for x in range(40):
            queue.sync.put({"x": x, "id": x % 7, "text": "a" * x})
            if x % 10 == 9:
                queue.sync.flush()
        queue.sync.put([{"x": 40, "id": 0}, {"x": 41, "id": 1}])
        queue.sync.put(TensorDict({"x": torch.arange(42, 50), "t": torch.ones(8, 4)}, [8]))
        queue.sync.flush()
        assert len(queue) == 50
        records = queue.sync.get(limit=100)
        assert sorted(record["x"] for record in records) == list(range(50))
        flushes = [set(range(start, start + 10)) for start in range(0, 40, 10)]
        for number, xs in enumerate(flushes):  # within a flush the order is each bucket's
            assert {record["x"] for record in records[number * 10 :][:10]} == xs
        ids = collections.defaultdict(list)
        for record in records[:40]:
            ids[record["id"]].append(record["x"])
        assert all(xs == sorted(xs) for xs in ids.values())
        assert [r["x"] for r in queue.sync.get(limit=5, offset=7)] == [
            r["x"] for r in records[7:12]
        ]
        streamed = [r["x"] for batch in queue.sync.stream(limit=None) for r in batch]
        assert streamed == [r["x"] for r in records]
        by_x = {int(record["x"]): record for record in records}
        assert by_x[45]["t"].tolist() == [1, 1, 1, 1]
        assert by_x[3] == {"x": 3, "id": 3, "text": "aaa", "t": None}
        assert verify(queue.engine) == []
    with Queue("q", tmp_path) as queue:
        assert same(queue.sync.get(limit=100), records)
        assert verify(queue.engine) == []


def test_a_reader_sees_waiting_samples_and_never_one_twice(tmp_path: Path):
    with opened(tmp_path, batch_size=1000) as queue:
        stream = queue.engine.stream()
        seen = []
        for x in range(30):
            queue.sync.put({"id": x, "x": x})
            if x % 4 == 0:
                seen += [record["x"] for record in stream.next(3)]
            if x % 9 == 8:
                queue.sync.flush()
        while records := stream.next(4):
            seen += [record["x"] for record in records]
        assert sorted(seen) == list(range(30))


def test_late_fields_come_to_the_samples_that_they_were_put_for(tmp_path: Path):
    with opened(tmp_path, batch_size=7) as queue:
        meta = queue.sync.put([{"x": x, "id": x} for x in range(60)])
        assert queue.sync.get_meta(["x", "y"], 10).size == 0
        some = meta.select_samples(list(range(59, 0, -3)))
        values = torch.tensor(some.global_indexes, dtype=torch.float32)
        both = queue.sync.put(TensorDict({"y": values}, [some.size]), metadata=some)
        assert queue.sync.get_data(both)["y"].tolist() == values.tolist()
        newer = meta.select_samples([59, 2, 5])
        queue.sync.put(
            [{"y": 0.5, "tag": "a"}, {"y": 1.5, "tag": "b"}, {"tag": "c"}], metadata=newer
        )
        expected = dict(zip(some.global_indexes, values.tolist(), strict=True))
        expected |= {59: 0.5, 2: 1.5}
        tags = {59: "a", 2: "b", 5: "c"}
        for fold in (False, True):
            if fold:
                queue.engine.tending.fold_all()
                assert not queue.engine.books.late
            for record in queue.sync.get(limit=100):
                assert record["y"] == expected.get(record["x"]), record
                assert record["tag"] == tags.get(record["x"])
            assert verify(queue.engine) == []
        ready = queue.sync.get_meta(["x", "y"], 100).global_indexes
        assert sorted(ready) == sorted(expected)
    with Queue("q", tmp_path) as queue:
        assert {r["x"]: r["y"] for r in queue.sync.get(limit=100) if r["y"] is not None} == expected


def test_a_field_that_only_some_buckets_have_is_none_elsewhere(tmp_path: Path):
    with opened(tmp_path, "id") as queue:
        queue.sync.put([{"id": 0, "only": "zero"}])
        queue.sync.flush()
        meta = queue.sync.put([{"id": id} for id in range(1, 20)])
        queue.sync.flush()
        records = queue.sync.get()
        assert [r["id"] for r in records if r["only"] is not None] == [0]
        batch = queue.engine.read_batch("default", [0, *meta.global_indexes[:3]], ["only", "id"])
        assert batch["only"] is not None
        assert batch["id"].tolist() == [0, 1, 2, 3]
        assert verify(queue.engine) == []


def test_fields_widen_and_become_ragged_across_buckets(tmp_path: Path):
    with opened(tmp_path, batch_size=1000) as queue:
        expected = []
        for x in range(30):
            number: float = x if x < 10 else x + 0.5
            tokens = torch.arange(3 if x % 2 == 0 or x < 6 else x)
            expected.append((x, number, tokens.tolist()))
            queue.sync.put({"id": x, "number": number, "tokens": tokens})
            if x % 6 == 5:
                queue.sync.flush()
        found = {r["id"]: r for r in queue.sync.get()}
        for x, number, tokens in expected:
            assert found[x]["number"] == number
            assert found[x]["tokens"].tolist() == tokens
        meta = queue.sync.get_meta(["id", "number", "tokens"], 100)
        batch = queue.sync.get_data(meta)
        rows = zip(
            batch["id"].tolist(), batch["number"].tolist(), batch["tokens"].unbind(), strict=True
        )
        assert sorted((i, n, t.tolist()) for i, n, t in rows) == expected
        assert verify(queue.engine) == []


def test_claims_assignments_and_consumption_go_by_index_whatever_the_bucket(tmp_path: Path):
    with opened(tmp_path, batch_size=5) as queue:
        queue.sync.put([{"id": x, "x": x} for x in range(100)])
        assert queue.sync.get_meta(["x"], 8).global_indexes == list(range(8))
        assert queue.sync.get_batch(["x"], 4)["x"].tolist() == [8, 9, 10, 11]
        queue.sync.mark_consumed("t", range(0, 100, 2))
        assert queue.sync.get_meta(["x"], 3, "t").global_indexes == [1, 3, 5]
        queue.sync.reset_consumption("t")
        assert queue.sync.get_meta(["x"], 3, "t").global_indexes == [0, 1, 2]
        queue.sync.seal()
        formed = [
            queue.engine.await_assignment("a", "default", k, batch_size=30, timeout=5)
            for k in range(4)
        ]
        assert formed[3] is None
        taken = [list(one.slices[0]) for one in formed[:3] if one is not None]
        assert taken == [list(range(first, first + 30)) for first in (0, 30, 60)]
    with Queue("q", tmp_path) as queue:
        again = queue.engine.await_assignment("a", "default", 1, batch_size=30, timeout=5)
        assert again is not None
        assert list(again.slices[0]) == taken[1]
        assert queue.sync.get_meta(["x"], 1).global_indexes == [12]
        with pytest.raises(PersistingError, match="sealed"):
            queue.sync.put({"id": 1, "x": 1})


def test_keys_work_in_every_bucket(tmp_path: Path):
    async def story(queue: Queue) -> None:
        kv = KVInterface(queue)
        keys = [f"k{number}" for number in range(40)]
        await kv.kv_batch_put(keys, TensorDict({"x": torch.arange(40)}, [40]), "p", [{"n": 0}] * 40)
        assert len(set(buckets_of(queue, list(range(40))))) == 3
        await kv.kv_put("k7", {"x": -7, "y": 1.5}, "p", {"n": 7})
        await kv.kv_put("k8", None, "p", {"n": 8})
        found = await kv.kv_batch_get(["k39", "k7", "k8"], "p", ["x"])
        assert found["x"].tolist() == [39, -7, 8]
        tags = dict(await kv.kv_list("p"))
        assert tags["k7"] == {"n": 7}
        assert tags["k8"] == {"n": 8}
        await kv.kv_clear(["k0", "k39"], "p")
        queue.engine.tending.tend()
        assert sorted(key for key, _ in await kv.kv_list("p")) == sorted(keys[1:39])
        with pytest.raises(KeyError, match="k39"):
            await kv.kv_batch_get(["k39"], "p")
        assert verify(queue.engine) == []

    with opened(tmp_path) as queue:
        asyncio.run(story(queue))
    with Queue("q", tmp_path) as queue:
        found = asyncio.run(KVInterface(queue).kv_batch_get(["k7"], "p"))
        assert (found["x"].tolist(), found["y"].tolist()) == ([-7], [1.5])


def test_cleared_samples_leave_the_files_and_the_ledger_forgets_where_they_were(tmp_path: Path):
    with opened(tmp_path, batch_size=10) as queue:
        for _ in range(5):
            queue.sync.put([{"id": x, "x": x} for x in range(20)])
        meta = queue.sync.get_meta(["x"], 100)
        late = meta.select_samples(list(range(0, 100, 2)))
        queue.sync.put(TensorDict({"y": torch.arange(50)}, [50]), metadata=late)
        for first in range(0, 90, 30):
            queue.sync.clear(list(range(first, first + 30)))
            assert len(queue) == 70 - first
            assert queue.engine.tending.tend()
            assert rows_stored(queue) == 70 - first
            assert verify(queue.engine) == []
        queue.engine.tending.fold_all()
        assert queue.engine.snapshot("default").tolist() == list(range(90, 100))
        found = sorted((r["x"], r["y"]) for r in queue.sync.get())
        assert found[::2] == [(x, (x + 80) // 2) for x in range(10, 20, 2)]
        assert [y for _, y in found[1::2]] == [None] * 5
        with queue.engine.ledger.reading() as tx:
            places = tx.execute("SELECT sum(count) FROM places").fetchone()[0]
        assert places < 60, "the ledger remembers rows that are long gone"
        queue.sync.clear(list(range(90, 100)))
        queue.engine.tending.tend()
        assert (len(queue), rows_stored(queue), queue.sync.get()) == (0, 0, [])
        queue.sync.put([{"id": x, "x": x} for x in range(9)])
        queue.sync.flush()
        assert len(queue.sync.get()) == 9
        assert verify(queue.engine) == []
    with Queue("q", tmp_path) as queue:
        assert sorted(r["x"] for r in queue.sync.get()) == list(range(9))
        assert verify(queue.engine) == []


def test_what_all_tasks_consumed_is_deleted_from_every_bucket(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(retention, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(retention.Keeper, "due", lambda self: False)
    with opened(tmp_path, batch_size=10, retention="consumed") as queue:
        queue.sync.put([{"id": x, "x": x} for x in range(100)])
        queue.sync.get_meta(["x"], 60)
        for _ in range(2):  # the first notes what may go
            queue.engine.tending.tend()
        assert (len(queue), rows_stored(queue)) == (40, 40)
        assert queue.sync.get_batch(["x"], 100)["x"].tolist() == list(range(60, 100))
        for _ in range(2):
            queue.engine.tending.tend()
        assert (len(queue), rows_stored(queue)) == (0, 0)
        assert verify(queue.engine) == []


def test_upkeep_joins_the_fragments_of_every_bucket(tmp_path: Path):
    with opened(tmp_path, batch_size=1000) as queue:
        for x in range(60):
            queue.sync.put([{"id": 3 * x + at, "x": 3 * x + at} for at in range(3)])
            queue.sync.flush()
        before = queue.sync.stats()["storage"]
        while queue.engine.tending.tend() and queue.sync.stats()["storage"]["fragments"] > 30:
            assert queue.sync.stats()["storage"]["fragments"] < before["fragments"]
        after = queue.sync.stats()["storage"]
        assert after["upkeep_error"] is None
        assert sorted(r["x"] for r in queue.sync.get(1000)) == list(range(180))
        assert verify(queue.engine) == []


def test_the_figures_are_of_all_buckets(tmp_path: Path):
    with opened(tmp_path) as queue:
        queue.sync.put([{"id": x, "x": torch.rand(1000)} for x in range(60)])
        queue.sync.flush()
        found = queue.sync.stats()
        assert found["persisted_count"] == found["total_count"] == 60
        assert found["storage"]["fragments"] == 3
        assert found["storage"]["bytes"] > 60 * 4000
        json.dumps(found)


def test_the_readers_of_all_ranks_share_the_records_by_bucket(tmp_path: Path):
    async def read(queue: Queue, world: int) -> list[list[int]]:
        readers = [queue.reader(rank, world) for rank in range(world)]
        return [[r["x"] for r in await reader.get(100)] for reader in readers]

    with opened(tmp_path, "id") as queue:
        queue.sync.put([{"id": x % 7, "x": x} for x in range(60)])
        for world in (1, 2, 3, 5):
            found = asyncio.run(read(queue, world))
            assert sorted(x for own in found for x in own) == list(range(60))
            if 1 < world <= 3:
                rank_of = {x % 7: rank for rank, own in enumerate(found) for x in own}
                assert all(rank_of[x % 7] == rank for rank, own in enumerate(found) for x in own)


# Routing


@pytest.mark.parametrize(
    ("name", "kinds"),
    {
        "int": "[[5, 6, 7, 123456789012, -3]] * 3",
        "numpy": "[[5, 6, 7, 9], [np.int64(id) for id in (5, 6, 7, 9)]]",
        "tensor": "[[5, 6, 7, 9], [torch.tensor(id) for id in (5, 6, 7, 9)]]",
        "small tensor": "[[torch.tensor(id, dtype=torch.uint8) for id in (5, 6, 7, 9)]] * 2",
        "str": "[['a', 'b', 'c', 'ä' * 1000, '']] * 2",
        "bool": "[[True, False]] * 2",
        "float": "[[1.5, -0.25, 1e300]] * 2",
        "widened": "[[1, 2, 3, 4, 5, -7, 0], [1.0, 2.0, 3.0, 4.0, 5.0, -7.0, -0.0]]",
        "bytes": "[[b'a', b'b', b'c']] * 2",
        "vectors": "[[torch.tensor([id, 1]) for id in (5, 6, 7, 9)]] * 2",
    }.items(),
)
def test_equal_values_go_to_one_bucket_whatever_process_puts_them(tmp_path: Path, name, kinds):
    split(tmp_path, "id")
    script = f"""
import json, sys
import numpy as np, torch
from persisting_torch import Queue
kinds = {kinds}
with Queue("q", sys.argv[1]) as queue:
    ids = kinds[int(sys.argv[2])]
    print(json.dumps([queue.sync.put({{"id": id}}).global_indexes[0] for id in ids]), flush=True)
"""
    told = [children.run(script, tmp_path, number).lines[0] for number in range(2)]
    with Queue("q", tmp_path) as queue:
        first, second = (buckets_of(queue, indexes) for indexes in told)
        assert first == second
        assert verify(queue.engine) == []


@pytest.mark.parametrize("ids", [list(range(300)), list(map(str, range(300)))], ids=["int", "str"])
def test_values_are_spread_over_the_buckets(tmp_path: Path, ids: list[Any]):
    with opened(tmp_path, "id", batch_size=10_000) as queue:
        meta = queue.sync.put([{"id": id} for id in ids])
        shares = collections.Counter(buckets_of(queue, meta.global_indexes))
        assert len(shares) == 3
        assert min(shares.values()) > 60


def test_a_tensordict_goes_to_the_buckets_of_its_values(tmp_path: Path):
    with opened(tmp_path, "id") as queue:
        ids = torch.arange(50) % 10
        many = queue.sync.put(TensorDict({"id": ids, "x": torch.rand(50, 3)}, [50]))
        ones = [queue.sync.put(TensorDict({"id": id}, [])).global_indexes[0] for id in ids[:10]]
        where = buckets_of(queue, many.global_indexes)
        assert where == where[:10] * 5
        assert buckets_of(queue, ones) == where[:10]


def test_without_the_column_keys_decide_and_else_indexes(tmp_path: Path):
    with opened(tmp_path, batch_size=10_000) as queue:
        meta = queue.sync.put([{"x": x} for x in range(640)])
        where = buckets_of(queue, meta.global_indexes)
        assert collections.Counter(where) == {0: 256, 1: 192, 2: 192}
        assert where[:64] == [where[0]] * 64
        kv = KVInterface(queue)
        for turn in range(2):
            asyncio.run(
                kv.kv_batch_put(list("abcdef"), TensorDict({"x": torch.ones(6)}, [6]), str(turn))
            )
        first = buckets_of(queue, list(range(640, 646)))
        assert buckets_of(queue, list(range(646, 652))) == first
        assert len(set(first)) > 1


@pytest.mark.parametrize(
    ("data", "record"),
    [
        ({"x": 1}, "record 0"),
        ({"id": None, "x": 1}, "record 0"),
        ([{"id": 1}, {"id": 2}, {"x": 3}], "record 2"),
    ],
    ids=["a record", "a None", "a list"],
)
def test_a_put_without_the_bucket_column_stores_nothing_and_says_what_lacks(
    tmp_path: Path, data, record
):
    with opened(tmp_path, "id") as queue:
        for put in (queue.sync.put, lambda data: asyncio.run(queue.put(data))):
            with pytest.raises(SchemaError) as caught:
                put(data)
            assert "'q'" in str(caught.value)
            assert "'id'" in str(caught.value)
            assert record in str(caught.value)
        queue.sync.flush()
        assert (len(queue), queue.sync.get()) == (0, [])
        queue.sync.put({"id": 1})
        assert len(queue) == 1
        with pytest.raises(SchemaError, match="takes a dict"):
            queue.sync.put(5)


def test_a_nested_field_of_tensordicts_may_be_the_bucket_column(tmp_path: Path):
    with opened(tmp_path, "prompt.id") as queue:
        data = TensorDict({"prompt": {"id": torch.arange(32) % 8}, "x": torch.ones(32)}, [32])
        where = buckets_of(queue, queue.sync.put(data).global_indexes)
        assert where == where[:8] * 4
        assert len(set(where)) > 1
        with pytest.raises(SchemaError, match=r"prompt\.id"):
            queue.sync.put({"prompt": {"id": 3}})  # of a record, what is in a dict is no field
        lacking = TensorDict({"prompt": {"text": torch.ones(256)}}, [256])
        assert len(set(buckets_of(queue, queue.sync.put(lacking).global_indexes))) > 1


def test_a_queue_stays_split_as_it_was_made(tmp_path: Path):
    split(tmp_path, "id")
    with Queue("q", tmp_path, num_buckets=3, bucket_column="id") as queue:
        assert (queue.num_buckets, queue.bucket_column) == (3, "id")
    with pytest.raises(PersistingError, match="num_buckets=3"):
        Queue("q", tmp_path, num_buckets=4)
    with pytest.raises(PersistingError, match="bucket_column='id'"):
        Queue("q", tmp_path, bucket_column="prompt")


def test_a_queue_of_one_bucket_has_nothing_to_say_about_buckets(tmp_path: Path):
    for options in ({}, {"num_buckets": 4}, {"num_buckets": 7, "bucket_column": "id"}):
        with Queue("one", tmp_path, **options) as queue:
            assert queue.num_buckets == 1
            queue.sync.put({"x": 1})
            queue.sync.flush()
            assert not isinstance(queue.sync.stats().get("num_buckets"), int)
    assert [name for name in os.listdir(tmp_path / "one") if "bucket" in name] == ["bucket-0"]
    assert "num_buckets" not in (tmp_path / "one" / "queue.json").read_text()


# Several processes

WRITER = """
import json, random, sys
import torch
from tensordict import TensorDict
from persisting_torch import Queue

path, number = sys.argv[1], int(sys.argv[2])
chance = random.Random(number)
queue = Queue("q", path, batch_size=chance.choice([1, 7, 50]))
put, x = [], number * 10_000
while x < number * 10_000 + 200:
    count = chance.randint(1, 20)
    xs = list(range(x, x + count))
    if chance.random() < 0.3:
        data = TensorDict({"id": torch.tensor(xs) % 10, "x": torch.tensor(xs)}, [count])
    else:
        data = [{"id": x % 10, "x": x, "note": f"{x}" * (x % 5)} for x in xs]
    meta = queue.sync.put(data)
    put += zip(meta.global_indexes, xs)
    if chance.random() < 0.3:
        queue.sync.put(TensorDict({"late": torch.tensor(xs) * 2}, [count]), metadata=meta)
    if chance.random() < 0.1:
        queue.engine.tending.tend()
    x += count
queue.close()
print(json.dumps(put), flush=True)
"""

CLAIMER = """
import json, os, sys, time
from persisting_torch import Queue
path = sys.argv[1]
queue = Queue("q", path)
took = []
while True:
    ended = os.path.exists(path + "/ended")
    meta = queue.sync.get_meta(["x"], 13, "t")
    if meta.size:
        took += zip(meta.global_indexes, queue.sync.get_data(meta)["x"].tolist())
    elif ended:
        break
    else:
        time.sleep(0.002)
print(json.dumps(took), flush=True)
"""


def test_several_processes_lose_double_and_mix_nothing(tmp_path: Path):
    split(tmp_path, "id")
    writers = [children.start(WRITER, tmp_path, number) for number in range(3)]
    claimers = [children.start(CLAIMER, tmp_path) for _ in range(2)]
    assert [child.wait() for child in writers] == [0] * 3, [child.err for child in writers]
    (tmp_path / "ended").touch()
    assert [child.wait() for child in claimers] == [0] * 2, [child.err for child in claimers]
    put = {index: x for child in writers for index, x in child.lines[0]}
    took = [pair for child in claimers for pair in child.lines[0]]
    assert len(took) == len(put)
    assert dict(map(tuple, took)) == put
    with Queue("q", tmp_path) as queue:
        records = queue.sync.get(limit=10_000)
        assert sorted(r["x"] for r in records) == sorted(put.values())
        assert all(r["late"] in (None, 2 * r["x"]) for r in records)
        assert all(r["note"] in (None, f"{r['x']}" * (r["x"] % 5)) for r in records)
        by_id = collections.defaultdict(set)
        for index, bucket in zip(put, buckets_of(queue, list(put)), strict=True):
            by_id[put[index] % 10].add(bucket)
        assert all(len(buckets) == 1 for buckets in by_id.values())
        assert verify(queue.engine) == []


# Killed

DIE = """
import os, signal, sys
import torch
from tensordict import TensorDict
from persisting_torch import BatchMeta, Queue
from persisting_torch.queue.commit import Committer
from persisting_torch.queue.shards import BucketCommitter
from persisting_torch.queue.storage import RowStore

def at(owner, name, turn, after):
    method = getattr(owner, name)
    turns = iter(range(100))
    def then_die(*arguments, **options):
        here = next(turns) == turn
        if here and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = method(*arguments, **options)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer
    setattr(owner, name, then_die)

queue = Queue("q", sys.argv[1], batch_size=1000)
"""

POINTS = [
    "RowStore, 'append', {turn}, False",
    "RowStore, 'commit', {turn}, False",
    "RowStore, 'commit', {turn}, True",
    "BucketCommitter, '_place', {turn}, False",
    "Committer, '_enter', {turn}, True",
]


@pytest.mark.parametrize("turn", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_put_loses_nothing_doubles_nothing_and_leaves_no_row(
    tmp_path: Path, point: str, turn: int
):
    split(tmp_path, "id")
    children.run(
        DIE
        + f"""
queue.sync.put([{{"id": x, "x": x}} for x in range(30)])
queue.sync.flush()
at({point.format(turn=turn)})
queue.sync.put([{{"id": x, "x": x, "new": torch.ones(2)}} for x in range(30, 60)])
queue.sync.flush()
""",
        tmp_path,
        status=-signal.SIGKILL,
    )
    with Queue("q", tmp_path) as queue:
        there = sorted(record["x"] for record in queue.sync.get(limit=1000))
        assert there[:30] == list(range(30))
        assert len(set(there)) == len(there) == len(queue)
        assert len(there) < 60 or "_enter" in point
        assert turn == 0 or len(there) > 30
        queue.engine.tending.tend()
        assert rows_stored(queue) == len(queue)
        assert verify(queue.engine) == []
        queue.sync.put([{"id": x, "x": x} for x in range(100, 130)])
        queue.sync.flush()
        expected = [*there, *range(100, 130)]
        assert sorted(record["x"] for record in queue.sync.get(limit=1000)) == expected
        assert sorted(queue.sync.get_batch(["x"], 1000)["x"].tolist()) == expected
        assert verify(queue.engine) == []


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("point", POINTS[:3] + POINTS[4:])
def test_killed_late_fields_are_there_whole_in_each_bucket_and_can_be_put_again(
    tmp_path: Path, point: str, turn: int
):
    with opened(tmp_path, "id") as queue:
        meta = queue.sync.put([{"id": x, "x": x} for x in range(30)])
    children.run(
        DIE
        + f"""
at({point.format(turn=turn)})
meta = BatchMeta(list(range(30)), "default")
queue.sync.put(TensorDict({{"y": torch.arange(30)}}, [30]), metadata=meta)
""",
        tmp_path,
        status=-signal.SIGKILL,
    )
    with Queue("q", tmp_path) as queue:
        assert verify(queue.engine) == []
        assert all(record["y"] in (None, record["x"]) for record in queue.sync.get())
        queue.sync.put(TensorDict({"y": torch.arange(30) * 2}, [30]), metadata=meta)
        assert {r["x"]: r["y"] for r in queue.sync.get()} == {x: 2 * x for x in range(30)}
        queue.engine.tending.tend()
        queue.engine.tending.fold_all()
        assert {r["x"]: r["y"] for r in queue.sync.get()} == {x: 2 * x for x in range(30)}
        assert verify(queue.engine) == []
        assert all(
            not store.exists() or store.dataset().count_rows() == 0
            for store in queue.engine.late.store.stores
        )


def test_a_bucket_that_fails_takes_its_part_at_the_next_try(tmp_path: Path, monkeypatch):
    with opened(tmp_path, "id", batch_size=1000) as queue:
        queue.sync.put([{"id": x, "x": x} for x in range(30)])
        committers = queue.engine.committer.appenders
        append = committers[1].append

        def fail(composed):
            raise OSError("no room")

        monkeypatch.setattr(committers[1], "append", fail)
        with pytest.raises(PersistingError, match="no room"):
            queue.sync.flush()
        assert sorted(r["x"] for r in queue.sync.get()) == list(range(30))
        monkeypatch.setattr(committers[1], "append", append)
        queue.sync.flush()
        assert rows_stored(queue) == len(queue) == 30
        assert sorted(r["x"] for r in queue.sync.get()) == list(range(30))
        assert verify(queue.engine) == []


# Against a queue of one bucket

VALUES = st.one_of(st.integers(-5, 5), st.floats(-2, 2), st.none())
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"), st.lists(st.tuples(st.integers(0, 6), VALUES), min_size=1, max_size=6)
        ),
        st.tuples(st.just("tensors"), st.integers(1, 5)),
        st.tuples(
            st.just("late"), st.lists(st.integers(0, 40), min_size=1, max_size=5, unique=True)
        ),
        st.tuples(st.just("claim"), st.integers(1, 7)),
        st.tuples(st.just("mark"), st.lists(st.integers(0, 40), max_size=4)),
        st.tuples(st.just("clear"), st.lists(st.integers(0, 40), max_size=4)),
        st.tuples(st.just("flush"), st.none()),
        st.tuples(st.just("tend"), st.none()),
        st.tuples(st.just("fold"), st.none()),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=14,
)


def do(queue: Queue, step: tuple[str, Any], number: int) -> Any:
    """One step; what it says, the error's kind included."""
    name, given = step
    try:
        if name == "put":
            records = [{"id": id, "v": value, "n": number} for id, value in given]
            return queue.sync.put(records).global_indexes
        if name == "tensors":
            ragged = {"t": torch.full((given, 2), number)}
            return queue.sync.put(TensorDict({"id": torch.arange(given), **ragged}, [given])).size
        if name == "late":
            from persisting_torch import BatchMeta

            meta = BatchMeta(given, "default")
            data = [{"late": f"{number}-{index}"} for index in given]
            return queue.sync.put(data, metadata=meta).global_indexes
        if name == "claim":
            return queue.sync.get_meta(["id"], given).global_indexes
        if name == "mark":
            return queue.sync.mark_consumed("other", given)
        if name == "clear":
            return queue.sync.clear(given)
        if name == "flush":
            return queue.sync.flush()
        if name == "tend":
            return queue.engine.tending.tend()
        return queue.engine.tending.fold_all()
    except (KeyError, ValueError, PersistingError) as error:
        return type(error).__name__


def sorted_records(queue: Queue) -> list[str]:
    return sorted(
        json.dumps({k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in r.items()})
        for r in queue.sync.get(limit=1000)
    )


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS)
def test_three_buckets_answer_as_one_does(tmp_path_factory: pytest.TempPathFactory, steps):
    path = tmp_path_factory.mktemp("both")
    split(path, None, "many")
    queues = [Queue(name, path, batch_size=8) for name in ("one", "many")]
    try:
        for number, step in enumerate(steps):
            if step[0] == "reopen":
                for queue in queues:
                    queue.close()
                queues = [Queue(name, path, batch_size=8) for name in ("one", "many")]
            else:
                one, many = (do(queue, step, number) for queue in queues)
                assert one == many, step
            one, many = (sorted_records(queue) for queue in queues)
            assert one == many, step
            assert len(queues[0]) == len(queues[1])
        for queue in queues:
            queue.sync.flush()
            assert verify(queue.engine) == []
        indexes = [queue.engine.snapshot("default").tolist() for queue in queues]
        assert indexes[0] == indexes[1]
        if indexes[0]:
            batches = [queue.engine.read_batch("default", indexes[0], ["id"]) for queue in queues]
            assert batches[0]["id"].tolist() == batches[1]["id"].tolist()
        stats = [queue.sync.stats() for queue in queues]
        for key in ("total_count", "fields", "partitions", "tasks"):
            assert stats[0][key] == stats[1][key]
    finally:
        for queue in queues:
            queue.close()
