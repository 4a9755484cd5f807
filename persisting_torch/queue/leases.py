"""Claims that a producer has not finished: its own until it does, the others' when it dies.

A claim with a lease is two rows, one in `claims` and one in `leased`. Finishing takes away from
`leased`, giving back from both.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from pyroaring import BitMap64

from persisting_torch.queue.sets import pack_set, unpack_set

MOST_ROWS_OF_ONE = 64


def lease(tx: sqlite3.Connection, task: int, producer: str, members: BitMap64) -> None:
    """Enter that a producer is at work on samples which the task has just taken."""
    if not members:
        return
    _enter(tx, task, producer, members)
    rows = tx.execute(
        "SELECT first, count, members FROM leased WHERE task = ? AND producer = ?", (task, producer)
    ).fetchall()
    if len(rows) > MOST_ROWS_OF_ONE:
        tx.execute("DELETE FROM leased WHERE task = ? AND producer = ?", (task, producer))
        _enter(tx, task, producer, BitMap64().union(*(unpack_set(*row) for row in rows)))


def finish(
    tx: sqlite3.Connection,
    members: BitMap64,
    *,
    producer: str | None = None,
    task: int | None = None,
) -> None:
    """Enter that these samples are done: of one producer, or for one task whoever has them."""
    rows = tx.execute(
        "SELECT seq, task, producer, first, count, members FROM leased"
        " WHERE producer = coalesce(?, producer) AND task = coalesce(?, task)",
        (producer, task),
    ).fetchall()
    for seq, of_task, holder, *packed in rows:
        held = unpack_set(*packed)
        if held & members:
            tx.execute("DELETE FROM leased WHERE seq = ?", (seq,))
            _enter(tx, of_task, holder, held - members)


def finish_all(tx: sqlite3.Connection, producer: str) -> None:
    """Enter that a producer has done all that it had claimed."""
    tx.execute("DELETE FROM leased WHERE producer = ?", (producer,))


def withdraw(tx: sqlite3.Connection, producers: Iterable[str]) -> dict[int, BitMap64]:
    """Take from producers what they have not finished: samples by task, by its number."""
    found: dict[int, BitMap64] = {}
    for producer in producers:
        for task, *packed in tx.execute(
            "SELECT task, first, count, members FROM leased WHERE producer = ?", (producer,)
        ):
            found.setdefault(task, BitMap64()).update(unpack_set(*packed))
        finish_all(tx, producer)
    return found


def holders(tx: sqlite3.Connection) -> list[str]:
    """The producers that have claimed something and not finished it."""
    return [name for (name,) in tx.execute("SELECT DISTINCT producer FROM leased")]


def unfinished(tx: sqlite3.Connection) -> dict[int, BitMap64]:
    """For each task, by its number, the samples taken that may still come back."""
    found: dict[int, BitMap64] = {}
    for task, *packed in tx.execute("SELECT task, first, count, members FROM leased"):
        found.setdefault(task, BitMap64()).update(unpack_set(*packed))
    return found


def counts(tx: sqlite3.Connection, of: str) -> dict[int | str, int]:
    """How many samples are leased, by `of`: "task" (its number) or "producer" (its name)."""
    rows: Iterable[tuple[int | str, int]] = tx.execute(
        f"SELECT {of}, sum(count) FROM leased GROUP BY {of}"
    )
    return dict(rows)


def _enter(tx: sqlite3.Connection, task: int, producer: str, members: BitMap64) -> None:
    if members:
        tx.execute(
            "INSERT INTO leased (task, producer, first, count, members) VALUES (?, ?, ?, ?, ?)",
            (task, producer, *pack_set(members)),
        )
