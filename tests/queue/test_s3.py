"""A queue in an object store: all that a local one does, for one process at a time."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time

import obstore
import pytest
import torch

from persisting_torch import PersistingDataset, Queue
from persisting_torch.errors import BucketUnavailable, PersistingError, StaleOwner
from persisting_torch.queue import journal, lifecycle, ownership
from persisting_torch.queue.kv import KVInterface
from persisting_torch.queue.objects import ObjectFiles
from persisting_torch.queue.place import Split, open_place
from persisting_torch.queue.report import verify
from tests.queue import children, object_store


@pytest.fixture(scope="module")
def endpoint():
    with object_store.standing_in() as endpoint:
        yield endpoint


@pytest.fixture
def options(endpoint):
    return object_store.options_for(endpoint)


@pytest.fixture
def bucket(endpoint):
    return object_store.new_bucket(endpoint)


@pytest.fixture
def opened(bucket, options):
    """Opens the queue "q", and closes it in the end."""
    queues = []

    def open_queue(name="q", **given):
        queue = Queue(name, f"{bucket}/some/folder", storage_options=options, **given)
        queues.append(queue)
        return queue

    yield open_queue
    for queue in queues:
        queue.sync.close()


def rows(first, count):
    return [{"x": first + i, "tokens": torch.arange(i % 5)} for i in range(count)]


def taken_by(queue, task):
    tasks = queue.sync.stats()["tasks"]
    return tasks[task]["default"]["taken"] if task in tasks else 0


def objects_of(bucket, options):
    files = ObjectFiles(bucket, options)
    listed = obstore.list(files._store)
    return sorted(entry["path"] for entries in listed for entry in entries)


def test_what_was_put_claimed_added_and_sealed_is_there_for_the_next_process(opened):
    queue = opened()
    queue.sync.put(rows(0, 20))
    claimed = queue.sync.get_meta(["x"], 8, "train")
    queue.sync.put([{"reward": float(i)} for i in range(8)], metadata=claimed)
    KVInterface(queue).sync.kv_put("answer", {"x": 42}, "keyed", tag={"good": True})
    queue.sync.seal()
    queue.sync.close()

    queue = opened()
    found = queue.sync.get(100)
    assert [record["x"] for record in found] == [*range(20), 42]
    assert [record["reward"] for record in found[:9]] == [*map(float, range(8)), None]
    assert queue.sync.get_meta(["x"], 100, "train").size == 12
    assert KVInterface(queue).sync.kv_batch_get("answer", "keyed")["x"].tolist() == [42]
    assert KVInterface(queue).sync.kv_list("keyed") == [("answer", {"good": True})]
    assert queue.sync.get_meta(["x"], 100, "train").size == 0
    assert verify(queue.engine) == []


@pytest.mark.parametrize("name", ["a.b", "runs/7 #1?", "50%", "größe"])
def test_a_queue_may_have_any_name(opened, name):
    queue = opened(name)
    queue.sync.put(rows(0, 3))
    queue.sync.flush()
    queue.sync.close()
    assert [record["x"] for record in opened(name).sync.get()] == [0, 1, 2]
    assert opened(name).to_lance().count_rows() == 3


def test_upkeep_keeps_fragments_few_and_removes_cleared_rows_and_late_files(opened):
    queue = opened(retention="consumed")
    for first in range(0, 400, 10):
        queue.sync.put(rows(first, 10))
        queue.sync.flush()
    meta = queue.sync.get_meta(["x"], 200, "train")
    queue.sync.put([{"y": i} for i in range(200)], metadata=meta)
    queue.sync.clear(meta.global_indexes[:100])
    queue.engine.tending.tend()
    assert queue.engine.tending.error is None
    figures = queue.sync.stats()["storage"]
    assert figures["fragments"] <= 8
    assert figures["bytes"] > 0
    assert verify(queue.engine) == []


def test_handles_of_one_process_share_the_queue(opened):
    one, other = opened(), opened()
    one.sync.put(rows(0, 5))
    one.sync.flush()
    other.sync.put(rows(5, 5))
    other.sync.flush()
    assert sorted(r["x"] for r in one.sync.get()) == list(range(10))
    taken = [queue.sync.get_meta(["x"], 5, "t").global_indexes for queue in (one, other)]
    assert len({index for indexes in taken for index in indexes}) == 10
    one.sync.close()
    other.sync.put(rows(10, 1))
    other.sync.flush()
    other.sync.close()
    assert len(opened().sync.get()) == 11


def test_objects_stay_few_however_much_is_committed(opened, bucket, options, monkeypatch):
    monkeypatch.setattr(journal, "SNAPSHOT_CHANGES", 20)
    queue = opened()
    queue.sync.put(rows(0, 100))
    queue.sync.flush()
    deadline = time.monotonic() + 20
    while queue.engine.ledger.kept.journal._snapshot.number == 0:
        queue.sync.get_meta(["x"], 1, "t")
        assert time.monotonic() < deadline
    number = queue.engine.ledger.kept.journal.number
    queue.sync.close()
    logged = [path for path in objects_of(bucket, options) if "/ledger/1/" in path]
    assert len(logged) < number
    queue = opened()
    before = taken_by(queue, "t")
    assert before > 0
    assert queue.sync.get_meta(["x"], 100, "t").size == 100 - before
    left = [path for path in objects_of(bucket, options) if "/ledger/1/" in path]
    assert len(left) == 1  # the object that closed the epoch


def test_what_a_request_without_an_answer_has_done_is_found_out(endpoint, bucket):
    gate = object_store.Gate(endpoint)
    queue = Queue("q", bucket, storage_options=object_store.options_for(gate.endpoint))
    queue.sync.put(rows(0, 10))
    queue.sync.flush()
    for shut, taken in (("after", 2), ("before", 0)):
        before = taken_by(queue, "t")
        gate.shut = shut
        with pytest.raises(BucketUnavailable, match="cannot be written"):
            queue.sync.get_meta(["x"], 2, "t")
        gate.shut = ""
        assert queue.sync.get_meta(["x"], 3, "t").size == 3
        assert taken_by(queue, "t") == before + taken + 3
    gate.shut = "after"
    queue.sync.put(rows(10, 10))
    with pytest.raises(PersistingError, match="kept in memory"):
        queue.sync.flush()
    gate.shut = ""
    queue.sync.flush()
    assert [record["x"] for record in queue.sync.get()] == list(range(20))
    queue.sync.close()
    queue = Queue("q", bucket, storage_options=object_store.options_for(endpoint))
    assert verify(queue.engine) == []
    queue.sync.close()


def test_wrong_credentials_no_bucket_and_no_store_are_told_apart(options, endpoint):
    with object_store.refusing() as nobody:
        wrong = object_store.options_for(nobody)
        with pytest.raises(PersistingError, match=r"InvalidAccessKeyId.*credentials"):
            Queue("q", "s3://bucket", storage_options=wrong)
    with pytest.raises(PersistingError, match="there is no bucket 'nowhere'"):
        Queue("q", "s3://nowhere/folder", storage_options=options)
    with pytest.raises(PersistingError, match=r"cannot be opened at s3://b/q: .*network"):
        Queue("q", "s3://b", storage_options=options | {"aws_endpoint": "http://127.0.0.1:9"})
    with pytest.raises(PersistingError, match="'aws_acess_key_id' is not valid"):
        Queue("q", "s3://b", storage_options=options | {"aws_acess_key_id": "x"})


def test_a_change_that_is_interrupted_once_it_is_committed_is_not_made_again(opened, monkeypatch):
    ledger = opened().engine.ledger
    first = ledger.reserve(1)

    def interrupted():
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger.kept.journal, "done", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ledger.reserve(5)
    assert ledger.reserve(1) == first + 6
    ledger.close()
    assert opened().engine.ledger.reserve(1) == first + 7


def test_all_buckets_of_a_split_queue_belong_to_the_process_that_opens_it(opened, bucket, options):
    made = open_place("q", f"{bucket}/some/folder", Split(2, distributed=True), options)
    other = made.of_bucket(1).bucket
    node = ownership.Ownership.take(other, 0, "some", "node-7", "10.0.0.1:1", made.files)
    ends = threading.Event()

    def live():
        while not ends.wait(0.2):
            node.beat()

    beating = threading.Thread(target=live)
    beating.start()
    try:
        with pytest.raises(BucketUnavailable, match="belongs to a cluster, whose node 'node-7'"):
            opened()
    finally:
        ends.set()
        beating.join()
    queue = opened()  # once it stands still
    with pytest.raises(StaleOwner):
        node.beat()
    queue.sync.put(rows(0, 200))
    queue.sync.flush()
    assert [store.rows > 0 for store in queue.engine.ledger.hold.rows] == [True, True]
    assert queue.sync.get_meta(["x"], 200, "t").size == 200
    queue.engine.tending.tend()
    assert queue.engine.tending.error is None
    queue.sync.close()
    queue = opened()
    assert sorted(record["x"] for record in queue.sync.get(1000)) == list(range(200))
    assert verify(queue.engine) == []


def test_a_dataset_says_that_there_is_no_such_queue(bucket, options, monkeypatch):
    for name, value in options.items():
        monkeypatch.setenv(name.upper() if name.startswith("aws") else f"AWS_{name.upper()}", value)
    with pytest.raises(PersistingError, match="there is no queue 'none'"):
        PersistingDataset("none", storage_path=bucket, batch_size=2).handle.check()


COMMON = """
import json, os, sys, time
import torch
from persisting_torch import PersistingDataLoader, PersistingDataset, Queue

