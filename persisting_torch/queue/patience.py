"""How long a wait lasts where nobody says so, and what is said in the log meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LONGEST_WAIT_SECONDS = 1800.0
FIRST_NOTICE_SECONDS = 30.0
FIRST_NOTICE_OF_A_STREAM_SECONDS = 300.0


class Patience:
    """Says in the log what a wait misses once it has lasted for `first` seconds, twice that, ..."""

    def __init__(self, log: logging.Logger, first: float) -> None:
        self._log = log
        self._next = first
        self._began = time.monotonic()

    def begin(self) -> None:
        """Another wait begins, of which nothing is said until it is longer than those before."""
        self._began = time.monotonic()

    def check(self, what_is_missing: Callable[[float], str]) -> None:
        """Say it if it is time; the function is given the seconds waited."""
        if time.monotonic() - self._began >= self._next:
            self._log.warning("still waiting: %s", what_is_missing(self._next))
            self._next *= 2
