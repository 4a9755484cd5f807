"""Sealed partitions, closed queues, and threads that meet them."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from persisting_torch import (
    Queue,
    QueueClosed,
    QueueSealed,
)
from tests.queue import children


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


def test_a_sealed_partition_takes_no_more_but_keeps_what_waited(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"x": 1}, "train")
        queue.sync.seal("train")
        for data in ({"x": 2}, [{"x": 2}], TensorDict({"y": torch.ones(2)}, batch_size=[2])):
            with pytest.raises(QueueSealed, match=r"q/train"):
                queue.sync.put(data, "train")
        with Queue("q", tmp_path) as other:
            assert other.sync.get() == [{"x": 1}]
            with pytest.raises(QueueSealed, match=r"q/train"):
                other.sync.put({"x": 2}, "train")
        queue.sync.put({"x": 3}, "val")
        queue.sync.seal()
        with pytest.raises(QueueSealed):
            queue.sync.put({"x": 3}, "val")
        queue.sync.seal("train")
        queue.sync.seal()
        assert queue.sync.get() == [{"x": 1}, {"x": 3}]


def test_a_partition_can_be_sealed_before_its_first_sample(queue: Queue):
    queue.sync.seal("never")
    with pytest.raises(QueueSealed, match="q/never"):
        queue.sync.put({"x": 1}, "never")
    assert queue.engine.await_assignment("t", "never", 0, batch_size=1, timeout=0) is None


def test_a_seal_by_another_process_is_seen_within_a_poll(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"x": 1})
        children.run(
            "import sys; from persisting_torch import Queue\n"
            "with Queue('q', sys.argv[1]) as queue: queue.sync.seal('default')",
            tmp_path,
        )
        time.sleep(0.05)
        with pytest.raises(QueueSealed):
            queue.sync.put({"x": 2})


def test_late_fields_reach_samples_of_a_sealed_partition(queue: Queue):
    meta = queue.sync.put([{"x": 1}])
    queue.sync.seal()
    queue.sync.put([{"y": 2}], metadata=meta)
    assert queue.sync.get() == [{"x": 1, "y": 2}]


def test_a_closed_queue_says_so_whatever_is_asked(tmp_path: Path):
    queue = Queue("q", tmp_path)
    meta = queue.sync.put({"x": 1})
    queue.close()
    queue.close()
    calls = [
        lambda: queue.sync.put({"x": 1}),
        lambda: queue.sync.put([{"x": 1}]),
        lambda: queue.sync.put({"y": 1}, metadata=meta),
        lambda: queue.sync.flush(),
        lambda: queue.sync.get(),
        lambda: list(queue.sync.stream()),
        lambda: queue.sync.get_meta(["x"], 1),
        lambda: queue.sync.get_data(meta),
        lambda: queue.sync.mark_consumed("t", meta.global_indexes),
        lambda: queue.sync.reset_consumption("t"),
        lambda: queue.sync.clear(meta.global_indexes),
        lambda: queue.sync.seal(),
        lambda: queue.sync.stats(),
        lambda: len(queue),
        lambda: queue.to_lance(),
        lambda: queue.producer("p").__enter__(),
        lambda: asyncio.run(queue.put({"x": 1})),
        lambda: asyncio.run(queue.reader(0, 1).get()),
    ]
    for call in calls:
        with pytest.raises(QueueClosed, match="'q'"):
            call()
    with Queue("q", tmp_path) as again:
        assert again.sync.get() == [{"x": 1}]


def test_every_put_that_returned_is_there_though_another_thread_closed_the_queue(tmp_path: Path):
    for attempt in range(5):
        path = tmp_path / str(attempt)
        queue = Queue("q", path, batch_size=50)
        put: list[int] = []

        def keep_putting(queue: Queue = queue, put: list[int] = put) -> None:
            while True:
                try:
                    put += queue.sync.put({"x": 1}).global_indexes
                except QueueClosed:
                    return

        threads = [threading.Thread(target=keep_putting) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        queue.close()
        for thread in threads:
            thread.join()
        with Queue("q", path) as again:
            assert len(again) == len(put)


def test_threads_may_put_new_fields_read_and_claim_at_once(tmp_path: Path):
    errors: list[BaseException] = []
    claimed: list[int] = []
    with Queue("q", tmp_path, batch_size=20) as queue:

        def guarded(action: Any) -> None:
            try:
                for step in range(40):
                    action(step)
            except BaseException as error:
                errors.append(error)

        def put(step: int) -> None:
            queue.sync.put([{"x": step, f"f{step}": step}] * 3)
            queue.sync.put(TensorDict({f"t{step}": torch.ones(2)}, batch_size=[2]))

        def claim(step: int) -> None:
            claimed.extend(queue.sync.get_meta(["x"], 5).global_indexes)

        def read(step: int) -> None:
            queue.sync.get(20)
            queue.sync.get_batch(None, 2, f"task {step % 3}")

        actions = [put, put, claim, claim, read]
        threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(queue) == 2 * 40 * 5
        while (meta := queue.sync.get_meta(["x"], 100)).size:
            claimed += meta.global_indexes
        assert len(claimed) == len(set(claimed)) == 2 * 40 * 3
