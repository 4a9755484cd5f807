"""A cluster's queue in an object store: all that it does on shared files, through every failure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from persisting_torch import (
    BucketUnavailable,
    KVInterface,
    PersistingDataset,
    PersistingError,
    Queue,
)
from persisting_torch.cli import main
from persisting_torch.cluster import moving
from persisting_torch.cluster.bucket import Bucket
from persisting_torch.cluster.finder import Target
from persisting_torch.cluster.keeping import Key
from persisting_torch.cluster.node import Node
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import StaleOwner
from persisting_torch.queue import journal, objects, ownership
from persisting_torch.queue.objects import ObjectFiles
from persisting_torch.queue.ownership import Owner, Ownership, read_owner
from persisting_torch.queue.place import Split, open_place
from persisting_torch.queue.report import verify
from tests.cluster import work
from tests.cluster.nodes import Cluster, Member, by_weight
from tests.cluster.stories import (
    consumption,
    keys_and_tags,
    late_fields,
    partitions,
    puts_and_gets,
    samplers,
    tell,
)
from tests.cluster.work import PAUSE, TAKEOVER, Told, each_once
from tests.queue import object_store

BUCKETS = 3
Options = dict[str, str]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with object_store.standing_in() as endpoint:
        yield endpoint


@pytest.fixture
def options(endpoint: str) -> Options:
    return object_store.options_for(endpoint)


@pytest.fixture
def url(endpoint: str) -> str:
    """A storage path at which node-0 and node-1 own buckets of queue "q", node-0 the first."""
    bucket = object_store.new_bucket(endpoint)
    for number in range(1000):
        url = f"{bucket}/{number}"
        owners = [by_weight(url, b, ["node-0", "node-1"])[0] for b in range(BUCKETS)]
        if owners == ["node-0", "node-1", "node-0"]:
            return url
    raise AssertionError("the hash is none")


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


def opened(url: str, options: Options, **given: Any) -> Queue:
    return Queue("q", url, storage_options=options, **given)


def owner_of(url: str, options: Options, bucket: int = 0) -> Owner:
    root = f"{url}/q"
    found = read_owner(f"{root}/bucket-{bucket}", ObjectFiles(root, options))
    assert found is not None
    return found


def member(nodes: Cluster, owner: Owner) -> Member:
    return next(node for node in nodes.nodes if node.name == owner.node)


# What it does


@pytest.mark.parametrize(
    "story",
    [
        puts_and_gets,
        late_fields,
        keys_and_tags,
        pytest.param(consumption, marks=pytest.mark.slow),
        pytest.param(partitions, marks=pytest.mark.slow),
        pytest.param(samplers, marks=pytest.mark.slow),
    ],
    ids=lambda story: story.__name__,
)
def test_a_cluster_tells_of_a_store_what_one_machine_tells(
    shared, client, url, options, tmp_path, story
):
    given = {"storage_options": options, "num_buckets": BUCKETS}
    far = client.begin(tell, story, url, given)
    with shared.alone() as alone:
        _, expected = alone.call(tell, story, str(tmp_path), {})
    assert far.result() == (BUCKETS, expected)


def fill(url: str, options: Options, first: int, count: int, **given: Any) -> None:
    with opened(url, options, **given) as queue:
        queue.sync.put([{"id": x, "uid": x} for x in range(first, first + count)])


def seen(url: str, options: Options) -> dict[str, Any]:
    """All that there is, in every way to look at it."""
    with opened(url, options) as queue:
        assert verify(queue.engine) == []
        return {
            "count": len(queue),
            "got": sorted(record["uid"] for record in queue.sync.get(10**6)),
            "streamed": sorted(r["uid"] for batch in queue.sync.stream(None) for r in batch),
            "stored": [bucket.exists() for bucket in queue.engine.rows.stores],
            "near": [bucket.near() is not None for bucket in queue.engine.rows.stores],
        }


def test_rows_of_two_nodes_are_read_where_they_lie(shared, client, url, options):
    client.call(fill, url, options, 0, 100, num_buckets=BUCKETS)
    shared.client().call(fill, url, options, 100, 200)
    told = client.call(seen, url, options)
    assert told["count"] == 300
    assert told["got"] == told["streamed"] == list(range(300))
    assert told["stored"] == told["near"] == [True] * BUCKETS
    assert [owner_of(url, options, b).node for b in range(BUCKETS)] == [
        "node-0",
        "node-1",
        "node-0",
    ]


def load(url: str, options: Options) -> list[int]:
    from persisting_torch import PersistingDataLoader

    with opened(url, options, durability="fsync") as queue:
        dataset = PersistingDataset(queue, batch_size=8, last="split", fields=["uid"])
        loader = PersistingDataLoader(dataset, num_workers=1)
        return [uid for batch in loader for uid in batch["uid"].tolist()]


def put_large(url: str, options: Options) -> tuple[list[str], list[int]]:
    """Put two megabytes, twice; the requests that did it, and what is there then."""
    ops, message = [], Bucket._message

    def noted(self: Bucket, op: str, *rest: Any) -> Message:
        ops.append(op)
        return message(self, op, *rest)

    with opened(url, options, num_buckets=BUCKETS, batch_size=1000) as queue:
        Bucket._message = noted  # type: ignore[method-assign]
        # The first put makes the datasets with the columns that the second one needs.
        for first in (0, 300):
            uids = range(first, first + 300)
            queue.sync.put([{"id": uid, "uid": uid, "x": torch.ones(2000)} for uid in uids])
            queue.sync.flush()
        Bucket._message = message  # type: ignore[method-assign]
        return ops, sorted(record["uid"] for record in queue.sync.get(1000))


def test_large_puts_are_written_by_those_who_put(client, url, options):
    ops, found = client.call(put_large, url, options)
    appends = [op for op in ops if op.startswith("append")]
    assert appends == ["append"] * BUCKETS + ["append_written"] * BUCKETS
    assert found == list(range(600))


def looked_at(url: str, options: Options) -> int:
    told = [text for one in options.items() for text in ("--storage-option", "=".join(one))]
    return main(["verify", "q", "--storage-path", url, *told])


def test_the_command_line_looks_at_what_a_cluster_has(shared, client, url, options):
    client.call(fill, url, options, 0, 30, num_buckets=BUCKETS)
    with shared.alone() as alone:
        assert alone.call(looked_at, url, options) == 0, alone.err


def seal(url: str, options: Options) -> None:
    with opened(url, options) as queue:
        queue.sync.seal()


@pytest.mark.slow
def test_workers_of_a_data_loader_share_the_queue(client, url, options):
    client.call(fill, url, options, 0, 50, num_buckets=BUCKETS)
    client.call(seal, url, options)
    each_once(client.call(load, url, options), list(range(50)))


def few_changes(count: int) -> None:
    journal.SNAPSHOT_CHANGES = count


def claim_often(url: str, options: Options, times: int) -> list[int]:
    with opened(url, options) as queue:
        batches = [queue.sync.get_batch(["uid"], 1, "t") for _ in range(times)]
        return [uid for batch in batches for uid in batch["uid"].tolist()]


def test_the_log_in_the_store_stays_short_and_the_next_head_finds_all(nodes, url, options):
    nodes.grow(2)
    for node in nodes.nodes:
        node.call(few_changes, 20)
    client = nodes.client()
    client.call(fill, url, options, 0, 100, num_buckets=BUCKETS)
    claimed = client.call(claim_often, url, options, 60)
    files = ObjectFiles(url, options)
    epoch = owner_of(url, options).epoch
    logged = f"{url}/q/bucket-0/ledger/{epoch}"
    work.await_so(lambda: len(files.names(logged)) < 25, 10, "a snapshot")
    member(nodes, owner_of(url, options)).leave()
    claimed += client.call(claim_often, url, options, 40)
    each_once(claimed, list(range(100)))


# Nodes that come and go


def follow_soon() -> None:
    moving.STABLE_SECONDS = 1.0


def test_buckets_go_to_a_node_that_joins(nodes, url, options, tmp_path):
    nodes.grow(1)
    nodes[0].call(follow_soon)
    workers = Work(nodes, url, options, tmp_path)
    assert owner_of(url, options, 1).node == "node-0"
    nodes.grow(1)
    work.await_so(lambda: owner_of(url, options, 1).node == "node-1", 20, "to follow")
    time.sleep(2)
    assert workers.end() < 5
    assert [owner_of(url, options, b).node[-1] for b in range(BUCKETS)] == ["0", "1", "0"]


def rounds(stop: str) -> Iterator[int]:
    number = 0
    while not Path(stop).exists():
        yield number
        number += 1
        time.sleep(PAUSE)


def put(url: str, options: Options, stop: str, count: int = 20) -> Told:
    told = Told()
    with opened(url, options, num_buckets=BUCKETS) as queue:
        for number in rounds(stop):
            uids = list(range(number * count, number * count + count))
            with told.call():
                queue.sync.put([{"id": uid, "uid": uid} for uid in uids])
                queue.sync.flush()
            told.uids += uids
    return told


def claim(url: str, options: Options, stop: str, count: int = 8) -> Told:
    told = Told()
    with opened(url, options) as queue:
        for _ in rounds(stop):
            with told.call():
                batch = queue.sync.get_batch(["uid"], count, "claim")
            told.uids += batch["uid"].tolist() if len(batch) else []
            Path(stop).with_name("claiming").touch()
    return told


def drain(url: str, options: Options) -> list[int]:
    with opened(url, options) as queue:
        batch = queue.sync.get_batch(["uid"], 10**6, "claim")
        return batch["uid"].tolist() if len(batch) else []


class Work:
    """One puts and one claims, until the end, when all is counted."""

    def __init__(self, nodes: Cluster, url: str, options: Options, tmp_path: Path) -> None:
        self.nodes, self.url, self.options = nodes, url, options
        self.stop = tmp_path / "stop"
        self.pending = []
        for function in (put, claim):
            self.pending.append(nodes.client().begin(function, url, options, str(self.stop)))
            files = ObjectFiles(url, options)
            rows = f"{url}/q/bucket-1/data.lance/_versions"
            work.await_so(lambda: files.exists(rows), TAKEOVER, "to begin")  # noqa: B023
        work.await_so(self.stop.with_name("claiming").exists, TAKEOVER, "to claim")

    def end(self) -> float:
        """The longest that a call took. Asserts that nothing is lost, and nothing there twice."""
        self.stop.touch()
        producer, consumer = [pending.result() for pending in self.pending]
        client = self.nodes.client()
        assert client.call(seen, self.url, self.options)["got"] == producer.uids
        rest = client.call(drain, self.url, self.options)
        each_once([*consumer.uids, *rest], producer.uids)
        assert len(consumer.uids) > 8
        return max(producer.longest, consumer.longest)


def test_the_head_is_killed_and_nobody_notices_but_by_waiting(nodes, url, options, tmp_path):
    nodes.grow(2)
    workers = Work(nodes, url, options, tmp_path)
    time.sleep(2)
    head = owner_of(url, options)
    member(nodes, head).kill()
    work.await_so(lambda: owner_of(url, options).epoch > head.epoch, TAKEOVER, "a takeover")
    time.sleep(2)
    assert workers.end() < TAKEOVER


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("before a change of a claim is stored", marks=pytest.mark.slow),
        "after a change of a claim was stored",
        pytest.param("before a commit of a claim is answered", marks=pytest.mark.slow),
    ],
)
def test_a_head_that_stood_still_and_was_replaced_does_nothing_any_more(
    nodes, url, options, tmp_path, moment
):
    nodes.grow(2)
    workers = Work(nodes, url, options, tmp_path)
    client, old = nodes.client(), owner_of(url, options)
    client.call(work.ways_to, old.address, url, 0)
    halted = member(nodes, old)
    halted.begin(work.halt_at, moment)
    work.await_so(lambda: work.is_halted(halted), TAKEOVER, moment)
    work.await_so(lambda: owner_of(url, options).epoch > old.epoch, TAKEOVER, "a takeover")
    time.sleep(1)
    asking = client.begin(work.ask_directly)
    time.sleep(1)
    halted.go_on()
    assert set(asking.result().values()) == {"StaleOwner"}
    time.sleep(2)
    assert workers.end() < TAKEOVER


def believe() -> None:
    """From now on this process holds itself to be the owner of whatever it owned."""
    ownership._now = lambda: 0.0
    Ownership.beat = lambda self: None  # type: ignore[method-assign]
    Node._drop = staticmethod(lambda kept, held: None)  # type: ignore[method-assign]


def commit_directly() -> str:
    """Take the turn to write and write; the error."""
    for op in ("begin", "commit"):
        peer, request = work.HELD["ways"][op]
        try:
            peer.ask(request, 10.0)
        except StaleOwner as error:
            return f"{op}: {error}"
    return "written"


def test_the_store_refuses_a_head_that_believes_in_itself(nodes, url, options):
    nodes.grow(2)
    client, other = nodes.client(), nodes.client()
    client.call(fill, url, options, 0, 10, num_buckets=BUCKETS)
    old = owner_of(url, options)
    client.call(work.ways_to, old.address, url, 0)
    halted = member(nodes, old)
    halted.call(believe)
    halted.stop()
    assert other.call(claim_often, url, options, 4) == [0, 1, 2, 3]
    assert owner_of(url, options).epoch > old.epoch
    halted.go_on()
    said = client.call(commit_directly)
    assert said.startswith("commit: ")
    assert "/ledger was taken over" in said


@pytest.mark.slow
def test_a_change_whose_answer_was_lost_is_made_once(nodes, endpoint, url, options, tmp_path):
    gate = object_store.Gate(endpoint)
    gate.only = "/ledger/"
    nodes.grow(2)
    workers = Work(nodes, url, object_store.options_for(gate.endpoint), tmp_path)
    for shut in ("after", "before"):
        time.sleep(1)
        gate.shut = shut
        time.sleep(2)
        gate.shut = ""
    time.sleep(1)
    assert workers.end() < 20


def try_once() -> None:
    """From now on no request is sent again, and none waits long."""
    objects.RETRIES = 0
    objects.CLIENT["timeout"] = "1500ms"


def put_along(path: str, seconds: float) -> float:
    """Flush into a queue of files for so long; how long the slowest took."""
    slowest, end = 0.0, time.monotonic() + seconds
    with Queue("files", path) as queue:
        while (began := time.monotonic()) < end:
            queue.sync.put({"id": 1})
            queue.sync.flush()
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(PAUSE)
    return slowest


def longest_silence(folder: Path, seconds: float) -> float:
    """Between two beats of the bucket's owner, for so long."""
    longest, counted, end = 0.0, -1, time.monotonic() + seconds
    heard = time.monotonic()
    while (now := time.monotonic()) < end:
        owner = read_owner(folder)
        assert owner is not None
        if owner.count != counted:
            longest, counted, heard = max(longest, now - heard), owner.count, now
        time.sleep(PAUSE)
    return max(longest, now - heard)


