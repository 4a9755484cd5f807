"""Nodes and clients are killed and halted: nothing is lost, nothing is done twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import work
from tests.cluster.nodes import Cluster
from tests.cluster.work import TAKEOVER, Work, owner


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path)


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


def test_a_client_may_be_there_before_the_first_node(nodes: Cluster, path: str) -> None:
    first = nodes.client()
    pending = first.begin(work.fill, path, 0, 300)
    assert not pending.is_there(2)
    nodes.grow_from(first.address)
    assert pending.result() == list(range(300))
