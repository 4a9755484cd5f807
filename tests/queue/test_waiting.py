"""Waiting for news: how fast it comes, what it costs, how it ends, what it says."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from persisting_torch import Queue, QueueClosed, WaitTimeout
from tests.queue import children


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


def in_thread(action: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run an action in a thread; its answer or its error comes into the list."""
    answers: list[Any] = []

    def work() -> None:
        try:
            answers.append(action())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, answers


def test_an_async_stream_wakes_within_5_ms_of_a_put_in_the_same_process(queue: Queue):
    async def main() -> list[float]:
        delays = []

        async def read() -> None:
            async for records in queue.stream(15, wait=True, timeout=20):
                delays.extend(time.monotonic() - record["at"] for record in records)

        reading = asyncio.create_task(read())
        for _ in range(15):
            await asyncio.sleep(0.02)
            await queue.put({"at": time.monotonic()})
        await reading
        return delays

    delays = asyncio.run(main())
    assert len(delays) == 15
    assert statistics.median(delays) < 0.005


def test_a_stream_in_a_thread_wakes_within_5_ms_of_a_put_in_the_same_process(queue: Queue):
    def read() -> list[float]:
        return [
            time.monotonic() - record["at"]
            for records in queue.sync.stream(15, wait=True, timeout=20)
            for record in records
        ]

    thread, answers = in_thread(read)
    for _ in range(15):
        time.sleep(0.02)
        queue.sync.put({"at": time.monotonic()})
    thread.join(20)
    assert len(answers[0]) == 15
    assert statistics.median(answers[0]) < 0.005


def test_a_stream_wakes_within_50_ms_of_a_flush_in_another_process(tmp_path: Path, queue: Queue):
    child = children.start(
        """
        import sys, time
        from persisting_torch import Queue
        with Queue("q", sys.argv[1]) as queue:
            for _ in range(15):
                time.sleep(0.03)
                queue.sync.put({"x": 1})
                queue.sync.flush()
                print(time.time(), flush=True)
        """,
        tmp_path,
    )
    woken = [
        time.time() for records in queue.sync.stream(15, wait=True, timeout=20) for _ in records
    ]
    assert child.wait() == 0
    flushed = child.lines
    assert len(woken) == len(flushed) == 15
    delays = [at - since for at, since in zip(woken, flushed, strict=True)]
    assert statistics.median(delays) < 0.05


def test_timeout_ends_a_wait_for_records(queue: Queue):
    queue.sync.put({"x": 1})
    start = time.monotonic()
    assert list(queue.sync.stream(5, wait=True, timeout=0.2)) == [[{"x": 1}]]
    assert 0.2 <= time.monotonic() - start < 5

    async def main() -> list[Any]:
        return [records async for records in queue.stream(5, wait=True, timeout=0.1)]

    assert asyncio.run(main()) == [[{"x": 1}]]


def test_timeout_counts_from_the_last_record_whatever_other_news_there_is(queue: Queue):
    stop = threading.Event()

    def chatter() -> None:
        while not stop.wait(0.02):
            queue.sync.reset_consumption("t")
            queue.sync.mark_consumed("t", [])

    thread, _ = in_thread(chatter)
    start = time.monotonic()
    assert list(queue.sync.stream(5, wait=True, timeout=0.3)) == []
    assert time.monotonic() - start < 5
    stop.set()
    thread.join()


def test_waiting_costs_next_to_no_processor_time(queue: Queue):
    def cost(wait: Callable[[], Any]) -> float:
        before = time.process_time()
        wait()
        return time.process_time() - before

    async def stream() -> None:
        async for _ in queue.stream(5, wait=True, timeout=1):
            pass

    def assignment() -> None:
        with pytest.raises(WaitTimeout):
            queue.engine.await_assignment("t", "default", 0, batch_size=1, timeout=1)

    assert cost(lambda: list(queue.sync.stream(5, wait=True, timeout=1))) < 0.3
    assert cost(lambda: asyncio.run(stream())) < 0.3
    assert cost(assignment) < 0.3


def test_a_put_wakes_the_one_who_waits_for_a_global_batch(queue: Queue):
    def ask() -> Any:
        return queue.engine.await_assignment("t", "default", 0, batch_size=3, timeout=20)

    thread, answers = in_thread(ask)
    indexes: list[int] = []
    for _ in range(3):
        time.sleep(0.02)
        indexes += queue.sync.put({"x": 1}).global_indexes
    thread.join(10)
    assert answers[0].slices == (tuple(indexes),)


def test_the_error_of_a_wait_for_a_global_batch_says_what_is_missing(queue: Queue):
    with queue.producer("rollout-3"):
        queue.sync.put([{"ids": n, "reward": 1.0} for n in range(4)], "train_0")
        queue.sync.put([{"ids": n} for n in range(3)], "train_0")
    with pytest.raises(WaitTimeout) as raised:
        queue.engine.await_assignment(
            "actor", "train_0", 0, batch_size=8, fields=["ids", "reward"], timeout=0.1
        )
    text = str(raised.value)
    assert "waited 0.1 s for 8 samples of q/train_0 with fields ids, reward" in text
    assert "task 'actor'" in text
    assert "4 ready, 3 lack reward; last put 0 s ago by producer rollout-3" in text
    with pytest.raises(WaitTimeout, match="0 ready"):
        queue.engine.await_assignment("actor", "other", 0, batch_size=8, timeout=0)


