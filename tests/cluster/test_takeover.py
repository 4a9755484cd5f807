"""A ledger is taken from an owner that stands still, wherever it does: nothing committed is lost,
and nothing that such an owner still does is seen."""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from persisting_torch.errors import (
    BucketUnavailable,
    PersistingError,
    QueueClosed,
    StaleOwner,
    WaitTimeout,
)
from persisting_torch.queue import ownership as owners
from persisting_torch.queue import takeover
from persisting_torch.queue.lease import end_lease, take_lease
from persisting_torch.queue.ledger import Ledger, Sharing
from persisting_torch.queue.ownership import Ownership
from persisting_torch.queue.place import Place, open_place
from persisting_torch.queue.record import Log
from persisting_torch.queue.takeover import check_in_place, open_taken_over
from persisting_torch.queue.turns import Turns
from tests.cluster.nodes import HELD, Cluster, Member
from tests.cluster.work import await_so, is_halted, stand_still

WORD = "x" * 2000  # so that a transaction changes many pages


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    kept = takeover.LOCKED_SECONDS, takeover.OTHERS_SECONDS, owners.TRUSTED_SECONDS
    hasten()
    yield
    takeover.LOCKED_SECONDS, takeover.OTHERS_SECONDS, owners.TRUSTED_SECONDS = kept


def hasten() -> None:
    takeover.LOCKED_SECONDS = 0.2
    takeover.OTHERS_SECONDS = 0.5
    owners.TRUSTED_SECONDS = 0.1


At = tuple[str, bool]


@pytest.fixture(params=["write-ahead log", "rollback journal, as on a network"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> At:
    return str(tmp_path), request.param.startswith("rollback")


@pytest.fixture
def place(at: At) -> Place:
    return place_at(at)


def place_at(at: At) -> Place:
    path, network = at
    return replace(open_place("q", path), network=network)


@pytest.fixture
def process() -> Iterator[Member]:
    with Cluster() as cluster, cluster.alone() as member:
        yield member


def own(place: Place, after: int = 0) -> tuple[Ledger, Ownership]:
    """Become the owner of the epoch after this one, as a node does."""
    name = f"node-{after}"
    ownership = Ownership.take(place.bucket, after, name, name, f"{name}:1")
    assert ownership is not None
    ledger = open_taken_over(place, ownership)
    ledger.share(Sharing(ownership.owner.epoch, Log(), Turns("q"), ownership.check))
    return ledger, ownership


def count(ledger: Ledger) -> int:
    with ledger.reading() as tx:
        return int(tx.execute("SELECT value FROM meta WHERE key = 'next_index'").fetchone()[0])


# What the owner does that is halted


def begin(at: At, after: int = 0) -> None:
    hasten()
    ledger, _ = HELD["own"] = own(place_at(at), after)
    ledger.connection.execute("PRAGMA wal_autocheckpoint = 20")  # pages: often


def step(halt: bool = False) -> None:
    """One transaction, and a halt in it, with pages in the file already."""
    ledger: Ledger = HELD["own"][0]
    with ledger.transaction() as tx:
        tx.execute("PRAGMA cache_size = 1")
        ledger.reserve_in(tx, 1)
        for number in range(30):
            key = f"some {number}"
            tx.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, WORD))
        if halt:
            stand_still()


def steps(told: str) -> str:
    """Transactions without an end, each told of once it is done; what ended it."""
    with open(told, "w") as file:
        while True:
            try:
                step()
            except PersistingError as error:
                return str(error)
            file.write("x")
            file.flush()


def end() -> None:
    ledger, _ = HELD.pop("own")
    ledger.close()


@contextmanager
def standing_still(member: Member) -> Iterator[None]:
    await_so(lambda: is_halted(member), 20.0, "the halt")
    try:
        yield
    finally:
        member.go_on()


def check_whole(place: Place, expected: int) -> None:
    """What everybody sees who opens the ledger now."""
    connection = sqlite3.connect(place.ledger)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    found = connection.execute("SELECT value FROM meta WHERE key = 'next_index'").fetchone()
    assert found == (expected,)
    connection.close()
    assert not [name for name in os.listdir(place.bucket) if ".copy" in name]


def test_an_owner_that_stands_still_amid_a_transaction_is_replaced(
    at: At, place: Place, process: Member
):
    process.call(begin, at)
    for _ in range(3):
        process.call(step)
    halted = process.begin(step, halt=True)
    with standing_still(process):
        ledger, ownership = own(place, after=1)
        assert count(ledger) == 3
        with ledger.transaction() as tx:
            ledger.reserve_in(tx, 10)
    with suppress(StaleOwner):  # its commit is one that nobody sees
        halted.result()
    with pytest.raises(StaleOwner, match="taken over"):
        process.call(step)
    process.call(end)
    with ledger.transaction() as tx:
        ledger.reserve_in(tx, 10)
    ownership.beat()
    process.end()
    check_whole(place, 23)
    ledger.close()
    check_whole(place, 23)


