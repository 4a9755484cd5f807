"""Producers by name: alive, done, failed or dead, so that nobody waits for one that is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from persisting_torch.errors import ProducerFailed
from persisting_torch.queue.host import boot, born
from persisting_torch.queue.ledger import Ledger

SILENT_SECONDS = 10.0


@contextmanager
def producing(ledger: Ledger, name: str) -> Iterator[None]:
    """Registers a producer; an exception in the block is recorded as its failure, and raised."""
    with ledger.transaction() as tx:
        tx.execute(
            "INSERT OR REPLACE INTO producers VALUES (?, ?, ?, ?, ?, ?, 'alive', NULL, 0)",
            (name, boot(), os.getpid(), time.time(), born(os.getpid()), time.time()),
        )
    try:
        yield
    except BaseException as error:
        _end(ledger, name, "failed", f"{type(error).__name__}: {error}")
        raise
    _end(ledger, name, "done", None)


def _end(ledger: Ledger, name: str, state: str, cause: str | None) -> None:
    with ledger.transaction() as tx:
        tx.execute(
            "UPDATE producers SET state = ?, cause = ?, beat = ? WHERE name = ?",
            (state, cause, time.time(), name),
        )


def beat(ledger: Ledger) -> None:
    """Say that the producers of this process are alive."""
    with ledger.transaction() as tx:
        tx.execute(
            "UPDATE producers SET beat = ? WHERE state = 'alive' AND host = ? AND pid = ?",
            (time.time(), boot(), os.getpid()),
        )


def check_producers(ledger: Ledger) -> None:
    """Raise ProducerFailed if a producer failed or died and none is left that could still put."""
    with ledger.reading() as tx:
        rows = tx.execute(
            "SELECT name, host, pid, born, beat, state, cause FROM producers"
        ).fetchall()
    failures = []
    for name, where, pid, start, last, state, cause in rows:
        if state == "failed":
            failures.append(f"{name} failed with {cause}")
        elif state == "alive":
            if _is_alive(where, pid, start, last):
                return
            failures.append(
                f"{name} (process {pid}) died {time.time() - last:.0f} s after its last beat"
            )
    if failures:
        raise ProducerFailed(
            f"no producer of queue {ledger.place.queue!r} is left: {'; '.join(failures)}."
            " Start it again under the same name, or seal the partition to go on without it."
        )


def _is_alive(where: str, pid: int, start: str, last: float) -> bool:
    if where == boot():
        return born(pid) == start
    return time.time() - last < SILENT_SECONDS
