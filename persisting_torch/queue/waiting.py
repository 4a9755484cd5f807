"""Waking those who wait for news of a queue, in this process and from others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from persisting_torch.queue.ledger import Ledger

POLL_SECONDS = 0.01

_hubs: dict[str, Hub] = {}
_hubs_lock = threading.Lock()


class Hub:
    """The waiters of one bucket in this process, whichever handles they use."""

    def __init__(self) -> None:
        self.changes = 0
        # Taken by itself: a signal in the condition's own __enter__ would leave it taken.
        self.lock = threading.Lock()
        self.condition = threading.Condition(self.lock)
        self.listeners: set[Callable[[], None]] = set()
        self.waiting = 0

    def notify(self) -> None:
        """Say that something has changed. Costs next to nothing when nobody waits."""
        self.changes += 1
        if self.waiting:
            with self.lock:
                self.condition.notify_all()
        if self.listeners:
            for listener in tuple(self.listeners):
                listener()


def hub_of(path: str) -> Hub:
    """The hub of the bucket at this path."""
    with _hubs_lock:
        return _hubs.setdefault(path, Hub())


def forget_hubs() -> None:
    """After a fork: waiters and locks of the parent mean nothing here."""
    global _hubs_lock
    _hubs_lock = threading.Lock()
    _hubs.clear()


class News:
    """One waiter's view of a bucket: blocks until something may have changed since last asked.

    A change made in this process wakes it at once; one committed by another process within
    `POLL_SECONDS` (a look at the ledger's version costs some microseconds).
    """

    def __init__(self, hub: Hub, ledger: Ledger) -> None:
        self._hub = hub
        self._ledger = ledger
        self._seen = self._now()

    def _now(self) -> tuple[int, int]:
        return self._hub.changes, self._ledger.watch()

    def _fresh(self) -> bool:
        now = self._now()
        if now == self._seen:
            return False
        self._seen = now
        return True

    def wait(self, deadline: float, stop: threading.Event | None = None) -> bool:
        """Whether there was news before `deadline` (of time.monotonic) or `stop`."""
        while not self._fresh():
            left = deadline - time.monotonic()
            if left <= 0 or (stop is not None and stop.is_set()):
                return False
            with self._hub.lock:
                self._hub.waiting += 1
                try:
                    if self._hub.changes == self._seen[0]:
                        self._hub.condition.wait(min(POLL_SECONDS, left))
                finally:
                    self._hub.waiting -= 1
        return True

    async def wait_async(self, deadline: float) -> bool:
        """The same without holding up the event loop."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(event.set)

        self._hub.listeners.add(wake)
        try:
            while not self._fresh():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                event.clear()
                try:
                    await asyncio.wait_for(event.wait(), min(POLL_SECONDS, left))
                except asyncio.TimeoutError:
                    continue
            return True
        finally:
            self._hub.listeners.discard(wake)