bucket, options = sys.argv[1], json.loads(sys.argv[2])
def open_queue(**given):
    return Queue("q", bucket, storage_options=options, **given)
def say(*what):
    print(json.dumps(what), flush=True)
"""

WRITER = (
    COMMON
    + """
queue, x = open_queue(batch_size=10_000), 0
while True:
    queue.sync.put([{"x": x + i, "tokens": torch.arange(i)} for i in range(7)])
    queue.sync.flush()
    say("put", list(range(x, x + 7)))
    x += 7
    meta = queue.sync.get_meta(["x"], 3, "train")
    say("claimed", queue.sync.get_data(meta)["x"].tolist())
"""
)


def test_what_was_acknowledged_before_a_kill_is_there_for_the_next_process(
    opened, bucket, options, monkeypatch
):
    monkeypatch.setattr(ownership, "TAKEOVER_SECONDS", 1.5)
    put, claimed = set(), []
    for seconds in (0.4, 0.9):
        child = children.start(WRITER, bucket + "/some/folder", json.dumps(options))
        child.await_line()
        time.sleep(seconds)
        child.send(signal.SIGKILL)
        child.wait()
        queue = opened()
        for what, values in child.lines:
            if what == "put":
                put |= set(values)
            else:
                claimed += values
        found = [record["x"] for record in queue.sync.get(10**6)]
        assert put <= set(found)
        rest = queue.sync.get_data(queue.sync.get_meta(["x"], 10**6, "train"))["x"].tolist()
        # Of what was claimed last the answer may have been under way.
        assert not set(claimed) & set(rest)
        assert len(found) - len(claimed) - len(rest) <= 3
        assert verify(queue.engine) == []
        queue.sync.clear(queue.engine.snapshot("default").tolist())
        put, claimed = set(), []
        queue.sync.close()


HOLDER = (
    COMMON
    + """
