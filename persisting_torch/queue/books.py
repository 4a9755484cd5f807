"""What the ledger says, mirrored in memory: what has arrived, what is taken, what is ready.

The mirror only ever follows the ledger: each table's rows carry rising sequence numbers, and
`refresh` reads those it has not seen. So its cost is that of the news, not of the history.
"""

from __future__ import annotations

import json
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from pyroaring import BitMap64

from persisting_torch.queue.fields import FieldType, Schema, Variant
from persisting_torch.queue.keep import KEEP_ALL, read_retention
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.places import Places
from persisting_torch.queue.runs import Int64s, Runs
from persisting_torch.queue.sets import set_of, unpack_set

VIEWS_KEPT = 64
TABLES_WITH_NEWS = (
    "fields",
    "places",
    "runs",
    "arrivals",
    "late",
    "cleared",
    "dropped",
    "claims",
    "consumed",
)

PULSE = """SELECT
    (SELECT value FROM meta WHERE key = 'sealed'),
    (SELECT value FROM meta WHERE key = 'retention'),
    (SELECT value FROM meta WHERE key = 'partitions'),
    (SELECT max(seq) FROM fields),
    (SELECT max(id) FROM field_sets),
    (SELECT seq FROM sqlite_sequence WHERE name = 'places'),
    (SELECT seq FROM sqlite_sequence WHERE name = 'runs'),
    (SELECT seq FROM sqlite_sequence WHERE name = 'arrivals'),
    (SELECT seq FROM sqlite_sequence WHERE name = 'late'),
    (SELECT value FROM meta WHERE key = 'folded'),
    (SELECT seq FROM sqlite_sequence WHERE name = 'cleared'),
    (SELECT value FROM meta WHERE key = 'removed'),
    (SELECT value FROM meta WHERE key = 'tasks'),
    (SELECT seq FROM sqlite_sequence WHERE name = 'dropped'),
    (SELECT seq FROM sqlite_sequence WHERE name = 'claims'),
    (SELECT max(seq) FROM consumed)"""
"""One look that tells which tables have news."""


@dataclass
class Partition:
    """One partition: its samples, by field, and those cleared."""

    id: int
    name: str
    sealed: float | None = None
    arrived: BitMap64 = field(default_factory=BitMap64)
    cleared: BitMap64 = field(default_factory=BitMap64)
    having: dict[str, BitMap64] = field(default_factory=dict)

    @property
    def present(self) -> BitMap64:
        return self.arrived - self.cleared if self.cleared else self.arrived


@dataclass
class Task:
    """One task in one partition: what it has taken, and its committed cursor."""

    id: int
    name: str
    partition: int
    epoch: int = 0
    cursor: int = 0
    taken: BitMap64 = field(default_factory=BitMap64)
    dropped: dict[str, BitMap64] = field(default_factory=dict)

    def drop(self, reason: str, members: BitMap64) -> None:
        self.dropped[reason] = self.dropped.get(reason, BitMap64()) | members

    @property
    def let_go(self) -> int:
        """How many samples the task dropped, for whatever reason."""
        return len(BitMap64().union(*self.dropped.values()))


@dataclass(frozen=True, slots=True)
class LateRun:
    """Consecutive rows of `late.lance` that hold these fields."""

    seq: int
    names: tuple[str, ...]
    first_row: int
    count: int

    def rows(self) -> Int64s:
        return np.arange(self.first_row, self.first_row + self.count, dtype=np.int64)


@dataclass
class View:
    """What is ready for one task that asks for certain fields."""

    task: str
    partition: str
    fields: frozenset[str]
    available: BitMap64


