"""Of the nodes that are asked for a new queue at the same moment, one makes it.

Each node may have storage of its own, so no file can decide. A node says that it is about to make
the queue before it asks the others whether they have it or are about to, too; so of two at least
one sees the other. The smaller name yields then. The larger one waits until nobody else is at it,
for the smaller one may have asked too early to see it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from persisting_torch.errors import BucketUnavailable

if TYPE_CHECKING:
    from persisting_torch.cluster.keeping import Key

YIELD_SECONDS = 1.0  # for which a node that has yielded does not try again
WAIT_SECONDS = 2.0
PAUSE_SECONDS = 0.02


class Told(NamedTuple):
    """What another node says of a queue."""

    name: str
    known: bool
    making: bool


class Making:
    """Which queues a node is about to make."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._now: Counter[Key] = Counter()
        self._yielded: dict[Key, float] = {}

    def is_at(self, key: Key) -> bool:
        """Whether the queue is being made here; to be asked before whether it is there."""
        return self._now[key] > 0

    @contextmanager
    def alone(self, key: Key, ask: Callable[[], Sequence[Told]]) -> Iterator[None]:
        """For the block, in which the queue is made, no other node makes it.

        `ask` answers what the others say. Raises BucketUnavailable where one of them has it
        already, or is to make it: whoever wants it asks again.
        """
        if time.monotonic() < self._yielded.get(key, 0.0):
            raise BucketUnavailable(f"another node is making queue {key.queue!r}.")
        with self._lock:
            self._now[key] += 1
        try:
            self._await_others(key, ask)
            yield
        finally:
            with self._lock:
                self._now[key] -= 1
                self._now += Counter()  # keeps nothing of what is done

    def _await_others(self, key: Key, ask: Callable[[], Sequence[Told]]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            told = ask()
            if any(one.known for one in told):
                raise BucketUnavailable(f"{key} lies on storage that {self._name} does not see.")
            others = [one.name for one in told if one.making]
            if not others:
                self._yielded.pop(key, None)
                return
            if max(others) > self._name or time.monotonic() > deadline:
                self._yielded[key] = time.monotonic() + YIELD_SECONDS
                raise BucketUnavailable(f"{max(others)} is making queue {key.queue!r}.")
            time.sleep(PAUSE_SECONDS)
