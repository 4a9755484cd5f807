"""Threads for calls that may touch the disk, so that neither event loops nor signals meet them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

Answer = TypeVar("Answer")

MOST = 16
END_SECONDS = 60.0


class Threads(Executor):
    """Threads that start as they are needed and do not hold up the end of the interpreter.

    Unlike a ThreadPoolExecutor, which waits forever at the end for a thread whose start a signal
    broke off.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
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

        if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
            thread = threading.Thread(target=self._work, name="persisting_torch", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._calls.put(settle)
        return future

    def _work(self) -> None:
        while True:
            settle = self._calls.get()
            if settle is None:
                return
            settle()
            del settle
            self._idle.release()

    def end(self) -> None:
        """Let calls under way end: a thread that wakes in an ended interpreter may crash it."""
        self._ended = True
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            if thread.ident is not None:
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
