"""When waiting samples are flushed, and what happens when they cannot be."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from persisting_torch import PersistingError, Queue, QueueClosed
from persisting_torch.errors import FlushFailed
from tests.queue import children

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def stored(path) -> list[int]:
    """The values of x that a newcomer finds, in order."""
    with Queue("q", path) as queue:
        assert queue.engine.tending.error is None
        return [record["x"] for record in queue.sync.get(limit=1_000_000)]


def test_the_put_that_fills_a_batch_flushes(tmp_path):
    with Queue("q", tmp_path, batch_size=3) as writer, Queue("q", tmp_path) as reader:
        writer.sync.put({"x": 0})
        writer.sync.put({"x": 1})
        assert len(reader) == 0
        writer.sync.put({"x": 2})
        assert len(reader) == 3
        writer.sync.put([{"x": x} for x in range(3, 10)])
        assert len(reader) == 10


def test_samples_are_flushed_once_they_have_waited_long_enough(tmp_path):
    with (
        Queue("q", tmp_path, auto_flush_interval_sec=0.2) as writer,
        Queue("q", tmp_path) as reader,
    ):
        start = time.monotonic()
        writer.sync.put({"x": 0})
        assert len(reader) == 0
        while len(reader) == 0:
            assert time.monotonic() - start < 10
            time.sleep(0.005)
        assert time.monotonic() - start > 0.15


def test_close_flushes(tmp_path):
    queue = Queue("q", tmp_path)
    queue.sync.put({"x": 0})
    queue.close()
    queue.close()
    assert stored(tmp_path) == [0]
    for refused in (
        lambda: queue.sync.put({"x": 1}),
        lambda: queue.sync.get(),
        lambda: len(queue),
        lambda: queue.sync.flush(),
        lambda: queue.sync.get_meta(["x"], 1),
    ):
        with pytest.raises(QueueClosed, match=r"'q' was closed\. Open it again"):
            refused()


EXIT = """
import sys
from persisting_torch import Queue

queue = Queue("q", sys.argv[1])
for x in range(5):
    queue.sync.put({"x": x})
"""


def test_the_end_of_the_interpreter_flushes(tmp_path):
    children.run(EXIT, tmp_path, whole_end=True)
    assert stored(tmp_path) == [0, 1, 2, 3, 4]


def test_an_unhandled_exception_flushes(tmp_path):
    child = children.run(EXIT + "raise ValueError('of the user')\n", tmp_path, status=1)
    assert "ValueError: of the user" in child.err
    assert stored(tmp_path) == [0, 1, 2, 3, 4]


def test_sys_exit_in_the_middle_of_asyncio_flushes(tmp_path):
    children.run(
        """
        import asyncio, sys
        from persisting_torch import Queue

        async def main():
            queue = Queue("q", sys.argv[1], batch_size=3)
            for x in range(5):
                await queue.put({"x": x})
            sys.exit(7)

        asyncio.run(main())
        """,
        tmp_path,
        status=7,
    )
    assert stored(tmp_path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_the_end_of_a_multiprocessing_child_flushes(tmp_path, method):
    (tmp_path / "child.py").write_text(
        "from persisting_torch import Queue\n"
        "def put(path):\n"
        "    queue = Queue('q', path)\n"
        "    for x in range(5):\n"
        "        queue.sync.put({'x': x})\n"
    )
    children.run(
        """
        import multiprocessing, sys

        sys.path.insert(0, sys.argv[1])
        import child

        process = multiprocessing.get_context(sys.argv[2]).Process(
            target=child.put, args=(sys.argv[1],)
        )
        process.start()
        process.join()
        sys.exit(process.exitcode)
        """,
        tmp_path,
        method,
    )
    assert stored(tmp_path) == [0, 1, 2, 3, 4]


PUT_LOOP = """
for x in range(1_000_000):
    queue.sync.put({"x": x})
    print(x, flush=True)
"""
SLEEP = """
for x in range(5):
    queue.sync.put({"x": x})
    print(x, flush=True)
while True:
    time.sleep(100)
"""
ASYNC = """
async def main():
    for x in range(1_000_000):
        await queue.put({"x": x})
        print(x, flush=True)
        if x % 20 == 7:
            await asyncio.sleep(0.01)

