"""The lock that all processes of a machine share before they commit to a bucket."""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from types import TracebackType

from persisting_torch.errors import WaitTimeout

FIRST_NAP = 0.0002
LONGEST_NAP = 0.005


class FileLock:
    """An exclusive `flock` on a file, and a thread lock beside it; the kernel frees it on death.

    `with lock:` waits at most `limit` seconds and then raises WaitTimeout. It may be taken again
    by the thread that holds it.
    """

    def __init__(self, path: str, *, limit: float = 120.0) -> None:
        self.path = path
        self.limit = limit
        self._forget()
        _locks.add(self)

    def _forget(self) -> None:
        self._thread = threading.RLock()
        self._depth = 0
        self._file = -1

    def acquire(self, limit: float) -> bool:
        """Whether the lock could be had within `limit` seconds (0: only if it is free now)."""
        deadline = time.monotonic() + limit
        if not self._thread.acquire(timeout=limit):
            return False
        if self._depth:
            self._depth += 1
            return True
        held = False
        try:
            if self._file < 0:
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            held = self._lock_file(deadline)
        finally:
            if not held:
                self._thread.release()
        if held:
            self._depth = 1
        return held

    def _lock_file(self, deadline: float) -> bool:
        nap = FIRST_NAP
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)

    def release(self) -> None:
        self._depth -= 1
        try:
            if not self._depth:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            self._thread.release()

    def close(self) -> None:
        """Give the file back; the lock must not be held."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> FileLock:
        if not self.acquire(self.limit):
            raise WaitTimeout(
                f"waited {self.limit:g} s for the lock {self.path}, which another process holds."
                " See which one with `lslocks` or `fuser`; it frees the lock when it ends."
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _after_fork_in_child() -> None:
    # A file that both share would stay locked for as long as either lives.
    for lock in tuple(_locks):
        if lock._file >= 0:
            os.close(lock._file)
        lock._forget()


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()

os.register_at_fork(after_in_child=_after_fork_in_child)
