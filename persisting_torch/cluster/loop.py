"""The thread with the one event loop that owns Pulsing, and ways to have it run something."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from persisting_torch.errors import PersistingError
from persisting_torch.queue.threads import Background

CALL_SECONDS = 5.0
STOP_SECONDS = 2.0

Answer = TypeVar("Answer")


class LoopThread:
    """An event loop in a daemon thread. Any thread may call, but not the loop's own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._running: set[asyncio.Task[None]] = set()
        self._thread = Background(self._run)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def call(self, what: Coroutine[Any, Any, Answer], limit: float = CALL_SECONDS) -> Answer:
        """Run a coroutine there and wait for it. Raises TimeoutError after `limit` seconds."""
        answer: list[Answer] = []
        errors: list[BaseException] = []
        # A bare lock: a signal that ends the wait of a concurrent Future may leave that broken.
        done = threading.Lock()
        done.acquire()

        async def run() -> None:
            try:
                answer.append(await asyncio.wait_for(what, limit))
            except asyncio.TimeoutError:
                errors.append(TimeoutError(f"Pulsing did not answer within {limit:g} s."))
            except BaseException as error:
                errors.append(error)
            finally:
                done.release()

        def begin() -> None:
            task = self._loop.create_task(run())
            self._running.add(task)  # the loop itself holds no more than weak references
            task.add_done_callback(self._running.discard)

        if self._stopped:
            what.close()
            raise PersistingError("this process has left the cluster.")
        self._loop.call_soon_threadsafe(begin)
        if not done.acquire(timeout=limit + 1.0):
            raise TimeoutError(f"the thread that speaks with Pulsing is stuck for {limit:g} s.")
        if errors:
            raise errors[0]
        return answer[0]

    def stop(self) -> None:
        """End the thread."""
        if not self._stopped:
            self._stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_SECONDS)