asyncio.run(main())
"""
WAIT = """
for x in range(5):
    queue.sync.put({"x": x})
    print(x, flush=True)
for _ in queue.sync.stream(limit=None, wait=True):
    pass
"""
CLAIM = """
for x in range(1_000_000):
    queue.sync.put({"x": x})
    print(x, flush=True)
    queue.sync.get_meta(["x"], 1)
"""


@pytest.mark.parametrize(
    "body",
    [PUT_LOOP, SLEEP, ASYNC, WAIT, CLAIM],
    ids=["in a loop of puts", "in time.sleep", "in asyncio", "in a stream", "in a loop of claims"],
)
def test_sigterm_flushes_every_put_that_returned(tmp_path, body):
    begin = """
import asyncio, sys, time
from persisting_torch import Queue

queue = Queue("q", sys.argv[1], batch_size=10)
"""
    chance = random.Random(body)
    for turn in range(4):
        path = tmp_path / str(turn)
        child = children.start(begin + body, path, whole_end=turn == 0)
        child.await_line()
        time.sleep(chance.uniform(0.0, 0.12))
        child.send(signal.SIGTERM)
        assert child.wait() in (128 + signal.SIGTERM, -signal.SIGTERM), child.err
        assert "Traceback" not in child.err
        put = child.lines
        found = stored(path)
        assert found[: len(put)] == put
        assert len(found) <= len(put) + 1


def test_sigterm_does_not_replace_a_handler_of_the_user(tmp_path):
    child = children.start(
        """
        import signal, sys, time
        from persisting_torch import Queue

        def bye(number, frame):
            sys.exit(9)

        signal.signal(signal.SIGTERM, bye)
        queue = Queue("q", sys.argv[1])
        queue.sync.put({"x": 3})
        print(1, flush=True)
        time.sleep(60)
        """,
        tmp_path,
    )
    child.await_line()
    child.send(signal.SIGTERM)
    assert child.wait() == 9
    assert stored(tmp_path) == [3]


def test_ctrl_c_at_any_moment_loses_nothing_and_leaves_the_queue_usable(tmp_path):
    children.run(
        """
        import random, signal, sys, time
        import numpy as np
        from persisting_torch import Queue

        signal.signal(signal.SIGALRM, signal.default_int_handler)
        chance = random.Random(7)
        queue = Queue("q", sys.argv[1], batch_size=4)
        done, claimed, x = [], [], 0
        ending = time.monotonic() + 4
        interrupts = 0
        while time.monotonic() < ending:
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, 0.03))
                while True:
                    x += 1
                    queue.sync.put({"x": x, "t": np.full(3, x)})
                    done.append(x)
                    if x % 3 == 0:
                        claimed += queue.sync.get_meta(["x"], 2).global_indexes
            except KeyboardInterrupt:
                interrupts += 1
        records = queue.sync.get(limit=10**6)
        found = [record["x"] for record in records]
        assert sorted(set(found)) == sorted(found), "twice"
        assert not set(done) - set(found), "lost"
        assert all((record["t"] == record["x"]).all() for record in records)
        assert len(set(claimed)) == len(claimed), "claimed twice"
        from persisting_torch.queue.report import verify
        assert verify(queue.engine) == []
        assert interrupts > 20
        queue.close()
        """,
        tmp_path,
    )


INTERRUPT = Path(__file__).parents[1] / "interrupt.py"
INTERRUPTED = """
from persisting_torch import Queue
from persisting_torch.queue.report import verify

queue = Queue("q", sys.argv[1], batch_size=2)
queue.sync.put([{"x": 0}, {"x": 0}])
done, x, interrupts = {0}, 0, 0
while True:
    x += 1
    try:
        sys.settrace(Interrupt(interrupts + 1))
        queue.sync.put([{"x": x}, {"x": x}])
        meta = queue.sync.get_meta(["x"], 2)
        queue.sync.get_data(meta)
        list(queue.sync.stream(limit=2, offset=2 * x))
        sys.settrace(None)
        break
    except KeyboardInterrupt:
        interrupts += 1
        queue.sync.put({"x": -1})
        queue.sync.flush()
        queue.sync.get_meta(["x"], 10)
