"""What happens to open queues when their process ticks, ends, is told to end, or forks."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Protocol

from persisting_torch.errors import PersistingError
from persisting_torch.queue import waiting
from persisting_torch.queue.threads import Background, keep_spare_threads, threads

LONGEST_TICK_SECONDS = 1.0
SIGTERM_EXIT_CODE = 128 + signal.SIGTERM


class Open(Protocol):
    """An engine as its process sees it."""

    def tick(self) -> float:
        """Do what is due; answer the seconds until it wants its next turn. Raises nothing."""
        ...

    def close(self) -> None: ...

    @property
    def serves(self) -> bool:
        """Whether it works for others, and is closed by whoever lets it."""
        ...


_open: dict[int, Open] = {}
_lock = threading.Lock()
_ticker: Background | None = None
# Not an Event: a signal in its `set` could leave its lock taken.
_wake: SimpleQueue[None] = SimpleQueue()
_used = False
_ends = False
_afterwards: list[Callable[[], None]] = []
_forked_from = 0


def register(engine: Open) -> None:
    """Keep an engine ticking, and close it when the process ends or gets SIGTERM."""
    global _ticker, _used
    with _lock:
        if not _used:
            _end_with_process()
        _used = True
        _open[id(engine)] = engine
        if _ticker is None or not _ticker.is_alive():
            _ticker = Background(_tick)
    _wake.put(None)
    listen_to_sigterm()


def unregister(engine: Open) -> None:
    with _lock:
        _open.pop(id(engine), None)


def after_closing(call: Callable[[], None]) -> None:
    """Do this when the process ends, once every engine is closed."""
    _end_with_process()
    _afterwards.append(call)


def _end_with_process() -> None:
    global _ends
    keep_spare_threads()
    if not _ends and multiprocessing.parent_process() is not None:
        # Children of multiprocessing end without an end of the interpreter.
        multiprocessing.util.Finalize(None, _close_all, exitpriority=0)
    _ends = True


def is_fork() -> bool:
    """Whether this process is the fork of one that had used a queue."""
    return bool(_forked_from)


def check_process(what: str) -> None:
    """Raise where this process is the fork of one that had used a queue.

    Lance's threads do not survive a fork, so the child could hang or crash at its first read.
    """
    if _forked_from:
        raise PersistingError(
            f"{what} cannot be used in process {os.getpid()}: it was forked from process"
            f" {_forked_from} after a queue had been opened there, and Lance does not survive a"
            " fork. Start processes with the 'spawn' or 'forkserver' method, or open the first"
            " queue only after the fork."
        )


def _tick() -> None:
    delay = LONGEST_TICK_SECONDS
    while True:
        with suppress(Empty):
            _wake.get(timeout=delay)
        with _lock:
            engines = list(_open.values())
        delay = min((engine.tick() for engine in engines), default=LONGEST_TICK_SECONDS)


def _close_all() -> None:
    if _forked_from:
        return
    with _lock:
        engines = [engine for engine in _open.values() if not engine.serves]
    try:
        _each(engines, lambda engine: engine.close())
    finally:
        threads().end()
        for call in _afterwards:
            call()


def _each(engines: list[Open], action: Callable[[Open], None]) -> None:
    """Every engine gets its turn, whatever the others raise; the first error is raised then."""
    errors = []
    for engine in engines:
        try:
            action(engine)
        except Exception as error:
            errors.append(error)
    for further in errors[1:]:
        print(f"persisting_torch: {further}", file=sys.stderr)
    if errors:
        raise errors[0]


def listen_to_sigterm() -> None:
    """Let SIGTERM end the process through SystemExit, so that waiting rows are flushed.

    Only where nobody else handles it, and only from the main thread, which alone may.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit_on_sigterm)


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGTERM) is not _exit_on_sigterm:
        return  # whoever came after us and calls us, as Lightning's Trainer does, ends the process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(SIGTERM_EXIT_CODE)


def _after_fork_in_child() -> None:
    global _lock, _ticker, _wake, _ends, _forked_from
    _ends = False
    _afterwards.clear()
    _lock = threading.Lock()
    _wake = SimpleQueue()
    _ticker = None
    if _used:
        _forked_from = os.getppid()
    _forgotten.extend(_open.values())
    _open.clear()
    waiting.forget_hubs()


_forgotten: list[Open] = []
"""Engines of a parent process, kept from being finalised in the child."""

atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
