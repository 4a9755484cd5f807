"""One owner at a time of each bucket, and none beside processes that use the queue locally."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from persisting_torch.errors import BucketUnavailable, FormatError, StaleOwner
from persisting_torch.queue import lease as leases
from persisting_torch.queue import ownership as module
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.ownership import (
    KEPT,
    Ownership,
    Watch,
    read_owner,
    refuse_living_owner,
)
from persisting_torch.queue.place import Place, open_place
from persisting_torch.queue.takeover import take_over


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRUSTED_SECONDS", 0.3)
    monkeypatch.setattr(module, "TAKEOVER_SECONDS", 0.5)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return open_place("q", tmp_path)


def take(bucket: Path, name: str, after: int = 0) -> Ownership:
    found = Ownership.take(bucket, after, f"{name} incarnation", name, f"{name}:1")
    assert found is not None
    return found


def wait_until_dead(watch: Watch) -> float:
    began = time.monotonic()
    while watch.dead() is None:
        time.sleep(0.01)
    return time.monotonic() - began


def test_of_many_that_want_a_bucket_one_gets_it(tmp_path: Path):
    for epoch in range(20):
        won: list[Ownership] = []
        ready = threading.Barrier(8)

        def run(name: str, epoch: int = epoch, won: list = won, ready=ready) -> None:
            ready.wait()
            found = Ownership.take(tmp_path, epoch, name, name, name)
            if found is not None:
                won.append(found)

        threads = [threading.Thread(target=run, args=(str(n),)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        found = read_owner(tmp_path)
        assert found == won[0].owner
        assert found.epoch == epoch + 1
    assert len(list((tmp_path / "owner").iterdir())) == KEPT + 1


@pytest.mark.usefixtures("quick")
def test_an_owner_is_held_dead_only_when_its_count_has_stood_still(tmp_path: Path):
    owner, watch = take(tmp_path, "a"), Watch(tmp_path)
    for _ in range(10):
        owner.beat()
        assert watch.dead() is None
        time.sleep(0.1)
    assert wait_until_dead(watch) < 1.0
    owner.beat()
    assert watch.dead() is None


def test_an_owner_that_gives_up_lets_nobody_wait(tmp_path: Path):
    owner, watch = take(tmp_path, "a"), Watch(tmp_path)
    assert watch.dead() is None
    owner.give_up()
    dead = watch.dead()
    assert dead is not None
    assert dead.epoch == 1
    with pytest.raises(StaleOwner):
        owner.check()
    take(tmp_path, "b", after=1)
    owner.give_up()
    found = read_owner(tmp_path)
    assert found is not None
    assert found.node == "b"


def test_an_owner_that_was_replaced_neither_beats_nor_answers(tmp_path: Path):
    old = take(tmp_path, "old")
    new = take(tmp_path, "new", after=1)
    for refuse in (old.beat, old.check, old.beat):
        with pytest.raises(StaleOwner, match="taken over"):
            refuse()
    new.beat()
    new.check()
    assert read_owner(tmp_path) == new.owner


@pytest.mark.usefixtures("quick")
def test_an_owner_that_could_not_beat_for_long_does_not_trust_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = take(tmp_path, "old")
    old.check()
    time.sleep(0.4)
    take(tmp_path, "new", after=1)
    with pytest.raises(StaleOwner):
        old.check()

    # Halted for long between its look and its beat, it looks once more.
    halted = take(tmp_path, "halted", after=2)
    time.sleep(0.4)
    write = halted._write

    def write_late(owner: module.Owner) -> None:
        take(tmp_path, "newer", after=3)
        time.sleep(0.4)
        write(owner)

    monkeypatch.setattr(halted, "_write", write_late)
    with pytest.raises(StaleOwner):
        halted.check()
    found = read_owner(tmp_path)
    assert found is not None
    assert found.node == "newer"


@pytest.mark.usefixtures("quick")
def test_an_owner_whose_folder_is_out_of_reach_does_not_answer(tmp_path: Path):
    bucket = tmp_path / "bucket-0"
    bucket.mkdir()
    owner = take(bucket, "a")
    bucket.rename(tmp_path / "away")
    time.sleep(0.4)
    with pytest.raises(StaleOwner):
        owner.check()


def test_beats_from_several_threads_do_not_get_in_each_others_way(tmp_path: Path):
    owner, errors = take(tmp_path, "a"), []

    def beat() -> None:
        try:
            for _ in range(50):
                owner.beat()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=beat) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = read_owner(tmp_path)
    assert found is not None
    assert found.count == 200


def test_a_file_that_names_no_owner_is_told_of(tmp_path: Path):
    take(tmp_path, "a")
    (tmp_path / "owner" / "2").write_text("{}")
    with pytest.raises(FormatError, match="does not say who owns"):
        read_owner(tmp_path)


def test_a_local_open_is_refused_while_an_owner_lives_and_names_its_node(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    refuse_living_owner(place)
    owner, ended = take(Path(place.bucket), "node-7"), threading.Event()

    def keep() -> None:
        while not ended.wait(0.2):
            owner.beat()

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        with pytest.raises(BucketUnavailable, match=r"node 'node-7'"):
            refuse_living_owner(place)
    finally:
        ended.set()
        keeper.join()
    owner.give_up()
    monkeypatch.setattr(module, "TAKEOVER_SECONDS", 60.0)
    began = time.monotonic()
    refuse_living_owner(place)
    assert time.monotonic() - began < 20.0


@pytest.mark.usefixtures("quick")
def test_a_dead_owner_hinders_a_local_open_for_a_moment_only(place: Place):
    take(Path(place.bucket), "dead")
    began = time.monotonic()
    refuse_living_owner(place)
    assert 0.4 < time.monotonic() - began < 4.0


def test_a_cluster_cannot_own_a_queue_that_a_living_process_has_open(place: Place, tmp_path: Path):
    script = (
        "import sys\n"
        "from persisting_torch.queue.ledger import Ledger\n"
        "from persisting_torch.queue.lease import take_lease\n"
        "from persisting_torch.queue.place import open_place\n"
        "ledger = Ledger(open_place('q', sys.argv[1]))\n"
        "take_lease(ledger, 1)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    local = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert local.stdout is not None
        assert local.stdout.readline() == b"ready\n"
        ledger = Ledger(place)
        with pytest.raises(BucketUnavailable, match=f"local queue in process {local.pid} "):
            take_over(ledger, 1)
    finally:
        local.kill()
        local.wait()
    take_over(ledger, 1)
    with pytest.raises(StaleOwner, match="epoch 1"):
        take_over(ledger, 1)
    take_over(ledger, 2)
    ledger.close()


def test_a_local_process_that_slept_through_a_takeover_writes_nothing_more(place: Place):
    local = Ledger(place)
    leases.take_lease(local, 1)
    with local.transaction() as tx:
        tx.execute("UPDATE leases SET expires = 0")
    owner = Ledger(place)
    take_over(owner, 1)
    assert leases.renew_lease(local, 1) == 0.0
    with pytest.raises(StaleOwner, match="taken over by others"), local.transaction():
        pytest.fail("it was taken over")
    local.close()
    owner.close()
    later = Ledger(place)
    leases.take_lease(later, 1)
    leases.take_lease(later, 1)
    later.close()
