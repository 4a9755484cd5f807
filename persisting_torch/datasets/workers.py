"""Worker processes that read a pass, and the error that says what has become of one."""

from __future__ import annotations

import signal
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from persisting_torch.datasets.reading import Pass, identity
from persisting_torch.errors import PersistingError
from persisting_torch.queue.demand import LONGEST_WAIT_SECONDS

if TYPE_CHECKING:
    from persisting_torch.datasets.loader import PersistingDataLoader

LOOK_SECONDS = 2.0
"""How often a loop that waits for its workers looks whether they are stopped."""
LONGEST_DEATH_SECONDS = 1.0


class Workers(Iterator[tuple[int, Any]]):
    """Reads a pass in worker processes, which end with this: closed, lost, or dead.

    Raises PersistingError where a worker has died, or is stopped (SIGSTOP, a debugger) while the
    loop waits for longer than the dataset's time limit.
    """

    def __init__(self, reading: Pass, like: PersistingDataLoader) -> None:
        context = like.multiprocessing_context
        reading.lifeline, writer = context.Pipe(duplex=False)
        self._finalizer = weakref.finalize(self, writer.close)
        self._queue = reading.dataset.handle.name
        limit = reading.dataset.timeout
        self._limit = LONGEST_WAIT_SECONDS if limit is None else limit
        self._looks = like.timeout == 0
        loader = DataLoader(
            reading,
            batch_size=None,
            num_workers=like.num_workers,
            collate_fn=identity,
            pin_memory=like.pin_memory,
            timeout=LOOK_SECONDS if self._looks else like.timeout,
            worker_init_fn=like.worker_init_fn,
            multiprocessing_context=context,
            generator=like.generator,
            prefetch_factor=like.prefetch_factor,
            pin_memory_device=like.pin_memory_device,
        )
        self._batches: Iterator[tuple[int, Any]] | None = iter(loader)
        self._processes: list[BaseProcess] = self._batches._workers  # type: ignore[attr-defined]
        reading.lifeline.close()

    def __next__(self) -> tuple[int, Any]:
        if self._batches is None:
            raise StopIteration
        began = time.monotonic()
        while True:
            try:
                return next(self._batches)
            except PersistingError:
                raise
            except (RuntimeError, OSError, EOFError) as error:
                if not (self._looks and "DataLoader timed out" in str(error)):
                    self._tell_of_the_dead(error)
                    raise
            if time.monotonic() - began >= self._limit:
                self._tell_of_the_stopped()

    def _tell_of_the_dead(self, error: Exception) -> None:
        """Raise if it was a worker's death that led to this error."""
        wait([process.sentinel for process in self._processes], LONGEST_DEATH_SECONDS)
        for process in self._processes:
            if process.exitcode is not None:
                how = f"ended with status {process.exitcode}"
                if process.exitcode < 0:
                    how = f"was ended by {signal.Signals(-process.exitcode).name}"
                raise PersistingError(
                    f"worker process {process.pid} of the loader of queue {self._queue!r} {how}."
                    " SIGKILL often means that memory ran out: the kernel's log tells. No sample"
                    " is lost: start again from the newest checkpoint, with fewer workers perhaps."
                ) from error

    def _tell_of_the_stopped(self) -> None:
        for process in self._processes:
            if _is_stopped(process):
                raise PersistingError(
                    f"worker process {process.pid} of the loader of queue {self._queue!r} is"
                    f" stopped, and the loop has waited {self._limit:g} s for it. Was it sent"
                    " SIGSTOP, or held by a debugger? It is ended now. No sample is lost: start"
                    " again from the newest checkpoint."
                )

    def close(self) -> None:
        """End the workers' waits, then the workers."""
        self._finalizer()
        for process in self._processes:
            if _is_stopped(process):
                process.kill()  # else it is waited for, at the latest when this process ends
        self._batches = None


def _is_stopped(process: BaseProcess) -> bool:
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"
