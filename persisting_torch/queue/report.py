"""What can be said about a queue: the figures of `stats()` and the checks of `verify`."""

from __future__ import annotations

import sqlite3
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from persisting_torch.queue import leases
from persisting_torch.queue.books import LateRun
from persisting_torch.queue.clearing import deleted
from persisting_torch.queue.gone import present_between
from persisting_torch.queue.pacing import puts_wait
from persisting_torch.queue.registry import Registered, registered

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine

VERIFY_STEP = 8192


def supply(tx: sqlite3.Connection) -> str:
    """Who waits for samples is told this of those who put: when they did last, and who lives."""
    last = dict(tx.execute("SELECT key, value FROM meta WHERE key LIKE 'last_%'"))
    told = "nothing was ever put"
    if "last_put" in last:
        by = f" by producer {last['last_writer']}" if last.get("last_writer") else ""
        told = f"last put {time.time() - last['last_put']:.0f} s ago{by}"
    pace, producers = puts_wait(tx), registered(tx)
    if pace is not None:
        told += f"; puts wait for room, their capacity is {pace.capacity}"
    if producers:
        living = ", ".join(sorted(one.name for one in producers if one.lives)) or "none"
        told += f"; producers that live: {living}"
    return told


def stats(engine: Engine) -> dict[str, Any]:
    """Figures of a queue, JSON-able: sizes in samples and bytes, times in seconds since 1970."""
    engine.check_open()
    buffered = engine.intake.buffer.samples
    producers = engine.producers.look()
    with engine.ledger.reading() as tx:
        books = engine.books
        books.refresh(tx)
        last = tx.execute("SELECT value FROM meta WHERE key = 'last_put'").fetchone()
        full = puts_wait(tx)
        persisted = books.rows - len(books.gone)
        engine.rows.refresh()
        found: dict[str, Any] = {
            "name": engine.place.queue,
            "path": engine.place.root,
            "total_count": persisted + buffered,
            "persisted_count": persisted,
            "buffer_size": buffered,
            "last_put": last[0] if last else None,
            "fields": {name: str(field) for name, field in books.schema.fields.items()},
            "partitions": {
                name: {"samples": len(partition.present), "sealed": books.is_sealed(name)}
                for name, partition in sorted(books.partitions.items())
            },
            "tasks": _tasks(engine, leases.counts(tx, "task")),
            "producers": _producers(producers, leases.counts(tx, "producer")),
            "full": full is not None,
            "retention": str(books.retention).strip("'"),
            "storage": {
                "bytes": sum(
                    engine.place.files.size(engine.place.of_bucket(number).bucket)
                    for number in range(engine.place.num_buckets)
                ),
                "ledger_bytes": sum(
                    engine.place.files.size(engine.place.ledger + end) for end in ("", "-wal")
                ),
                "fragments": engine.rows.fragments if engine.rows.exists() else 0,
                "versions": engine.rows.versions if engine.rows.exists() else 0,
                "deleted": deleted(tx),
                "upkeep_error": None if engine.tending.error is None else str(engine.tending.error),
            },
        }
    if engine.metrics.enabled:
        found["metrics"] = engine.metrics.report()
    return found


def _producers(
    producers: list[tuple[Registered, str | None]], leased: dict[int | str, int]
) -> dict[str, Any]:
    return {
        one.name: {
            "pid": one.pid,
            "state": "failed" if fate else one.state,
            "cause": fate.removeprefix("failed: ") if fate else one.cause,
            "beat": one.beat,
            "essential": bool(one.essential),
            "leased": leased.get(one.name, 0),
        }
        for one, fate in producers
    }


