"""Producers that fail, die or are silent, and those who wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from persisting_torch import (
    PersistingError,
    ProducerFailed,
    Queue,
    WaitTimeout,
)
from persisting_torch.queue import producers, registry
from tests.queue import children


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


def put_and_fail(queue: Queue) -> None:
    queue.sync.put([{"x": 1}, {"x": 2}])
    raise ZeroDivisionError("division by zero")


def test_a_failed_producer_reaches_the_one_who_waits(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=30)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        with pytest.raises(ZeroDivisionError), queue.producer("rollout-1"):
            put_and_fail(queue)
        thread.join(10)
        assert len(failed) == 1
        assert isinstance(failed[0], ProducerFailed)
        assert "rollout-1" in str(failed[0])
        assert "ZeroDivisionError: division by zero" in str(failed[0])


def test_a_wait_goes_on_while_another_producer_lives(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        with pytest.raises(ZeroDivisionError), queue.producer("one"):
            raise ZeroDivisionError
        with queue.producer("two"), pytest.raises(WaitTimeout):
            queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=1.2)
        with pytest.raises(ProducerFailed, match="one"):
            queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=10)
        with queue.producer("one"), pytest.raises(WaitTimeout):
            queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=1.2)


def test_samples_that_suffice_are_given_though_the_producer_has_failed(queue: Queue):
    with pytest.raises(ZeroDivisionError), queue.producer("one"):
        put_and_fail(queue)
    assert queue.engine.await_assignment("t", "default", 0, batch_size=2, timeout=5) is not None


def test_a_killed_producer_reaches_the_one_who_waits_in_another_process(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        producer = children.start(
            "import sys, time; from persisting_torch import Queue\n"
            "queue = Queue('q', sys.argv[1])\n"
            "with queue.producer('rollout-7'):\n"
            "    queue.sync.put({'x': 1}); queue.sync.flush(); print(1, flush=True)\n"
            "    time.sleep(60)",
            tmp_path,
        )
        producer.await_line()
        with pytest.raises(WaitTimeout):
            queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=1.2)
        producer.send(signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(ProducerFailed, match=f"rollout-7.*{producer.pid}.*died"):
            queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=30)
        assert time.monotonic() - start < 10


def test_producers_are_checked_though_other_news_keeps_coming(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        with pytest.raises(ZeroDivisionError), queue.producer("one"):
            raise ZeroDivisionError
        stop = threading.Event()

        def chatter() -> None:
            while not stop.wait(0.1):
                queue.sync.put({"x": 1}, "other")
                queue.sync.flush()

        thread = threading.Thread(target=chatter)
        thread.start()
        try:
            with pytest.raises(ProducerFailed):
                queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=8)
        finally:
            stop.set()
            thread.join()


PRODUCE = """
import os, signal, sys, time
from persisting_torch import Queue
queue = Queue("q", sys.argv[1])
with queue.producer(sys.argv[2]):
    print(1, flush=True)
    {does}
    time.sleep(60)
"""


def produce(path: Path, name: str = "one", does: str = "pass") -> children.Child:
    child = children.start(PRODUCE.format(does=does), path, name)
    child.await_line()
    return child


def wait(queue: Queue, timeout: float) -> None:
    queue.engine.await_assignment("t", "default", 0, batch_size=4, timeout=timeout)


@contextmanager
def failing(queue: Queue, name: str, *, essential: bool = False) -> Iterator[None]:
    with (
        contextlib.suppress(ZeroDivisionError),
        queue.producer(name, essential=essential),
    ):
        yield
        raise ZeroDivisionError("by zero")


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever says nothing for a second and a half counts as silent, for this process."""
    monkeypatch.setattr(registry, "SILENT_SECONDS", 1.5)


def test_a_stopped_producer_reaches_the_one_who_waits_and_may_go_on(
    queue: Queue, tmp_path: Path, short_silence: None
):
    child = produce(tmp_path, does="os.kill(os.getpid(), signal.SIGSTOP)")
    with pytest.raises(ProducerFailed, match=f"one failed: process {child.pid} .*stopped.*SIGSTOP"):
        wait(queue, 30)
    child.send(signal.SIGCONT)
    time.sleep(1.5)
    with pytest.raises(WaitTimeout):
        wait(queue, 2.5)
    child.send(signal.SIGKILL)


