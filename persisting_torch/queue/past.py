"""What of a task's batches can no longer be asked for: below every checkpoint, and deleted.

Batches that some checkpoint on disk may be resumed from are kept with their samples. Those below
all of them lose their entries in `assignments` once samples of theirs are deleted; `past` holds how
far that has come, and all samples that were in them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np
from pyroaring import BitMap64

from persisting_torch.errors import PersistingError
from persisting_torch.queue.sets import unpack_list, unpack_set

RANKS_APART = 16
"""Batches that one data-parallel rank may be ahead of another; rank 0 moves the cursor for all."""
LOOK_AGAIN_SECONDS = 60.0
FARTHEST_LOOK = 256  # batches without a cleared sample, beyond which none is expected
FAR = 1 << 62


@dataclass
class Past:
    """A task's batches below k, whose entries are gone; `members` are all samples they had."""

    k: int = 0
    members: BitMap64 = field(default_factory=BitMap64)


def past_of(tx: sqlite3.Connection, task: int) -> Past:
    found = tx.execute("SELECT k, members FROM past WHERE task = ?", (task,)).fetchone()
    return Past(found[0], BitMap64.deserialize(found[1])) if found else Past()


def check_not_past(tx: sqlite3.Connection, task: int, k: int, what: str) -> None:
    """Raise PersistingError if batch k is past. `what` names task, queue and partition."""
    found = tx.execute("SELECT k FROM past WHERE task = ?", (task,)).fetchone()
    if found is None or k >= found[0]:
        return
    known = tx.execute(
        "SELECT path, k FROM checkpoints WHERE task = ? AND k >= ? ORDER BY k", (task, found[0])
    ).fetchall()
    which = ", ".join(f"{path} (batch {at})" for path, at in known) or "none that the queue knows"
    raise PersistingError(
        f"batch {k} of {what} is gone: the queue's retention deletes what is consumed, and no"
        f" checkpoint that was known to it still needed the batch. Resume from a checkpoint of"
        f" batch {found[0]} or later: {which}."
    )


# Checkpoints


def register(tx: sqlite3.Connection, task: int, path: str, k: int) -> None:
    """Note that what is at this path may be resumed from batch k."""
    tx.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", (task, path, k))


class Files:
    """Whether checkpoints are still there."""

    def __init__(self) -> None:
        self._remote: dict[str, tuple[float, bool]] = {}

    def gone(self, paths: list[str]) -> set[str]:
        """Those of the paths, of files or folders, at which there is nothing any more."""
        return {path for path in paths if not self._there(path)}

    def _there(self, path: str) -> bool:
        if not is_remote(path):
            return _exists(path)
        looked, there = self._remote.get(path, (-LOOK_AGAIN_SECONDS, True))
        if time.monotonic() - looked >= LOOK_AGAIN_SECONDS:
            there = _exists_remotely(path)
            self._remote[path] = time.monotonic(), there
        return there


def is_remote(path: str) -> bool:
    """Whether it is the URL of a file system, as fsspec has them."""
    return len(urlsplit(path).scheme) > 1 and "://" in path


def _exists(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # nobody has said that it is gone
    return True


def _exists_remotely(path: str) -> bool:
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        system, inside = url_to_fs(path)
        return bool(system.exists(inside))
    except Exception:
        # Each file system has errors of its own, and none of them says that the file is gone.
        return True


def forget_gone(tx: sqlite3.Connection, gone: set[str]) -> None:
    """Forget checkpoints found to be gone, unless they are there again."""
    for path in gone:
        if is_remote(path) or not _exists(path):
            tx.execute("DELETE FROM checkpoints WHERE path = ?", (path,))


def first_needed(tx: sqlite3.Connection, task: int, cursor: int, gone: set[str]) -> int:
    """The first batch that somebody may still ask for, `gone` checkpoints apart."""
    needed = [cursor]
    for path, k in tx.execute("SELECT path, k FROM checkpoints WHERE task = ?", (task,)):
        if path not in gone:
            needed.append(k)
    last = tx.execute(
        "SELECT sizes FROM assignments WHERE task = ? ORDER BY k DESC LIMIT 1", (task,)
    ).fetchone()
    ranks = len(json.loads(last[0])) if last else 1
    return max(0, min(needed) - (RANKS_APART if ranks > 1 else 0))


# Batches


class Batches:
    """The samples of a task's batches, read from the ledger as they come."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.trained = BitMap64()
        """Those of all batches below `trained_until`."""
        self.trained_until = 0
        self.assigned = BitMap64()
        """Those of all batches below `assigned_until`."""
        self.assigned_until = 0
        self._past = 0

    def read(self, tx: sqlite3.Connection, task: int, needed: int) -> None:
        """Let `trained` be of the batches below `needed` and those past, `assigned` of all."""
        if needed < self.trained_until > self._past:
            self.trained, self.trained_until, self._past = BitMap64(), 0, 0
        found = tx.execute("SELECT k FROM past WHERE task = ?", (task,)).fetchone()
        if found is not None and found[0] > self._past:
            past = past_of(tx, task)
            self.trained |= past.members
            self.assigned |= past.members
            self._past = past.k
            self.trained_until = max(self.trained_until, past.k)
            self.assigned_until = max(self.assigned_until, past.k)
        for k, members in batches_from(tx, task, self.trained_until, needed):
            self.trained |= members
            self.trained_until = k + 1
        for k, members in batches_from(tx, task, self.assigned_until, None):
            self.assigned |= members
            self.assigned_until = k + 1


def batches_from(
    tx: sqlite3.Connection, task: int, start: int, stop: int | None
) -> Iterator[tuple[int, BitMap64]]:
    """(k, the samples of batch k) from batch `start` to `stop` - 1, or to the last."""
    rows = tx.execute(
        "SELECT k, first, count, members FROM assignments"
        " WHERE task = ? AND k >= ? AND k < ? ORDER BY k",
        (task, start, FAR if stop is None else stop),
    )
    for k, first, count, members in rows:
        yield k, unpack_set(first, count, None) if members is None else _set_of(members)


def _set_of(members: bytes) -> BitMap64:
    return BitMap64(np.frombuffer(members, dtype="<i8").tolist())


def prune(tx: sqlite3.Connection, task: int, needed: int, cleared: BitMap64) -> None:
    """Make batches past that cannot be replayed: up to the last of them with a cleared sample."""
    past = past_of(tx, task)
    doomed, since, end = BitMap64(), BitMap64(), past.k
    for k, members in batches_from(tx, task, past.k, needed):
        since |= members
        if members & cleared:
            doomed, end = doomed | since, k + 1
            since = BitMap64()
        elif k - end > FARTHEST_LOOK:
            break
    if end > past.k:
        members = past.members | doomed
        members.run_optimize()
        tx.execute("INSERT OR REPLACE INTO past VALUES (?, ?, ?)", (task, end, members.serialize()))
        tx.execute("DELETE FROM assignments WHERE task = ? AND k < ?", (task, end))


def forget_answers(tx: sqlite3.Connection, task: int, cleared: BitMap64) -> None:
    """Forget what `get_meta` answered to ranks where all of it is cleared."""
    rows = tx.execute(
        "SELECT dp_rank, batch_index, first, count, members FROM rank_batches WHERE task = ?",
        (task,),
    )
    doomed = [
        (task, rank, batch)
        for rank, batch, *packed in rows
        if BitMap64(unpack_list(*packed)).issubset(cleared)
    ]
    tx.executemany(
        "DELETE FROM rank_batches WHERE task = ? AND dp_rank = ? AND batch_index = ?", doomed
    )
