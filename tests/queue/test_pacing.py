"""Puts that wait for their consumers, or are refused; and those who would wait for each other."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from persisting_torch import (
    BaseSampler,
    GRPOGroupNSampler,
    KVInterface,
    Queue,
    QueueFull,
    QueueSealed,
    WaitTimeout,
)
from tests.queue import children


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


@contextmanager
def waiting(call: Callable[[], Any]) -> Iterator[list[BaseException]]:
    """Runs the call in a thread, which has to be waiting when the block begins; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), raised
    yield raised
    thread.join(20)
    assert not thread.is_alive()


def numbers(count: int) -> list[dict[str, int]]:
    return [{"x": number} for number in range(count)]


def test_a_full_queue_refuses_puts_where_that_is_wanted(tmp_path: Path):
    with Queue("q", tmp_path, capacity=4, when_full="raise") as queue:
        queue.sync.put(numbers(4))
        with pytest.raises(
            QueueFull, match=r"no task has taken any of the 4 samples of q/default.*capacity is 4"
        ):
            queue.sync.put({"x": 4})
        assert queue.sync.get_meta(["x"], 1, "train").size == 1
        queue.sync.put({"x": 4})
        with pytest.raises(QueueFull, match=r"task 'train' is 4 samples of q/default behind"):
            KVInterface(queue).sync.kv_put("key", {"x": 5}, "default")
        assert len(queue) == 5


def test_a_put_that_finds_no_room_in_its_time_says_who_lags_and_since_when(tmp_path: Path):
    with Queue("q", tmp_path, capacity=4, put_timeout=1.3) as queue:
        queue.sync.put(numbers(6))
        queue.sync.get_meta(["x"], 2, "train")
        queue.sync.get_meta(["x"], 4, "score")
        began = time.monotonic()
        with pytest.raises(WaitTimeout) as caught:
            queue.sync.put({"x": 6})
        assert 1.2 < time.monotonic() - began < 10
        told = str(caught.value)
        assert told.startswith("waited 1 s to put into q/default: task 'train' is 4 samples of")
        assert "capacity is 4" in told
        assert "None was taken for 1 s" in told


def test_a_put_goes_in_whole_whatever_its_size(tmp_path: Path):
    with Queue("q", tmp_path, capacity=4, when_full="raise") as queue:
        assert queue.sync.put(numbers(3)).size == 3
        assert queue.sync.put(numbers(20)).size == 20
        with pytest.raises(QueueFull):
            queue.sync.put(numbers(1))
        assert queue.sync.get_meta(["x"], 20).size == 20
        assert queue.sync.put(numbers(20)).size == 20


def test_a_put_that_waits_learns_of_the_seal(tmp_path: Path):
    with Queue("q", tmp_path, capacity=2) as queue:
        queue.sync.put(numbers(2))
        with waiting(lambda: queue.sync.put({"x": 2})) as raised, Queue("q", tmp_path) as other:
            other.sync.seal()
        assert isinstance(raised[0], QueueSealed)


def test_samples_that_lack_fields_hold_room_until_they_are_taken(tmp_path: Path):
    with Queue("q", tmp_path, capacity=4, when_full="raise") as queue:
        meta = queue.sync.put(numbers(4))
        assert queue.sync.get_meta(["x"], 4, "score").size == 4
        assert queue.sync.get_meta(["reward"], 4, "train").size == 0
        queue.sync.put([{"reward": 1.0}] * 2, metadata=meta.select_samples([0, 1]))
        assert queue.sync.get_meta(["reward"], 4, "train").size == 2
        queue.sync.put(numbers(2))
        with pytest.raises(QueueFull, match="'train' is 4 samples"):
            queue.sync.put(numbers(1))


def test_leased_samples_hold_no_room_and_returned_ones_do(tmp_path: Path):
    with Queue("q", tmp_path, capacity=4, when_full="raise") as queue:
        queue.sync.put(numbers(4))
        with contextlib.suppress(ZeroDivisionError), queue.producer("one"):
            assert queue.sync.get_meta(["x"], 4, "work").size == 4
            queue.sync.put(numbers(3))
            raise ZeroDivisionError
        with pytest.raises(QueueFull, match="'work' is 7 samples"):
            queue.sync.put(numbers(1))


class Lazy(BaseSampler):
    """Takes every second sample; the others are dropped, or left for good."""

    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        self.drops = drops

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        fresh = [index for index in ready_indexes if index % 2 == 0]
        taken = fresh[:batch_size]
        if self.drops and taken:
            return taken, [index for index in ready_indexes if index <= taken[-1] + 1]
        return taken, taken


def test_dropped_samples_hold_no_room(tmp_path: Path):
    with Queue("q", tmp_path, capacity=8, when_full="raise") as queue:
        for _ in range(5):
            queue.sync.put(numbers(8))
            assert queue.sync.get_meta(["x"], 4, "train", sampler=Lazy(drops=True)).size == 4
        assert queue.sync.stats()["tasks"]["train"]["default"]["available"] == 0