queue = open_queue(batch_size=10_000)
queue.sync.put([{"x": i} for i in range(10)])
queue.sync.flush()
say("ready", os.getpid())
input_file = sys.argv[3]
while not os.path.exists(input_file):
    time.sleep(0.02)
def attempt(what, call):
    try:
        call()
        say(what, "done")
    except Exception as error:
        cause = error.__cause__ or error
        say(what, type(cause).__name__)
attempt("get", lambda: queue.sync.get())
attempt("claim", lambda: queue.sync.get_meta(["x"], 2, "t"))
attempt("put", lambda: (queue.sync.put({"x": 100}), queue.sync.flush()))
os._exit(0)
"""
)


def test_a_second_process_is_refused_and_takes_over_one_that_stands_still(
    opened, bucket, options, tmp_path
):
    go = tmp_path / "go"
    child = children.start(HOLDER, bucket + "/some/folder", json.dumps(options), go)
    child.await_line()
    with pytest.raises(BucketUnavailable, match=rf"open in process .*:{child.pid}"):
        opened()
    child.send(signal.SIGSTOP)
    began = time.monotonic()
    queue = opened()
    assert time.monotonic() - began >= ownership.TAKEOVER_SECONDS
    assert queue.sync.get_meta(["x"], 4, "t").size == 4
    go.touch()
    child.send(signal.SIGCONT)
    assert child.wait() == 0
    assert child.lines[1:] == [[what, "StaleOwner"] for what in ("get", "claim", "put")]
    queue.sync.put({"x": 10})
    queue.sync.flush()
    assert [record["x"] for record in queue.sync.get()] == list(range(11))
    assert queue.sync.get_meta(["x"], 100, "t").size == 7
    assert verify(queue.engine) == []


OPENER = """
    import json, sys
    from persisting_torch import Queue
    with Queue("q", sys.argv[1], storage_options=json.loads(sys.argv[2])) as queue:
        queue.sync.put({"x": 1})
