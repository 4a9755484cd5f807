"""Nodes and clients are killed and halted: nothing is lost, nothing is done twice."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from persisting_torch import BucketUnavailable
from tests.cluster import work
from tests.cluster.apart import OwnStorage
from tests.cluster.nodes import Cluster, spread
from tests.cluster.work import TAKEOVER, Work, each_once, owner


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def path(tmp_path: Path) -> str:
    return spread(tmp_path, 3)


def test_nodes_are_killed_one_after_the_other_and_nobody_notices_but_by_waiting(
    nodes: Cluster, path: str
) -> None:
    nodes.grow(3)
    workers = Work(nodes, path)
    time.sleep(1)
    head = owner(nodes, path, 0)
    other = next(node for b in (1, 2, 3) if (node := owner(nodes, path, b)) is not head)
    for killed in (head, other):
        owned = [bucket for bucket in range(4) if owner(nodes, path, bucket) is killed]
        epochs = {bucket: work.owner_of(path, bucket).epoch for bucket in owned}
        killed.kill()
        work.await_takeover(path, epochs)
        nodes.start(killed)
        time.sleep(0.5)
    told = workers.end()
    assert max(t.longest for t in told) < TAKEOVER


@pytest.mark.parametrize(
    ("moment", "bucket"), [("before rows are committed", 1), ("before a commit", 0)]
)
def test_an_owner_that_stood_still_for_longer_than_it_is_trusted_does_nothing_any_more(
    nodes: Cluster, path: str, moment: str, bucket: int
) -> None:
    work.stands_still(nodes, path, moment, bucket)


def test_all_nodes_die_at_once_and_are_started_again(nodes: Cluster, path: str) -> None:
    nodes.grow(2)
    workers = Work(nodes, path, few=True)
    time.sleep(1)
    for node in nodes.nodes:
        node.kill()
    for node in reversed(nodes.nodes):
        nodes.start(node)
    time.sleep(1)
    assert max(t.longest for t in workers.end()) < TAKEOVER


def test_a_node_that_leaves_lets_nobody_wait(nodes: Cluster, path: str) -> None:
    nodes.grow(3)
    workers = Work(nodes, path, few=True)
    time.sleep(1)
    for bucket in (0, 1):
        owner(nodes, path, bucket).leave()
    time.sleep(1)
    assert max(t.longest for t in workers.end()) < 3


@pytest.mark.slow
def test_a_client_that_is_killed_holds_others_up_for_seconds_only(
    nodes: Cluster, path: str
) -> None:
    nodes.grow(2)
    workers = Work(nodes, path, few=True)
    for way in (work.die_with_the_turn, work.die_amid_a_put, work.die_alone):
        dying = nodes.client()
        with pytest.raises(AssertionError, match="the process died"):
            dying.call(way, path)
        time.sleep(1)
    assert max(t.longest for t in workers.end()) < 6


def test_a_client_may_be_there_before_the_first_node(nodes: Cluster, path: str) -> None:
    first = nodes.client()
    pending = first.begin(work.fill, path, 0, 300)
    assert not pending.is_there(2)
    nodes.seeds = [first.address]
    nodes.grow(1)
    assert pending.result() == list(range(300))


@pytest.mark.slow
def test_a_node_with_storage_of_its_own_comes_back_to_its_buckets_which_nobody_else_takes(
    tmp_path: Path,
) -> None:
    path = spread(tmp_path, 3)
    with OwnStorage(path, tmp_path / "own") as nodes:
        nodes.grow(3)
        client = nodes.client()
        client.call(work.fail_after, 3.0)
        first = client.call(work.fill, path, 0, 256)  # 64 for each bucket
        assert os.listdir(path) == []
        at = {bucket: name for name, bucket in homes(nodes)}
        assert sorted(at) == [0, 1, 2, 3]
        lost = next(number for number in (1, 2, 3) if at[number] != at[0])
        killed = next(node for node in nodes.nodes if node.name == at[lost])
        killed.kill()
        assert client.call(work.read_buckets, path) == {
            bucket: "BucketUnavailable" if at[bucket] == killed.name else 64 for bucket in range(4)
        }
        second = client.call(work.put_in_vain, path, 1000, 256)
        nodes.start(killed)
        client.call(work.flush_at_last)
        found = [record["uid"] for record in client.call(work.records, path)]
        each_once(found, [*first, *second])
        assert sorted(homes(nodes)) == sorted((name, bucket) for bucket, name in at.items())


def homes(nodes: OwnStorage) -> list[tuple[str, int]]:
    """Which nodes have rows of which buckets: a pair for each."""
    return [
        (node.name, int(folder.parent.name.removeprefix("bucket-")))
        for node in nodes.nodes
        for folder in nodes.own(node.name).glob("*/bucket-*/data.lance")
    ]


def test_a_queue_is_not_begun_anew_on_other_storage_while_its_first_bucket_is_away(
    tmp_path: Path,
) -> None:
    path = spread(tmp_path, 3)
    with OwnStorage(path, tmp_path / "own") as nodes:
        nodes.grow(3)
        client = nodes.client()
        first = client.call(work.fill, path, 0, 256)
        (name,) = [
            node.name for node in nodes.nodes if [*nodes.own(node.name).glob("*/*/ledger.sqlite")]
        ]
        killed = next(node for node in nodes.nodes if node.name == name)
        killed.kill()
        other = nodes.client()
        other.call(work.fail_after, 3.0)
        with pytest.raises(BucketUnavailable, match="bucket 0 of queue 'q' lies on storage that"):
            other.call(work.records, path)
        nodes.start(killed)
        each_once([record["uid"] for record in client.call(work.records, path)], first)
