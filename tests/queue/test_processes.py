"""Many processes, threads and event loops on one queue, and what a fork may not do."""

from __future__ import annotations

import asyncio
import collections
import signal
import threading
import time
from pathlib import Path

import torch

from persisting_torch import KVInterface, Queue, QueueClosed
from persisting_torch.queue.report import verify
from tests.queue import children

BEGIN = """
import json, os, random, sys, time
import torch
from tensordict import TensorDict
from persisting_torch import Queue

path, number = sys.argv[1], int(sys.argv[2])
chance = random.Random(number)
torch.manual_seed(number)
"""

WRITER = (
    BEGIN
    + """
queue = Queue("q", path, batch_size=chance.choice([1, 7, 50]))
put, x = [], number * 10_000
while x < number * 10_000 + 400:
    if chance.random() < 0.2:
        count = chance.randint(1, 40)
        xs = torch.arange(x, x + count)
        data = TensorDict({"x": xs, "wide": xs[:, None].repeat(1, 8)}, [count])
    else:
        count = 1
        tokens = torch.randint(0, 9, (chance.randint(0, 500),))
        data = {"x": x, "tokens": tokens, "sum": int(tokens.sum()), "note": f"{x}-" * (x % 9)}
    put += queue.sync.put(data, "ab"[chance.random() < 0.5]).global_indexes
    x += count
queue.close()
print(json.dumps([put, list(range(number * 10_000, x))]), flush=True)
"""
)

CLAIMER = (
    BEGIN
    + """
queue = Queue("q", path)
took = []
while True:
    ended = os.path.exists(path + "/ended")
    before = len(took)
    for partition in "ab":
        meta = queue.sync.get_meta(["x"], chance.randint(1, 20), "t", partition)
        took += meta.global_indexes
        if meta.size:
            queue.sync.get_data(meta)
    if len(took) == before:
        if ended:
            break
        time.sleep(0.002)
print(json.dumps(took), flush=True)
"""
)


def test_four_writers_and_four_claimers_lose_double_and_tear_nothing(tmp_path: Path):
    writers = [children.start(WRITER, tmp_path, number) for number in range(4)]
    claimers = [children.start(CLAIMER, tmp_path, number) for number in range(4)]
    assert [child.wait(120) for child in writers] == [0] * 4, [child.err for child in writers]
    (tmp_path / "ended").touch()
    assert [child.wait(120) for child in claimers] == [0] * 4, [child.err for child in claimers]

    pairs = [pair for child in writers for pair in zip(*child.lines[0], strict=True)]
    assert len({index for index, _ in pairs}) == len(pairs)
    took = [index for child in claimers for index in child.lines[0]]
    assert sorted(took) == sorted(index for index, _ in pairs)
    assert sum(bool(child.lines[0]) for child in claimers) >= 2

    with Queue("q", tmp_path) as queue:
        records = queue.sync.get(limit=100_000)
        assert sorted(record["x"] for record in records) == sorted(x for _, x in pairs)
        for record in records:
            if record["wide"] is None:
                assert int(record["tokens"].sum()) == record["sum"]
                assert record["note"] == f"{record['x']}-" * (record["x"] % 9)
            else:
                assert record["wide"].tolist() == [record["x"]] * 8
        for partition in "ab":
            indexes = queue.engine.snapshot(partition)
            xs = queue.engine.read_batch(partition, indexes, ["x"])["x"].tolist()
            assert set(zip(indexes.tolist(), xs, strict=True)) <= set(pairs)
        assert verify(queue.engine) == []