assert verify(queue.engine) == []
found = [record["x"] for record in queue.sync.get(limit=10**6)]
assert all(found.count(each) in (0, 2) for each in range(x + 1)), "half of a put"
queue.close()
print(interrupts)
"""


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="knows the bytecode of Python 3.11")
def test_ctrl_c_wherever_python_looks_for_it_leaves_no_lock_taken(tmp_path):
    child = children.start(INTERRUPT.read_text() + INTERRUPTED, tmp_path)
    assert child.wait(180) == 0, child.err
    assert child.lines[0] > 300


# Failing flushes


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MB that is really full when it is full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1 << 8, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def test_a_flush_to_a_full_disk_raises_and_a_later_one_writes_every_sample_once(small_disk):
    queue = Queue("q", small_disk / "storage", batch_size=10)
    queue.sync.put({"x": 0, "t": torch.zeros(500)})
    queue.sync.flush()
    for x in range(1, 5):
        queue.sync.put({"x": x, "t": torch.full((500,), float(x))})
    ballast = small_disk / "ballast"
    fill(ballast)
    for _ in range(3):
        with pytest.raises(FlushFailed, match=r"'q': 4 samples .*kept in memory; make room"):
            queue.sync.flush()
    assert isinstance(FlushFailed("x"), PersistingError | OSError)
    assert [record["x"] for record in queue.sync.get()] == [0, 1, 2, 3, 4]
    assert len(queue) == 5
    with pytest.raises(FlushFailed):
        queue.close()
    ballast.unlink()
    queue.sync.put({"x": 5, "t": torch.full((500,), 5.0)})
    queue.sync.flush()
    records = queue.sync.get()
    assert [record["x"] for record in records] == [0, 1, 2, 3, 4, 5]
    assert all((record["t"] == record["x"]).all() for record in records)
    queue.close()
    assert stored(small_disk / "storage") == [0, 1, 2, 3, 4, 5]


def test_a_disk_that_fills_at_any_point_of_a_flush_costs_no_sample_and_doubles_none(small_disk):
    queue = Queue("q", small_disk / "storage", batch_size=10_000)
    queue.sync.put({"x": 0, "t": torch.zeros(50)})
    queue.sync.flush()
    ballast = small_disk / "ballast"
    x, failures = 1, 0
    for room in [*range(0, 60, 4), *range(60, 200, 20)]:
        for _ in range(20):
            queue.sync.put({"x": x, "t": torch.full((50,), float(x))})
            x += 1
        fill(ballast)
        size = ballast.stat().st_size
        os.truncate(ballast, max(0, size - room * 1024))
        try:
            queue.sync.flush()
        except FlushFailed:
            failures += 1
        ballast.unlink()
        if room % 8:
            queue.sync.flush()
    assert failures >= 5
    queue.close()
    assert stored(small_disk / "storage") == list(range(x))


def put_many(queue, numbers):
    for x in itertools.islice(numbers, 20_000):
        queue.sync.put({"x": x})


def test_a_put_that_needs_the_full_disk_says_so_and_stores_nothing(small_disk):
    queue = Queue("q", small_disk / "storage", batch_size=10_000)
    queue.sync.put({"x": 0})
    queue.sync.flush()
    ballast = small_disk / "ballast"
    fill(ballast)
    put = itertools.count(1)
    with pytest.raises(PersistingError, match=r"ledger.*'q'.*Make room"):
        put_many(queue, put)
    with pytest.raises(PersistingError, match=r"ledger.*'q'.*Make room"):
        queue.sync.get_meta(["x"], 1)
    ballast.unlink()
    assert queue.sync.get_meta(["x"], 1).size == 1
    queue.close()
    assert stored(small_disk / "storage") == list(range(next(put) - 1))


def test_late_fields_that_cannot_be_written_raise_and_can_be_put_again(small_disk):
    queue = Queue("q", small_disk / "storage", batch_size=10_000)
    meta = queue.sync.put([{"x": x} for x in range(10)])
    values = [{"late": torch.full((2000,), float(x))} for x in range(10)]
    queue.sync.put(values, metadata=meta)
    ballast = small_disk / "ballast"
    fill(ballast)
    newer = [{"late": torch.full((2000,), -1.0 - x)} for x in range(10)]
    with pytest.raises(PersistingError, match=r"'q'.*Make room"):
        queue.sync.put(newer, metadata=meta)
    ballast.unlink()
    assert [record["late"][0].item() for record in queue.sync.get()] == list(range(10))
    queue.sync.put(newer, metadata=meta)
    assert [record["late"][0].item() for record in queue.sync.get()] == [-1 - x for x in range(10)]
    queue.close()


def test_files_that_may_not_grow_make_a_flush_fail_and_nothing_more(tmp_path):
    children.run(
        """
        import resource, signal, sys
        import torch
        from persisting_torch import Queue
        from persisting_torch.errors import FlushFailed

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        queue = Queue("q", sys.argv[1], batch_size=1000)
        for x in range(50):
            queue.sync.put({"x": x, "t": torch.full((20_000,), float(x))})
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        try:
            queue.sync.flush()
        except FlushFailed:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            queue.sync.flush()
            sys.exit(5)
        """,
        tmp_path,
        status=5,
    )
    assert stored(tmp_path) == list(range(50))


@pytest.fixture
def public():
    """A folder that other users can reach."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


