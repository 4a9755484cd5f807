"""Reading ahead in a thread."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

LONGEST_JOIN_SECONDS = 10.0


class Prefetcher(Iterator[T]):
    """Iterates over `read(stop)`, which runs in a thread, at most `depth` items ahead.

    Items come in their order. What `read` raises is raised by the `next` that follows the items
    read before it. `close`, the end of the items, and the loss of the last reference each set
    `stop` and end the thread.
    """

    def __init__(self, read: Callable[[threading.Event], Iterator[T]], depth: int) -> None:
        self._channel: _Channel[T] = _Channel(depth)
        thread = threading.Thread(
            target=_fill, args=(read, self._channel), name="persisting_torch prefetch", daemon=True
        )
        self._finalizer = weakref.finalize(self, _shut, self._channel, thread)
        thread.start()

    def __next__(self) -> T:
        return self._channel.take()

    def close(self) -> None:
        """Stop the thread and wait for its end."""
        self._finalizer()


class _Channel(Generic[T]):
    """A bounded line of items from one thread to another, which either end may close."""

    def __init__(self, depth: int) -> None:
        self.stop = threading.Event()
        self._depth = depth
        self._items: deque[T] = deque()
        # Taken by itself: a signal in the condition's own __enter__ would leave it taken.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._finished = False
        self._error: BaseException | None = None

    def put(self, item: T) -> None:
        with self._lock:
            self._changed.wait_for(lambda: len(self._items) < self._depth or self.stop.is_set())
            self._items.append(item)
            self._changed.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def take(self) -> T:
        with self._lock:
            self._changed.wait_for(lambda: self._items or self._finished or self.stop.is_set())
            if self._items and not self.stop.is_set():
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        self.stop.set()
        with self._lock:
            self._items.clear()
            self._changed.notify_all()


def _fill(read: Callable[[threading.Event], Iterator[T]], channel: _Channel[T]) -> None:
    try:
        for item in read(channel.stop):
            channel.put(item)
            if channel.stop.is_set():
                break
    except BaseException as error:
        channel.finish(error)
    else:
        channel.finish()


def _shut(channel: _Channel[T], thread: threading.Thread) -> None:
    channel.close()
    if thread is not threading.current_thread():
        thread.join(LONGEST_JOIN_SECONDS)
