"""More of what test_failures tries: every bad moment, chance, training, networks in parts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from persisting_torch.cluster.runtime import current
from tests.cluster import work
from tests.cluster.apart import Network, OwnStorage
from tests.cluster.nodes import Cluster, Pending, spread
from tests.cluster.work import TAKEOVER, Work, each_once, owner, stands_still
from tests.exactly_once.model import Lineage, fill
from tests.exactly_once.stories import Story, every, uninterrupted_like
from tests.exactly_once.training import fit

pytestmark = pytest.mark.slow

SAMPLES = 240


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def path(tmp_path: Path) -> str:
    return spread(tmp_path, 3)


@pytest.mark.parametrize(
    ("moment", "bucket"),
    [
        pytest.param("after rows were committed", 1, marks=pytest.mark.soak),
        ("before a commit of a claim is answered", 0),
        ("in a commit", 0),
        pytest.param("before rows are committed", 0, marks=pytest.mark.soak),
        pytest.param("before rows are entered", 1, marks=pytest.mark.soak),
        pytest.param("before a put is answered", 1, marks=pytest.mark.soak),
        pytest.param("before a turn is given", 0, marks=pytest.mark.soak),
        pytest.param("after it has looked whether it owns the ledger", 0, marks=pytest.mark.soak),
    ],
)
def test_whenever_an_owner_stands_still_what_it_had_under_way_is_refused(
    nodes: Cluster, path: str, moment: str, bucket: int
) -> None:
    stands_still(nodes, path, moment, bucket)


def test_an_answer_that_has_become_old_is_not_given(nodes: Cluster, path: str) -> None:
    nodes.grow(2)
    workers = Work(nodes, path, few=True)
    client, old = nodes.client(), work.owner_of(path, 0)
    client.call(work.ways_to, old.address, path, 0)
    # They have their snapshots then, and this is the only one.
    work.await_so(
        lambda: client.call(work.tasks_begun, path) == ["claim", "train"], TAKEOVER, "to begin"
    )
    halted = owner(nodes, path, 0)
    halted.call(work.halt_at, "before a snapshot is answered")
    asking = client.begin(work.ask_directly, "snapshot")
    work.await_so(lambda: work.is_halted(halted), TAKEOVER, "the halt")
    work.await_takeover(path, {0: old.epoch})
    time.sleep(1)
    halted.go_on()
    assert asking.result() == {"snapshot": "StaleOwner"}
    workers.end()


def nodes_believed_to_live() -> int:
    return sum(not node.doubtful for node in current().discover())


def test_who_comes_while_a_node_is_halted_finds_those_that_live(
    nodes: Cluster, path: str, tmp_path: Path
) -> None:
    nodes.grow(3)
    client = nodes.client()
    first = client.call(work.fill, path, 0, 256)
    halted = owner(nodes, path, 0)
    halted.stop()
    # Pulsing takes the others, which live, for dead as well.
    work.await_so(lambda: client.call(nodes_believed_to_live) == 0, 60, "to be believed dead")
    second = nodes.client().call(work.fill, path, 256, 256)
    assert client.call(work.fill, str(tmp_path / "another"), 0, 16) == list(range(16))
    halted.go_on()
    found = client.call(work.records, path)
    each_once([record["uid"] for record in found], [*first, *second])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2))
def test_nodes_are_killed_and_halted_as_chance_has_it(nodes: Cluster, path: str, seed: int) -> None:
    chance = random.Random(seed)
    nodes.grow(3)
    workers = Work(nodes, path)
    for _ in range(6):
        node = chance.choice(nodes.nodes)
        if chance.random() < 0.5:
            node.kill()
            time.sleep(chance.uniform(0, 8))
            nodes.start(node)
        else:
            node.stop()
            time.sleep(chance.uniform(1, 9))
            node.go_on()
        time.sleep(chance.uniform(0, 4))
    workers.end()


def test_what_a_killed_producer_had_claimed_comes_back(nodes: Cluster, path: str) -> None:
    nodes.grow(2)
    dying, other = nodes.client(), nodes.client()
    first = other.call(work.fill, path, 0, 20)
    with pytest.raises(AssertionError, match="the process died"):
        dying.call(work.die_as_producer, path)
    began = time.monotonic()
    each_once(other.call(work.claim_all, path, 20), first)
    assert time.monotonic() - began < 25


@pytest.mark.soak
def test_rows_of_a_halted_owner_whose_storage_nobody_sees_are_given_up_in_time(
    tmp_path: Path,
) -> None:
    path = spread(tmp_path, 2)
    with OwnStorage(path, tmp_path / "own") as nodes:
        nodes.grow(2)
        client = nodes.client()
        client.call(work.fail_after, 3.0)
        client.call(work.fill, path, 0, 256)
        assert client.call(work.read_buckets, path) == dict.fromkeys(range(4), 64)
        part = next(n for n in nodes.nodes if not [*nodes.own(n.name).glob("*/*/ledger.sqlite")])
        part.stop()
        began = time.monotonic()
        found = client.call(work.read_buckets, path)
        part.go_on()
        assert set(found.values()) == {64, "BucketUnavailable"}
        assert time.monotonic() - began < 30
        time.sleep(8)  # it is left alone for a while
        assert client.call(work.read_buckets, path) == dict.fromkeys(range(4), 64)


# Training


def train(nodes: Cluster, story: Story, **order: Any) -> Pending:
    """A training run of a client."""
    options = {**story.common, **order}
    if options.get("resume"):
        options["resume"] = str(story.folder / options["resume"])
    return nodes.client().begin(fit, str(story.folder), **options)


def begun(nodes: Cluster, path: str, **common: Any) -> Story:
    """A story whose samples lie in the buckets of the cluster."""
    nodes.client().call(fill, Path(path), SAMPLES)
    return Story(Path(path), filled=False, samples=SAMPLES, **common)


def assert_each_sample_once(nodes: Cluster, story: Story) -> None:
    lineage = Lineage.in_file(story.folder / "end.ckpt")
    assert lineage.trained == [1] * SAMPLES
    assert lineage.order == uninterrupted_like(story).order
    put = {"put": SAMPLES, "once": SAMPLES, "twice": 0, "never": 0, "dropped": 0}
    assert nodes.client().call(work.books, str(story.folder)) == put


def test_a_trainer_notices_no_death_of_nodes(nodes: Cluster, path: str) -> None:
    nodes.grow(3)
    story = begun(nodes, path, model={"pace": 0.2})
    running = train(nodes, story)
    for bucket in (0, 2):
        time.sleep(2)
        killed = owner(nodes, path, bucket)
        killed.kill()
        assert not running.is_there(3)
        nodes.start(killed)
    running.result()
    assert_each_sample_once(nodes, story)


@pytest.mark.soak
def test_a_trainer_that_is_killed_with_a_node_goes_on_from_its_checkpoint(
    nodes: Cluster, path: str
) -> None:
    nodes.grow(3)
    story = begun(nodes, path, keep=[every(10)])
    with pytest.raises(AssertionError, match="the process died"):
        train(nodes, story, event=("sigkill", 25)).result()
    owner(nodes, path, 0).kill()
    train(nodes, story, resume=story.newest()).result()
    assert_each_sample_once(nodes, story)


def torchrun(nodes: Cluster, ranks: int, order: dict[str, Any]) -> subprocess.Popen[str]:
    file = Path(order["folder"]) / "order.json"
    seeds = [node.address for node in nodes.nodes]
    file.write_text(json.dumps({"seeds": seeds, "order": order}))
    script = Path(__file__).with_name("ranks_process.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*command, "--nproc-per-node", str(ranks), str(script), str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_ranks_go_on_while_nodes_die_and_others_go_on_where_they_stopped(
    nodes: Cluster, path: str
) -> None:
    nodes.grow(3)
    story = begun(nodes, path)
    trainer = {"strategy": "ddp", "devices": 2}
    order = {"folder": path, "samples": SAMPLES, "trainer": trainer, "model": {"pace": 0.3}}
    both = torchrun(nodes, 2, {**order, "event": ["save and stop", 15], "end": "first.ckpt"})
    try:
        began = time.monotonic()
        while "batch 3\n" not in (line := both.stdout.readline() if both.stdout else ""):
            assert line, "the ranks have ended"
            assert time.monotonic() - began < 100
        owner(nodes, path, 0).kill()
        out, _ = both.communicate(timeout=100)
        assert both.returncode == 0, out
    finally:
        both.kill()
    train(nodes, story, resume="stopped.ckpt").result()
    lineage = Lineage.in_file(story.folder / "end.ckpt")
    assert lineage.trained == [1] * SAMPLES
    put = {"put": SAMPLES, "once": SAMPLES, "twice": 0, "never": 0, "dropped": 0}
    assert nodes.client().call(work.books, path) == put


# A network in parts


@pytest.mark.soak
def test_an_owner_apart_from_network_and_storage_writes_nothing_and_comes_back(path: str) -> None:
    with Network() as nodes:
        nodes.grow(2)
        workers = Work(nodes, path, few=True)
        time.sleep(1)
        old = work.owner_of(path, 0)
        apart = owner(nodes, path, 0)
        nodes.cut(apart)
        nodes.hide(apart, path)
        work.await_takeover(path, {0: old.epoch})
        time.sleep(3)
        nodes.show(apart, path)
        nodes.mend(apart)
        assert apart.call(work.ask_here, path, 0) == "StaleOwner"
        time.sleep(2)
        assert max(told.longest for told in workers.end()) < TAKEOVER


@pytest.mark.soak
def test_an_owner_apart_from_the_network_alone_stays_the_owner_and_is_waited_for(path: str) -> None:
    with Network() as nodes:
        nodes.grow(2)
        workers = Work(nodes, path, few=True)
        time.sleep(1)
        owners = [work.owner_of(path, bucket).epoch for bucket in range(4)]
        apart = owner(nodes, path, 0)
        nodes.cut(apart)
        time.sleep(30)
        assert [work.owner_of(path, bucket).epoch for bucket in range(4)] == owners
        nodes.mend(apart)
        assert 29 < max(told.longest for told in workers.end()) < 30 + TAKEOVER