"""


def test_an_opening_that_is_broken_off_at_its_end_gives_the_queue_back(
    opened, bucket, options, monkeypatch
):
    def break_off(engine):
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(lifecycle, "register", break_off)
            with pytest.raises(KeyboardInterrupt):
                opened()
        # One that still beat would be named, and no other process could open the queue.
        children.run(OPENER, bucket + "/some/folder", json.dumps(options))
    first = opened()
    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "register", break_off)
        with pytest.raises(KeyboardInterrupt):
            opened()
    first.sync.put({"x": 2})
    first.sync.flush()
    assert [record["x"] for record in first.sync.get()] == [1, 1, 2]


def test_an_owner_that_is_late_cannot_commit_even_if_it_trusts_itself(opened, monkeypatch):
    first = opened()
    first.sync.put(rows(0, 10))
    first.sync.flush()
    hold = first.engine.ledger.hold
    monkeypatch.setattr(hold, "check", lambda: None)  # its clock stands still
    later = journal.Journal(hold.place.files, hold.place.ledger, hold.ownership.owner.epoch + 1)
    assert later.load(hold.kept.path + "-copy")
    with pytest.raises(StaleOwner, match="taken over"):
        first.sync.get_meta(["x"], 2, "t")
    with pytest.raises(StaleOwner, match="taken over"):
        first.sync.get()


def test_changes_that_are_removed_while_they_are_read_are_not_missed(opened, monkeypatch):
    queue = opened(batch_size=10)
    queue.sync.put(rows(0, 10))
    queue.sync.flush()
    hold = queue.engine.ledger.hold
    files, numbers = hold.place.files, journal.Journal._numbers

    def and_then_snapshot(self, epoch):
        found = numbers(self, epoch)
        if self is later and not removed:
            removed.append(True)
            hold.kept.snapshot()
        return found

    removed = []
    monkeypatch.setattr(journal.Journal, "_numbers", and_then_snapshot)
    later = journal.Journal(files, hold.place.ledger, hold.ownership.owner.epoch + 1)
    assert later.load(hold.kept.path + "-copy")
    assert removed
    with hold.kept.connected() as here:
        wanted = here.execute("SELECT * FROM runs").fetchall()
    with journal.sqlite3.connect(hold.kept.path + "-copy") as there:
        assert there.execute("SELECT * FROM runs").fetchall() == wanted
    with pytest.raises(StaleOwner):
        queue.sync.seal()


TRAINER = (
    COMMON
    + """
queue = open_queue()
dataset = PersistingDataset(queue, batch_size=4)
loader = PersistingDataLoader(dataset)
checkpoint = sys.argv[3]
if os.path.exists(checkpoint):
    loader.load_state_dict(torch.load(checkpoint))
for number, batch in enumerate(loader):
    say(batch["x"].tolist())
    torch.save(loader.state_dict(), checkpoint + ".new")
    os.rename(checkpoint + ".new", checkpoint)
    if number == int(sys.argv[4]):
        os.kill(os.getpid(), 9)
queue.sync.close()
"""
)


def test_a_training_run_that_is_killed_resumes_with_every_sample_once(
    opened, bucket, options, tmp_path
):
    queue = opened()
    queue.sync.put(rows(0, 40))
    queue.sync.seal()
    queue.sync.close()
    trained = []
    for last in (4, -1):
        child = children.start(
            TRAINER, bucket + "/some/folder", json.dumps(options), tmp_path / "checkpoint", last
        )
        assert child.wait() == (0 if last < 0 else -signal.SIGKILL), child.err
        trained += [x for (batch,) in child.lines for x in batch]
    assert sorted(trained) == list(range(40))


def test_without_the_extra_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(PersistingError, match=r"pip install 'persisting_torch\[s3\]'"):
        Queue("q", "s3://bucket")
