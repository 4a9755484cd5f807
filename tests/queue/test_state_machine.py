"""The queue and its ledger against a simple model in memory, step by step, restarts among them."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tensordict import TensorDict

from persisting_torch import (
    BatchMeta,
    GRPOGroupNSampler,
    KVInterface,
    Queue,
    QueueSealed,
    RankAwareSampler,
    ShuffleSampler,
    WaitTimeout,
)
from persisting_torch.queue.report import verify
from tests.queue.same import rows, same

Record = dict[str, Any]
Place = tuple[str, str]

PARTITIONS = ["p", "q"]
KEYS = ["a", "b/c", "é"]
RANKS, EACH = 2, 1


class Model:
    """What a queue should hold, said as plainly as possible."""

    def __init__(self) -> None:
        self.values: dict[int, Record] = {}
        self.partition: dict[int, str] = {}
        self.committed: list[int] = []
        self.waiting: list[list[int]] = [[], []]
        self.cleared: set[int] = set()
        self.fields: dict[str, None] = {}
        self.meets_float = False
        self.keys: dict[Place, tuple[int, Any]] = {}
        self.sealed: set[str] = set()
        self.taken: dict[Place, set[int]] = defaultdict(set)
        self.of_ranks: dict[Place, dict[tuple[int, int], list[int]]] = defaultdict(dict)
        self.batches: dict[Place, list[list[int]]] = defaultdict(list)
        self.cursor: dict[Place, int] = defaultdict(int)

    def put(self, handle: int, partition: str, indexes: Sequence[int], records: list[Record]):
        assert len(indexes) == len(records)
        for index in indexes:
            assert index not in self.values, "an index was given twice"
            self.values[index] = {}
            self.partition[index] = partition
        self.waiting[handle] += indexes
        self.give(indexes, records)

    def give(self, indexes: Iterable[int], records: list[Record]) -> None:
        for index, record in zip(indexes, records, strict=True):
            self.fields |= dict.fromkeys(record)
            self.meets_float |= type(record.get("n")) is float
            given = {name: value for name, value in record.items() if value is not None}
            self.values[index].update(given)

    def settle(self, handle: int, waiting: int) -> None:
        """So many samples of the handle still wait; the others were flushed."""
        flushed = len(self.waiting[handle]) - waiting
        assert flushed >= 0
        self.committed += self.waiting[handle][:flushed]
        del self.waiting[handle][:flushed]

    def clear(self, indexes: Iterable[int]) -> None:
        self.cleared |= set(indexes)
        self.keys = {key: held for key, held in self.keys.items() if held[0] not in self.cleared}

    def reset(self, task: str, partition: str) -> None:
        for state in (self.taken, self.of_ranks, self.batches, self.cursor):
            state.pop((task, partition), None)

    def record(self, index: int) -> Record:
        record = {name: self.values[index].get(name) for name in self.fields}
        if self.meets_float and record.get("n") is not None:
            record["n"] = float(record["n"])
        return record

    def seen_by(self, handle: int) -> list[int]:
        order = [*self.committed, *self.waiting[handle]]
        return [index for index in order if index not in self.cleared]

    def arrived(self, partition: str) -> list[int]:
        return sorted(index for index in self.committed if self.partition[index] == partition)

    def available(self, task: str, partition: str, fields: Iterable[str]) -> list[int]:
        gone = self.cleared | self.taken[task, partition]
        return [
            index
            for index in self.arrived(partition)
            if index not in gone and all(name in self.values[index] for name in fields)
        ]


def groups_of_two(ready: list[int], size: int) -> list[int]:
    found: list[int] = []
    at = 0
    while at + 1 < len(ready) and len(found) < size:
        if ready[at + 1] == ready[at] + 1:
            found += ready[at : at + 2]
            at += 1
        at += 1
    return found if len(found) == size else []


def ragged(length: int) -> torch.Tensor:
    return torch.arange(length * 2, dtype=torch.float32).view(length, 2) / 3


values: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(-(2**53), 2**53) | st.sampled_from([0.5, -0.0, float("inf"), 1e300]),
    "s": st.sampled_from(["", "text", "é😀"]),
    "v": st.integers(0, 3).map(ragged),
    "x": st.integers(-(2**63), 2**63 - 1).map(lambda n: torch.tensor([n, 0, -1])),
    "l": st.lists(st.integers(-9, 9), max_size=3),
}
records = st.fixed_dictionaries({}, optional={n: v | st.none() for n, v in values.items()})
late_values: dict[str, Callable[[random.Random], Any]] = {
    "n": lambda chance: chance.choice([chance.randint(-9, 9), chance.random(), None]),
    "r": lambda chance: torch.tensor(chance.random()),
    "v": lambda chance: ragged(chance.randint(0, 3)),
    "l": lambda chance: [chance.randint(0, 9)] * chance.randint(0, 2),
}
handles = st.integers(0, 1)
partitions = st.sampled_from(PARTITIONS)
wanted_fields = st.sampled_from([(), ("n",), ("s", "x"), ("v",), ("r",), ("o.a",), ("never",)])


class QueueMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.path = tempfile.mkdtemp(prefix="state-")
        self.model = Model()
        self.queues: list[Queue] = []
        self.rank_aware: list[RankAwareSampler] = []
        for _ in range(2):
            self.queues.append(self.open(len(self.queues)))
            self.rank_aware.append(RankAwareSampler())
        self.acted = 0

    def open(self, handle: int) -> Queue:
        return Queue("state", self.path, batch_size=[2, 100][handle])

    def teardown(self) -> None:
        if hasattr(self, "queues"):
            for queue in self.queues:
                queue.close()
            with self.open(0) as queue:
                assert verify(queue.engine) == []
            shutil.rmtree(self.path)

    def on(self, handle: int) -> Queue:
        self.acted = handle
        return self.queues[handle]

    def settle(self) -> None:
        waiting = self.queues[self.acted].sync.stats()["buffer_size"]
        self.model.settle(self.acted, waiting)

    # Putting

    def put(self, handle: int, data: Any, partition: str, given: list[Record]) -> None:
        queue = self.on(handle)
        if partition in self.model.sealed:
            with pytest.raises(QueueSealed):
                queue.sync.put(data, partition)
            return
        meta = queue.sync.put(data, partition)
        self.model.put(handle, partition, meta.global_indexes, given)
        self.settle()

    @rule(handle=handles, partition=partitions, record=records)
    def put_a_dict(self, handle: int, partition: str, record: Record) -> None:
        self.put(handle, record, partition, [record])

    @rule(handle=handles, partition=partitions, count=st.integers(1, 12), seed=st.integers(0, 99))
    def put_whole_records(self, handle: int, partition: str, count: int, seed: int) -> None:
        chance = random.Random(seed)
        given = [
            {
                "n": chance.randint(-9, 9) if seed % 7 else chance.random(),
                "s": chance.choice(["a", "b"]),
                "v": ragged(chance.randint(0, 3)),
                "x": torch.tensor([chance.randint(0, 9), 0, 1]),
            }
            for _ in range(count)
        ]
        self.put(handle, given, partition, given)

    @rule(handle=handles, partition=partitions, given=st.lists(records, max_size=4))
    def put_a_list(self, handle: int, partition: str, given: list[Record]) -> None:
        self.put(handle, given, partition, given)

    @rule(
        handle=handles,
        partition=partitions,
        lengths=st.lists(st.integers(0, 3), max_size=8),
        jagged=st.booleans(),
        names=st.sets(st.sampled_from(["v", "x", "s", "o.a"])),
    )
    def put_a_tensordict(
        self, handle: int, partition: str, lengths: list[int], jagged: bool, names: set[str]
    ) -> None:
        count = len(lengths)
        if not jagged and lengths:
            lengths = lengths[:1] * count
        columns: dict[str, list[Any]] = {
            "v": [ragged(length) for length in lengths],
            "x": [torch.tensor([n, n + 1, n + 2]) for n in range(count)],
            "s": [f"s{n}" for n in range(count)],
            "o.a": [torch.tensor(n / 7) for n in range(count)],
        }
        td = TensorDict({}, batch_size=[count])
        names = names if count else set()
        for name in sorted(names):
            if name == "v" and jagged:
                td["v"] = torch.nested.nested_tensor(columns["v"], layout=torch.jagged)
            elif name == "s":
                td["s"] = columns["s"]
            else:
                td[tuple(name.split("."))] = torch.stack(columns[name])
        given = [{name: columns[name][n] for name in sorted(names)} for n in range(count)]
        self.put(handle, td, partition, given)

    @rule(
        handle=handles,
        partition=partitions,
        seed=st.integers(0, 99),
        any_sample=st.integers(0, 4),
        data=st.data(),
    )
    def put_late_fields(
        self, handle: int, partition: str, seed: int, any_sample: int, data: st.DataObject
    ) -> None:
        seen = set(self.model.seen_by(handle))
        indexes = data.draw(self.some_of(partition, 6))
        if any_sample:
            indexes = [index for index in indexes if index in seen]
        chance = random.Random(seed)
        names = [name for name in late_values if chance.random() < 0.7]
        given = [{name: late_values[name](chance) for name in names} for _ in indexes]
        meta = BatchMeta(indexes, partition)
        queue = self.on(handle)
        if seen.issuperset(indexes):
            queue.sync.put(given, metadata=meta)
            self.model.give(indexes, given)
        else:
            with pytest.raises(KeyError):
                queue.sync.put(given, metadata=meta)
        self.settle()

    def some_of(self, partition: str, most: int) -> st.SearchStrategy[list[int]]:
        known = [index for index, where in self.model.partition.items() if where == partition]
        if not known:
            return st.just([])
        return st.lists(
            st.sampled_from(known), min_size=min(2, most, len(known)), max_size=most, unique=True
        )

    @rule(
        handle=handles,
        partition=partitions,
        given=st.dictionaries(st.sampled_from(KEYS), records, min_size=1),
        tag=st.none() | st.dictionaries(st.sampled_from("ab"), st.integers(), max_size=1),
    )
    def put_by_keys(self, handle: int, partition: str, given: dict[str, Record], tag: Any) -> None:
        model, kv = self.model, KVInterface(self.on(handle))
        new = [key for key in given if (partition, key) not in model.keys]
        put = kv.kv_batch_put(list(given), list(given.values()), partition, [tag] * len(given))
        if new and partition in model.sealed:
            with pytest.raises(QueueSealed):
                asyncio.run(put)
            model.fields |= dict.fromkeys(name for record in given.values() for name in record)
            model.meets_float |= any(type(r.get("n")) is float for r in given.values())
            self.fields_may_have_been_registered = True
            self.resync_fields()
            self.settle()
            return
        asyncio.run(put)
        if new:
            found = asyncio.run(kv.kv_batch_get(new, partition, ["_index"]))["_index"].tolist()
            assert found == sorted(found)
            model.put(handle, partition, found, [given[key] for key in new])
            model.keys |= {
                (partition, key): (index, tag) for key, index in zip(new, found, strict=True)
            }
        for key in given.keys() - set(new):
            index, old_tag = model.keys[partition, key]
            model.give([index], [given[key]])
            model.keys[partition, key] = index, old_tag if tag is None else tag
        self.settle()

    def resync_fields(self) -> None:
        """A put by keys that met a seal may have registered the fields of its known keys."""
        known = self.queues[self.acted].sync.stats()["fields"]
        self.model.fields = dict.fromkeys(known)
        self.model.meets_float = "float" in known.get("n", "")

    @rule(handle=handles, partition=partitions, keys=st.sets(st.sampled_from(KEYS), min_size=1))
    def clear_keys(self, handle: int, partition: str, keys: set[str]) -> None:
        model, kv = self.model, KVInterface(self.on(handle))
        if all((partition, key) in model.keys for key in keys):
            asyncio.run(kv.kv_clear(sorted(keys), partition))
            model.clear([model.keys[partition, key][0] for key in keys])
        else:
            with pytest.raises(KeyError):
                asyncio.run(kv.kv_clear(sorted(keys), partition))
        self.settle()

    # Flushing, clearing, sealing, upkeep, restarts

    @rule(handle=handles)
    def flush(self, handle: int) -> None:
        self.on(handle).sync.flush()
        self.settle()
        assert not self.model.waiting[handle]

    @rule(handle=handles, partition=partitions, flushes=st.sampled_from([0, 9]))
    def upkeep(self, handle: int, partition: str, flushes: int) -> None:
        for number in range(flushes):
            self.put(handle, {"n": number}, partition, [{"n": number}])
            self.flush(handle)
        while not self.on(handle).engine.tending.tend():
            time.sleep(0.001)  # upkeep in the background is at it

    @rule(handle=handles)
    def reopen(self, handle: int) -> None:
        self.on(handle).close()
        self.model.settle(handle, 0)
        self.queues[handle] = self.open(handle)
        self.rank_aware[handle] = RankAwareSampler()

    @rule(handle=handles, partition=partitions, data=st.data())
    def clear(self, handle: int, partition: str, data: st.DataObject) -> None:
        indexes = data.draw(self.some_of(partition, 4))
        queue = self.on(handle)
        known = {*self.model.committed, *self.model.waiting[handle]}
        if known.issuperset(indexes):
            queue.sync.clear(indexes, partition)
            self.model.clear(indexes)
        else:
            with pytest.raises(KeyError):
                queue.sync.clear(indexes, partition)
        self.settle()

    @precondition(lambda self: len(self.model.values) > 40 and not self.model.sealed)
    @rule(handle=handles, partition=partitions)
    def seal(self, handle: int, partition: str) -> None:
        self.on(handle).sync.seal(partition)
        self.model.sealed.add(partition)
        self.settle()
        time.sleep(0.02)

    # Claiming

    @rule(
        handle=handles,
        partition=partitions,
        fields=wanted_fields,
        size=st.integers(1, 4),
        shuffled=st.booleans(),
    )
    def claim(
        self, handle: int, partition: str, fields: tuple[str, ...], size: int, shuffled: bool
    ) -> None:
        sampler = ShuffleSampler(5, window=4) if shuffled else None
        got, ready = self.claimed(handle, "claims", partition, fields, size, sampler=sampler)
        if shuffled:
            assert len(set(got)) == len(got) == min(size, len(ready))
            assert set(got) <= set(ready[: max(4, size)])
        else:
            assert got == ready[:size]
        self.model.taken["claims", partition] |= set(got)

    @rule(handle=handles, partition=partitions, fields=wanted_fields, groups=st.integers(1, 2))
    def claim_groups(
        self, handle: int, partition: str, fields: tuple[str, ...], groups: int
    ) -> None:
        sampler = GRPOGroupNSampler(2)
        got, ready = self.claimed(handle, "claims", partition, fields, 2 * groups, sampler=sampler)
        assert got == groups_of_two(ready, 2 * groups)
        self.model.taken["claims", partition] |= set(got)

    @rule(
        handle=handles,
        partition=partitions,
        fields=wanted_fields,
        rank=st.integers(0, 1),
        batch=st.integers(0, 2),
    )
    def claim_for_a_rank(
        self, handle: int, partition: str, fields: tuple[str, ...], rank: int, batch: int
    ) -> None:
        ask = {"sampler": self.rank_aware[handle], "dp_rank": rank, "batch_index": batch}
        got, ready = self.claimed(handle, "ranks", partition, fields, 2, **ask)
        known = self.model.of_ranks["ranks", partition]
        assert got == known.get((rank, batch), ready[:2] if len(ready) > 1 else [])
        if got:
            known[rank, batch] = got
        self.model.taken["ranks", partition] |= set(got)

    def claimed(
        self, handle: int, task: str, partition: str, fields: Sequence[str], size: int, **ask: Any
    ) -> tuple[list[int], list[int]]:
        """What the queue gave out, and what the model could have given."""
        meta = self.on(handle).sync.get_meta(list(fields), size, task, partition, **ask)
        self.settle()
        return meta.global_indexes, self.model.available(task, partition, fields)

    @rule(handle=handles, partition=partitions, data=st.data())
    def mark(self, handle: int, partition: str, data: st.DataObject) -> None:
        indexes = data.draw(self.some_of(partition, 4))
        queue = self.on(handle)
        if {*self.model.committed, *self.model.waiting[handle]}.issuperset(indexes):
            queue.sync.mark_consumed("claims", indexes, partition)
            self.model.taken["claims", partition] |= set(indexes)
        else:
            with pytest.raises(KeyError):
                queue.sync.mark_consumed("claims", indexes, partition)
        self.settle()

    @rule(handle=handles, task=st.sampled_from(["claims", "ranks", "train"]), partition=partitions)
    def reset(self, handle: int, task: str, partition: str) -> None:
        self.on(handle).sync.reset_consumption(task, partition)
        self.model.reset(task, partition)

    # Global batches

    def await_batch(self, handle: int, partition: str, k: int) -> Any:
        return self.on(handle).engine.await_assignment(
            "train", partition, k, batch_size=EACH, dp_size=RANKS, fields=["n"], timeout=0
        )

    @rule(handle=handles, partition=partitions)
    def form_a_global_batch(self, handle: int, partition: str) -> None:
        model, place = self.model, ("train", partition)
        k = len(model.batches[place])
        try:
            found = self.await_batch(handle, partition, k)
        except WaitTimeout:
            found = "wait"
        self.settle()
        ready = model.available(*place, ["n"])
        if len(ready) >= RANKS * EACH:
            batch = ready[: RANKS * EACH]
            assert found.slices == (tuple(batch[:EACH]), tuple(batch[EACH:]))
            model.batches[place].append(batch)
            model.taken[place] |= set(batch)
        elif partition in model.sealed and (
            "n" not in model.fields or len(model.available(*place, [])) < RANKS * EACH
        ):
            assert found is None
        elif partition not in model.sealed:
            assert found == "wait"

    @rule(handle=handles, partition=partitions, data=st.data())
    def replay_a_global_batch(self, handle: int, partition: str, data: st.DataObject) -> None:
        batches = self.model.batches["train", partition]
        if batches:
            k = data.draw(st.integers(0, len(batches) - 1))
            found = self.await_batch(handle, partition, k)
            assert [index for part in found.slices for index in part] == batches[k]
            self.settle()

    @rule(handle=handles, partition=partitions, data=st.data())
    def commit_the_cursor(self, handle: int, partition: str, data: st.DataObject) -> None:
        place = ("train", partition)
        k = data.draw(st.integers(0, len(self.model.batches[place])))
        self.on(handle).engine.commit_cursor(*place, k)
        self.model.cursor[place] = max(k, self.model.cursor[place])

    # Reading

    @rule(handle=handles, partition=partitions, data=st.data())
    def get_data(self, handle: int, partition: str, data: st.DataObject) -> None:
        seen = set(self.model.seen_by(handle))
        indexes = [at for at in data.draw(self.some_of(partition, 5)) if at in seen]
        queue = self.on(handle)
        if not indexes or not self.model.fields:
            return
        meta = BatchMeta(indexes, partition, list(self.model.fields))
        batch = queue.sync.get_data(meta)
        self.settle()
        wanted = [self.model.record(index) for index in indexes]
        for name in self.model.fields:
            got = [row[name] for row in rows(batch)]
            column = [record[name] for record in wanted]
            whole = None not in column
            if name == "n" and whole:
                dtype = torch.float64 if self.model.meets_float else torch.int64
                column = [torch.tensor(value, dtype=dtype) for value in column]
            elif name == "l" and whole and isinstance(got[0], torch.Tensor):
                column = [torch.tensor(value, dtype=torch.int64) for value in column]
            assert same(got, column), name

    @rule(handle=handles, offset=st.integers(0, 30), limit=st.integers(0, 12))
    def get_a_part(self, handle: int, offset: int, limit: int) -> None:
        part = self.model.seen_by(handle)[offset : offset + limit]
        got = self.on(handle).sync.get(limit, offset)
        assert same(got, [self.model.record(index) for index in part])

    # What always holds

    @invariant()
    def everything_reads_as_the_model_says(self) -> None:
        if not hasattr(self, "queues"):
            return
        for handle in dict.fromkeys([self.acted, 1 - self.acted]):
            queue = self.queues[handle]
            wanted = [self.model.record(index) for index in self.model.seen_by(handle)]
            assert same(queue.sync.get(10**6), wanted)
            assert len(queue) == len(wanted)

    @invariant()
    def streams_say_the_same_as_get(self) -> None:
        if hasattr(self, "queues"):
            queue = self.queues[self.acted]
            streamed = [record for part in queue.sync.stream(None) for record in part]
            wanted = self.model.seen_by(self.acted)
            assert same(streamed, [self.model.record(index) for index in wanted])

    @invariant()
    def what_a_task_can_take_is_what_the_model_says(self) -> None:
        if not hasattr(self, "queues"):
            return
        claims = self.queues[self.acted].engine.claims
        for task in ("claims", "ranks", "train"):
            for partition in PARTITIONS:
                for fields in ((), ("n",), ("s", "x"), ("r",)):
                    wanted = self.model.available(task, partition, fields)
                    assert claims.available(task, partition, frozenset(fields)) == len(wanted)

    @invariant()
    def keys_and_books_say_what_the_model_says(self) -> None:
        if not hasattr(self, "queues"):
            return
        queue = self.queues[self.acted]
        for partition in PARTITIONS:
            keys = {
                key: tag for (where, key), (_, tag) in self.model.keys.items() if where == partition
            }
            assert dict(asyncio.run(KVInterface(queue).kv_list(partition))) == keys
            place = ("train", partition)
            once = len(self.model.batches[place][: self.model.cursor[place]]) * RANKS * EACH
            put = len(self.model.arrived(partition))
            assert queue.engine.cursor(*place) == self.model.cursor[place]
            assert queue.engine.books_of(*place) == {
                "put": put,
                "once": once,
                "twice": 0,
                "never": put - once,
                "dropped": 0,
            }


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def test_a_queue_behaves_as_a_simple_model_in_memory_does():
    run(examples=25, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_queue_behaves_as_a_simple_model_in_memory_does_at_length():
    run(examples=80, steps=60)