@pytest.mark.slow
def test_a_stop_of_some_seconds_is_no_failure(queue: Queue, tmp_path: Path):
    child = produce(tmp_path, does="os.kill(os.getpid(), signal.SIGSTOP)")
    with pytest.raises(WaitTimeout):
        wait(queue, 6)
    child.send(signal.SIGCONT)
    with pytest.raises(WaitTimeout):
        wait(queue, 8)
    child.send(signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(ProducerFailed, match="stopped"):
        wait(queue, 60)
    assert time.monotonic() - begin < 20
    child.send(signal.SIGKILL)


def test_a_host_that_is_lost_reaches_the_one_who_waits(
    queue: Queue, tmp_path: Path, short_silence: None
):
    child = produce(tmp_path, does="os.kill(os.getpid(), signal.SIGSTOP)")
    with queue.engine.ledger.transaction() as tx:
        tx.execute("UPDATE producers SET host = 'elsewhere'")
    with pytest.raises(ProducerFailed, match=r"one failed: .* on another host was not heard"):
        wait(queue, 30)
    child.send(signal.SIGKILL)


def test_an_essential_producer_that_fails_is_enough(queue: Queue):
    with queue.producer("two"):
        with failing(queue, "judge", essential=True):
            pass
        with pytest.raises(ProducerFailed, match=r"essential.*judge failed: ZeroDivisionError"):
            wait(queue, 30)
        with queue.producer("judge", essential=True), pytest.raises(WaitTimeout):
            wait(queue, 1.2)


def test_a_producer_that_is_done_has_not_failed(queue: Queue):
    with queue.producer("one"):
        pass
    with pytest.raises(WaitTimeout):
        wait(queue, 1.2)


def test_blocks_of_one_process_fail_one_by_one(queue: Queue):
    with queue.producer("one"):
        with failing(queue, "two"), queue.producer("three"):
            figures = queue.sync.stats()["producers"]
            assert {name: each["state"] for name, each in figures.items()} == {
                "one": "alive",
                "two": "alive",
                "three": "alive",
            }
        with pytest.raises(WaitTimeout):
            wait(queue, 1.2)
    with pytest.raises(ProducerFailed, match=r"is left: two failed: ZeroDivisionError: by zero\."):
        wait(queue, 30)


def test_a_name_belongs_to_one_living_producer(queue: Queue, tmp_path: Path):
    child = produce(tmp_path)
    with pytest.raises(PersistingError, match=f"'one'.*process {child.pid} already"):
        queue.producer("one").__enter__()
    with (
        queue.producer("two"),
        pytest.raises(PersistingError, match=f"'two'.*process {os.getpid()}"),
    ):
        queue.producer("two").__enter__()
    child.send(signal.SIGKILL)
    child.wait()
    with queue.producer("one"), pytest.raises(WaitTimeout):
        wait(queue, 1.2)


def test_producers_that_ended_long_ago_are_forgotten(queue: Queue):
    with queue.engine.ledger.transaction() as tx:
        tx.executemany(
            "INSERT INTO producers VALUES (?, '', 0, 0, '', ?, ?, NULL, 0)",
            [
                *((f"long-{n}", time.time() - 90_000, "failed") for n in range(10)),
                *((f"done-{n}", time.time() - n, "done") for n in range(300)),
            ],
        )
    with queue.producer("one"):
        names = set(queue.sync.stats()["producers"])
    assert names == {"one", *(f"done-{n}" for n in range(256))}


def test_whoever_opens_a_queue_gives_producers_of_an_earlier_run_time_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with Queue("q", tmp_path) as queue:
        with failing(queue, "one"):
            pass
        produce(tmp_path, "two", "os.kill(os.getpid(), signal.SIGKILL)").wait()
        with queue.engine.ledger.transaction() as tx:
            tx.execute("UPDATE producers SET beat = beat - 3600")
    with Queue("q", tmp_path) as queue:
        with pytest.raises(WaitTimeout):
            wait(queue, 2.5)
        monkeypatch.setattr(producers, "GRACE_SECONDS", 1.0)
        with pytest.raises(ProducerFailed, match=r"one failed.*two failed: process .* died"):
            wait(queue, 30)


def test_a_producer_beats_about_once_a_second(queue: Queue):
    with queue.producer("one"), queue.producer("two"):
        before = queue.engine.ledger.own_changes()
        beats = set()
        for _ in range(30):
            time.sleep(0.1)
            with queue.engine.ledger.reading() as tx:
                beats |= set(tx.execute("SELECT beat FROM producers WHERE name = 'one'"))
        assert 2 <= len(beats) <= 5
        assert queue.engine.ledger.own_changes() - before <= 10


def test_a_beat_brings_no_producer_back_that_has_just_ended(queue: Queue):
    stop = threading.Event()

    def beat() -> None:
        while not stop.is_set():
            queue.engine.producers.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    for number in range(30):
        with queue.producer(f"producer-{number}"):
            pass
    stop.set()
    thread.join()
    states = {each["state"] for each in queue.sync.stats()["producers"].values()}
    assert states == {"done"}


def test_a_stream_that_waits_hears_of_the_failure(queue: Queue):
    with failing(queue, "one"):
        queue.sync.put({"x": 1})
    stream = queue.sync.stream(limit=None, wait=True)
    assert next(stream) == [{"x": 1}]
    with pytest.raises(ProducerFailed, match="one"):
        next(stream)
    assert list(queue.sync.stream(limit=None)) == [[{"x": 1}]]


def test_async_streams_and_readers_that_wait_hear_of_it_too(tmp_path: Path):
    async def main() -> None:
        async with Queue("q", tmp_path) as queue:
            with contextlib.suppress(ZeroDivisionError), queue.producer("one"):
                await queue.put({"x": 1})
                raise ZeroDivisionError
            stream = queue.stream(limit=None, wait=True)
            assert await anext(stream) == [{"x": 1}]
            with pytest.raises(ProducerFailed):
                await anext(stream)
            reader = queue.reader(0, 1)
            assert await reader.get(wait=True) == [{"x": 1}]
            with pytest.raises(ProducerFailed):
                await reader.get(wait=True)

    asyncio.run(asyncio.wait_for(main(), 30))
