"""Ways to the processes that answer: over the network, or straight to this process's own node."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import pyarrow as pa

from persisting_torch.cluster.plane import Handler, Peer
from persisting_torch.cluster.secret import Credentials
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import BucketUnavailable
from persisting_torch.queue.threads import Background

Answer = TypeVar("Answer")

MOST_IN_FLIGHT = 8
WAITING = frozenset({"begin", "follow", "hold", "alive"})
"""Requests that mostly wait for others. They count nowhere where only so many are let through: they
would keep out those that they wait for."""

LOOK_SECONDS = 1.0
ALIVE_SECONDS = 2.0
SOON_SECONDS = 5.0  # calls that end by then are not looked after


class Way(Protocol):
    """How to ask one process."""

    address: str

    def ask(self, request: Message, timeout: float) -> Message: ...

    def get(self, request: Message, timeout: float) -> tuple[Message, pa.Table]: ...

    def put(self, request: Message, table: pa.Table, timeout: float) -> Message: ...

    def close(self) -> None: ...


class Far:
    """A way to another process, with at most eight requests in flight that it may be at."""

    def __init__(self, address: str, credentials: Credentials | None) -> None:
        self.address = address
        self._peer = Peer(address, credentials)
        self._lanes, self._left = _new_lanes(), 0
        self._next = itertools.count()

    def ask(self, request: Message, timeout: float) -> Message:
        if request.header["op"] in WAITING:
            return self._peer.ask(request, timeout)
        if timeout <= SOON_SECONDS:
            with self._lane():
                return self._peer.ask(request, timeout)
        return self._attended(request, lambda: self._peer.ask(request, timeout))

    def get(self, request: Message, timeout: float) -> tuple[Message, pa.Table]:
        return self._attended(request, lambda: self._peer.get(request, timeout))

    def put(self, request: Message, table: pa.Table, timeout: float) -> Message:
        return self._attended(request, lambda: self._peer.put(request, table, timeout))

    def _attended(self, request: Message, call: Callable[[], Answer]) -> Answer:
        """What a call that may take long answers, while the bucket's owner lives.

        From a process that is halted, or out of reach, nothing comes, not even an error. The call
        is left alone then, and raises what the look for the owner raises.
        """

        def in_lane() -> Answer:
            with self._lane():
                return call()

        answer, done = _begin(in_lane)
        bucket = {name: request.header[name] for name in ("queue", "storage_path", "bucket")}
        alive = Message({"op": "alive", **bucket})
        while not done.acquire(timeout=LOOK_SECONDS):
            self._peer.ask(alive, ALIVE_SECONDS)
        return answer.result()

    def _lane(self) -> threading.Lock:
        """One that is free, if there is any. What waits on a dead connection is in nobody's way."""
        if self._left != self._peer.left:
            self._lanes, self._left = _new_lanes(), self._peer.left
        free = next((lane for lane in self._lanes if not lane.locked()), None)
        return free or self._lanes[next(self._next) % MOST_IN_FLIGHT]

    def close(self) -> None:
        self._peer.close()


def _new_lanes() -> list[threading.Lock]:
    """Locks, one for each request in flight.

    `with` takes and frees them whatever signal comes, which it does with no Semaphore.
    """
    return [threading.Lock() for _ in range(MOST_IN_FLIGHT)]


class Near:
    """The way to this process's own node: its handler is called, and nothing goes over a wire."""

    def __init__(self, address: str, handler: Handler) -> None:
        self.address = address
        self._handler = handler
        self.closed = False

    def ask(self, request: Message, timeout: float) -> Message:
        return self._call(request, None)[0]

    def get(self, request: Message, timeout: float) -> tuple[Message, pa.Table]:
        answer, table = self._call(request, None)
        return answer, pa.table({}) if table is None else table

    def put(self, request: Message, table: pa.Table, timeout: float) -> Message:
        return self._call(request, table)[0]

    def _call(self, request: Message, table: pa.Table | None) -> tuple[Message, pa.Table | None]:
        if self.closed:
            raise BucketUnavailable(f"the node at {self.address}, in this process, is closed.")
        return _beside_signals(lambda: self._handler(request, table))

    def close(self) -> None:
        self.closed = True


def _beside_signals(call: Callable[[], Answer]) -> Answer:
    """Call what belongs to all processes, so that no Ctrl-C of this one breaks it off.

    In a thread of its own: those that are shared may all be waiting for what this call ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    answer, done = _begin(call)
    done.acquire()
    return answer.result()


def _begin(call: Callable[[], Answer]) -> tuple[Future[Answer], threading.Lock]:
    """Call in a thread of its own: what comes of it, and a lock that is free once it has."""
    answer: Future[Answer] = Future()
    done = threading.Lock()
    done.acquire()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)
        finally:
            done.release()

    Background(run)
    return answer, done