def test_a_store_that_does_not_answer_holds_up_no_other_queue(nodes, endpoint, url, tmp_path):
    gate = object_store.Gate(endpoint)
    nodes.grow(1)
    client, other = nodes.client(), nodes.client()
    given = object_store.options_for(gate.endpoint)
    nodes[0].call(try_once)
    client.call(fill, url, given, 0, 10, num_buckets=BUCKETS)
    other.call(put_along, str(tmp_path), 0.5)
    gate.shut = "always"
    pending = client.begin(claim_often, url, given, 1)
    assert longest_silence(tmp_path / "files" / "bucket-0", 6.0) < 4.0
    assert other.call(put_along, str(tmp_path), 2.0) < 4.0
    assert not pending.is_there()
    gate.shut = ""
    assert pending.result() == [0]
    warned = nodes[0].err.count("bucket 0 of queue 'q': ")
    assert warned == 1, nodes[0].err


# Between a cluster and one process


def kv_put(url: str, options: Options) -> None:
    with opened(url, options) as queue:
        KVInterface(queue).sync.kv_put("key", {"uid": -1}, "keyed")


def refusal(url: str, options: Options) -> str:
    with pytest.raises(BucketUnavailable) as refused:
        opened(url, options)
    return str(refused.value)


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_a_queue_goes_from_a_process_to_a_cluster_and_back(nodes, url, options, killed):
    with nodes.alone() as alone:
        alone.call(fill, url, options, 0, 30)
        first = alone.call(claim_often, url, options, 3)
    nodes.grow(2)
    client = nodes.client()
    client.call(fill, url, options, 30, 20)
    first += client.call(claim_often, url, options, 3)
    client.call(kv_put, url, options)
    with nodes.alone() as alone:
        said = alone.call(refusal, url, options)
        assert "belongs to a cluster" in said
        assert "'node-" in said
    for process in [client, *nodes.nodes]:
        process.kill() if killed else process.leave()
    with nodes.alone() as alone:
        alone.call(fill, url, options, 50, 10)
        first += alone.call(claim_often, url, options, 54)
        each_once(first, list(range(60)))


