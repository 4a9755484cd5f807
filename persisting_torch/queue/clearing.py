"""Samples that are cleared: entered first, and then gone from the rows, the files and the ledger.

An entry in `cleared` hides its samples from all readers at once. Their rows are deleted after that,
fragments that hold no others being dropped without a look at them; a process that dies in between
leaves entries newer than the key `removed`, which the next one goes on from.
"""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap64

from persisting_torch.queue.sets import pack_set, unpack_set
from persisting_torch.queue.storage import RowStore

if TYPE_CHECKING:
    from persisting_torch.queue.parts import Plain

MOST_ENTRIES = 1000
RECLAIM_BYTES = 16 << 20
RECLAIM_SHARE = 0.25  # of the bytes that count, which those that do not may reach
VERSIONS_KEPT = 2


def enter_cleared(tx: sqlite3.Connection, partition: int, members: BitMap64) -> None:
    """Clear samples of a partition, and forget their keys and notes."""
    tx.execute(
        "INSERT INTO cleared (partition, first, count, members) VALUES (?, ?, ?, ?)",
        (partition, *pack_set(members)),
    )
    bounds = (members.min(), members.max())
    for table in ("keys", "custom"):
        known = tx.execute(f"SELECT sample FROM {table} WHERE sample BETWEEN ? AND ?", bounds)
        doomed = [row for row in known if row[0] in members]
        tx.executemany(f"DELETE FROM {table} WHERE sample = ?", doomed)


def remove_rows(bucket: Plain) -> bool:
    """Delete the rows of samples that were cleared since the last time; whether there were any."""
    with bucket.ledger.reading() as tx:
        bucket.books.refresh(tx)
        removed = bucket.books.removed
        news = tx.execute(
            "SELECT seq, first, count, members FROM cleared WHERE seq > ?", (removed,)
        ).fetchall()
        if not news:
            return False
        members = BitMap64().union(*(unpack_set(*packed) for _, *packed in news))
        rows = np.array(bucket.books.runs.rows_of_set(members).to_array(), dtype=np.int64)
    with bucket.commit_lock:
        nbytes = bucket.rows.delete(rows)
    last = max(seq for seq, *_ in news)
    with bucket.ledger.transaction() as tx:
        bucket.books.refresh(tx)
        if bucket.books.removed >= last:
            return True  # another process was at it, too
        count_deleted(tx, len(rows), nbytes)
        tx.execute("INSERT OR REPLACE INTO meta VALUES ('removed', ?)", (last,))
        if tx.execute("SELECT max(seq) FROM cleared").fetchone()[0] == last:
            forget_runs(tx, bucket.books.gone)
            fold_cleared(tx, MOST_ENTRIES)
    return True


def count_deleted(tx: sqlite3.Connection, samples: int, nbytes: int) -> None:
    so_far = deleted(tx)
    so_far = {"samples": so_far["samples"] + samples, "bytes": so_far["bytes"] + nbytes}
    tx.execute("INSERT OR REPLACE INTO meta VALUES ('deleted', ?)", (json.dumps(so_far),))


def deleted(tx: sqlite3.Connection) -> dict[str, int]:
    """How many samples were deleted so far, and the bytes of files that held them."""
    found = tx.execute("SELECT value FROM meta WHERE key = 'deleted'").fetchone()
    figures: dict[str, int] = json.loads(found[0]) if found else {"samples": 0, "bytes": 0}
    return figures


def forget_runs(tx: sqlite3.Connection, gone: BitMap64) -> None:
    """Drop runs without a row that is there, but for the last, which new rows may lengthen."""
    runs = tx.execute("SELECT seq, first_row, first_row + count FROM runs").fetchall()
    last = max((end for _, _, end in runs), default=0)
    dead = [(seq,) for seq, row, end in runs if end < last and gone.contains_range(row, end)]
    tx.executemany("DELETE FROM runs WHERE seq = ?", dead)


def fold_cleared(tx: sqlite3.Connection, most: int) -> None:
    """Join entries whose rows are all deleted into one for each partition, if they are many."""
    if tx.execute("SELECT count(*) FROM cleared").fetchone()[0] <= most:
        return
    joined: dict[int, BitMap64] = {}
    for partition, *packed in tx.execute("SELECT partition, first, count, members FROM cleared"):
        joined.setdefault(partition, BitMap64()).update(unpack_set(*packed))
    tx.execute("DELETE FROM cleared")
    for partition, members in joined.items():
        members.run_optimize()
        tx.execute(
            "INSERT INTO cleared (partition, first, count, members) VALUES (?, ?, ?, ?)",
            (partition, *pack_set(members)),
        )
    tx.execute("INSERT OR REPLACE INTO meta SELECT 'removed', max(seq) FROM cleared")


def reclaim(store: RowStore, lock: AbstractContextManager[object]) -> bool:
    """Remove the files of old versions, if they hold a good share of what is on the disk.

    Rows that were deleted lie in them until then. A reader of such a version starts anew. Returns
    whether there may be more to remove once there are newer versions.
    """
    if not store.exists():
        return False
    table = store.table()
    live = sum(table.fragment(slot).bytes for slot in range(len(table)))
    stored = store.files.size(os.path.join(store.path, "data"))
    if stored - live <= max(RECLAIM_BYTES, RECLAIM_SHARE * live):
        return False
    with lock:
        store.dataset().cleanup_old_versions(retain_versions=VERSIONS_KEPT)
    return True