def test_what_one_process_flushes_a_waiting_one_gets_at_once(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        child = children.start(
            BEGIN
            + """
queue = Queue("q", path)
print(json.dumps("ready"), flush=True)
for records in queue.sync.stream(limit=3, wait=True):
    for record in records:
        print(json.dumps([record["x"], time.time()]), flush=True)
""",
            tmp_path,
            0,
        )
        child.await_line()
        flushed = []
        for x in range(3):
            time.sleep(0.1)
            queue.sync.put({"x": x})
            queue.sync.flush()
            flushed.append(time.time())
        assert child.wait() == 0, child.err
        assert [x for x, _ in child.lines[1:]] == [0, 1, 2]
        assert min(got - put for put, (_, got) in zip(flushed, child.lines[1:], strict=True)) < 0.5


def test_eight_threads_on_one_queue_lose_and_double_nothing(tmp_path: Path):
    queue = Queue("q", tmp_path, batch_size=16, auto_flush_interval_sec=0.02)
    put, took, errors = [], [], []
    writing = threading.Event()
    writing.set()

    def write(number: int) -> None:
        for x in range(150):
            meta = queue.sync.put({"x": number * 1000 + x, "t": torch.full((x % 5,), x)})
            put.extend(meta.global_indexes)

    def claim(number: int) -> None:
        while True:
            more = writing.is_set()
            meta = queue.sync.get_meta(["x", "t"], number + 1, "t")
            took.extend(meta.global_indexes)
            if meta.size:
                batch = queue.sync.get_data(meta)
                rows = zip(batch["x"].tolist(), batch["t"].unbind(), strict=True)
                assert all(t.tolist() == [x % 1000] * (x % 1000 % 5) for x, t in rows)
                queue.sync.get(limit=5)
                len(queue)
            elif not more:
                return

    def guarded(call, number: int) -> None:
        try:
            call(number)
        except BaseException as error:
            errors.append(error)
            raise

    writers = [threading.Thread(target=guarded, args=(write, n)) for n in range(4)]
    claimers = [threading.Thread(target=guarded, args=(claim, n)) for n in range(4)]
    for thread in writers + claimers:
        thread.start()
    for thread in writers:
        thread.join(60)
    writing.clear()
    for thread in claimers:
        thread.join(60)
    assert not errors
    assert len(set(put)) == len(put) == 600
    assert sorted(took) == sorted(put)
    assert len(queue) == 600
    assert verify(queue.engine) == []
    queue.close()


def test_a_close_among_busy_threads_keeps_every_put_that_returned(tmp_path: Path):
    for turn in range(5):
        path = tmp_path / str(turn)
        queue = Queue("q", path, batch_size=5)
        put: list[int] = []
        refused = []

        def write(queue=queue, put=put, refused=refused) -> None:
            try:
                while True:
                    queue.sync.put({"x": 1})
                    put.append(1)
            except QueueClosed as error:
                refused.append(error)

        def wait(queue=queue, refused=refused) -> None:
            try:
                for _ in queue.sync.stream(limit=None, wait=True):
                    pass
            except QueueClosed as error:
                refused.append(error)

        threads = [threading.Thread(target=call) for call in (write, write, wait, wait)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        closers = [threading.Thread(target=queue.close) for _ in range(2)]
        for thread in closers:
            thread.start()
        for thread in closers + threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert len(refused) == 4
        with Queue("q", path) as queue:
            assert len(queue) == len(put)


def test_an_event_loop_may_await_and_may_use_sync(tmp_path: Path):
    async def main() -> None:
        async with Queue("q", tmp_path, batch_size=8) as queue:
            beats = 0

            async def beat() -> None:
                nonlocal beats
                while True:
                    await asyncio.sleep(0.001)
                    beats += 1

            beating = asyncio.create_task(beat())
            metas = await asyncio.gather(*(queue.put({"x": x}) for x in range(50)))
            queue.sync.put({"x": 50})
            await queue.flush()
            parts = await asyncio.gather(*(queue.get_meta(["x"], 7, "t") for _ in range(10)))
            took = [index for part in parts for index in part.global_indexes]
            assert len(set(took)) == len(took) == 51
            assert len({meta.global_indexes[0] for meta in metas}) == 50
            assert len(await queue.get(limit=1000)) == len(queue.sync.get(limit=1000)) == 51
            keys = KVInterface(queue)
            await asyncio.gather(*(keys.kv_put(f"k{n}", {"x": n}, "kv") for n in range(10)))
            assert [key for key, _ in await keys.kv_list("kv")] == [f"k{n}" for n in range(10)]
            assert beats > 0
            beating.cancel()

    asyncio.run(main())
    asyncio.run(reopen(tmp_path))


async def reopen(path: Path) -> None:
    async with Queue("q", path) as queue:
        assert len(queue) == 61
        async for records in queue.stream(limit=10):
            assert len(records) == 10


FORK = """
import asyncio, os, signal, sys, threading, time
import torch
from persisting_torch import KVInterface, PersistingError, Queue

def fork(call):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        call()
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)

queue = Queue("q", sys.argv[1])
"""


def test_the_fork_of_a_process_with_an_open_queue_is_refused_at_once(tmp_path: Path):
    children.run(
        FORK
        + """
meta = queue.sync.put({"x": 1, "t": torch.ones(3)})
queue.sync.flush()
queue.sync.get()
queue.sync.put({"x": 2})

def asked():
    for call in (
        lambda: queue.sync.put({"x": 3}),
        lambda: queue.sync.get(),
        lambda: queue.sync.flush(),
        lambda: queue.sync.get_meta(["x"], 1),
        lambda: queue.sync.get_data(meta),
        lambda: queue.sync.stats(),
        lambda: next(queue.sync.stream()),
        lambda: len(queue),
        lambda: queue.sync.clear([0]),
        lambda: queue.sync.seal(),
        lambda: queue.to_lance(),
        lambda: asyncio.run(queue.put({"x": 3})),
        lambda: asyncio.run(queue.put([{"x": 3}])),
        lambda: asyncio.run(KVInterface(queue).kv_list("default")),
        lambda: Queue("q", sys.argv[1]),
        lambda: Queue("another", sys.argv[1]),
    ):
        start = time.monotonic()
        try:
            call()
        except PersistingError as error:
            assert "forked from process" in str(error), error
            assert "'spawn' or 'forkserver'" in str(error), error
        else:
            raise AssertionError("not refused")
        assert time.monotonic() - start < 10
    queue.close()

assert fork(asked) == 0
queue.sync.put({"x": 3})
queue.sync.flush()
assert [record["x"] for record in queue.sync.get()] == [1, 2, 3]
queue.close()
""",
        tmp_path,
    )


def test_the_fork_of_a_process_that_has_closed_its_queues_is_refused_too(tmp_path: Path):
    child = children.run(
        FORK
        + """
queue.sync.put({"x": 1})
queue.close()
assert fork(lambda: Queue("q", sys.argv[1])) == 1
""",
        tmp_path,
    )
    assert "forked from process" in child.err


def test_the_fork_of_a_process_that_never_opened_a_queue_works(tmp_path: Path):
    children.run(
        FORK.replace('queue = Queue("q", sys.argv[1])', "")
        + """
def use():
    with Queue("q", sys.argv[1], batch_size=2) as queue:
        queue.sync.put([{"t": torch.ones(1000)} for _ in range(10)])
        assert queue.sync.get_batch(["t"], 10)["t"].sum() == 10_000

for _ in range(3):
    assert fork(use) == 0
with Queue("q", sys.argv[1]) as queue:
    assert len(queue) == 30
""",
        tmp_path,
    )


def test_a_forked_child_never_flushes_what_its_parent_has_waiting(tmp_path: Path):
    children.run(
        FORK
        + """
queue.sync.put({"x": 0})
queue.sync.flush()
for x in range(1, 4):
    queue.sync.put({"x": x})

class Leave(Exception):
    pass

def leave():
    raise Leave

def end_in_block():
    with queue:
        pass

assert fork(lambda: None) == 0
assert fork(end_in_block) == 0
assert fork(lambda: time.sleep(0.05)) == 0
assert fork(leave) == 1

import multiprocessing
process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.01,))
process.start()
process.join()
assert process.exitcode == 0

reader = Queue("q", sys.argv[1])
assert len(reader) == 1
queue.sync.flush()
assert [record["x"] for record in reader.sync.get()] == [0, 1, 2, 3]
from persisting_torch.queue.report import verify
assert verify(queue.engine) == []
""",
        tmp_path,
        whole_end=True,
    )
    with Queue("q", tmp_path) as queue:
        assert [record["x"] for record in queue.sync.get()] == [0, 1, 2, 3]


def test_forks_among_busy_threads_neither_hang_nor_harm(tmp_path: Path):
    child = children.start(
        FORK
        + """
stop, put = threading.Event(), []

def write(number):
    while not stop.is_set():
        queue.sync.put({"x": number})
        put.append(1)
        queue.sync.flush()
        queue.sync.get_batch(["x"], 3)

threads = [threading.Thread(target=write, args=(n,)) for n in range(3)]
for thread in threads:
    thread.start()

def refused():
    try:
        queue.sync.put({"x": 9})
    except PersistingError:
        os._exit(0)
    os._exit(3)

for _ in range(25):
    time.sleep(0.01)
    assert fork(refused) == 0
stop.set()
for thread in threads:
    thread.join()
queue.sync.flush()
assert len(queue) == len(put)
from persisting_torch.queue.report import verify
assert verify(queue.engine) == []
""",
        tmp_path,
    )
    assert child.wait(60) == 0, child.err


def test_a_child_that_outlives_its_killed_parent_keeps_nobody_out(tmp_path: Path):
    child = children.start(
        FORK
        + """
queue.sync.put({"x": 0})
queue.sync.flush()
queue.engine.commit_lock.__enter__()
if os.fork():
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(30)
os._exit(0)
""",
        tmp_path,
    )
    assert child.wait() == -signal.SIGKILL
    start = time.monotonic()
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"x": 1})
        queue.sync.flush()
        assert time.monotonic() - start < 15
        assert collections.Counter(record["x"] for record in queue.sync.get()) == {0: 1, 1: 1}
