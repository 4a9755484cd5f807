"""Nodes with storage of their own: who makes a queue, and what is told of buckets elsewhere."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from persisting_torch.cluster import making, trouble
from persisting_torch.cluster.keeping import Key
from persisting_torch.cluster.making import Making, Told
from persisting_torch.cluster.trouble import Trouble
from persisting_torch.errors import BucketUnavailable
from persisting_torch.queue.threads import at_once
from tests.cluster import work
from tests.cluster.apart import OwnStorage
from tests.cluster.nodes import hold, let_go, spread

TIMES = 30


def ask_all_at_once(addresses: list[str], path: str, queue: str) -> list[str]:
    """What each of the nodes answers if all are asked for a new queue at the same moment."""
    from persisting_torch.cluster.plane import Peer
    from persisting_torch.cluster.wire import Message

    header = {"op": "where", "queue": queue, "storage_path": path, "bucket": 0, "split": [2, None]}
    peers = [Peer(address, None) for address in addresses]
    for peer in peers:
        peer.ask(Message({"op": "nodes"}), 5.0)
    start = threading.Barrier(len(peers))
    answers: list[str] = []

    def ask(peer: Peer) -> None:
        start.wait()
        try:
            answers.append(peer.ask(Message(header), 5.0).header.get("node", ""))
        except BucketUnavailable as error:
            answers.append(str(error))

    at_once([partial(ask, peer) for peer in peers])
    return answers


def addresses_seen() -> list[str]:
    from persisting_torch.cluster.runtime import current

    return [member.address for member in current().discover()]


@pytest.mark.parametrize("count", [2, 3])
def test_nodes_that_are_asked_for_a_new_queue_at_once_make_it_once(
    tmp_path: Path, count: int
) -> None:
    path = spread(tmp_path, 3)
    with OwnStorage(path, tmp_path / "own") as nodes:
        nodes.grow(count)
        client = nodes.client()
        addresses = client.call(addresses_seen)
        for number in range(TIMES):
            queue = f"q{number}"
            answers = client.call(ask_all_at_once, addresses, path, queue)
            made = [node.name for node in nodes.nodes if is_made(nodes, node.name, queue)]
            assert len(made) <= 1, (queue, answers)
            # Whoever was sent away asks again, and finds it where it is, or has it made.
            client.call(hold, path, queue, num_buckets=2)
            client.call(let_go, queue)
            again = [node.name for node in nodes.nodes if is_made(nodes, node.name, queue)]
            assert len(again) == 1
            assert made in ([], again)


def is_made(nodes: OwnStorage, name: str, queue: str) -> bool:
    """Whether a node has the queue's first bucket."""
    mark = nodes.own(name) / queue / "queue.json"
    return mark.exists() and not json.loads(mark.read_text()).get("part")


KEY = Key("q", "/storage", 0)


def test_one_that_was_not_seen_yet_is_waited_for() -> None:
    """The smaller one asked before the larger one had begun, so it will not yield."""
    larger = Making("b")
    told = [[Told("a", False, True)], [Told("a", False, True)], [Told("a", True, False)]]
    with (
        pytest.raises(BucketUnavailable, match="lies on storage"),
        larger.alone(KEY, partial(told.pop, 0)),
    ):
        pytest.fail("it was made already")
    assert told == []
    assert not larger.is_at(KEY)


def test_the_smaller_name_yields_and_does_not_come_in_the_way_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(making, "YIELD_SECONDS", 0.3)
    smaller = Making("a")
    with (
        pytest.raises(BucketUnavailable, match="b is making"),
        smaller.alone(KEY, lambda: [Told("b", False, True)]),
    ):
        pytest.fail("it did not yield")
    with pytest.raises(BucketUnavailable, match="another node"), smaller.alone(KEY, list):
        pytest.fail("it was in the way")
    time.sleep(0.3)
    with smaller.alone(KEY, list):
        assert smaller.is_at(KEY)
    assert not smaller.is_at(KEY)


def test_trouble_is_told_once_and_what_lasts_is_tried_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(trouble.time, "monotonic", lambda: now[0])
    one = Trouble()
    waits, told = [], []
    for _ in range(12):
        told.append(one.note("it lies elsewhere", lasting=True))
        waits.append(one.not_before - now[0])
        now[0] = one.not_before
    assert waits == [1.0, 2.0, 4.0, 8.0, *[10.0] * 8]
    assert told == [True, *[False] * 8, True, False, False]  # a minute later once more
    assert one.note("it is broken", lasting=False)
    assert one.not_before == now[0] + 1.0
    one.end()
    assert one.text == ""
    assert one.note("it is broken", lasting=False)


def test_a_node_that_does_not_see_a_bucket_says_so_once(tmp_path: Path) -> None:
    path = spread(tmp_path, 3)
    with OwnStorage(path, tmp_path / "own") as nodes:
        nodes.grow(3)
        client = nodes.client()
        client.call(work.fail_after, 6.0)
        client.call(work.fill, path, 0, 256)
        at = {
            int(folder.parent.name.removeprefix("bucket-")): node
            for node in nodes.nodes
            for folder in nodes.own(node.name).glob("q/bucket-*/data.lance")
        }
        lost = next(number for number in (1, 2, 3) if at[number] is not at[0])
        at[lost].kill()
        found = client.call(work.read_buckets, path)
        assert found[lost] == "BucketUnavailable"
        warnings = [
            node.err.count(f"could not open bucket {lost} of")
            for node in nodes.nodes
            if node is not at[lost]
        ]
        assert warnings == [1, 1]
