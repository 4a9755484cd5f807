"""One host at a time: SQLite's WAL and flock only work among processes of one kernel."""

from __future__ import annotations

import os
import socket
import sqlite3
import time

from persisting_torch.errors import BucketUnavailable, StaleOwner
from persisting_torch.queue.host import boot, host
from persisting_torch.queue.ledger import Ledger

LEASE_SECONDS = 30.0
RENEW_SECONDS = 10.0


def take_lease(ledger: Ledger, handle: int) -> float:
    """Say that a handle of this process has the queue open, for LEASE_SECONDS; when that ends.

    Calling it again renews the lease.

    Raises BucketUnavailable naming the host that holds the queue, if it is another one.
    """
    now = time.time()
    with ledger.transaction() as tx:
        _refuse_other_hosts(tx, ledger, now)
        _refuse_other_epochs(tx, ledger)
        tx.execute(
            "DELETE FROM leases WHERE expires < ? OR (host = ? AND boot != ?)",
            (now, host(), boot()),
        )
        tx.execute(
            "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)",
            (host(), boot(), os.getpid(), handle, socket.gethostname(), now + LEASE_SECONDS),
        )
    return now + LEASE_SECONDS


def renew_lease(ledger: Ledger, handle: int) -> float:
    """Renew it; when the new one ends.

    Where another host has the queue by now, the ledger refuses all further use.
    """
    try:
        return take_lease(ledger, handle)
    except BucketUnavailable as error:
        ledger.lost = StaleOwner(
            f"queue {ledger.place.queue!r} was taken over by others while this process slept"
            f" for more than {LEASE_SECONDS:g} s; nothing more can be read or written through this"
            f" handle. Close it. ({error})"
        )
        return 0.0


def end_lease(ledger: Ledger, handle: int) -> None:
    """Say that the handle was closed."""
    with ledger.transaction() as tx:
        tx.execute(
            "DELETE FROM leases WHERE host = ? AND boot = ? AND pid = ? AND handle = ?",
            (host(), boot(), os.getpid(), handle),
        )


def _refuse_other_hosts(tx: sqlite3.Connection, ledger: Ledger, now: float) -> None:
    other = tx.execute(
        "SELECT name, pid, expires FROM leases WHERE boot != ? AND host != ? AND expires >= ?"
        " ORDER BY expires DESC",
        (boot(), host(), now),
    ).fetchone()
    if other is not None:
        name, pid, expires = other
        raise BucketUnavailable(
            f"queue {ledger.place.queue!r} at {ledger.place.root} is open on host {name!r}"
            f" (process {pid}); two hosts cannot share a local queue. Close it there, or use"
            f" cluster mode to share it. If that host is gone, its lease ends in"
            f" {expires - now:.0f} s."
        )


def _refuse_other_epochs(tx: sqlite3.Connection, ledger: Ledger) -> None:
    """Raise BucketUnavailable if a cluster has owned the queue since this process opened it."""
    epoch = epoch_of(tx)
    if ledger.epoch is None:
        ledger.epoch = epoch
    if ledger.epoch != epoch:
        raise BucketUnavailable(
            f"queue {ledger.place.queue!r} at {ledger.place.root} was taken over by a cluster. Open"
            " it anew."
        )


def epoch_of(tx: sqlite3.Connection) -> int:
    found = tx.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
    return int(found[0]) if found else 0
