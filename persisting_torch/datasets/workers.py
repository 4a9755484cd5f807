"""Worker processes that read a pass, and the error that says what has become of one."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from persisting_torch.datasets.reading import Pass, identity
from persisting_torch.errors import PersistingError
from persisting_torch.queue.patience import LONGEST_WAIT_SECONDS

if TYPE_CHECKING:
    from persisting_torch.datasets.loader import PersistingDataLoader

LOOK_SECONDS = 1.0
LONGEST_DEATH_SECONDS = 1.0


class Workers(Iterator[tuple[int, Any]]):
    """Reads a pass in worker processes, which end with this: closed, lost, or dead.

    Raises PersistingError where a worker has died, or is stopped (SIGSTOP, a debugger) while the
    loop waits for longer than the dataset's time limit.
    """

    def __init__(self, reading: Pass, like: PersistingDataLoader) -> None:
        context = like.multiprocessing_context
        reading.lifeline, writer = context.Pipe(duplex=False)
        limit = reading.dataset.timeout
        self._queue = reading.dataset.handle.name
        self._guard = _Guard(LONGEST_WAIT_SECONDS if limit is None else limit)
        self._finalizer = weakref.finalize(self, _end, writer, self._guard)
        loader = DataLoader(
            reading,
            batch_size=None,
            num_workers=like.num_workers,
            collate_fn=identity,
            pin_memory=like.pin_memory,
            timeout=like.timeout,
            worker_init_fn=like.worker_init_fn,
            multiprocessing_context=context,
            generator=like.generator,
            prefetch_factor=like.prefetch_factor,
            pin_memory_device=like.pin_memory_device,
        )
        self._batches: Iterator[tuple[int, Any]] | None = iter(loader)
        self._guard.start(self._batches._workers)  # type: ignore[attr-defined]
        reading.lifeline.close()

    def __next__(self) -> tuple[int, Any]:
        if self._batches is None:
            raise StopIteration
        self._guard.waiting_since = time.monotonic()
        try:
            return next(self._batches)
        except PersistingError:
            raise
        except (RuntimeError, OSError, EOFError) as error:
            self._tell_of_the_dead(error)
            raise
        finally:
            self._guard.waiting_since = None

    def _tell_of_the_dead(self, error: Exception) -> None:
        """Raise if it was a worker's death that led to this error."""
        processes = self._guard.processes
        wait([process.sentinel for process in processes], LONGEST_DEATH_SECONDS)
        for process in processes:
            if process.exitcode is not None:
                raise PersistingError(
                    f"worker process {process.pid} of the loader of queue {self._queue!r}"
                    f" {self._what_befell(process)} No sample is lost: start again from the newest"
                    " checkpoint."
                ) from error

    def _what_befell(self, process: BaseProcess) -> str:
        status = process.exitcode
        if process in self._guard.ended:
            return (
                f"was stopped, and is ended now that the loop has waited {self._guard.limit:g} s"
                " for it. Was it sent SIGSTOP, or held by a debugger?"
            )
        if status is None or status >= 0:
            return f"ended with status {status}."
        name = signal.Signals(-status).name
        hint = " Often that means that memory ran out." if name == "SIGKILL" else ""
        return f"was ended by {name}.{hint}"

    def close(self) -> None:
        """End the workers' waits, then the workers."""
        self._finalizer()
        self._batches = None


class _Guard:
    """A thread that ends workers which are stopped while the loop waits for longer than `limit`.

    Whoever waits for a stopped process has no other way out: the batches that a worker has sent
    are fetched from it when they are received.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.processes: list[BaseProcess] = []
        self.ended: list[BaseProcess] = []
        self.waiting_since: float | None = None
        self._closed = threading.Event()

    def start(self, processes: list[BaseProcess]) -> None:
        self.processes = processes
        threading.Thread(target=self._watch, name="persisting_torch workers", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._end_the_stopped()  # else they are waited for, at the latest when this process ends

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            since = self.waiting_since
            if since is not None and time.monotonic() - since >= self.limit:
                self._end_the_stopped()

    def _end_the_stopped(self) -> None:
        for process in self.processes:
            if _is_stopped(process):
                self.ended.append(process)
                process.kill()


def _end(lifeline: Connection, guard: _Guard) -> None:
    lifeline.close()
    guard.close()


def _is_stopped(process: BaseProcess) -> bool:
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"