def _tasks(engine: Engine, leased: dict[int | str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (name, where), task in sorted(engine.books.tasks.items()):
        present = engine.books.partitions[where].present
        found.setdefault(name, {})[where] = {
            "taken": len(task.taken),
            "available": len(present - task.taken),
            "dropped": {reason: len(members) for reason, members in sorted(task.dropped.items())},
            "leased": leased.get(task.id, 0),
            "cursor": task.cursor,
        }
    return found


def verify(engine: Engine) -> list[str]:
    """Read everything and hold rows and ledger against each other; the faults, [] if none."""
    engine.check_open()
    faults: list[str] = []
    with engine.ledger.reading() as tx:
        engine.books.refresh(tx)
        damage = [row[0] for row in tx.execute("PRAGMA integrity_check") if row[0] != "ok"]
        books = engine.books
        total, schema = books.rows, books.schema
        columns = [variant.column for f in schema.fields.values() for variant in f.variants]
        gone = books.gone.copy()
        arrived = sum(len(partition.arrived) for partition in books.partitions.values())
        late = list(books.late.values())
        notes = tx.execute("SELECT count(*) FROM pending").fetchone()[0]
        shared = tx.execute("SELECT 1 FROM meta WHERE key GLOB 'epoch:*'").fetchone() is not None
    faults += [f"ledger: {text}" for text in damage]
    if engine.rows.exists():
        engine.rows.refresh()
    stored = engine.rows.rows if engine.rows.exists() else 0
    if shared or engine.router is not None:
        stored = total  # puts that failed may have left rows of which the ledger does not know
    if stored < total:
        faults.append(f"the ledger knows {total} rows, but data.lance holds {stored}")
    if stored > total and not notes and stored > _rows_by_now(engine):
        faults.append(f"data.lance holds {stored} rows, but the ledger knows {total}")
    if arrived > total or (arrived < total and not shared):
        faults.append(f"{arrived} samples arrived in partitions, but the ledger knows {total} rows")
    for start in range(0, min(total, stored), VERIFY_STEP):
        rows = present_between(gone, start, min(start + VERIFY_STEP, total, stored))
        if len(rows):
            faults += _verify_rows(engine, rows, columns)
    if engine.rows.version < books.folded_version:
        faults.append(
            f"late fields were folded into version {books.folded_version} of data.lance, whose"
            f" newest version is {engine.rows.version}"
        )
    for run in late:
        columns = [v.column for name in run.names for v in schema.fields[name].variants]
        for start in range(0, run.count, VERIFY_STEP):
            faults += _verify_late(engine, run, run.rows()[start : start + VERIFY_STEP], columns)
    return faults


def _verify_rows(
    engine: Engine, rows: np.ndarray[Any, np.dtype[np.int64]], columns: list[str]
) -> list[str]:
    try:
        table = engine.rows.read(rows, ["_index", *columns])
        table.validate(full=True)
    except (OSError, KeyError, ValueError) as error:
        kept = _not_cleared_since(engine, rows)
        if 0 < len(kept) < len(rows):
            return _verify_rows(engine, kept, columns)
        return [f"rows {rows[0]} to {rows[-1]} cannot be read: {error}"] if len(kept) else []
    wrong = table["_index"].to_numpy() != engine.books.runs.indexes_of(rows)
    return [f"row {row} holds another sample than the ledger says" for row in rows[wrong][:10]]


def _verify_late(
    engine: Engine, run: LateRun, rows: np.ndarray[Any, np.dtype[np.int64]], columns: list[str]
) -> list[str]:
    try:
        table = engine.late.store.read(rows, ["_index", *columns])
        table.validate(full=True)
    except (OSError, KeyError, ValueError) as error:
        engine.ledger.catch_up()
        with engine.ledger.reading() as tx:
            engine.books.refresh(tx)
            if run.seq not in engine.books.late:
                return []  # folded meanwhile
        return [f"late fields in rows {rows[0]} to {rows[-1]} cannot be read: {error}"]
    indexes = table["_index"].to_numpy()
    with engine.ledger.lock:
        stray = engine.books.runs.rows_of(indexes) < 0
        stray[stray] = [at not in engine.books.cleared_indexes for at in indexes[stray].tolist()]
    return [f"late row {row} is of a sample that is not there" for row in rows[stray][:10]]


def _not_cleared_since(
    engine: Engine, rows: np.ndarray[Any, np.dtype[np.int64]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Those of the rows that no process has cleared meanwhile."""
    engine.ledger.catch_up()
    with engine.ledger.reading() as tx:
        engine.books.refresh(tx)
        gone = engine.books.gone
        return rows[[row not in gone for row in rows.tolist()]]


def _rows_by_now(engine: Engine) -> float:
    """Rows that the ledger knows, or is about to, now that others may have flushed."""
    engine.ledger.catch_up()
    with engine.ledger.reading() as tx:
        engine.books.refresh(tx)
        notes = tx.execute("SELECT count(*) FROM pending").fetchone()[0]
        return float("inf") if notes else engine.books.rows