@as_root
def test_a_flush_without_permission_raises_and_a_later_one_writes_every_sample_once(public):
    child = children.start(
        """
        import json, os, sys, time
        import torch
        from persisting_torch import Queue
        from persisting_torch.errors import FlushFailed

        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        queue = Queue("q", sys.argv[1])
        queue.sync.put({"x": 0})
        queue.sync.flush()
        queue.sync.put({"x": 1})
        print(1, flush=True)
        while not os.path.exists(sys.argv[1] + "/forbidden"):
            time.sleep(0.005)
        try:
            queue.sync.flush()
        except FlushFailed as error:
            print(json.dumps(str(error)), flush=True)
        while os.path.exists(sys.argv[1] + "/forbidden"):
            time.sleep(0.005)
        queue.sync.put({"x": 2})
        """,
        public,
    )
    child.await_line()
    data = public / "q" / "bucket-0" / "data.lance"
    folders = [data / "data", data / "_versions", data / "_transactions"]
    for folder in folders:
        folder.chmod(0o555)
    (public / "forbidden").touch()
    while len(child.lines) < 2 and child.status is None:
        time.sleep(0.005)
    for folder in folders:
        folder.chmod(0o755)
    (public / "forbidden").unlink()
    assert child.wait() == 0, child.err
    assert "1 samples could not be written" in child.lines[1]
    assert "ermission denied" in child.lines[1]
    assert stored(public) == [0, 1, 2]


def keep_asking(queue, deadline):
    while time.monotonic() < deadline:
        len(queue)
        time.sleep(0.01)


def test_the_failure_of_a_background_flush_is_raised_by_the_next_call_and_made_good(small_disk):
    queue = Queue("q", small_disk / "storage", auto_flush_interval_sec=0.1)
    queue.sync.put({"x": 0, "t": torch.zeros(5000)})
    queue.sync.flush()
    ballast = small_disk / "ballast"
    fill(ballast)
    queue.sync.put({"x": 1, "t": torch.zeros(5000)})
    deadline = time.monotonic() + 20
    with pytest.raises(FlushFailed, match="1 samples"):
        keep_asking(queue, deadline)
    ballast.unlink()
    with Queue("q", small_disk / "storage") as reader:
        while len(reader) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    queue.engine._error = None
    queue.close()
    assert stored(small_disk / "storage") == [0, 1]


def test_what_cannot_be_flushed_at_the_end_is_reported(small_disk):
    child = children.start(
        """
        import os, sys, time
        from persisting_torch import Queue

        queue = Queue("q", sys.argv[1])
        queue.sync.put({"x": 0})
        print(1, flush=True)
        while not os.path.exists(sys.argv[1] + "/go"):
            time.sleep(0.005)
        """,
        small_disk,
    )
    child.await_line()
    (small_disk / "go").touch()
    fill(small_disk / "ballast")
    child.wait()
    assert "1 samples could not be written" in child.err
    (small_disk / "ballast").unlink()
    assert stored(small_disk) == []
