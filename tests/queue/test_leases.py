"""Claims of a producer are its own until it finishes them, and the others' when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from persisting_torch import BatchMeta, KVInterface, Queue, StaleOwner
from persisting_torch.queue import registry
from persisting_torch.queue.sets import unpack_set
from tests.producers import hold_to_be_dead
from tests.queue import children


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        opened.sync.put([{"x": n} for n in range(8)])
        opened.sync.flush()
        yield opened


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever says nothing for a second and a half counts as stopped, for this process."""
    monkeypatch.setattr(registry, "SILENT_SECONDS", 1.5)


def eventually(condition, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


@contextmanager
def failing(queue: Queue) -> Iterator[None]:
    """A producer block that ends with an exception."""
    with contextlib.suppress(ZeroDivisionError), queue.producer("one"):
        yield
        raise ZeroDivisionError


def fail(queue: Queue, *, claims: int, finishes: int) -> BatchMeta:
    """Claim as a producer, finish the first of it, and fail; what was claimed."""
    meta = BatchMeta([], "default")
    with failing(queue):
        meta = queue.sync.get_meta(["x"], claims, "work")
        if finishes:
            finish(queue, meta, finishes)
    return meta


def finish(queue: Queue, meta: BatchMeta, count: int) -> None:
    done = BatchMeta(meta.global_indexes[:count], meta.partition_id)
    queue.sync.put([{"y": index} for index in done.global_indexes], metadata=done)


def left(queue: Queue, task: str = "work") -> list[int]:
    """What the task can still claim."""
    return queue.sync.get_meta(["x"], 1000, task).global_indexes


def leased(queue: Queue) -> tuple[int, int]:
    """By the task `work`, and by the producer `one`."""
    figures = queue.sync.stats()
    return (
        figures["tasks"]["work"]["default"]["leased"],
        figures["producers"]["one"]["leased"],
    )


def test_what_a_producer_that_fails_has_not_finished_is_claimed_by_others(queue: Queue):
    fail(queue, claims=4, finishes=0)
    assert left(queue) == list(range(8))


def test_fields_that_were_put_finish_just_their_samples(queue: Queue):
    fail(queue, claims=6, finishes=2)
    assert left(queue) == [2, 3, 4, 5, 6, 7]


def test_fields_put_by_key_finish_the_samples_of_the_keys(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        kv = KVInterface(queue).sync
        kv.kv_batch_put(["a", "b", "c"], [{"x": n} for n in range(3)], "default")
        with failing(queue):
            assert queue.sync.get_meta(["x"], 3, "work").size == 3
            kv.kv_put("b", {"y": 1}, "default")
        assert left(queue) == [0, 2]


def test_a_put_by_key_of_samples_that_were_lost_writes_none_of_its_new_ones(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        kv = KVInterface(queue).sync
        kv.kv_put("a", {"x": 0}, "default")
        with failing(queue):
            assert queue.sync.get_meta(["x"], 1, "work").size == 1
        with pytest.raises(StaleOwner):
            kv.kv_batch_put(["a", "b"], [{"x": 1}, {"x": 2}], "default")
        assert queue.sync.get() == [{"x": 0}]


def test_samples_marked_as_consumed_are_finished(queue: Queue):
    with failing(queue):
        meta = queue.sync.get_meta(["x"], 4, "work")
        queue.sync.mark_consumed("other", meta.global_indexes[:3])
        queue.sync.mark_consumed("work", meta.global_indexes[:1])
    assert left(queue) == list(range(1, 8))


def test_a_block_that_ends_well_has_finished_all(queue: Queue):
    with queue.producer("one"):
        queue.sync.get_meta(["x"], 5, "work")
        assert leased(queue) == (5, 5)
    assert leased(queue) == (0, 0)
    assert left(queue) == [5, 6, 7]


def test_a_put_that_outlasts_its_block_goes_through_if_the_block_ended_well(queue: Queue):
    engine = queue.engine
    with queue.producer("one"):
        meta = queue.sync.get_meta(["x"], 2, "work")
        put_later = engine.producers.finishing(meta.index_array())
    with engine.ledger.transaction() as tx:
        put_later.check(tx)
    with failing(queue):
        meta = queue.sync.get_meta(["x"], 2, "work")
        put_later = engine.producers.finishing(meta.index_array())
    with engine.ledger.transaction() as tx, pytest.raises(StaleOwner):
        put_later.check(tx)


@pytest.mark.parametrize("then", ["beats", "claims anew", "ends"])
def test_what_a_producer_lost_amid_a_put_is_refused_though_it_lives_again(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
):
    check, again = queue.engine.reads.check_indexes, BatchMeta([], "default")

    def amid_the_put(*arguments: object) -> None:
        nonlocal again
        monkeypatch.undo()
        hold_to_be_dead(other, "one")
        if then == "ends":
            block.close()
        else:
            queue.engine.producers.beat()
        if then == "claims anew":
            again = queue.sync.get_meta(["x"], 3, "work")
        check(*arguments)

    with Queue("q", tmp_path) as other, ExitStack() as block:
        block.enter_context(queue.producer("one"))
        meta = queue.sync.get_meta(["x"], 4, "work")
        monkeypatch.setattr(queue.engine.reads, "check_indexes", amid_the_put)
        with pytest.raises(StaleOwner, match=r"'one'.*Nothing of this put was written"):
            queue.sync.put([{"y": 0}] * 4, metadata=meta)
        assert again.global_indexes == ([0, 1, 2] if then == "claims anew" else [])
        assert other.sync.get_meta(["x"], 1, "work").global_indexes == [again.size]
        if then == "claims anew":
            queue.sync.put([{"y": 1}] * 3, metadata=again)
        assert [record.get("y") for record in queue.sync.get(3)] == [1] * again.size + [None] * (
            3 - again.size
        )


def test_claims_outside_of_a_block_and_after_it_have_no_lease(queue: Queue):
    queue.sync.get_meta(["x"], 2, "work")
    with queue.producer("one"):
        pass
    queue.sync.get_meta(["x"], 2, "work")
    fail(queue, claims=2, finishes=0)
    assert left(queue) == [4, 5, 6, 7]


def test_a_claim_for_a_rank_has_no_lease_and_is_answered_again(queue: Queue):
    place = {"dp_rank": 0, "batch_index": 0}
    with failing(queue):
        meta = queue.sync.get_meta(["x"], 3, "work", **place)
    assert queue.sync.get_meta(["x"], 3, "work", **place).global_indexes == meta.global_indexes
    assert left(queue) == [3, 4, 5, 6, 7]


def test_many_claims_of_one_producer_are_kept_in_few_rows(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        queue.sync.put([{"x": n} for n in range(300)])
        with failing(queue):
            for _ in range(150):
                meta = queue.sync.get_meta(["x"], 2, "work")
                queue.sync.mark_consumed("work", meta.global_indexes[1:])
            with queue.engine.ledger.reading() as tx:
                assert tx.execute("SELECT count(*) FROM leased").fetchone()[0] <= 65
        assert left(queue) == list(range(0, 300, 2))


def test_another_task_keeps_its_claims_of_the_same_samples(queue: Queue):
    queue.sync.get_meta(["x"], 8, "other")
    fail(queue, claims=8, finishes=3)
    assert left(queue, "other") == []
    assert left(queue) == [3, 4, 5, 6, 7]


def test_two_blocks_in_two_tasks_of_one_loop_each_have_their_own_claims(tmp_path: Path):
    async def produce(queue: Queue, inside: list[str], name: str, fails: bool) -> list[int]:
        with queue.producer(name):
            inside.append(name)
            while len(inside) < 2:
                await asyncio.sleep(0.001)
            meta = await queue.get_meta(["x"], 3, "work")
            inside.append(name)
            while len(inside) < 4:
                await asyncio.sleep(0.001)
            if fails:
                raise ZeroDivisionError
            return meta.global_indexes

    async def main() -> None:
        async with Queue("q", tmp_path) as queue:
            await queue.put([{"x": n} for n in range(6)])
            inside: list[str] = []
            good, bad = await asyncio.gather(
                produce(queue, inside, "good", False),
                produce(queue, inside, "bad", True),
                return_exceptions=True,
            )
            assert isinstance(bad, ZeroDivisionError)
            rest = await queue.get_meta(["x"], 100, "work")
            assert sorted([*good, *rest.global_indexes]) == list(range(6))
            assert rest.size == 3

    asyncio.run(main())


def test_threads_of_a_process_with_one_block_claim_for_it(queue: Queue):
    with failing(queue):
        thread = threading.Thread(target=queue.sync.get_meta, args=(["x"], 3, "work"))
        thread.start()
        thread.join()
        assert leased(queue) == (3, 3)
    assert left(queue) == list(range(8))


def test_a_failed_block_cannot_finish_what_it_has_given_back(queue: Queue):
    meta = fail(queue, claims=4, finishes=1)
    with pytest.raises(StaleOwner, match=r"'one'.*\[1, 2, 3\].*Nothing of this put was written"):
        queue.sync.put([{"y": 0}] * 4, metadata=meta)
    assert [record.get("y") for record in queue.sync.get()] == [0, *[None] * 7]
    queue.sync.put([{"y": 5}], metadata=BatchMeta([5], "default"))
    again = queue.sync.get_meta(["x"], 3, "work")
    assert again.global_indexes == [1, 2, 3]
    queue.sync.put([{"y": 0}] * 3, metadata=again)


# Processes that are killed, stopped, and started anew

WORKER = """
import sys
from persisting_torch import BatchMeta, Queue
queue = Queue("q", sys.argv[1])
with queue.producer("one"):
    meta = queue.sync.get_meta(["x"], 4, "work")
    done = BatchMeta(meta.global_indexes[:1], meta.partition_id)
    queue.sync.put([{"y": 1}], metadata=done)
    print(1, flush=True)
"""


def test_a_killed_worker_loses_its_claims_to_those_who_ask(queue: Queue, tmp_path: Path):
    worker = children.start(WORKER + "    import time; time.sleep(60)", tmp_path)
    worker.await_line()
    assert left(queue) == [4, 5, 6, 7]
    assert leased(queue) == (3, 3)
    worker.send(signal.SIGKILL)
    worker.wait()
    assert eventually(lambda: left(queue) == [1, 2, 3])
    assert leased(queue) == (0, 0)
    assert left(queue) == []


def test_two_workers_that_die_together_both_lose_their_claims(queue: Queue, tmp_path: Path):
    script = WORKER.replace('"one"', "sys.argv[2]") + "    import time; time.sleep(60)"
    workers = [children.start(script, tmp_path, name) for name in ("one", "two")]
    for worker in workers:
        worker.await_line()
    with queue.engine.commit_lock:  # nobody takes notice before both are dead
        for worker in workers:
            worker.send(signal.SIGKILL)
            worker.wait()
    found: list[int] = []
    assert eventually(lambda: found.extend(left(queue)) or len(found) >= 6)
    assert found == [1, 2, 3, 5, 6, 7]


def test_a_dead_worker_is_found_by_a_process_that_only_has_the_queue_open(
    queue: Queue, tmp_path: Path
):
    worker = children.start(WORKER + "    import time; time.sleep(60)", tmp_path)
    worker.await_line()
    worker.send(signal.SIGKILL)
    worker.wait()

    def given_back() -> bool:
        with queue.engine.ledger.reading() as tx:
            return not tx.execute("SELECT count(*) FROM leased").fetchone()[0]

    assert eventually(given_back)
    assert left(queue) == [1, 2, 3, 4, 5, 6, 7]


def test_a_worker_that_starts_anew_finds_what_its_predecessor_left(queue: Queue, tmp_path: Path):
    worker = children.start(WORKER + "    import time; time.sleep(60)", tmp_path)
    worker.await_line()
    worker.send(signal.SIGKILL)
    worker.wait()
    with queue.producer("one"):
        assert left(queue) == [1, 2, 3, 4, 5, 6, 7]


def test_a_stopped_worker_loses_its_claims_and_may_not_finish_them_when_it_goes_on(
    queue: Queue, tmp_path: Path, short_silence: None
):
    worker = children.start(
        """
        import json, os, signal, sys
        from persisting_torch import Queue, StaleOwner
        queue = Queue("q", sys.argv[1])
        with queue.producer("one"):
            mine = queue.sync.get_meta(["x"], 4, "work")
            print(1, flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            try:
                queue.sync.put([{"y": 1}] * 4, metadata=mine)
            except StaleOwner as error:
                print(json.dumps(str(error)), flush=True)
            queue.sync.put({"x": 8})
            queue.sync.flush()
            again = queue.sync.get_meta(["x"], 10, "work")
            queue.sync.put([{"y": 2}] * again.size, metadata=again)
            print(json.dumps(queue.sync.get_data(again)["x"].tolist()), flush=True)
        """,
        tmp_path,
    )
    worker.await_line()
    assert left(queue) == [4, 5, 6, 7]
    with queue.producer("two"):
        claimed: list[int] = []
        assert eventually(lambda: claimed.extend(left(queue)) or claimed == [0, 1, 2, 3])
        assert queue.sync.stats()["producers"]["one"]["state"] == "failed"
        worker.send(signal.SIGCONT)
        assert worker.wait() == 0, worker.err
        mine = BatchMeta([0, 1, 2, 3], "default")
        queue.sync.put([{"y": 3}] * 4, metadata=mine)
    refusal, again = worker.lines[1:]
    assert "'one'" in refusal
    assert "[0, 1, 2, 3]" in refusal
    assert again == [8]
    found = {record["x"]: record["y"] for record in queue.sync.get()}
    assert found == {0: 3, 1: 3, 2: 3, 3: 3, 4: None, 5: None, 6: None, 7: None, 8: 2}
    assert queue.sync.stats()["producers"]["one"]["state"] == "done"


def test_who_lost_the_name_while_stopped_may_put_and_may_not_claim(
    queue: Queue, tmp_path: Path, short_silence: None
):
    worker = children.start(
        """
        import json, os, signal, sys
        from persisting_torch import Queue, StaleOwner
        queue = Queue("q", sys.argv[1])
        with queue.producer("one"):
            queue.sync.get_meta(["x"], 4, "work")
            print(1, flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            queue.sync.put({"x": 8})
            try:
                queue.sync.get_meta(["x"], 4, "work")
            except StaleOwner as error:
                print(json.dumps(str(error)), flush=True)
        """,
        tmp_path,
    )
    worker.await_line()
    time.sleep(1.6)
    with queue.producer("one"):
        mine = queue.sync.get_meta(["x"], 6, "work")
        assert mine.global_indexes == [0, 1, 2, 3, 4, 5]
        worker.send(signal.SIGCONT)
        assert worker.wait() == 0, worker.err
        assert leased(queue) == (6, 6)
        queue.sync.put([{"y": 1}] * 6, metadata=mine)
    assert "begin one with another name" in worker.lines[1]
    assert len(queue) == 9


DIE = """
import os, signal, sys
from persisting_torch import BatchMeta, Queue
from persisting_torch.queue.commit import Committer
from persisting_torch.queue.storage import RowStore

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def die_after(owner, name):
    method = getattr(owner, name)
    def then_die(*arguments, **options):
        method(*arguments, **options)
        die()
    setattr(owner, name, then_die)

queue = Queue("q", sys.argv[1])
with queue.producer("one"):
    meta = queue.sync.get_meta(["x"], 4, "work")
    {patch}
    queue.sync.put([{{"y": 1}}] * 4, metadata=meta)
"""

POINTS = {
    "before the rows are written": ("RowStore.append = die", False),
    "right after the commit of the rows": ("die_after(RowStore, 'append')", True),
    "before the ledger's entry": ("Committer._enter = die", True),
    "within the ledger's entry": ("die_after(Committer, '_enter')", True),
}


@pytest.mark.parametrize(("patch", "landed"), POINTS.values(), ids=POINTS)
def test_a_kill_within_a_put_either_keeps_the_fields_or_returns_the_samples(
    queue: Queue, tmp_path: Path, patch: str, landed: bool
):
    worker = children.start(DIE.format(patch=patch), tmp_path)
    assert worker.wait() == -signal.SIGKILL, worker.err
    found: list[int] = []
    assert eventually(lambda: found.extend(left(queue)) or (landed or 0 in found))
    time.sleep(1.2)
    found += left(queue)
    expected = [4, 5, 6, 7] if landed else list(range(8))
    assert sorted(found) == expected
    put = [record["x"] for record in queue.sync.get() if record.get("y") is not None]
    assert put == ([0, 1, 2, 3] if landed else [])


ANSWER = """
import sys, time
from persisting_torch import Queue
queue = Queue("q", sys.argv[1])
with queue.producer(sys.argv[2]):
    print(1, flush=True)
    end = time.monotonic() + 120  # should the test not come to its end
    while time.monotonic() < end:
        meta = queue.sync.get_meta(["x"], 4, "work")
        time.sleep(0.02)
        if meta.size:
            batch = queue.sync.get_data(meta)
            queue.sync.put([{"y": x + 1} for x in batch["x"].tolist()], metadata=meta)
"""


def test_every_question_is_answered_once_though_workers_are_killed_all_the_while(tmp_path: Path):
    chance = random.Random(7)
    with Queue("q", tmp_path) as queue:
        queue.sync.put([{"x": n} for n in range(120)])
        queue.sync.flush()
        workers = [children.start(ANSWER, tmp_path, f"worker-{n}") for n in range(3)]
        for n in range(3, 11):
            at = chance.randrange(3)
            workers[at].await_line()
            time.sleep(chance.uniform(0, 0.1))
            workers[at].send(signal.SIGKILL)
            workers[at].wait()
            workers[at] = children.start(ANSWER, tmp_path, f"worker-{n}")

        def answers() -> list[int | None]:
            return [record.get("y") for record in queue.sync.get(1000)]

        assert eventually(lambda: None not in answers(), 60)
        assert answers() == [n + 1 for n in range(120)]
        queue.engine.late.store.refresh()
        assert queue.engine.late.store.rows >= 120
        for worker in workers:
            assert worker.status is None, worker.err
            worker.send(signal.SIGKILL)
            worker.wait()


# Everything at once, against a model

NAMES = ["a", "b"]


class Leases(RuleBasedStateMachine):
    """Two handles, each with a producer block that is entered, left, and left by an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.queues = [Queue("q", self.folder.name) for _ in NAMES]
        self.blocks: list = [None, None]
        self.available: set[int] = set()
        self.held: list[set[int]] = [set(), set()]
        self.loose: list[set[int]] = [set(), set()]
        self.done: set[int] = set()
        self.stale: list[set[int]] = [set(), set()]

    def teardown(self) -> None:
        for at in (0, 1):
            self.leave(at)
            self.queues[at].close()
        self.folder.cleanup()

    @initialize(count=st.integers(1, 20))
    def start(self, count: int) -> None:
        self.put(0, count)

    @rule(at=st.integers(0, 1), count=st.integers(1, 5))
    def put(self, at: int, count: int) -> None:
        meta = self.queues[at].sync.put([{"x": 1}] * count)
        self.queues[at].sync.flush()
        self.available |= set(meta.global_indexes)

    def enter(self, at: int) -> None:
        if self.blocks[at] is None:
            self.blocks[at] = self.queues[at].producer(NAMES[at])
            self.blocks[at].__enter__()

    @rule(at=st.integers(0, 1))
    def leave(self, at: int) -> None:
        if self.blocks[at] is not None:
            self.blocks[at].__exit__(None, None, None)
            self.blocks[at] = None
            self.done |= self.held[at]
            self.held[at] = set()

    @rule(at=st.integers(0, 1))
    def fail(self, at: int) -> None:
        if self.blocks[at] is not None:
            error = ZeroDivisionError()
            assert not self.blocks[at].__exit__(type(error), error, None)
            self.blocks[at] = None
            self.give_back(at)

    def give_back(self, at: int) -> None:
        self.available |= self.held[at]
        self.stale[at] |= self.held[at]
        self.held[at] = set()

    @rule(at=st.integers(0, 1), count=st.integers(1, 6), puts=st.booleans())
    def claims_and_is_held_to_be_dead(self, at: int, count: int, puts: bool) -> None:
        self.claim(at, count, True)
        self.is_held_to_be_dead(at, puts)

    @rule(at=st.integers(0, 1), puts=st.booleans())
    def is_held_to_be_dead(self, at: int, puts: bool) -> None:
        if self.blocks[at] is not None:
            hold_to_be_dead(self.queues[1 - at], NAMES[at])
            self.give_back(at)
            if puts:
                self.finish_what_was_lost(at)

    @rule(at=st.integers(0, 1), count=st.integers(1, 6), inside=st.booleans())
    def claim(self, at: int, count: int, inside: bool) -> None:
        if inside:
            self.enter(at)
        got = set(self.queues[at].sync.get_meta(["x"], count, "work").global_indexes)
        assert got == set(sorted(self.available)[:count])
        self.available -= got
        self.stale[at] -= got
        if self.blocks[at] is None:
            self.done |= got
        else:
            self.held[at] |= got

    @rule(at=st.integers(0, 1), chance=st.randoms(use_true_random=False))
    def finish(self, at: int, chance) -> None:
        chosen = {index for index in self.held[at] if chance.random() < 0.5}
        if chosen:
            meta = BatchMeta(sorted(chosen), "default")
            self.queues[at].sync.put([{"y": 1}] * len(chosen), metadata=meta)
            self.held[at] -= chosen
            self.done |= chosen

    @rule(at=st.integers(0, 1))
    def finish_what_was_lost(self, at: int) -> None:
        if self.stale[at]:
            meta = BatchMeta(sorted(self.stale[at]), "default")
            with pytest.raises(StaleOwner):
                self.queues[at].sync.put([{"z": 1}] * meta.size, metadata=meta)

    @rule(at=st.integers(0, 1), chance=st.randoms(use_true_random=False))
    def mark(self, at: int, chance) -> None:
        everything = self.available | self.done | self.held[0] | self.held[1]
        chosen = {index for index in everything if chance.random() < 0.2}
        self.queues[at].sync.mark_consumed("work", sorted(chosen))
        for members in (self.available, self.held[0], self.held[1]):
            members -= chosen
        self.done |= chosen
        # Who says that it is consumed has no lease of it to lose, whether it knew of that or not.
        self.stale[at] -= chosen

    @invariant()
    def every_sample_is_done_or_leased_or_available(self) -> None:
        for queue in self.queues:
            engine = queue.engine
            with engine.ledger.reading() as tx:
                engine.books.refresh(tx)
                view = engine.books.view("work", "default", frozenset({"x"}))
                rows = tx.execute("SELECT producer, first, count, members FROM leased").fetchall()
            assert set(view.available) == self.available
            held = {name: set() for name in NAMES}
            for name, *packed in rows:
                assert not held[name] & set(unpack_set(*packed))
                held[name] |= set(unpack_set(*packed))
            assert list(held.values()) == self.held
        assert not self.done & (self.available | self.held[0] | self.held[1])


def test_every_sample_is_finished_once_or_leased_or_available():
    run_state_machine_as_test(
        Leases,
        settings=settings(
            max_examples=40,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_batch_that_was_read_by_get_batch_is_leased_too(queue: Queue):
    with failing(queue):
        batch = queue.sync.get_batch(["x"], 4, "work")
        assert torch.equal(batch["x"], torch.arange(4))
    assert left(queue) == list(range(8))