def hold(url: str, options: Options) -> Queue:
    queue = work.HELD["q"] = opened(url, options)
    queue.sync.put({"id": 0, "uid": 0})
    queue.sync.flush()


def test_a_split_queue_is_one_process_once_its_nodes_are_dead(nodes, url, options):
    nodes.grow(2)
    client = nodes.client()
    client.call(fill, url, options, 0, 60, num_buckets=BUCKETS)
    claimed = client.call(claim_often, url, options, 5)
    for process in [client, *nodes.nodes]:
        process.kill()
    with nodes.alone() as alone:
        alone.call(fill, url, options, 60, 60)
        claimed += alone.call(claim_often, url, options, 5)
    again = Cluster()
    with again:
        again.grow(2)
        client = again.client()
        client.call(fill, url, options, 120, 60)
        assert client.call(seen, url, options)["got"] == list(range(180))
        claimed += client.call(claim_often, url, options, 170)
        each_once(claimed, list(range(180)))


def told_to_close_it(url: str, options: Options) -> str:
    work.fail_after(3.0)
    return refusal(url, options)


def test_a_cluster_does_not_take_what_a_process_has_open_alone(shared, url, options):
    with shared.alone() as alone:
        alone.call(hold, url, options)
        client = shared.client()
        said = client.call(told_to_close_it, url, options)
        assert "is open as a local queue in process" in said
        assert f":{alone.pid}" in said
        alone.kill()
    assert client.call(seen, url, options)["got"] == [0]


