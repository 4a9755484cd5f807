"""Retention: what all tasks have consumed is deleted, and its space given back, as time goes on.

A sample may go once every task of its partition is done with it. For batches of a training run
that is when neither the task's cursor nor any checkpoint on disk is before them; for what
`get_meta` gave out, some time after it was given, since its data is only asked for then. What may
go is cleared where it makes up whole fragments of `data.lance`, which are dropped, or most of one,
which is then rewritten without it.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap64

from persisting_torch.queue import past
from persisting_torch.queue.books import Partition, Task
from persisting_torch.queue.clearing import enter_cleared
from persisting_torch.queue.fragments import FragmentTable
from persisting_torch.queue.keep import Retention
from persisting_torch.queue.sets import unpack_set
from persisting_torch.queue.storage import RowStore

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine

GRACE_SECONDS = 30.0
"""What `get_meta` gave out is kept for this long at least, so that its data can be fetched."""
EVERY_SECONDS = 1.0
QUIET_SECONDS = 10.0
LEAST_SHARE = 0.5  # of a fragment's rows, which is rewritten for the sake of no less
CLOCK_STEPS = 100  # entries of `clock` over the time that is kept


@dataclass
class Choice:
    """What may go now: the samples, by partition, and what each task still needs.

    `fresh` are those that only claims have consumed; they may go after a while.
    """

    members: dict[int, BitMap64]
    needed: dict[int, int]
    fresh: BitMap64


class Keeper:
    """Deletes for one process what the queue's setting does not keep; one process at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._files = past.Files()
        self._batches: dict[int, past.Batches] = {}
        self._looked = 0.0
        self._seen: tuple[int, int] | None = None

    def due(self) -> bool:
        """Whether there may be something to delete since the last round."""
        engine = self._engine
        if not engine.books.retention.deletes:
            return False
        waited = time.monotonic() - self._looked
        return waited >= QUIET_SECONDS or (
            waited >= EVERY_SECONDS and engine.ledger.version() != self._seen
        )

    def clear_consumed(self) -> bool:
        """Clear what may go, where that frees whole files; whether there was any."""
        engine = self._engine
        self._looked, self._seen = time.monotonic(), engine.ledger.version()
        gone = self._gone_checkpoints()
        with engine.ledger.reading() as tx:
            engine.books.refresh(tx)
            setting = engine.books.retention
            stale = set(self._batches) - {task.id for task in engine.books.tasks.values()}
            choice = self._choose(tx, gone) if setting.deletes else None
            nothing = choice is None or not any(choice.members.values())
            ticks = setting.kind == "seconds" and self._clock_is_due(tx, setting)
            doomed = choice is not None and _doomed_are_due(tx, choice)
        for task in stale:
            del self._batches[task]
        if nothing and not gone and not ticks and not doomed:
            return False
        rows = engine.rows
        whole = isinstance(rows, RowStore)
        table = rows.table() if isinstance(rows, RowStore) and rows.exists() else None
        with engine.ledger.transaction() as tx:
            engine.books.refresh(tx)
            past.forget_gone(tx, gone)
            if ticks:
                self._tick(tx, setting)
            if not setting.deletes or (whole and table is None):
                return False
            choice = self._choose(tx, set())
            if doomed:
                _doom(tx, choice)
            return self._clear(tx, choice, table)

    def _gone_checkpoints(self) -> set[str]:
        with self._engine.ledger.reading() as tx:
            paths = [path for (path,) in tx.execute("SELECT DISTINCT path FROM checkpoints")]
        return self._files.gone(paths)

    # What may go

    def _choose(self, tx: sqlite3.Connection, gone: set[str]) -> Choice:
        books = self._engine.books
        doomed = _read_doomed(tx)
        members: dict[int, BitMap64] = {}
        needed: dict[int, int] = {}
        fresh = BitMap64()
        for partition in books.partitions.values():
            tasks = [task for task in books.tasks.values() if task.partition == partition.id]
            if not tasks:
                continue
            for task in tasks:
                needed[task.id] = past.first_needed(tx, task.id, task.cursor, gone)
            at_once, later = self._consumed(tx, partition, tasks, needed)
            fresh |= later
            members[partition.id] = at_once | (later & doomed)
        return Choice(self._beyond_what_is_kept(tx, members), needed, fresh)

    def _consumed(
        self,
        tx: sqlite3.Connection,
        partition: Partition,
        tasks: list[Task],
        needed: dict[int, int],
    ) -> tuple[BitMap64, BitMap64]:
        """Samples that all tasks are done with, and those for which that takes a while yet."""
        trained, done = partition.present.copy(), partition.present.copy()
        for task in tasks:
            batches = self._batches.get(task.id)
            if batches is None or batches.epoch != task.epoch:
                batches = self._batches[task.id] = past.Batches(task.epoch)
            batches.read(tx, task.id, needed[task.id])
            held = (batches.assigned | _leased(tx, task.id)) - batches.trained
            dropped = BitMap64().union(*task.dropped.values())
            trained &= (batches.trained | dropped) - held
            done &= (task.taken | batches.trained) - held
        return trained, done - trained

    def _beyond_what_is_kept(
        self, tx: sqlite3.Connection, members: dict[int, BitMap64]
    ) -> dict[int, BitMap64]:
        books, setting = self._engine.books, self._engine.books.retention
        if setting.kind == "consumed":
            return members
        candidates = BitMap64().union(*members.values())
        if setting.kind == "rows":
            excess = books.rows - len(books.gone) - int(setting.amount)
            old = _lowest(candidates, excess)
        else:
            row = _row_before(tx, time.time() - setting.amount)
            old = candidates & books.runs.indexes_below(row)
        return {partition: own & old for partition, own in members.items()}

    # Time

    def _clock_is_due(self, tx: sqlite3.Connection, setting: Retention) -> bool:
        last = tx.execute("SELECT first_row, at FROM clock ORDER BY first_row DESC").fetchone()
        return last is None or (
            last[0] < self._engine.books.rows
            and time.time() - last[1] >= setting.amount / CLOCK_STEPS
        )

    def _tick(self, tx: sqlite3.Connection, setting: Retention) -> None:
        """Note how many rows there are now, and forget what is older than need be."""
        now = time.time()
        tx.execute("INSERT OR IGNORE INTO clock VALUES (?, ?)", (self._engine.books.rows, now))
        row = _row_before(tx, now - setting.amount)
        tx.execute("DELETE FROM clock WHERE first_row < ?", (row,))

    # Going

    def _clear(self, tx: sqlite3.Connection, choice: Choice, table: FragmentTable | None) -> bool:
        """Enter as cleared what may go; where fragments are known, what makes up most of one."""
        books = self._engine.books
        going = BitMap64().union(*choice.members.values())
        if table is not None:
            going = self._of_whole_fragments(going, table)
        if not going:
            return False
        for partition, members in choice.members.items():
            own = members & going
            if own:
                enter_cleared(tx, partition, own)
        cleared = books.cleared_indexes | going
        for task, k in choice.needed.items():
            past.prune(tx, task, k, cleared)
            past.forget_answers(tx, task, cleared)
        return True

    def _of_whole_fragments(self, candidates: BitMap64, table: FragmentTable) -> BitMap64:
        books = self._engine.books
        indexes = np.array(candidates.to_array(), dtype=np.int64)
        slots, _ = table.locate(books.runs.rows_of(indexes))
        counts = np.bincount(slots[slots >= 0], minlength=len(table))
        goes = np.zeros(len(table) + 1, dtype=bool)  # the last for rows in no fragment: slot -1
        goes[-1] = True
        for slot in np.flatnonzero(counts).tolist():
            fragment = table.fragment(slot)
            live = fragment.positions.count - fragment.metadata.num_deletions
            goes[slot] = counts[slot] >= LEAST_SHARE * live
        return BitMap64(indexes[goes[slots]].tolist())


