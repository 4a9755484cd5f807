"""Threads for calls that may touch the disk, so that neither event loops nor signals meet them."""

from __future__ import annotations

import _thread
import asyncio
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Answer = TypeVar("Answer")

MOST = 16
END_SECONDS = 60.0
STARTS_NONE_AT_END = (3, 12, 0) <= sys.version_info[:3] < (3, 12, 3)
SPARE = 24


class Background:
    """A daemon thread whose start no signal can break off half-way.

    The start of a `threading.Thread` waits on an Event; a signal there leaves the thread stuck for
    ever, and whoever joins it too.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._ended = threading.Lock()
        self._ended.acquire()
        self.ident = 0
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:
            if not _lend_spare(self._run):
                raise

    def _run(self) -> None:
        self.ident = threading.get_ident()
        try:
            self._call()
        finally:
            self._ended.release()

    def is_alive(self) -> bool:
        return self._ended.locked()

    def join(self, limit: float) -> None:
        """Wait for its end, `limit` seconds at most; its own thread does not wait."""
        if self.ident != threading.get_ident() and self._ended.acquire(timeout=limit):
            self._ended.release()


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Make all the calls at the same time, and wait for them; the first error is raised then."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    others = []
    for call in calls[1:]:
        try:
            others.append(Background(partial(run, call)))
        except RuntimeError:  # there are no threads to be had any more
            run(call)
    for call in calls[:1]:
        run(call)
    for other in others:
        other.join(threading.TIMEOUT_MAX)
    if errors:
        raise errors[0]


# CPython 3.12.0 to 3.12.2 start no threads once the interpreter has begun to end, though what is to
# be done then, such as to flush, may need some. There they are started before.

_spare_calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
_spare_idle: SimpleQueue[None] = SimpleQueue()
_has_spare = False


def keep_spare_threads() -> None:
    """To be called while threads can be started: there are some for the end of the process, too."""
    global _has_spare
    if STARTS_NONE_AT_END and not _has_spare:
        _has_spare = True
        for _ in range(SPARE):
            _thread.start_new_thread(_be_spare, ())


def _be_spare() -> None:
    while True:
        _spare_idle.put(None)
        _spare_calls.get()()


def _lend_spare(call: Callable[[], None]) -> bool:
    try:
        _spare_idle.get_nowait()
    except Empty:
        return False
    _spare_calls.put(call)
    return True


def _after_fork_in_child() -> None:
    global _has_spare, _spare_calls, _spare_idle
    _has_spare = False
    _spare_calls, _spare_idle = SimpleQueue(), SimpleQueue()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Threads(Executor):
    """Threads that start as they are needed and do not hold up the end of the interpreter.

    Unlike a ThreadPoolExecutor, no signal that arrives in `submit` leaves them unusable.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A token for each idle thread. Not a Semaphore: a signal that breaks into its acquire
        # leaves its lock taken, and then nobody ever gets through again.
        self._idle: SimpleQueue[None] = SimpleQueue()
        self._threads: list[Background] = []
        self._ended = False

    def submit(self, call: Callable[..., Answer], /, *args: Any, **kwargs: Any) -> Future[Answer]:
        """See Executor. Raises RuntimeError when the interpreter is ending."""
        if self._ended:
            raise RuntimeError("no further calls at the end of the interpreter")
        future: Future[Answer] = Future()

        def settle() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        if not self._take_idle() and len(self._threads) < self._most:
            self._threads.append(Background(self._work))
        self._calls.put(settle)
        return future

    def _take_idle(self) -> bool:
        try:
            self._idle.get_nowait()
        except Empty:
            return False
        return True

    def _work(self) -> None:
        while True:
            settle = self._calls.get()
            if settle is None:
                return
            settle()
            del settle
            self._idle.put(None)

    def end(self) -> None:
        """Let calls under way end: a thread that wakes in an ended interpreter may crash it."""
        self._ended = True
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(END_SECONDS)


_of_process: dict[int, Threads] = {}


def threads() -> Threads:
    """The threads of this process."""
    found = _of_process.get(os.getpid())
    return _of_process.setdefault(os.getpid(), Threads()) if found is None else found


async def in_thread(call: Callable[..., Answer], *arguments: Any) -> Answer:
    """Run what may touch the disk beside the event loop, with the task's context variables."""
    run = copy_context().run
    return await asyncio.get_running_loop().run_in_executor(threads(), run, call, *arguments)


def undisturbed(call: Callable[..., Answer], *arguments: Any) -> Answer:
    """Run what no signal may break off, in a thread, where none arrives.

    In the main thread a signal ends a call into Lance at once, but not the commit that it began.
    """
    if threading.current_thread() is not threading.main_thread():
        return call(*arguments)
    # A bare lock, since a signal that ends the wait of a Condition, and so of a Future, may leave
    # it broken.
    done = threading.Lock()
    done.acquire()
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)
        finally:
            done.release()

    try:
        threads().submit(run)
    except RuntimeError:  # the interpreter is shutting down
        return call(*arguments)
    done.acquire()
    return future.result()