def test_a_wait_on_an_empty_queue_says_that_nothing_was_ever_put(queue: Queue):
    with pytest.raises(WaitTimeout, match="nothing was ever put"):
        queue.engine.await_assignment("t", "default", 0, batch_size=8, timeout=0)


def test_stop_a_seal_and_a_close_end_a_wait_for_a_global_batch(tmp_path: Path):
    for end in ("stop", "seal", "close", "seal by another handle"):
        with Queue("q", tmp_path / end) as queue, Queue("q", tmp_path / end) as other:
            stop = threading.Event()

            def ask(queue: Queue = queue, stop: threading.Event = stop) -> Any:
                return queue.engine.await_assignment(
                    "t", "default", 0, batch_size=3, timeout=30, stop=stop
                )

            thread, answers = in_thread(ask)
            time.sleep(0.05)
            start = time.monotonic()
            if end == "stop":
                stop.set()
            elif end == "seal":
                queue.sync.seal("default")
            elif end == "close":
                queue.close()
            else:
                other.sync.seal()
            thread.join(20)
            assert time.monotonic() - start < 10
            if end == "close":
                assert isinstance(answers[0], QueueClosed)
            else:
                assert answers == [None]


def test_a_close_ends_streams_that_wait(tmp_path: Path):
    async def stream(queue: Queue) -> None:
        async for _ in queue.stream(5, wait=True):
            pass

    for wait in (
        lambda queue: list(queue.sync.stream(5, wait=True)),
        lambda queue: asyncio.run(stream(queue)),
    ):
        queue = Queue("q", tmp_path)
        thread, answers = in_thread(lambda wait=wait, queue=queue: wait(queue))
        time.sleep(0.05)
        start = time.monotonic()
        queue.close()
        thread.join(20)
        assert time.monotonic() - start < 10
        assert isinstance(answers[0], QueueClosed)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is said after a tenth of a second."""
    for name in ("stream.FIRST_NOTICE_OF_A_STREAM_SECONDS", "producers.CHECK_SECONDS"):
        monkeypatch.setattr(f"persisting_torch.queue.{name}", 0.1)


@pytest.mark.usefixtures("soon")
def test_a_stream_without_a_limit_says_in_the_log_what_is_missing(
    queue: Queue, caplog: pytest.LogCaptureFixture
):
    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    async def read() -> list[Any]:
        return [records async for records in queue.stream(1, offset=1, wait=True)]

    async def read_share() -> list[Any]:
        return await queue.reader(0, 1).get(1, wait=True)

    thread, answers = in_thread(lambda: list(queue.sync.stream(1, wait=True)))
    await_that(told)
    assert "still waiting: waited 0.1 s for further records of queue 'q' at " in told()[0]
    assert "0 samples are flushed; nothing was ever put. Start or check" in told()[0]
    queue.sync.put({"x": 1})
    thread.join(20)
    assert answers == [[[{"x": 1}]]]

    with queue.producer("rollout-3"):
        queue.sync.flush()
        caplog.clear()
        thread, answers = in_thread(lambda: asyncio.run(read()))
        await_that(told)
        assert "1 samples are flushed; last put " in told()[0]
        assert "by producer rollout-3; producers that live: rollout-3. Start" in told()[0]
        queue.sync.put({"x": 2})
        thread.join(20)
        assert answers == [[[{"x": 2}]]]

        queue.sync.clear([0, 1])
        caplog.clear()
        thread, answers = in_thread(lambda: asyncio.run(read_share()))
        await_that(told)
        queue.sync.put({"x": 3})
        thread.join(20)
        assert answers == [[{"x": 3}]]


@pytest.mark.usefixtures("soon")
def test_what_a_stream_misses_is_said_ever_more_rarely(
    queue: Queue, caplog: pytest.LogCaptureFixture
):
    assert list(queue.sync.stream(1, wait=True, timeout=1.0)) == []
    waited = [record.getMessage().split(" s ")[0].split()[-1] for record in caplog.records]
    assert waited
    assert waited == ["0.1", "0.2", "0.4", "0.8"][: len(waited)]


def test_a_seal_of_the_whole_queue_ends_streams_that_wait(tmp_path: Path):
    async def stream(queue: Queue) -> list[Any]:
        return [records async for records in queue.stream(5, wait=True)]

    async def share(queue: Queue) -> list[Any]:
        return [records async for records in queue.reader(0, 1).stream(5, wait=True)]

    waits: list[Callable[[Queue], Any]] = [
        lambda queue: list(queue.sync.stream(5, wait=True)),
        lambda queue: asyncio.run(stream(queue)),
        lambda queue: asyncio.run(share(queue)),
    ]
    for number, wait in enumerate(waits):
        with Queue("q", tmp_path / str(number)) as queue:
            queue.sync.put({"x": 1}, "a")
            thread, answers = in_thread(lambda wait=wait, queue=queue: wait(queue))
            time.sleep(0.05)
            queue.sync.seal("a")
            thread.join(0.3)
            assert thread.is_alive()  # another partition may come
            queue.sync.put({"x": 2}, "b")
            queue.sync.seal()
            thread.join(20)
            read = [record["x"] for records in answers[0] for record in records]
            assert read == [1, 2]
            assert list(queue.sync.stream(5, offset=3, wait=True)) == []


def await_that(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