def test_whenever_an_owner_is_halted_all_that_it_has_told_of_is_there(
    at: At, place: Place, process: Member, tmp_path: Path
):
    chance = random.Random(1)
    rounds = replaced = 0
    told = tmp_path / "told"
    process.call(begin, at)
    epoch, before = 1, 0
    while rounds < 10 or replaced < 3:  # else it was halted between two transactions
        rounds += 1
        assert rounds < 100
        told.unlink(missing_ok=True)
        working = process.begin(steps, str(told))
        while not told.exists() or not told.stat().st_size:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.03))
        process.stop()
        with standing_still(process):
            old = os.stat(place.ledger).st_ino
            ledger, ownership = own(place, after=epoch)
            replaced += os.stat(place.ledger).st_ino != old
            done = count(ledger) - before
            assert 0 <= done - told.stat().st_size <= 1
        # The last is SQLite's own word for a file that is not there any more.
        assert re.search(
            "was taken over from this process|has the owner of epoch|a readonly database",
            working.result(),
        )
        process.call(end)
        check_whole(place, before + done)
        before, epoch = before + done, epoch + 2
        ownership.give_up()
        ledger.close()
        process.call(begin, at, epoch - 1)


def test_a_ledger_that_is_written_to_after_all_is_not_replaced(
    at: At, place: Place, process: Member, monkeypatch: pytest.MonkeyPatch
):
    process.call(begin, at)
    halted = process.begin(step, halt=True)
    copyfile, copied = shutil.copyfile, []

    def copy_slowly(source: str, target: str) -> None:
        copyfile(source, target)
        if not copied:
            process.go_on()
            assert halted.is_there(10)
        copied.append(source)

    with standing_still(process):
        old = os.stat(place.ledger).st_ino
        monkeypatch.setattr(shutil, "copyfile", copy_slowly)
        with pytest.raises(WaitTimeout, match="keeps it locked"):
            own(place, after=1)
    assert copied
    assert os.stat(place.ledger).st_ino == old
    halted.result()
    monkeypatch.undo()
    ledger, _ = own(place, after=2)
    assert count(ledger) == 1
    check_whole(place, 1)
    ledger.close()


def lock_locally(at: At, expire: bool) -> None:
    ledger = HELD["ledger"] = Ledger(place_at(at))
    take_lease(ledger, 1)
    if expire:
        with ledger.transaction() as tx:
            tx.execute("UPDATE leases SET expires = 0")
    with ledger.transaction() as tx:
        tx.execute("UPDATE meta SET value = value WHERE key = 'next_index'")
        stand_still()


@pytest.mark.parametrize(
    ("expired", "kind", "why"),
    [(False, BucketUnavailable, "open as a local queue"), (True, WaitTimeout, "keeps it locked")],
)
def test_a_local_process_that_stands_still_keeps_its_queue(
    at: At, place: Place, process: Member, expired: bool, kind: type[Exception], why: str
):
    halted = process.begin(lock_locally, at, expired)
    with standing_still(process):
        old = os.stat(place.ledger).st_ino
        with pytest.raises(kind, match=why):
            own(place)
        assert os.stat(place.ledger).st_ino == old
    halted.result()


def take_slowly(at: At, after: int) -> None:
    """Become the owner, and stand still when the copy is about to take the ledger's place."""
    hasten()
    place = place_at(at)
    whole: Callable[..., Any] = os.replace

    def halting(source: str, target: str) -> None:
        if target == place.ledger:
            stand_still()
        whole(source, target)

    os.replace = halting  # type: ignore[assignment]
    HELD["own"] = own(place, after)


def test_who_is_slow_to_replace_a_ledger_never_replaces_a_later_owners(
    at: At, place: Place, process: Member
):
    process.call(begin, at)
    halted = process.begin(step, halt=True)
    with standing_still(process), Cluster() as cluster, cluster.alone() as slow:
        pending = slow.begin(take_slowly, at, 1)
        with standing_still(slow):
            for after in (2, 3):
                with pytest.raises(WaitTimeout, match=r"takeover\.lock"):
                    own(place, after)
            if place.network:
                with pytest.raises(WaitTimeout, match="keeps it locked"):
                    Ledger(place, patience=0.1)
            else:
                local = Ledger(place)
                with pytest.raises(WaitTimeout, match=r"takeover\.lock"):
                    check_in_place(local)
        with suppress(StaleOwner):
            pending.result()
        if not place.network:
            with pytest.raises(BucketUnavailable, match="while it was opened"):
                check_in_place(local)
            local.close()
        ledger, _ = own(place, after=4)
        with ledger.transaction() as tx:
            ledger.reserve_in(tx, 5)
    with suppress(StaleOwner):
        halted.result()
    check_whole(place, 5)
    ledger.close()


def test_a_queue_that_was_a_clusters_opens_as_a_local_one(place: Place):
    ledger, ownership = own(place)
    ownership.give_up()
    ledger.close()
    with pytest.raises(QueueClosed):
        ledger.check_open()
    local = Ledger(place)
    take_lease(local, 1)
    check_in_place(local)
    end_lease(local, 1)
    local.close()
