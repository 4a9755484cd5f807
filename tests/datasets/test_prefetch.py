from __future__ import annotations

import gc
import itertools
import threading
import time

import pytest

from persisting_torch.datasets.prefetch import Prefetcher


class Counter:
    """Yields 0, 1, 2, ... and remembers how far it was read."""

    def __init__(self, end: int | None = None, error: BaseException | None = None) -> None:
        self.read = 0
        self.end = end
        self.error = error
        self.thread: threading.Thread | None = None
        self.stopped = threading.Event()

    def __call__(self, stop):
        self.thread = threading.current_thread()
        try:
            for number in itertools.count():
                if number == self.end:
                    break
                self.read += 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.stopped.set()


def eventually(condition) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_items_come_in_order_and_end():
    assert list(Prefetcher(Counter(100), 3)) == list(range(100))


def test_it_reads_at_most_depth_items_ahead_and_one_in_hand():
    counter = Counter()
    prefetcher = Prefetcher(counter, 3)
    assert eventually(lambda: counter.read == 4)
    time.sleep(0.05)
    assert counter.read == 4
    assert next(prefetcher) == 0
    assert eventually(lambda: counter.read == 5)
    prefetcher.close()


def test_an_exception_follows_the_items_read_before_it_and_ends_the_iteration():
    prefetcher = Prefetcher(Counter(2, error=KeyError("lost")), 5)
    assert [next(prefetcher), next(prefetcher)] == [0, 1]
    with pytest.raises(KeyError, match="lost"):
        next(prefetcher)
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_close_ends_a_thread_that_is_ahead_at_once():
    counter = Counter()
    prefetcher = Prefetcher(counter, 1)
    next(prefetcher)
    began = time.monotonic()
    prefetcher.close()
    assert counter.thread is not None
    assert not counter.thread.is_alive()
    assert time.monotonic() - began < 10
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_close_stops_a_thread_that_waits_for_data():
    waits = threading.Event()

    def read(stop):
        waits.set()
        stop.wait(60)
        yield from ()

    prefetcher = Prefetcher(read, 1)
    waits.wait(5)
    began = time.monotonic()
    prefetcher.close()
    assert time.monotonic() - began < 10


def test_close_in_another_thread_wakes_the_one_that_waits_for_an_item():
    def read(stop):
        stop.wait(60)
        yield from ()

    prefetcher = Prefetcher(read, 1)
    threading.Timer(0.05, prefetcher.close).start()
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_the_thread_ends_when_nobody_holds_the_prefetcher():
    counter = Counter()
    for number in Prefetcher(counter, 2):
        if number == 3:
            break
    gc.collect()
    assert counter.stopped.wait(5)
    assert eventually(lambda: not counter.thread.is_alive())
