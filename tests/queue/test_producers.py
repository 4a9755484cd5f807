"""Producers that fail or die, and queues that are full."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path

import pytest

from persisting_torch import (
    ProducerFailed,
    Queue,
    WaitTimeout,
)
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


def test_puts_wait_while_the_queue_is_full_until_samples_are_consumed(tmp_path: Path):
    with Queue("q", tmp_path, capacity=4) as queue:
        queue.sync.put([{"x": n} for n in range(4)])
        done = threading.Event()

        def put() -> None:
            queue.sync.put({"x": 4})
            done.set()

        thread = threading.Thread(target=put)
        thread.start()
        assert not done.wait(0.3)
        with Queue("q", tmp_path) as consumer:
            assert consumer.sync.get_meta(["x"], 1).size == 1
        assert done.wait(10)
        thread.join()


def test_more_async_puts_than_threads_may_wait_for_room_while_a_consumer_makes_it(
    tmp_path: Path,
):
    async def main() -> list[int]:
        async with Queue("q", tmp_path, capacity=2) as queue:
            puts = [asyncio.create_task(queue.put({"x": n})) for n in range(40)]
            taken: list[int] = []
            while len(taken) < 40:
                meta = await queue.get_meta(["x"], 8)
                taken += meta.global_indexes
                await asyncio.sleep(0.005)
            await asyncio.gather(*puts)
            return taken

    taken = asyncio.run(asyncio.wait_for(main(), 60))
    assert len(set(taken)) == 40
