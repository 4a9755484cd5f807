"""A ledger is taken over from whoever owned it, also from one that stands still amid a transaction.

SQLite's locks end with the process that has them. One that is halted, or cut off from its storage,
in the middle of a transaction keeps them, and would keep all others from the ledger. As its place
is taken by then, a copy of the ledger as it was last committed takes the place of the file; what
such a process still writes goes to a file that nobody finds any more, and it answers nobody.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from contextlib import closing

from persisting_torch.errors import BucketUnavailable, PersistingError, StaleOwner, WaitTimeout
from persisting_torch.queue.files import LOCAL, sync
from persisting_torch.queue.host import boot, born, host
from persisting_torch.queue.lease import epoch_of
from persisting_torch.queue.ledger import BUSY_SECONDS, Ledger
from persisting_torch.queue.locks import FileLock
from persisting_torch.queue.ownership import Ownership
from persisting_torch.queue.place import Place

LOCKED_SECONDS = 2.0  # a transaction takes milliseconds, and its owner was silent for long already
OTHERS_SECONDS = 10.0
JOURNALS = ("-wal", "-journal")


def open_taken_over(place: Place, ownership: Ownership, *, fsync: bool = False) -> Ledger:
    """The ledger, with this process as its owner, whom no earlier one gets in the way of any more.

    Raises BucketUnavailable while processes have the queue open as a local one, StaleOwner if there
    is a later owner, WaitTimeout if somebody has it locked who is no earlier owner.
    """
    with FileLock(place.takeover_lock, limit=OTHERS_SECONDS):
        ownership.beat()  # raises for one that was replaced while it waited
        LOCAL.remove(_with_journals(_copy_of(place)))
        try:
            return _open(place, ownership.owner.epoch, fsync, LOCKED_SECONDS)
        except WaitTimeout:
            if not _replace(place, ownership):
                raise
        return _open(place, ownership.owner.epoch, fsync, BUSY_SECONDS)


def _open(place: Place, epoch: int, fsync: bool, patience: float) -> Ledger:
    opened = Ledger(place, fsync=fsync, recorded=True, patience=patience)
    ledger = taken_over(opened, epoch)
    ledger.be_patient()
    return ledger


def taken_over(ledger: Ledger, epoch: int) -> Ledger:
    """The ledger, once it is taken over; it is closed where that fails, as `take_over` says."""
    try:
        take_over(ledger, epoch)
    except BaseException:
        ledger.close()
        raise
    return ledger


def take_over(ledger: Ledger, epoch: int) -> None:
    """Begin an epoch of ownership: from here on no earlier owner can write the ledger.

    Raises BucketUnavailable while processes have the queue open as a local one, StaleOwner if there
    is a later owner.
    """
    with ledger.transaction() as tx:
        _refuse_local_processes(tx, ledger.place)
        tx.execute("DELETE FROM leases")
        # Of a flush that a local process was killed in: its rows, if they have landed, are removed
        # like all that no ledger knows, and a note of them would bring them back.
        tx.execute("DELETE FROM pending")
        now = epoch_of(tx)
        if now >= epoch:
            raise StaleOwner(f"{ledger.place.bucket} has the owner of epoch {now} by now.")
        tx.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (epoch,))
    ledger.epoch = epoch


def _refuse_local_processes(tx: sqlite3.Connection, place: Place) -> None:
    for where, boot_id, pid, name in tx.execute(
        "SELECT host, boot, pid, name FROM leases WHERE expires >= ?", (time.time(),)
    ):
        if where != host() or (boot_id == boot() and born(pid)):
            raise BucketUnavailable(
                f"queue {place.queue!r} at {place.root} is open as a local queue in"
                f" process {pid} on {name}, so a cluster cannot own it. Close it there."
            )


def check_in_place(ledger: Ledger) -> None:
    """Raise BucketUnavailable if a copy has taken the ledger's place since it was opened.

    None will from now on, where this process has noted in it that it has the queue open. Raises
    WaitTimeout if somebody stands still just there.
    """
    place = ledger.place
    if ledger.file is None or not os.path.exists(place.takeover_lock):
        return
    with FileLock(place.takeover_lock, limit=OTHERS_SECONDS):
        if os.stat(place.ledger).st_ino != ledger.file:
            raise BucketUnavailable(
                f"queue {place.queue!r} at {place.root} was taken over by a cluster while it was"
                " opened. Open it anew, once no node runs."
            )


def _replace(place: Place, ownership: Ownership) -> bool:
    """Put a copy in the place of a ledger that an earlier owner keeps locked; whether that is done.

    The takeover lock is held, and a process that has become the owner since waits for it: so there
    is nobody yet whose ledger the copy could replace. Not done if something is written meanwhile:
    then whoever has it locked is at work. Nor if the queue is, or may be, open as a local one: what
    such a process believes depends on the file.
    """
    copy, seen = _copy_of(place), _seen(place)
    try:
        for ending in ("", *JOURNALS):
            if os.path.exists(place.ledger + ending):
                shutil.copyfile(place.ledger + ending, copy + ending)
        if _seen(place) != seen or not _is_an_earlier_owners(place, copy):
            return False
        ownership.beat()
        # In this order: with a new file, the old journals change nothing that is not in it.
        os.replace(copy, place.ledger)
        LOCAL.remove(_with_journals(place.ledger)[1:])
        sync(place.bucket)
        return True
    finally:
        LOCAL.remove(_with_journals(copy))


def _is_an_earlier_owners(place: Place, copy: str) -> bool:
    """Whether the copy, which has no journal any more then, is the ledger of a cluster alone."""
    try:
        with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
            (mode,) = connection.execute("PRAGMA journal_mode = DELETE").fetchone()
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if found == "ok":
                _refuse_local_processes(connection, place)
                local = connection.execute("SELECT 1 FROM leases").fetchone()
                owned = epoch_of(connection) > 0
    except sqlite3.DatabaseError as error:
        mode, found = "delete", str(error)
    if found != "ok" or mode != "delete":
        raise PersistingError(
            f"queue {place.queue!r}: a process that stands still keeps the ledger {place.ledger}"
            f" locked, and a copy of that cannot be used ({found}, {mode}). End that process."
        )
    sync(copy)
    return owned and local is None


def _copy_of(place: Place) -> str:
    return f"{place.ledger}.copy"


def _with_journals(ledger: str) -> list[str]:
    """A ledger's file, and all that SQLite has beside it."""
    return [ledger + ending for ending in ("", *JOURNALS, "-shm")]


def _seen(place: Place) -> list[tuple[int, int, int] | None]:
    return [_state(place.ledger + ending) for ending in ("", *JOURNALS)]


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
