"""Buckets follow the nodes that join, and nobody notices but by a short wait."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from persisting_torch import Queue
from persisting_torch.cluster import moving
from persisting_torch.cluster.finder import Target, rank_nodes
from persisting_torch.cluster.node import Node
from persisting_torch.cluster.wire import Message
from persisting_torch.queue.again import again
from persisting_torch.queue.place import open_place
from persisting_torch.queue.threads import Background
from tests.cluster import work
from tests.cluster.apart import OwnStorage
from tests.cluster.ledger_process import open_ledger
from tests.cluster.nodes import (
    HELD,
    Cluster,
    Member,
    buckets_owned,
    by_weight,
    hold,
    let_go,
    spread,
)
from tests.cluster.work import TAKEOVER, Work, await_so, owner_of

LONGEST = 40.0  # until all buckets of a test are where they belong


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def follow_soon(stable: float = 2.0) -> None:
    """This node hands buckets over to who has been there for that long."""
    moving.STABLE_SECONDS = stable


def grow(nodes: Cluster, count: int) -> list[Member]:
    added = nodes.grow(count)
    for node in added:
        node.call(follow_soon)
    return added


def preferred(nodes: Cluster, path: str, bucket: int, queue: str = "q") -> str:
    """The node that is to have a bucket, among those that live."""
    living = [node.name for node in nodes.nodes if node.is_alive()]
    return by_weight(path, bucket, living, queue)[0]


def all_follow(nodes: Cluster, path: str) -> bool:
    return all(owner_of(path, b).node == preferred(nodes, path, b) for b in range(4))


def epochs(path: str) -> list[int]:
    return [owner_of(path, bucket).epoch for bucket in range(4)]


def test_buckets_go_to_the_nodes_that_join_while_clients_are_at_work(
    nodes: Cluster, tmp_path: Path
) -> None:
    path = spread(tmp_path, 3)
    grow(nodes, 1)
    workers = Work(nodes, path)
    assert {owner_of(path, bucket).node for bucket in range(4)} == {"node-0"}
    assert epochs(path) == [1, 1, 1, 1]
    grow(nodes, 2)
    began = time.time()
    await_so(lambda: all_follow(nodes, path), LONGEST, "to follow")
    took = time.time() - began
    time.sleep(1)
    moved = [owner_of(path, bucket).node != "node-0" for bucket in range(4)]
    beyond = [epoch - 1 - away for epoch, away in zip(epochs(path), moved, strict=True)]
    assert all(0 <= more <= away for more, away in zip(beyond, moved, strict=True))
    assert sum(beyond) <= 1  # by way of the other node that joined
    told = workers.end()
    print(f"followed in {took:.1f} s, longest calls", [round(one.longest, 2) for one in told])
    assert max(one.longest for one in told) < 3


def test_nothing_moves_to_a_node_that_does_not_see_the_files(tmp_path: Path) -> None:
    path = spread(tmp_path, 3)
    with OwnStorage(path, tmp_path / "own") as nodes:
        (first,) = grow(nodes, 1)
        client = nodes.client()
        uids = client.call(work.fill, path, 0, 256)
        grow(nodes, 2)
        await_so(lambda: first.call(left_alone, path) == 2, LONGEST, "to ask both")
        time.sleep(3)
        for bucket in range(4):
            folder = nodes.own("node-0") / "q" / f"bucket-{bucket}" / "owner"
            assert os.listdir(folder) == ["1"]
        assert not [*nodes.own("node-1").glob("q")], "asking has made the queue"
        work.each_once([record["uid"] for record in client.call(work.records, path)], uids)


def left_alone(path: str) -> int:
    """How many nodes this one hands nothing of the queue to for now."""
    from persisting_torch.cluster.runtime import current

    node = current().node
    assert node is not None
    return len([what for what in node._mover._left_alone if what[1:] == ("q", path)])


def halt_when_given(at: str) -> None:
    """This node stands still right when it is handed a bucket: before or after it takes it."""
    from persisting_torch.cluster import node

    take = node.Ownership.take

    def halting(*arguments: Any) -> Any:
        if at == "before":
            work.stand_still()
        taken = take(*arguments)
        if at == "after":
            work.stand_still()
        return taken

    node.Ownership.take = staticmethod(halting)  # type: ignore[method-assign]


@pytest.mark.parametrize("at", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_bucket_comes_back_from_a_node_that_is_halted_as_it_is_handed_over(
    nodes: Cluster, tmp_path: Path, at: str
) -> None:
    path = spread(tmp_path, 2, "node-0")
    grow(nodes, 1)
    workers = Work(nodes, path, few=True)
    (halted,) = grow(nodes, 1)
    halted.call(halt_when_given, at)
    await_so(lambda: work.is_halted(halted), LONGEST, "to hand a bucket over")
    moved = next(bucket for bucket in range(4) if preferred(nodes, path, bucket) == halted.name)
    epoch = {"before": 1, "after": 2}[at]
    assert owner_of(path, moved).epoch == epoch
    await_so(lambda: owner_of(path, moved).epoch == epoch + 1, TAKEOVER, "to come back")
    time.sleep(1)
    halted.go_on()
    time.sleep(2)
    assert {owner_of(path, bucket).node for bucket in range(4)} == {"node-0"}
    assert max(told.longest for told in workers.end()) < TAKEOVER


def test_a_node_that_is_started_anew_gets_its_buckets_back(nodes: Cluster, tmp_path: Path) -> None:
    path = spread(tmp_path, 2)
    grow(nodes, 2)
    client = nodes.client()
    uids = client.call(work.fill, path, 0, 256)
    assert all_follow(nodes, path)
    nodes[1].leave()
    uids += client.call(work.fill, path, 1000, 256)
    assert {owner_of(path, bucket).node for bucket in range(4)} == {"node-0"}
    before = epochs(path)
    nodes.start(nodes[1]).call(follow_soon)
    await_so(lambda: all_follow(nodes, path), LONGEST, "to go back")
    moved = [owner_of(path, bucket).node == "node-1" for bucket in range(4)]
    assert epochs(path) == [epoch + away for epoch, away in zip(before, moved, strict=True)]
    work.each_once([record["uid"] for record in client.call(work.records, path)], uids)


def have_alone(path: str, seconds: float) -> float:
    """Keep all others from committing for a while; when that was over, by time.time()."""
    with Queue("q", path) as queue, queue.engine.commit_lock:
        HELD["alone"] = True
        time.sleep(seconds)
        return time.time()


def test_the_head_stays_while_somebody_has_the_queue_alone(nodes: Cluster, tmp_path: Path) -> None:
    path = spread(tmp_path, 2, "node-1")
    grow(nodes, 1)
    client, other = nodes.client(), nodes.client()
    client.call(work.fill, path, 0, 256)
    holding = other.begin(have_alone, path, 9.0)
    grow(nodes, 1)
    while not holding.is_there():
        assert owner_of(path, 0).node == "node-0"
        time.sleep(0.1)
    await_so(lambda: all_follow(nodes, path), LONGEST, "to follow")
    assert [owner_of(path, 0).node, owner_of(path, 0).epoch] == ["node-1", 2]


def write_on(path: str, seconds: float) -> None:
    """Beside all else, one transaction after the other, each of that length."""
    counts = HELD["begun"] = Counter()

    def write_all() -> None:
        with Queue("q", path) as queue:

            @again
            def write(key: str) -> None:
                counts["begun"] += 1
                with queue.engine.ledger.transaction() as tx:
                    tx.execute("INSERT INTO meta VALUES (?, 0)", (key,))
                    time.sleep(seconds)

            while not (Path(path) / "stop").exists():
                write(f"written {counts['done']}")
                counts["done"] += 1

    HELD["writing"] = Background(write_all)


def written() -> tuple[int, int]:
    """How many of them were begun and committed in all."""
    HELD["writing"].join(30.0)
    assert not HELD["writing"].is_alive()
    return HELD["begun"]["begun"], HELD["begun"]["done"]


@pytest.mark.parametrize(
    ("seconds", "by", "interrupted"),
    [
        (0.3, "a client", 0),
        (0.3, "its own node", 0),
        pytest.param(4.0, "a client", 1, marks=pytest.mark.slow),
    ],
)
def test_a_transaction_ends_before_the_ledger_moves_or_is_done_anew(
    nodes: Cluster, tmp_path: Path, seconds: float, by: str, interrupted: int
) -> None:
    path = spread(tmp_path, 2, "node-1")
    (first,) = grow(nodes, 1)
    writer = first if by == "its own node" else nodes.client()
    client = nodes.client()
    client.call(hold, path)
    writer.call(write_on, path, seconds)
    grow(nodes, 1)
    await_so(lambda: owner_of(path, 0).node == "node-1", LONGEST, "to follow")
    work.stop(path)
    begun, done = writer.call(written)
    assert done > 0
    assert begun - done <= interrupted
    client.call(let_go)


def follow(path: str) -> list[float]:
    """How long after they were put, samples come to one who waits for them."""
    delays = []
    with Queue("q", path) as queue:
        for records in queue.sync.stream(limit=None, wait=True, timeout=60):
            delays += [time.time() - record["at"] for record in records]
            if records[-1]["last"]:
                return delays
    raise AssertionError


def put_times(path: str) -> None:
    """Put the time, again and again."""
    with Queue("q", path) as queue:
        for _ in work.rounds(path):
            queue.sync.put([{"at": time.time(), "last": False}])
            queue.sync.flush()
        queue.sync.put([{"at": time.time(), "last": True}])


def test_who_waits_for_samples_hears_of_them_soon_though_the_ledger_moves(
    nodes: Cluster, tmp_path: Path
) -> None:
    path = spread(tmp_path, 2, "node-1")
    grow(nodes, 1)
    client, other = nodes.client(), nodes.client()
    other.call(hold, path)
    putting = client.begin(put_times, path)
    waiting = other.begin(follow, path)
    grow(nodes, 1)
    await_so(lambda: owner_of(path, 0).node == "node-1", LONGEST, "to follow")
    time.sleep(1)
    work.stop(path)
    putting.result()
    delays = waiting.result()
    print("longest", sorted(delays)[-3:])
    assert max(delays) < 0.75


def test_a_node_with_many_queues_hands_them_over_one_after_the_other(
    nodes: Cluster, tmp_path: Path
) -> None:
    path = str(tmp_path)
    both = [f"node-{number}" for number in range(2)]
    moving_ones, staying = [], []
    for number in range(200):
        name = f"queue-{number}"
        moves = by_weight(path, 0, both, name)[0] == "node-1"
        (moving_ones if moves else staying).append(name)
    names = [*moving_ones[:4], *staying[:4]]
    grow(nodes, 1)
    client = nodes.client()
    for name in names:
        client.call(hold, path, name, num_buckets=1)
    grow(nodes, 1)
    to_move = [(name, 0) for name in moving_ones[:4]]
    times: list[float] = []
    deadline = time.monotonic() + LONGEST
    while len(times) < len(to_move):
        there = set(nodes[1].call(buckets_owned))
        times += [time.monotonic()] * (len(there) - len(times))
        assert there <= set(to_move)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    apart = [later - earlier for earlier, later in pairwise(times)]
    assert all(gap > moving.APART_SECONDS / 2 for gap in apart), apart


def test_nodes_with_different_views_do_not_send_a_bucket_to_and_fro(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "STABLE_SECONDS", 0.5)
    monkeypatch.setattr(moving, "APART_SECONDS", 0.1)
    open_place("q", tmp_path)
    opened = [Node(name, "127.0.0.1", None, open_ledger) for name in "abc"]
    target = Target("q", str(tmp_path), 0)
    ranked = rank_nodes([node.member for node in opened], target)
    best, middle, worst = (next(n for n in opened if n.member == member) for member in ranked)
    try:
        where = Message({"op": "where", **target.header})
        assert worst.answer(where, None)[0].header["node"] == worst.name
        # Each of the two others believes that it is alone with the last one.
        best.discover = lambda: [best.member, worst.member]
        middle.discover = lambda: [middle.member, worst.member]
        worst.discover = lambda: [middle.member, worst.member]
        await_so(lambda: read(tmp_path) == (middle.name, 2), 5, "to go to the one that it sees")
        worst.discover = lambda: [best.member, worst.member]
        time.sleep(1)
        assert read(tmp_path) == (middle.name, 2)
        middle.discover = lambda: [best.member, middle.member, worst.member]
        await_so(lambda: read(tmp_path) == (best.name, 3), 5, "to go to the best")
        time.sleep(1)
        assert read(tmp_path) == (best.name, 3)
    finally:
        for node in opened:
            node.close()


def read(path: Path) -> tuple[str, int]:
    owner = owner_of(str(path), 0)
    return owner.node, owner.epoch
