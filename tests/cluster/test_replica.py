"""Copies of a ledger, and what their owner's death, halt, or silence does to transactions."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from persisting_torch.cluster.bucket import Bucket
from persisting_torch.cluster.finder import Finder, Target
from persisting_torch.cluster.head import Head
from persisting_torch.cluster.node import Node
from persisting_torch.cluster.plane import Peer
from persisting_torch.cluster.replica import Replica
from persisting_torch.cluster.service import LedgerService
from persisting_torch.cluster.ways import Near
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import BucketUnavailable, PersistingError, QueueClosed, StaleOwner
from persisting_torch.queue import ownership
from persisting_torch.queue.books import Books
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.ownership import Ownership, read_owner
from persisting_torch.queue.place import open_place
from persisting_torch.queue.waiting import Hub, News
from tests.children import ROOT
from tests.cluster.children import Child, Family, gathered
from tests.cluster.ledger_process import QUEUE, head_of, note, noted, open_ledger, replica_of


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    yield from gathered(tmp_path)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    opened = Node("a", "127.0.0.1", None, open_ledger)
    yield opened
    opened.close()


class Losing(Near):
    """A way on which requests of one kind, or the answers to them, get lost once."""

    lose = ""
    what = "answer"

    def ask(self, request: Message, timeout: float) -> Message:
        lose = request.header["op"] == self.lose
        if lose:
            self.lose = ""
            if self.what == "request":
                raise BucketUnavailable("the request was lost")
        answer = super().ask(request, timeout)
        if lose:
            raise BucketUnavailable("the answer was lost")
        return answer


def connected(node: Node, folder: Path) -> tuple[Replica, Losing]:
    finder = Finder(lambda: [node.member], None)
    way = Losing(node.member.address, node.answer)
    finder._ways[way.address] = way
    head = Head(Bucket(finder, Target(QUEUE, str(folder), 0)))
    return Replica(open_place(QUEUE, folder), head, Hub()), way


def content(connection: sqlite3.Connection) -> list[str]:
    """All that a ledger holds, but for what the owner keeps for itself."""
    return [line for line in connection.iterdump() if 'INTO "requests"' not in line]


def file_of(folder: Path) -> list[str]:
    with sqlite3.connect(open_place(QUEUE, folder).ledger) as connection:
        return content(connection)


def wait_for_owner(folder: Path, child: Child, limit: float = 30.0) -> None:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        owner = read_owner(Path(open_place(QUEUE, folder).bucket))
        if owner is not None and owner.address == child.address:
            return
        time.sleep(0.02)
    pytest.fail("it did not become the owner")


def owner_and_other(family: Family, head: Head) -> tuple[Child, Child]:
    """Two nodes of the test: the one that owns the ledger, and the one that does not."""
    address = head.bucket.owner().address
    nodes = {child.address: child for child in family.children if child.address}
    return nodes.pop(address), nodes.popitem()[1]


def test_transactions_of_several_processes_are_one_after_another_everywhere(family: Family):
    node = family.start("node", "a")
    clients = [family.start("client", node.address) for _ in range(2)]
    own = replica_of(family.folder, [node.address])
    for client in clients:
        client.tell(["reserve", 100])
    indexes = [own.reserve(1) for _ in range(100)]
    for client in clients:
        indexes += client.said()["answer"]
    assert sorted(indexes) == list(range(300))
    own.catch_up()
    with own.reading() as tx:
        assert content(tx) == file_of(family.folder)
    with sqlite3.connect(own.place.ledger) as file:
        # Each client has told that it has the answer to the one before.
        assert file.execute("SELECT count(*) FROM requests").fetchone()[0] <= 3
    own.close()
    with pytest.raises(QueueClosed):
        own.catch_up()


def test_a_copy_hears_of_others_changes_and_wakes_those_who_wait(node: Node, tmp_path: Path):
    first, _ = connected(node, tmp_path)
    second, _ = connected(node, tmp_path)
    news = News(second._hub, second)
    threading.Timer(0.3, note, (first, "a")).start()
    began = time.monotonic()
    assert news.wait(began + 60.0)
    assert time.monotonic() - began < 20.0
    assert noted(second) == ["a"]
    at = second.version()
    note(first, "b")
    second.catch_up()
    assert noted(second) == ["a", "b"]
    assert second.version() != at
    at = second.version()
    second.catch_up()
    assert second.version() == at
    others = second.others_version()
    note(second, "c")
    assert second.others_version() == others
    first.close()
    second.close()


def test_books_follow_a_copy_as_they_follow_a_ledger(node: Node, tmp_path: Path):
    first, _ = connected(node, tmp_path)
    second, _ = connected(node, tmp_path)
    books = Books(second)
    books.follow()
    with first.transaction() as tx:
        tx.execute("INSERT INTO partitions (name) VALUES ('train')")
    second.catch_up()
    books.follow()
    assert list(books.partitions) == ["train"]
    with first.transaction() as tx:
        tx.execute("UPDATE partitions SET sealed = 1.5")
    with second.transaction() as tx:
        books.refresh(tx)
        assert books.partitions["train"].sealed == 1.5
    first.close()
    second.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_a_failed_block_wrote_is_nowhere_and_the_copy_goes_on(
    node: Node, tmp_path: Path, error: type[BaseException]
):
    replica, _ = connected(node, tmp_path)

    def fail(tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO notes VALUES (1, 'a', '')")
        raise error

    with pytest.raises(error), replica.transaction() as tx:
        fail(tx)
    assert noted(replica) == []
    with pytest.raises(sqlite3.IntegrityError), replica.transaction() as tx:
        tx.executemany("INSERT INTO notes VALUES (1, ?, '')", [("a",), ("a",)])
    began = time.monotonic()
    note(replica, "b")
    assert time.monotonic() - began < 1.0  # the turns were given back
    assert noted(replica) == ["b"]
    with replica.reading() as tx:
        assert content(tx) == file_of(tmp_path)
    replica.close()


@pytest.mark.parametrize("op", ["begin", "commit", "follow", "settled", "abort"])
@pytest.mark.parametrize("what", ["request", "answer"])
def test_requests_and_answers_that_get_lost_do_not_change_what_is_done(
    node: Node, tmp_path: Path, op: str, what: str
):
    replica, way = connected(node, tmp_path)
    other, _ = connected(node, tmp_path)
    note(replica, "before")
    way.lose, way.what = op, what
    lost = (op, what) == ("commit", "request")
    if lost:
        with pytest.raises(BucketUnavailable, match="Nothing was changed"):
            note(replica, "a")
    else:
        note(replica, "a")
    with replica.transaction():
        pass
    replica.catch_up()
    note(other, "b")
    note(replica, "c")
    expected = ["b", "before", "c"] if lost else ["a", "b", "before", "c"]
    other.catch_up()
    assert noted(replica) == noted(other) == expected
    with replica.reading() as tx:
        assert content(tx) == file_of(tmp_path)
    replica.close()
    other.close()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="knows the bytecode of Python 3.11")
@pytest.mark.parametrize("way", ["near", "far"])
def test_ctrl_c_wherever_python_looks_for_it_leaves_neither_lock_nor_turn_taken(
    tmp_path: Path, way: str
):
    script = Path(__file__).with_name("interrupted_process.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), way],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    interrupts, slowest = done.stdout.split()
    assert int(interrupts) > 100
    assert float(slowest) < 2.0  # of the transaction after an interrupted one


def test_a_commit_that_arrives_after_it_was_given_up_is_refused(node: Node, tmp_path: Path):
    replica, _ = connected(node, tmp_path)
    head = replica._head
    head.begin("late", *replica._position())
    assert not head.bucket.ask("settled", {"token": "late"}).header["settled"]
    statement = ["INSERT INTO notes VALUES (1, 'late', '')", [[]]]
    assert head.begin("late", "", 0) is None
    header = {"token": "late", "statements": [statement], "before": ""}
    with pytest.raises(StaleOwner, match="over"):
        head.bucket.ask("commit", header, limit=0)
    replica.catch_up()
    assert noted(replica) == []
    replica.close()


def test_a_transaction_may_take_longer_than_a_silent_one_would_be_given(node: Node, tmp_path: Path):
    slow, _ = connected(node, tmp_path)
    other, _ = connected(node, tmp_path)
    thread = threading.Thread(target=note, args=(slow, "slow", 4.0))
    thread.start()
    time.sleep(0.2)
    note(other, "other")
    assert noted(other) == ["other", "slow"]
    thread.join()
    slow.close()
    other.close()


def test_a_client_that_is_killed_with_the_turn_holds_others_up_for_seconds_only(family: Family):
    node = family.start("node", "a")
    client = family.start("client", node.address)
    own = replica_of(family.folder, [node.address])
    client.tell(["note", "never", 60.0])
    time.sleep(0.5)
    client.kill()
    began = time.monotonic()
    note(own, "a")
    assert time.monotonic() - began < 20.0
    assert noted(own) == ["a"]
    own.close()


def test_when_the_owner_is_killed_another_goes_on_with_all_that_was_acknowledged(family: Family):
    addresses = [family.start("node", name).address for name in "ab"]
    own = replica_of(family.folder, addresses)
    writers = [family.start("client", *addresses) for _ in range(2)]
    owner, other = owner_and_other(family, own._head)
    for writer, name in zip(writers, "xy", strict=True):
        writer.tell(["write_on", name])
    time.sleep(1.0)
    killed = time.monotonic()
    owner.kill()
    done: list[str] = []
    failed: list[str] = []
    for writer in writers:
        after = 0
        while after < 50:
            said = writer.said()
            if "done" in said:
                done.append(said["done"])
                if said["at"] > killed + 0.1:
                    assert after or said["at"] < killed + 10.0
                    after += 1
            elif "failed" in said:
                assert "Nothing was changed" in said["error"]
                failed.append(said["failed"])
    wait_for_owner(family.folder, other)
    own.catch_up()
    found = noted(own)
    assert set(done) <= set(found)
    assert not set(failed) & set(found)
    assert len(failed) <= 1  # only one can have had the turn
    for writer in writers:
        writer.kill()
    note(own, "end")
    with own.reading() as tx:
        assert content(tx) == file_of(family.folder)
    own.close()


def test_an_owner_that_was_halted_and_replaced_neither_writes_nor_answers(family: Family):
    addresses = [family.start("node", name).address for name in "ab"]
    own = replica_of(family.folder, addresses)
    note(own, "before")
    old, new = owner_and_other(family, own._head)
    old.ask("remember")
    target = own._head.bucket.target
    old_way = Peer(old.address, None)  # of its own, and open: what it is asked arrives
    old_way.ask(Message({"op": "alive", **target.header}), 20.0)
    old.send(signal.SIGSTOP)
    old.tell(["note", "by the old owner itself"])
    note(own, "during")
    wait_for_owner(family.folder, new)

    answers: list[Any] = []

    def ask(op: str, **header: Any) -> None:
        try:
            answers.append(old_way.ask(Message({"op": op, **target.header, **header}), 20.0))
        except PersistingError as error:
            answers.append(error)

    token = {"token": "t", "log": "", "number": 0}
    threads = [
        threading.Thread(target=ask, args=(op,), kwargs=token)
        for op in ("alive", "begin", "settled", "hold")
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    old.send(signal.SIGCONT)
    for thread in threads:
        thread.join()
    old_way.close()
    assert [type(answer) for answer in answers] == [StaleOwner] * 4
    assert "StaleOwner" in old.said()["error"]
    note(own, "after")
    assert noted(own) == ["after", "before", "during"]
    with own.reading() as tx:
        assert content(tx) == file_of(family.folder)
    # It is a node like any other by now, and knows who the owner is.
    assert head_of(family.folder, [old.address]).bucket.owner().address == new.address
    own.close()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_node_gives_no_answer_that_was_not_its_own_to_give_all_the_time(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
):
    monkeypatch.setattr(ownership, "TRUSTED_SECONDS", 0.2)
    way, target = Near("", node.answer), Target(QUEUE, str(tmp_path), 0)
    way.ask(Message({"op": "where", **target.header}), 1.0)
    node._end.release()  # from here on it does not notice by itself
    node._keeper.join(5.0)
    (held,) = (kept.held for kept in node._kept.values())
    assert held is not None
    assert held.service is not None
    answer = held.service.answer

    def replace() -> None:
        assert Ownership.take(held.ownership.bucket, 1, "another", "another", "")
        time.sleep(0.3)

    def answer_late(request: Message, table: Any) -> Any:
        found = answer(request, table)
        replace()
        return found

    if when == "before":
        replace()
    else:
        monkeypatch.setattr(held.service, "answer", answer_late)
    for op in ("snapshot", "hold"):
        with pytest.raises(StaleOwner, match="taken over"):
            way.get(Message({"op": op, **target.header, "token": "t"}), 1.0)
    with pytest.raises(StaleOwner, match="taken over"):
        way.ask(Message({"op": "alive", **target.header}), 1.0)


def test_a_node_that_closes_leaves_its_ledger_to_the_next_at_once(tmp_path: Path):
    first = Node("a", "127.0.0.1", None, open_ledger)
    second = Node("b", "127.0.0.1", None, open_ledger)
    own = replica_of(tmp_path, [first.member.address, second.member.address])
    note(own, "a")
    nodes = {node.member.address: node for node in (first, second)}
    nodes.pop(own._head.bucket.owner().address).close()
    began = time.monotonic()
    note(own, "b")
    assert time.monotonic() - began < 3.0
    assert noted(own) == ["a", "b"]
    own.close()
    for node in nodes.values():
        node.close()


def test_a_ledger_that_has_lost_what_was_confirmed_is_not_gone_on_with(tmp_path: Path):
    place = open_place(QUEUE, tmp_path)
    Ledger(place).close()
    shutil.copy(place.ledger, tmp_path / "older")
    node = Node("a", "127.0.0.1", None, open_ledger)
    replica, _ = connected(node, tmp_path)
    with replica.transaction() as tx:
        tx.execute("INSERT INTO runs (first_index, count, first_row) VALUES (0, 1, 0)")
    node.close()
    for ending in ("-wal", "-shm"):
        Path(place.ledger + ending).unlink(missing_ok=True)
    shutil.copy(tmp_path / "older", place.ledger)
    node = Node("a", "127.0.0.1", None, open_ledger)
    replica._head = connected(node, tmp_path)[0]._head
    with pytest.raises(StaleOwner, match="lost changes"):
        note(replica, "a")
    replica.close()
    node.close()


def test_one_that_holds_the_common_lock_keeps_others_out_until_it_is_silent(
    node: Node, tmp_path: Path
):
    head = connected(node, tmp_path)[0]._head
    assert head.hold("a", 0.0)
    assert not head.hold("b", 0.0)
    head.hold_on("a")
    head.release("a")
    assert head.hold("c", 0.0)
    began = time.monotonic()
    assert head.hold("d", 60.0)
    assert 2.0 < time.monotonic() - began < 20.0
    with pytest.raises(StaleOwner):
        head.hold_on("c")


def test_why_a_node_cannot_own_a_ledger_is_told_to_who_asks_for_it(tmp_path: Path):
    place = open_place(QUEUE, tmp_path)
    Path(place.ledger).write_text("this is no ledger")
    node = Node("a", "127.0.0.1", None, open_ledger)
    head = connected_head(node, tmp_path)
    with pytest.raises(BucketUnavailable, match="is not its ledger"):
        head.snapshot()
    node.close()


def connected_head(node: Node, folder: Path) -> Head:
    finder = Finder(lambda: [node.member], None)
    return Head(Bucket(finder, Target(QUEUE, str(folder), 0), limit=1.5))


def test_no_older_owner_gets_in_the_way_of_the_transactions_of_a_new_one(tmp_path: Path):
    place = open_place(QUEUE, tmp_path)
    bucket = Path(place.bucket)
    services = []
    for epoch in range(2):
        owner = Ownership.take(bucket, epoch, f"i{epoch}", f"n{epoch}", "")
        assert owner is not None
        services.append(LedgerService.open(place, owner))
    old, new = services
    with pytest.raises(StaleOwner, match="epoch 2"), old.ledger.transaction():
        pytest.fail("there is a later owner")
    note(new.ledger, "a")
    assert new.log.last == 1
    assert old.log.last == 0
    for service in services:
        service.close()