class Books:
    """The mirror of one bucket's ledger. All methods expect the ledger's lock to be held."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.folds = 0  # how often rows have left `late`
        self.folded_version = 0  # of data.lance, which has what has left
        self._forget()

    def _forget(self) -> None:
        self.schema = Schema(self.ledger.place.queue)
        self.runs = Runs()
        self.places = Places()
        self.partitions: dict[str, Partition] = {}
        self.tasks: dict[tuple[str, str], Task] = {}
        self.rows = 0
        self.sealed: float | None = None
        self.retention = KEEP_ALL
        self.cleared_indexes = BitMap64()
        self.gone = BitMap64()  # rows of data.lance whose samples are cleared
        self.removed = 0  # the newest entry of `cleared` whose rows are deleted
        self.late: dict[int, LateRun] = {}  # those that count, by rising sequence number
        self._by_id: dict[int, Partition] = {}
        self._tasks_by_id: dict[int, Task] = {}
        self._field_sets: dict[int, tuple[str, ...]] = {}
        self._views: OrderedDict[tuple[str, str, frozenset[str]], View] = OrderedDict()
        self._seen = dict.fromkeys(TABLES_WITH_NEWS, 0)
        self._at: tuple[int, int] | None = None
        self._pulse: tuple[Any, ...] | None = None

    # Following the ledger

    def follow(self) -> None:
        """Read what is new, outside a transaction. Takes the ledger's lock itself."""
        with self.ledger.lock:
            self.ledger.meet()
            self.glance()

    def glance(self) -> None:
        """Likewise, but wait for nothing that others have still to tell."""
        with self.ledger.lock:
            if self.ledger.version() != self._at:
                with self.ledger.glancing() as tx:
                    self.refresh(tx)

    def catch_up(self) -> None:
        """Read all that was committed before this call, by whomever."""
        self.ledger.catch_up()
        self.follow()

    def follow_others(self) -> None:
        """Read what other processes or handles may have changed."""
        with self.ledger.lock:
            self.ledger.meet()
            if self._at is None or self.ledger.others_version() != self._at[0]:
                self.glance()

    def refresh(self, tx: sqlite3.Connection) -> None:
        """Read what is new. In a transaction it comes before the transaction's own writes."""
        at = self.ledger.version()
        if at == self._at:
            return
        try:
            pulse = tx.execute(PULSE).fetchone()
            last = self._pulse or (object(),) * len(pulse)
            for read, beat, before in zip(self._readers, pulse, last, strict=True):
                if beat != before:
                    read(tx)
            self._at, self._pulse = at, pulse
        except BaseException:
            # Ctrl-C, too, would leave a gap that no later refresh fills.
            self._forget()
            raise

    def _news(self, tx: sqlite3.Connection, table: str, columns: str) -> list[tuple[Any, ...]]:
        rows = tx.execute(
            f"SELECT seq, {columns} FROM {table} WHERE seq > ? ORDER BY seq", (self._seen[table],)
        ).fetchall()
        if rows:
            self._seen[table] = rows[-1][0]
        return rows

    @property
    def _readers(self) -> tuple[Callable[[sqlite3.Connection], None], ...]:
        """Who reads what each beat of the pulse tells of, in the order of their dependence."""
        return (
            self._read_seal,
            self._read_retention,
            self._read_partitions,
            self._read_fields,
            self._read_field_sets,
            self._read_places,
            self._read_runs,
            self._read_arrivals,
            self._read_late,
            self._read_folded,
            self._read_cleared,
            self._read_removed,
            self._read_tasks,
            self._read_dropped,
            self._read_claims,
            self._read_folds,
        )

    def _read_seal(self, tx: sqlite3.Connection) -> None:
        sealed = tx.execute("SELECT value FROM meta WHERE key = 'sealed'").fetchone()
        self.sealed = sealed and sealed[0]

    def _read_retention(self, tx: sqlite3.Connection) -> None:
        self.retention = read_retention(tx)

    def _read_partitions(self, tx: sqlite3.Connection) -> None:
        for number, name, sealed in tx.execute("SELECT id, name, sealed FROM partitions"):
            if number not in self._by_id:
                self._by_id[number] = self.partitions[name] = Partition(number, name)
            self._by_id[number].sealed = sealed

    def _read_fields(self, tx: sqlite3.Connection) -> None:
        for _, name, path, column, kind in self._news(
            tx, "fields", "name, path, field_column, type"
        ):
            variant = Variant(str(column), FieldType.from_json(str(kind))) if kind else None
            self.schema.add(str(name), tuple(json.loads(str(path))), variant)

    def _read_field_sets(self, tx: sqlite3.Connection) -> None:
        known = max(self._field_sets, default=0)
        for number, names in tx.execute("SELECT id, names FROM field_sets WHERE id > ?", (known,)):
            self._field_sets[number] = tuple(json.loads(names))

    def _read_places(self, tx: sqlite3.Connection) -> None:
        for _, *place in self._news(tx, "places", "first_row, count, bucket, bucket_row"):
            self.places.add(*place)

    def _read_runs(self, tx: sqlite3.Connection) -> None:
        came, known = BitMap64(), self.rows
        columns = "first_index, count, first_row, members"
        for _, first, count, row, members in self._news(tx, "runs", columns):
            self.runs.add_all(unpack_set(first, count, members), row)
            self.rows = max(self.rows, row + count)
            came.add_range(row, row + count)
        # Rows that no run covers were deleted, and their runs with them.
        if len(came) and came.range_cardinality(known, self.rows) < self.rows - known:
            self.gone |= set_of(range(known, self.rows)) - came

    def _read_arrivals(self, tx: sqlite3.Connection) -> None:
        columns = "partition, field_set, first, count, members"
        for _, partition, field_set, *packed in self._news(tx, "arrivals", columns):
            self._arrive(self._by_id[partition], self._field_sets[field_set], unpack_set(*packed))

    def _arrive(self, partition: Partition, names: tuple[str, ...], members: BitMap64) -> None:
        partition.arrived |= members
        for name in names:
            partition.having.setdefault(name, BitMap64()).update(members)
        for view in self._views.values():
            if view.partition == partition.name:
                task = self.tasks.get((view.task, view.partition))
                view.available |= self._ready(partition, view.fields, members, task)

    def _read_late(self, tx: sqlite3.Connection) -> None:
        for seq, field_set, first_row, count in self._news(
            tx, "late", "field_set, first_row, count"
        ):
            self.late[seq] = LateRun(seq, self._field_sets[field_set], first_row, count)

    def _read_folded(self, tx: sqlite3.Connection) -> None:
        found = dict(
            tx.execute("SELECT key, value FROM meta WHERE key IN ('folded', 'folded_version')")
        )
        self.folds = found.get("folded", 0)
        self.folded_version = found.get("folded_version", 0)
        left = {seq for (seq,) in tx.execute("SELECT seq FROM late")}
        self.late = {seq: run for seq, run in self.late.items() if seq in left}

    def _read_cleared(self, tx: sqlite3.Connection) -> None:
        for _, partition, *packed in self._news(tx, "cleared", "partition, first, count, members"):
            members = unpack_set(*packed) - self.cleared_indexes
            self._by_id[partition].cleared |= members
            self.cleared_indexes |= members
            self.gone |= self.runs.rows_of_set(members)
            for view in self._views.values():
                if view.partition == self._by_id[partition].name:
                    view.available -= members

    def _read_removed(self, tx: sqlite3.Connection) -> None:
        found = tx.execute("SELECT value FROM meta WHERE key = 'removed'").fetchone()
        self.removed = found[0] if found else 0
        if self.removed and self.removed >= self._seen["cleared"]:
            self.runs.drop(self.gone)
            self.places.drop(self.gone)
            self._tidy()

    def _tidy(self) -> None:
        """Let sets take the least memory: a solid range some bytes, however it came about."""
        sets = [self.cleared_indexes, self.gone]
        for partition in self.partitions.values():
            sets += [partition.arrived, partition.cleared, *partition.having.values()]
        for task in self.tasks.values():
            sets += [task.taken, *task.dropped.values()]
        for members in sets:
            members.run_optimize()

    def _read_tasks(self, tx: sqlite3.Connection) -> None:
        for number, name, partition, epoch, cursor in tx.execute(
            "SELECT id, name, partition, epoch, cursor FROM tasks"
        ):
            task = self._tasks_by_id.get(number)
            if task is None or task.epoch != epoch:
                where = self._by_id[partition].name
                task = Task(number, name, partition, epoch)
                self._tasks_by_id[number] = self.tasks[name, where] = task
                folded = tx.execute("SELECT members FROM consumed WHERE task = ?", (number,))
                for (members,) in folded:
                    task.taken |= BitMap64.deserialize(members)
                self._read_dropped_by(tx, task)
                for key in [key for key in self._views if key[:2] == (name, where)]:
                    del self._views[key]
            task.cursor = cursor

    def _read_dropped(self, tx: sqlite3.Connection) -> None:
        columns = "task, reason, first, count, members"
        for _, number, reason, *packed in self._news(tx, "dropped", columns):
            self._tasks_by_id[number].drop(reason, unpack_set(*packed))

    def _read_dropped_by(self, tx: sqlite3.Connection, task: Task) -> None:
        for reason, *packed in tx.execute(
            "SELECT reason, first, count, members FROM dropped WHERE task = ?", (task.id,)
        ):
            task.drop(reason, unpack_set(*packed))

    def _read_claims(self, tx: sqlite3.Connection) -> None:
        for _, number, *packed in self._news(tx, "claims", "task, first, count, members"):
            self._take(self._tasks_by_id[number], unpack_set(*packed))

    def _read_folds(self, tx: sqlite3.Connection) -> None:
        for _, task, members in self._news(tx, "consumed", "task, members"):
            self._take(self._tasks_by_id[task], BitMap64.deserialize(members))

    def note_claim(self, task: str, partition: str, members: BitMap64, seq: int) -> None:
        """Enter a claim that was committed in a transaction which began with a refresh.

        With the ledger's lock held all the while. That spares the next refresh to find the claim.
        """
        known = self.tasks.get((task, partition))
        if known is not None and self._at is not None and self._pulse is not None and seq:
            self._take(known, members)
            self._seen["claims"] = seq
            self._pulse = (*self._pulse[:-2], seq, self._pulse[-1])
            self._at = self._at[0], self.ledger.own_changes()

    def _take(self, task: Task, members: BitMap64) -> None:
        task.taken |= members
        where = self._by_id[task.partition].name
        for view in self._views.values():
            if view.task == task.name and view.partition == where:
                view.available -= members

    # Answering

    @property
    def last_late(self) -> int:
        """The number of the newest run of late rows that was read."""
        return self._seen["late"]

    @property
    def claims_seen(self) -> int:
        """The number of the newest claim that was read."""
        return self._seen["claims"]

    def is_sealed(self, partition: str) -> bool:
        """Whether no more samples will come to the partition."""
        known = self.partitions.get(partition)
        return self.sealed is not None or (known is not None and known.sealed is not None)

    def view(self, task: str, partition: str, fields: frozenset[str]) -> View:
        """What the task may take: all named fields arrived, not taken, not cleared."""
        key = (task, partition, fields)
        view = self._views.get(key)
        if view is None:
            where = self.partitions.get(partition)
            ready = BitMap64()
            if where is not None:
                ready |= self._ready(
                    where, fields, where.arrived, self.tasks.get((task, partition))
                )
            view = self._views[key] = View(task, partition, fields, ready)
            if len(self._views) > VIEWS_KEPT:
                self._views.popitem(last=False)
        self._views.move_to_end(key)
        return view

    @staticmethod
    def _ready(
        partition: Partition, fields: frozenset[str], members: BitMap64, task: Task | None
    ) -> BitMap64:
        ready = members - partition.cleared
        for name in fields:
            ready = ready & partition.having.get(name, BitMap64())
        if task is not None:
            ready = ready - task.taken
        return ready

    def ready_whoever_took(self, partition: str, fields: frozenset[str]) -> BitMap64:
        """All samples whose named fields have arrived, whatever any task has taken."""
        where = self.partitions.get(partition)
        return BitMap64() if where is None else self._ready(where, fields, where.arrived, None)

    def lacking(self, view: View) -> dict[str, int]:
        """For each asked field, how many untaken samples of the partition lack it."""
        where = self.partitions.get(view.partition)
        if where is None:
            return {}
        task = self.tasks.get((view.task, view.partition))
        untaken = self._ready(where, frozenset(), where.arrived, task)
        counts = {name: len(untaken - where.having.get(name, BitMap64())) for name in view.fields}
        return {name: count for name, count in sorted(counts.items()) if count}

    def arrived_of(self, partition: str, first: int, count: int) -> BitMap64:
        """Which of these consecutive samples of the partition were committed, cleared or not."""
        where = self.partitions.get(partition)
        own = BitMap64()
        if where is not None and count:
            own.add_range(first, first + count)
            own &= where.arrived
        return own

    def strays(self, partition: str, indexes: Sequence[int] | Int64s) -> list[int]:
        """Those of the indexes, ten at most, that were never put into the partition."""
        where = self.partitions.get(partition)
        if where is not None and len(indexes) and _are_a_run(indexes):
            first = int(indexes[0])
            if where.arrived.contains_range(first, first + len(indexes)):
                return []
        try:
            stray = set_of(indexes)
        except OverflowError:
            return [int(index) for index in indexes if index < 0][:10]
        if where is not None:
            stray -= where.arrived
        return list(islice(stray, 10))

    # Names, entered in a transaction

    def partition_id(self, tx: sqlite3.Connection, name: str) -> int:
        known = self.partitions.get(name)
        if known is not None:
            return known.id
        tx.execute("INSERT OR IGNORE INTO partitions (name) VALUES (?)", (name,))
        found = tx.execute("SELECT id FROM partitions WHERE name = ?", (name,)).fetchone()
        return int(found[0])

    def task_id(self, tx: sqlite3.Connection, task: str, partition: str) -> int:
        known = self.tasks.get((task, partition))
        if known is not None:
            return known.id
        where = self.partition_id(tx, partition)
        tx.execute("INSERT OR IGNORE INTO tasks (name, partition) VALUES (?, ?)", (task, where))
        found = tx.execute(
            "SELECT id FROM tasks WHERE name = ? AND partition = ?", (task, where)
        ).fetchone()
        return int(found[0])

    @staticmethod
    def field_set_id(tx: sqlite3.Connection, names: tuple[str, ...]) -> int:
        text = json.dumps(sorted(names))
        tx.execute("INSERT OR IGNORE INTO field_sets (names) VALUES (?)", (text,))
        return int(tx.execute("SELECT id FROM field_sets WHERE names = ?", (text,)).fetchone()[0])


def _are_a_run(indexes: Sequence[int] | Int64s) -> bool:
    """Whether these are consecutive numbers from 0 up, in order."""
    if isinstance(indexes, np.ndarray):
        return bool(len(indexes) and indexes[0] >= 0 and (np.diff(indexes) == 1).all())
    return isinstance(indexes, range) and indexes.step == 1 and indexes.start >= 0
