"""A queue of three nodes gives what a queue of one machine gives."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from persisting_torch import Queue
from tests.cluster.nodes import Cluster


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def fill(path: str) -> object:
    with Queue("q", path) as queue:
        return (
            queue.sync.put([{"x": 1}, {"x": 2}]).global_indexes,
            len(queue),
            queue.num_buckets,
        )


def test_try(nodes: Cluster, tmp_path: Path) -> None:
    t = time.time()
    nodes.grow(3)
    print(time.time() - t)
    cl = nodes.client()
    print(time.time() - t)
    p = str(tmp_path)
    print(cl.call(fill, p), time.time() - t)
    print(cl.call(fill, p), time.time() - t)
    nodes[1].kill()
    nodes.start(nodes[1])
    print("restart", time.time() - t)
    print(cl.call(fill, p), time.time() - t)
    cl.leave()
    print(time.time() - t, cl.err)
    with nodes.alone() as a:
        try:
            print(a.call(fill, p))
        except Exception as e:
            print(repr(e)[:300])
    from tests.cluster.nodes import buckets_owned
    print([n.call(buckets_owned) for n in nodes.nodes])
    print(time.time() - t)
    for n in nodes.nodes:
        n.leave()
    print(time.time() - t)
    with nodes.alone() as a:
        print(a.call(fill, p))
    print(time.time() - t)
