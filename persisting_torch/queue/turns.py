"""Whose turn it is to write: one holder at a time, in the order in which they asked.

Unlike a lock a turn belongs to a token, not to a thread, so that it can be held from another
process by calls that different threads serve. A holder that does not say for a while that it lives
loses its turn. A token has one turn only: whatever is late on its way finds the turn over.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from persisting_torch.errors import StaleOwner, WaitTimeout

SILENT_SECONDS = 3.0
LOOK_SECONDS = 0.5
REMEMBERED = 16384


class _Waiter(NamedTuple):
    heard: float
    bell: threading.Lock


class Turns:
    """The turns of one ledger or one lock. Times are of time.monotonic."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, _Waiter] = OrderedDict()
        self._over: OrderedDict[str, None] = OrderedDict()
        self._holder: str | None = None
        self._heard = 0.0
        self._ended = False

    def take(self, token: str, limit: float) -> None:
        """Wait for the turn.

        Raises WaitTimeout after `limit` seconds; who asks again at once has kept its place. Raises
        StaleOwner if the token has had its turn.
        """
        deadline = time.monotonic() + limit
        # A bare lock, since a signal that ends the wait of a Condition may leave it broken.
        bell = threading.Lock()
        bell.acquire()
        try:
            while not self._had(token, bell):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WaitTimeout(
                        f"waited {limit:g} s for a turn to write {self.what}: other processes"
                        " take all of them. See which ones with stats()."
                    )
                bell.acquire(timeout=min(left, LOOK_SECONDS))
        except WaitTimeout:
            raise  # its place in the queue is kept for a moment, for it may ask again
        except BaseException:
            self.give(token)
            raise

    def _had(self, token: str, bell: threading.Lock) -> bool:
        with self._lock:
            if self._ended:
                raise StaleOwner(f"there are no turns to write {self.what} here any more.")
            if self._holder == token:
                return True  # it asks again, for want of an answer
            self._refuse_late(token)
            now = time.monotonic()
            self._waiting[token] = _Waiter(now, bell)
            if self._next(now) != token:
                return False
            del self._waiting[token]
            self._holder, self._heard = token, now
            return True

    def _next(self, now: float) -> str | None:
        """Who may have the turn now: nobody while it is held, else who has waited longest."""
        if self._holder is not None and now - self._heard > SILENT_SECONDS:
            self._end(self._holder)
        if self._holder is not None:
            return None
        while now - next(iter(self._waiting.values())).heard > SILENT_SECONDS:
            self._waiting.popitem(last=False)  # its thread has ended without a word
        return next(iter(self._waiting))

    def _call_next(self) -> None:
        if self._holder is None and self._waiting:
            bell = next(iter(self._waiting.values())).bell
            if bell.locked():
                bell.release()

    def beat(self, token: str) -> None:
        """Say that the holder lives. Raises StaleOwner if the turn is over."""
        with self._lock:
            self._check(token)
            self._heard = max(self._heard, time.monotonic())

    def give(self, token: str) -> None:
        """End the turn, or let it never begin; one that is being used ends by itself."""
        with self._lock:
            if self._holder != token or self._heard != math.inf:
                self._end(token)

    @contextmanager
    def held(self, token: str | None, limit: float) -> Iterator[None]:
        """The turn for the block, and over with it: a caller's, or for None one of its own.

        Once the block has begun the turn cannot be lost. Raises StaleOwner if it was before.
        """
        token, own = token or uuid.uuid4().hex, token is None
        try:
            if own:
                self.take(token, limit)
            with self._lock:
                self._check(token)
                self._heard = math.inf
            yield
        finally:
            with self._lock:
                self._end(token)

    def end(self) -> None:
        """There are no more turns: whoever waits for one gets StaleOwner."""
        with self._lock:
            self._ended = True
            for waiter in self._waiting.values():
                if waiter.bell.locked():
                    waiter.bell.release()

    def _refuse_late(self, token: str) -> None:
        if token in self._over:
            raise StaleOwner(
                f"the turn to write {self.what} is over: it was given back, or its holder was"
                f" silent for more than {SILENT_SECONDS:g} s. Nothing was written; try again."
            )

    def _check(self, token: str) -> None:
        if self._holder != token:
            self._over[token] = None
        self._refuse_late(token)

    def _end(self, token: str) -> None:
        self._over[token] = None
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        self._waiting.pop(token, None)
        if self._holder == token:
            self._holder = None
        self._call_next()