# storage_options


def failure(url: str, options: Options) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(PersistingError) as refused:
        opened(url, options)
    return str(refused.value), time.monotonic() - began


def test_what_is_wrong_with_the_store_is_said_at_once(client, options):
    with object_store.refusing() as nobody:
        said, took = client.call(failure, "s3://bucket", object_store.options_for(nobody))
        assert "InvalidAccessKeyId" in said
        assert "credentials" in said
        assert took < 5
    said, took = client.call(failure, "s3://nowhere/folder", options)
    assert "there is no bucket 'nowhere'" in said
    assert took < 5
    away = options | {"aws_endpoint": "http://127.0.0.1:9"}
    said, took = client.call(failure, "s3://b", away)
    assert "network" in said
    assert took < 20


def test_nobody_is_told_the_credentials(nodes, endpoint, url):
    gate = object_store.Gate(endpoint)
    given = object_store.options_for(gate.endpoint) | {"aws_secret_access_key": "hush-hush"}
    nodes.grow(2)
    client = nodes.client()
    client.call(fill, url, given, 0, 10, num_buckets=BUCKETS)
    gate.shut = "before"
    with pytest.raises(PersistingError) as refused:
        client.call(fill, url, given, 0, 10)
    time.sleep(4)
    written = [str(refused.value), *(member.err + member.out for member in [client, *nodes.nodes])]
    assert all("hush" not in one for one in written)
    assert any("bucket 0 of queue 'q'" in one for one in written)
    target = Target("q", url, 0, storage_options=given)
    assert "hush" not in f"{target} {target!r} {target.header}"
    assert target == replace(target, storage_options=None)