def test_with_half_a_sample_per_insert_those_that_are_left_for_good_hold_no_room(tmp_path: Path):
    sampler = Lazy(drops=False)
    with Queue("q", tmp_path, capacity=8, samples_per_insert=0.5, when_full="raise") as queue:
        for _ in range(5):
            queue.sync.put(numbers(16))
            with pytest.raises(QueueFull, match=r"q/default.*is 8, at 0\.5 samples per insert"):
                queue.sync.put(numbers(1))
            assert queue.sync.get_meta(["x"], 8, "train", sampler=sampler).size == 8
    with (
        Queue("q", tmp_path, capacity=8, when_full="raise") as queue,
        pytest.raises(QueueFull, match="40 samples"),
    ):
        queue.sync.put(numbers(1))


def test_a_partition_that_no_task_takes_from_leaves_the_others_their_room(tmp_path: Path):
    with Queue("q", tmp_path, capacity=4, when_full="raise") as queue:
        queue.sync.put(numbers(100), "val")
        with pytest.raises(QueueFull, match="q/val"):
            queue.sync.put(numbers(1), "val")
        queue.sync.put(numbers(4), "train_0")
        queue.sync.get_meta(["x"], 2, "train", "train_0")
        queue.sync.put(numbers(2), "train_1")
        with pytest.raises(QueueFull, match="train_1"):
            queue.sync.put(numbers(1), "train_1")


@pytest.mark.parametrize("sampler", [None, GRPOGroupNSampler(8)], ids=["samples", "a group"])
def test_a_batch_for_which_there_can_be_no_room_is_refused(tmp_path: Path, sampler: BaseSampler):
    with Queue("q", tmp_path, capacity=4) as producer, Queue("q", tmp_path) as trainer:
        stop = threading.Event()

        def put() -> None:
            while not stop.is_set():
                producer.sync.put({"x": 1})

        def train() -> None:
            trainer.engine.await_assignment(
                "train", "default", 0, batch_size=8, sampler=sampler, timeout=60
            )

        with waiting(put) as put_raised:
            with waiting(train) as raised:
                pass
            stop.set()
            trainer.sync.get_meta(["x"], 4, "train")
        assert put_raised == []
        assert isinstance(raised[0], QueueFull)
        assert "'train' asks for 8 samples of q/default" in str(raised[0])
        assert "capacity is 4" in str(raised[0])


def test_a_trainer_that_waits_for_fields_tells_that_puts_wait_for_room(tmp_path: Path):
    with Queue("q", tmp_path, capacity=4, put_timeout=6) as producer:
        producer.sync.put(numbers(4))
        with (
            Queue("q", tmp_path) as trainer,
            waiting(lambda: producer.sync.put({"x": 4})),
            pytest.raises(WaitTimeout, match=r"4 lack reward.*puts wait for room.*is 4"),
        ):
            trainer.engine.await_assignment(
                "train", "default", 0, batch_size=4, fields=["reward"], timeout=3.5
            )


PUT = """
import sys
from persisting_torch import Queue
queue = Queue("q", sys.argv[1], capacity=6, put_timeout=30)
count = 0
while True:
    queue.sync.put({"x": 1})
    count += 1
    print(count, flush=True)
"""


def test_processes_share_the_room_and_each_gets_its_turn(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        putters = [children.start(PUT, tmp_path) for _ in range(3)]
        for each in putters:
            each.await_line()
        deadline = time.monotonic() + 60
        while len(queue) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(queue) >= 6
        taken = most = 0
        while taken < 120 and time.monotonic() < deadline:
            most = max(most, len(queue) - taken)
            taken += queue.sync.get_meta(["x"], 1, "train").size
            time.sleep(0.01)
        for each in putters:
            each.send(signal.SIGKILL)
            each.wait()
        assert taken == 120
        assert most <= 6 + 3
        shares = [each.lines[-1] for each in putters]
        assert min(shares) > max(shares) / 10, shares


def test_what_is_trained_is_at_most_so_many_versions_old(tmp_path: Path):
    ahead, batch_size = 2, 8
    trained = 0
    stop = threading.Event()

    def produce() -> None:
        with Queue("q", tmp_path, capacity=ahead * batch_size) as queue:
            while not stop.is_set():
                queue.sync.put({"version": trained})

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        with Queue("q", tmp_path) as queue:
            oldest = 0
            for k in range(12):
                deadline = time.monotonic() + 30
                while len(queue) < (k + ahead) * batch_size and time.monotonic() < deadline:
                    time.sleep(0.01)
                found = queue.engine.await_assignment(
                    "train", "default", k, batch_size=batch_size, timeout=30
                )
                batch = queue.engine.read_batch("default", found.slices[0], ["version"])
                oldest = max(oldest, int((trained - batch["version"]).max()))
                trained += 1
            stop.set()
            queue.sync.get_meta(None, 1000, "train")
    finally:
        stop.set()
        thread.join(30)
    assert 1 <= oldest <= ahead + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_insert": 0.5}, "without capacity"),
        ({"samples_per_insert": 2.0, "capacity": 8}, "at most 1"),
        ({"samples_per_insert": 0.0, "capacity": 8}, "above 0"),
        ({"when_full": "drop", "capacity": 8}, "'wait' or 'raise'"),
        ({"put_timeout": -1.0, "capacity": 8}, "put_timeout"),
    ],
)
def test_a_pace_that_makes_no_sense_is_refused(tmp_path: Path, options: Any, message: str):
    with pytest.raises(ValueError, match=message):
        Queue("q", tmp_path, **options)
