"""A queue goes from one machine to a cluster and back, and its producers die with their claims."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from persisting_torch import BatchMeta, BucketUnavailable, KVInterface, ProducerFailed, Queue
from persisting_torch.queue.report import verify
from tests.cluster.nodes import HELD, Cluster, Member, buckets_owned, hold, let_go


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """Two nodes that no test kills."""
    with Cluster() as cluster:
        cluster.grow(2)
        yield cluster


@pytest.fixture(scope="module")
def client(shared: Cluster) -> Member:
    return shared.client()


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """A cluster for a test that ends it."""
    with Cluster() as cluster:
        yield cluster


# From one machine to a cluster and back


def fill_local(path: str) -> list[int]:
    with Queue("q", path) as queue:
        meta = queue.sync.put([{"id": x, "x": x} for x in range(30)])
        queue.sync.put([{"y": x} for x in range(5)], metadata=meta.select_samples(range(5)))
        KVInterface(queue).sync.kv_put("key", {"x": 99}, "kv")
        return queue.sync.get_meta(["x"], 10, "t").global_indexes


def go_on_with_it(path: str, num_buckets: int) -> list[Any]:
    with Queue("q", path) as queue:
        assert queue.num_buckets == num_buckets
        told = [
            len(queue),
            sorted(int(record["x"]) for record in queue.sync.get(1000)),
            queue.sync.get_meta(["x"], 5, "t").global_indexes,
            queue.sync.put([{"id": x, "x": x} for x in range(100, 105)]).global_indexes[0] > 30,
            queue.sync.get_data(BatchMeta([4, 0], "default", ["x", "y"]))["y"].tolist(),
            len(KVInterface(queue).sync.kv_list("kv")),
        ]
        queue.sync.flush()
        assert verify(queue.engine) == []
        return told


def refused_here(path: str) -> str:
    began = time.monotonic()
    try:
        Queue("q", path).close()
    except BucketUnavailable as error:
        assert time.monotonic() - began < 10
        return str(error)
    return "opened"


def test_a_queue_moves_to_the_cluster_and_back_and_forgets_nothing(nodes, tmp_path: Path):
    path = str(tmp_path)
    with nodes.alone() as alone:
        assert alone.call(fill_local, path) == list(range(10))
    nodes.grow(2)
    client = nodes.client()
    first = client.call(go_on_with_it, path, 1)
    assert first == [31, [*range(30), 99], list(range(10, 15)), True, [4, 0], 1]
    with nodes.alone() as alone:
        said = alone.call(refused_here, path)
        assert "belongs to a cluster" in said
        assert "node-" in said
    client.leave()
    for node in nodes.nodes:
        node.leave()
    with nodes.alone() as alone:
        assert alone.call(go_on_with_it, path, 1)[:3] == [
            36,
            sorted([*range(30), 99, *range(100, 105)]),
            list(range(15, 20)),
        ]


def test_a_queue_of_a_cluster_is_read_here_once_its_nodes_are_dead(nodes, tmp_path: Path):
    path = str(tmp_path)
    nodes.grow(3)
    client = nodes.client()
    client.call(fill_local, path)
    for member in [*nodes.nodes, client]:
        member.kill()
    with nodes.alone() as alone:
        told = alone.call(go_on_with_it, path, 4)
        assert told == [31, [*range(30), 99], list(range(10, 15)), True, [4, 0], 1]
    again = Cluster()
    with again:
        again.grow(2)
        assert again.client().call(go_on_with_it, path, 4)[0] == 36


def hold_local(path: str) -> None:
    hold(path)
    HELD["q"].sync.put([{"id": 1}])


def test_a_cluster_does_not_take_what_a_process_has_open_alone(shared, client, tmp_path: Path):
    path = str(tmp_path)
    with shared.alone() as alone:
        alone.call(hold_local, path)
        pending = client.begin(hold, path)
        assert not pending.is_there(2.0)
        alone.call(let_go)
        assert pending.result() == 1
        client.call(let_go)


def test_a_passphrase_changes_nothing(tmp_path: Path):
    with Cluster(passphrase="a secret of tests") as cluster:
        cluster.grow(2)
        assert cluster.client().call(fill_local, str(tmp_path)) == list(range(10))
        told = cluster.client().call(go_on_with_it, str(tmp_path), 4)
        assert told == [31, [*range(30), 99], list(range(10, 15)), True, [4, 0], 1]


# Producers


def produce(path: str, claims: int) -> list[int]:
    """Register, claim some, and stay registered."""
    queue = HELD["queue"] = Queue("q", path)
    HELD["block"] = queue.producer("rollouts")
    HELD["block"].__enter__()
    return queue.sync.get_meta(["x"], claims, "t").global_indexes


def wait_for_more(path: str) -> str:
    with Queue("q", path) as queue:
        try:
            for _ in queue.sync.stream(limit=None, wait=True, timeout=50):
                pass
        except ProducerFailed as error:
            return str(error)
    return "no error"


def test_who_waits_is_told_of_a_killed_producer_and_its_claims_come_back(shared, client, tmp_path):
    path = str(tmp_path)
    client.call(work_once, path)
    producer = shared.client()
    held = producer.call(produce, path, 4)
    assert held == [0, 1, 2, 3]
    pending = client.begin(wait_for_more, path)
    time.sleep(0.5)
    assert not pending.is_there()
    producer.kill()
    said = pending.result(40)
    assert "rollouts" in said
    assert client.call(claim_all, path) == list(range(10))


def work_once(path: str) -> None:
    with Queue("q", path) as queue:
        queue.sync.put([{"id": x, "x": x} for x in range(10)])


def claim_all(path: str) -> list[int]:
    with Queue("q", path) as queue:
        return queue.sync.get_meta(["x"], 100, "t").global_indexes


def die_at(owner: str, name: str) -> None:
    """End this process when it next comes to that method, which its owners of rows call."""
    import os
    import signal

    from persisting_torch.queue import commit, storage

    def die(*arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    classes = {"Committer": commit.Committer, "RowStore": storage.RowStore}
    setattr(classes[owner], name, die)


def put_ten(path: str, first: int) -> None:
    with Queue("q", path) as queue:
        queue.sync.put([{"id": x, "x": x} for x in range(first, first + 10)])


def books(path: str) -> tuple[list[int], list[str], int]:
    with Queue("q", path) as queue:
        return sorted(r["x"] for r in queue.sync.get(1000)), verify(queue.engine), len(queue)


def rows_of_all_files(path: str) -> int:
    import lance

    with Queue("q", path) as queue:
        queue.engine.tending.tend()
        if queue.num_buckets == 1:
            return int(queue.to_lance().count_rows())
    return sum(lance.dataset(file).count_rows() for file in Path(path).glob("q/*/data.lance"))


@pytest.mark.parametrize(
    ("buckets", "point"),
    [
        (1, ("Committer", "_enter")),
        (3, ("Committer", "_enter")),
        pytest.param(1, ("RowStore", "append"), marks=pytest.mark.slow),
        pytest.param(3, ("RowStore", "append"), marks=pytest.mark.slow),
    ],
)
def test_a_put_whose_owner_was_killed_in_it_is_there_once(nodes, tmp_path, buckets, point):
    path = str(tmp_path)
    nodes.grow(2)
    client = nodes.client()
    client.call(hold, path, num_buckets=buckets)
    client.call(put_ten, path, 0)
    owner = next(node for node in nodes.nodes if node.call(buckets_owned))
    owner.call(die_at, *point)
    client.call(put_ten, path, 10)
    assert not owner.is_alive()
    assert client.call(books, path) == (list(range(20)), [], 20)
    client.call(put_ten, path, 20)
    assert client.call(books, path) == (list(range(30)), [], 30)
    client.call(let_go)
    for member in nodes.nodes:
        if member is not owner:
            member.leave()
    with nodes.alone() as alone:
        assert alone.call(books, path) == (list(range(30)), [], 30)
        assert alone.call(rows_of_all_files, path) == 30


def flush_and_die(path: str) -> None:
    """Flush ten samples, and end with ten more in the files, but not in the ledger."""
    put_ten(path, 0)
    die_at("Committer", "_enter")
    put_ten(path, 10)


def have_it_tended(path: str) -> int:
    with Queue("q", path) as queue:
        (appender,) = queue.engine.committer.appenders  # type: ignore[attr-defined]
        appender.bucket.ask("tend", {}, seconds=30)
        return len(queue)


def test_a_flush_that_a_local_process_was_killed_in_is_not_finished_after_a_cluster_had_the_queue(
    nodes, tmp_path
):
    path = str(tmp_path)
    with nodes.alone() as alone:
        alone.begin(flush_and_die, path)
        alone.await_end()
    nodes.grow(1)
    client = nodes.client()
    assert client.call(have_it_tended, path) == 10
    client.leave()
    nodes[0].leave()
    with nodes.alone() as alone:
        assert alone.call(books, path) == (list(range(10)), [], 10)
        assert alone.call(rows_of_all_files, path) == 10