class Nothing:
    """What answers for a bucket that nobody asks anything."""

    def answer(self, request: Message, table: Any) -> Any:
        return Message({}), None

    def settle(self, limit: float, *, anyway: bool) -> bool:
        return True

    def close(self) -> None:
        pass

    abandon = close


def test_the_newest_options_count_until_the_bucket_is_open(url, options):
    def ask(given: Options | None, bucket: int) -> Any:
        key = Key("q", url, bucket)
        request = {"op": "where", **key._asdict(), "split": [2, None], "storage_options": given}
        return node.answer(Message(request), None)[0].header

    reached: list[dict[str, str] | None] = []

    def open_service(key: Key, ownership: Ownership) -> Nothing:
        reached.append(ownership.files.options)
        return Nothing()

    node = Node("node", "127.0.0.1", None, open_service)
    try:
        with object_store.refusing() as nobody, pytest.raises(PersistingError, match="InvalidAcc"):
            ask(object_store.options_for(nobody), 0)
        first, second, third = [options | {"aws_access_key_id": name} for name in "abc"]
        assert ask(first, 0)["node"] == "node"
        assert ask(second, 1)["node"] == "node"
        assert ask(third, 1)["node"] == "node"
        assert ask(None, 1)["node"] == "node"
        assert reached == [first, second]
    finally:
        node.close()


def test_handles_with_different_keys_do_not_keep_a_dead_owner_in_office(url, options):
    made = open_place("q", url, Split(1, distributed=True), options)
    away = Ownership.take(made.bucket, 0, "some", "node-7", "127.0.0.1:1", made.files)
    assert away is not None
    away._write(replace(away.owner, processes="of another machine"))
    node = Node("node", "127.0.0.1", None, lambda key, ownership: Nothing())
    try:
        deadline = time.monotonic() + TAKEOVER
        while owner_of(url, options).epoch == 1:
            assert time.monotonic() < deadline
            for name in ("a", "b"):
                header = {"op": "where", "queue": "q", "storage_path": url, "bucket": 0}
                given = options | {"aws_access_key_id": name}
                node.answer(Message(header | {"storage_options": given}), None)
        assert owner_of(url, options).node == "node"
    finally:
        node.close()
