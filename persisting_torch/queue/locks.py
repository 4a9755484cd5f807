"""The lock that all processes of a machine share before they commit to a bucket."""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from types import TracebackType
from typing import Protocol

from persisting_torch.errors import WaitTimeout

FIRST_NAP = 0.0002
LONGEST_NAP = 0.005
LONGEST_NAP_OF_THE_NEXT = 0.001


class Lock(Protocol):
    """Keeps others from a bucket for a while: threads and processes, or other machines."""

    def acquire(self, limit: float) -> bool: ...

    def release(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class FileLock:
    """An exclusive `flock` on a file, and a thread lock beside it; the kernel frees it on death.

    `with lock:` waits at most `limit` seconds and then raises WaitTimeout. It may be taken again
    by the thread that holds it. Whoever waits longest goes next: a thread or process that gives
    the lock back and wants it again at once queues up at the turnstile, where the next one stands.
    """

    def __init__(self, path: str, *, limit: float = 120.0) -> None:
        self.path = path
        self.limit = limit
        self._forget()
        _locks.add(self)

    def _forget(self) -> None:
        self._thread_turnstile = threading.Lock()
        self._thread = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._turnstile = self._file = -1

    def acquire(self, limit: float) -> bool:
        """Whether the lock could be had within `limit` seconds (0: only if it is free now)."""
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return True
        deadline = time.monotonic() + limit
        if not self._thread_turnstile.acquire(timeout=limit):
            return False
        try:
            if not self._thread.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return False
        finally:
            self._thread_turnstile.release()
        held = False
        try:
            held = self._acquire_file(deadline)
            if held:
                self._owner, self._depth = me, 1
        finally:
            if not held:
                self._thread.release()
        return held

    def _acquire_file(self, deadline: float) -> bool:
        if self._file < 0:
            self._turnstile = _open(f"{self.path}.turn")
            self._file = _open(self.path)
        if not _flock(self._turnstile, deadline, LONGEST_NAP):
            return False
        try:
            return _flock(self._file, deadline, LONGEST_NAP_OF_THE_NEXT)
        finally:
            fcntl.flock(self._turnstile, fcntl.LOCK_UN)

    def release(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._owner = None
        try:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            self._thread.release()

    def close(self) -> None:
        """Give the files back; the lock must not be held."""
        for file in (self._turnstile, self._file):
            if file >= 0:
                os.close(file)
        self._turnstile = self._file = -1

    def __del__(self) -> None:
        self.close()

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


class ThreadLock:
    """A lock among the threads of this process, for what no other process may touch."""

    def __init__(self, what: str, *, limit: float = 120.0) -> None:
        self.what = what
        self.limit = limit
        self._lock = threading.RLock()

    def acquire(self, limit: float) -> bool:
        """Whether the lock could be had within `limit` seconds (0: only if it is free now)."""
        return self._lock.acquire(timeout=limit)

    def release(self) -> None:
        self._lock.release()

    def close(self) -> None:
        """Nothing: it is in memory only."""

    def __enter__(self) -> ThreadLock:
        if not self.acquire(self.limit):
            raise WaitTimeout(
                f"waited {self.limit:g} s for {self.what}, with which another thread is busy."
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _flock(file: int, deadline: float, longest_nap: float) -> bool:
    """Whether the file could be locked before the deadline; flock has no limit of its own."""
    nap = FIRST_NAP
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(nap)
        nap = min(2 * nap, longest_nap)


def _after_fork_in_child() -> None:
    # A file that both share would stay locked for as long as either lives.
    for lock in tuple(_locks):
        lock.close()
        lock._forget()


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()

os.register_at_fork(after_in_child=_after_fork_in_child)
