"""Counts and times of what one handle has done, for `stats()`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

NOTHING = nullcontext()


class Metrics:
    """Counters by name; when not enabled they stay empty and cost next to nothing."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._began = time.time()

    def count(self, name: str, more: float = 1) -> None:
        """Add to the counter of this name."""
        if self.enabled:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + more

    def timed(self, name: str, samples: int = 0) -> AbstractContextManager[None]:
        """Add a call, its seconds and its samples to the counters of this name, if it succeeds."""
        return self._timed(name, samples) if self.enabled else NOTHING

    @contextmanager
    def _timed(self, name: str, samples: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.count(f"{name}_calls")
        self.count(f"{name}_samples", samples)
        self.count(f"{name}_seconds", time.perf_counter() - start)

    def report(self) -> dict[str, float]:
        """The counters, and the seconds since they began."""
        with self._lock:
            return {**self._counts, "since_seconds": time.time() - self._began}