def _leased(tx: sqlite3.Connection, task: int) -> BitMap64:
    """Samples that a producer has claimed and not finished."""
    rows = tx.execute("SELECT first, count, members FROM leased WHERE task = ?", (task,))
    return BitMap64().union(*(unpack_set(*packed) for packed in rows))


def _read_doomed(tx: sqlite3.Connection) -> BitMap64:
    """Samples given out for so long that they may go; none before their time."""
    found = dict(tx.execute("SELECT key, value FROM meta WHERE key IN ('doomed', 'doomed_at')"))
    if not found or time.time() - found["doomed_at"] < GRACE_SECONDS:
        return BitMap64()
    return BitMap64.deserialize(found["doomed"])


def _doomed_are_due(tx: sqlite3.Connection, choice: Choice) -> bool:
    """Whether what was given out long enough ago may go, or has yet to be noted."""
    found = tx.execute("SELECT value FROM meta WHERE key = 'doomed_at'").fetchone()
    if found is None:
        return bool(choice.fresh)
    return bool(time.time() - found[0] >= GRACE_SECONDS)


def _doom(tx: sqlite3.Connection, choice: Choice) -> None:
    """Note what may go by the next time."""
    if not choice.fresh:
        tx.execute("DELETE FROM meta WHERE key IN ('doomed', 'doomed_at')")
        return
    choice.fresh.run_optimize()
    tx.executemany(
        "INSERT OR REPLACE INTO meta VALUES (?, ?)",
        (("doomed", choice.fresh.serialize()), ("doomed_at", time.time())),
    )


def _lowest(members: BitMap64, count: int) -> BitMap64:
    if count >= len(members):
        return members
    if count <= 0:
        return BitMap64()
    below = BitMap64()
    below.add_range(0, members[count])
    return members & below


def _row_before(tx: sqlite3.Connection, moment: float) -> int:
    """All rows below this one were there at the moment."""
    found = tx.execute("SELECT max(first_row) FROM clock WHERE at <= ?", (moment,)).fetchone()
    return int(found[0] or 0)
