"""What clients do while nodes fail, and how it is counted.

A worker goes on until the file `stop` lies in the queue's folder, and answers what was confirmed to
it, sample by sample. Each sample has a `uid` that no other has.
"""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lance

from persisting_torch import BatchMeta, KVInterface, PersistingDataLoader, PersistingDataset, Queue
from persisting_torch.cluster import bucket
from persisting_torch.cluster.node import Node
from persisting_torch.errors import FlushFailed, PersistingError
from persisting_torch.queue.names import directory_name
from persisting_torch.queue.ownership import Owner, read_owner
from persisting_torch.queue.threads import at_once
from tests.cluster.nodes import HELD, Cluster, Member, Pending

APART = 1_000_000  # between the uids of one worker and those of the next
PAUSE = 0.02
TAKEOVER = 10.0  # seconds, at most, from a death until all goes on


@dataclass
class Told:
    """What was confirmed to a worker, and how long its calls took."""

    uids: list[int] = field(default_factory=list)
    longest: float = 0.0
    ended: list[float] = field(default_factory=list)
    """When each call ended, by time.time()."""

    @contextmanager
    def call(self) -> Iterator[None]:
        began = time.time()
        yield
        self.ended.append(time.time())
        self.longest = max(self.longest, self.ended[-1] - began)


def rounds(path: str) -> Iterator[int]:
    """0, 1, 2, ... until the test says stop."""
    for number in itertools.count():
        if (Path(path) / "stop").exists():
            return
        yield number
        time.sleep(PAUSE)


def put(path: str, who: int, count: int = 20) -> Told:
    """New samples, flushed put by put."""
    told = Told()
    with Queue("q", path) as queue:
        for number in rounds(path):
            first = who * APART + number * count
            uids = list(range(first, first + count))
            with told.call():
                queue.sync.put([{"uid": uid} for uid in uids])
                queue.sync.flush()
            told.uids += uids
    return told


def put_late(path: str, who: int, count: int = 10) -> Told:
    """New samples, each of which gets a field later: `late`, the same number as its uid."""
    told = Told()
    with Queue("q", path) as queue:
        for number in rounds(path):
            first = who * APART + number * count
            uids = list(range(first, first + count))
            with told.call():
                metadata = queue.sync.put([{"uid": uid} for uid in uids])
                queue.sync.flush()
            with told.call():
                queue.sync.put([{"late": uid} for uid in uids], metadata=metadata)
            told.uids += uids
    return told


def put_keys(path: str, who: int) -> Told:
    """New samples by key, and a new tag for the one before."""
    told = Told()
    with Queue("q", path) as queue:
        kv = KVInterface(queue).sync
        for number in rounds(path):
            uid = who * APART + number
            with told.call():
                kv.kv_put(str(uid), {"uid": uid}, "keyed", {"n": 0})
            if number:
                with told.call():
                    kv.kv_put(str(uid - 1), None, "keyed", {"n": 1})
            told.uids.append(uid)
    return told


def claim(path: str, count: int = 8) -> Told:
    """Samples for task "claim", whichever come."""
    told = Told()
    with Queue("q", path) as queue:
        for _ in rounds(path):
            with told.call():
                batch = queue.sync.get_batch(["uid"], count, "claim")
            if len(batch):
                told.uids += batch["uid"].tolist()
    return told


def train(path: str, rank: int, size: int = 1) -> Told:
    """Batches of 4 for one rank of task "train", until the partition is sealed."""
    told = Told()
    dataset = PersistingDataset(
        "q",
        storage_path=path,
        batch_size=4,
        fields=["uid"],
        dp_rank=rank,
        dp_size=size,
        last="split",
        timeout=60.0,
    )
    loader = PersistingDataLoader(dataset)
    for batch in loader:
        told.uids += batch["uid"].tolist()
        told.ended.append(time.time())
    loader.close()
    return told


def seal(path: str) -> None:
    with Queue("q", path) as queue:
        queue.sync.seal()


def drain(path: str) -> list[int]:
    """What task "claim" has not claimed yet."""
    uids: list[int] = []
    with Queue("q", path) as queue:
        while len(batch := queue.sync.get_batch(["uid"], 10_000, "claim")):
            uids += batch["uid"].tolist()
    return uids


def tasks_begun(path: str) -> list[str]:
    """The tasks of which something was given out."""
    with Queue("q", path) as queue:
        tasks = queue.sync.stats()["tasks"].items()
        return [name for name, parts in tasks if any(one["taken"] for one in parts.values())]


def records(path: str) -> list[dict[str, Any]]:
    """All there is."""
    with Queue("q", path) as queue:
        return queue.sync.get(limit=10**9)


def keys(path: str) -> list[tuple[str, Any]]:
    with Queue("q", path) as queue:
        return KVInterface(queue).sync.kv_list("keyed")


def fill(path: str, first: int, count: int) -> list[int]:
    """So many new samples, 64 of which go to a bucket before the next one has its turn."""
    uids = list(range(first, first + count))
    with Queue("q", path) as queue:
        queue.sync.put([{"uid": uid} for uid in uids])
    return uids


def fail_after(seconds: float) -> None:
    """From now on wait only so long for a bucket that nobody owns. For queues opened later."""
    bucket.LONGEST_WAIT_SECONDS = seconds


def read_buckets(path: str) -> dict[int, int | str]:
    """How many of samples 0 to 255 each bucket answers, or the error."""
    found: dict[int, int | str] = {}
    with Queue("q", path) as queue:
        for number in range(4):
            at = range(number * 64, number * 64 + 64)
            try:
                found[number] = len(queue.sync.get_data(BatchMeta(at, "default", ["uid"])))
            except PersistingError as error:
                found[number] = type(error).__name__
    return found


def put_in_vain(path: str, first: int, count: int) -> list[int]:
    """Samples that cannot all be flushed now, and stay in memory."""
    queue = HELD["queue"] = Queue("q", path, batch_size=10**6)
    uids = list(range(first, first + count))
    queue.sync.put([{"uid": uid} for uid in uids])
    try:
        queue.sync.flush()
    except FlushFailed:
        return uids
    raise AssertionError("it was not in vain")


def flush_at_last() -> None:
    """Flush those; their node may need a while yet."""
    queue = HELD.pop("queue")
    deadline = time.monotonic() + 2 * TAKEOVER
    while time.monotonic() < deadline:
        try:
            queue.sync.flush()
            break
        except FlushFailed:
            continue
    queue.close()


def stop(path: str) -> None:
    (Path(path) / "stop").touch()


def folder(path: str, bucket: int = 0) -> Path:
    return Path(path) / directory_name("q") / f"bucket-{bucket}"


def owner_of(path: str, bucket: int) -> Owner:
    """Who owns a bucket, as its folder tells."""
    found = read_owner(folder(path, bucket))
    assert found is not None, f"nobody owns bucket {bucket}"
    return found


def each_once(found: list[int], wanted: list[int]) -> None:
    """Assert that both are the same numbers, each of them once."""
    twice = [uid for uid, count in Counter(found).items() if count > 1]
    assert not twice, f"{len(twice)} came twice: {sorted(twice)[:10]}"
    lost = set(wanted) - set(found)
    assert not lost, f"{len(lost)} of {len(wanted)} are lost: {sorted(lost)[:10]}"
    strange = set(found) - set(wanted)
    assert not strange, f"{len(strange)} came from nowhere: {sorted(strange)[:10]}"


def await_so(told: Callable[[], bool], seconds: float, what: str) -> float:
    """How long it takes until this is so."""
    began = time.monotonic()
    while not told():
        assert time.monotonic() - began < seconds, f"{what} took more than {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - began


def owner(nodes: Cluster, path: str, bucket: int) -> Member:
    """The node that owns a bucket, dead or alive."""
    name = owner_of(path, bucket).node
    return next(node for node in nodes.nodes if node.name == name)


def await_takeover(path: str, epochs: dict[int, int]) -> float:
    """Until these buckets have owners of later epochs; how long that takes."""

    def is_over() -> bool:
        return all(owner_of(path, bucket).epoch > epoch for bucket, epoch in epochs.items())

    return await_so(is_over, TAKEOVER, f"the takeover of {list(epochs)}")


class Work:
    """Clients at work: one trains, others put, also late fields and by key, and claim.

    `few`: one puts, one claims, one trains.
    """

    def __init__(self, nodes: Cluster, path: str, *, few: bool = False) -> None:
        self.nodes = nodes
        self.path = path
        self.pending: list[tuple[str, Pending]] = []
        self._begin(put, 1)
        await_so(lambda: all(map(self._has_rows, range(4))), TAKEOVER, "to begin")
        self._begin(train, 0)
        self._begin(claim)
        if not few:
            self._begin(put, 2)
            self._begin(put_late, 3)
            self._begin(put_keys, 4)
            self._begin(claim)

    def _has_rows(self, bucket: int) -> bool:
        return (folder(self.path, bucket) / "data.lance" / "_versions").exists()

    def _begin(self, function: Callable[..., Told], *arguments: int) -> None:
        client = self.nodes.client()
        begun = client.begin(function, self.path, *arguments)
        self.pending.append((function.__name__, begun))

    def end(self) -> list[Told]:
        """Stop, and count everything."""
        stop(self.path)
        told = [(name, one.result()) for name, one in self.pending if name != "train"]
        client = self.nodes.client()
        client.call(seal, self.path)
        (trained,) = [one.result().uids for name, one in self.pending if name == "train"]

        def of(*names: str) -> list[int]:
            return [uid for name, one in told if name in names for uid in one.uids]

        plain = of("put", "put_late")
        each_once([*of("claim"), *client.call(drain, self.path)], plain)
        each_once(trained, plain)
        found = client.call(records, self.path)
        each_once([record["uid"] for record in found], [*plain, *of("put_keys")])
        late = [record for record in found if record.get("late") is not None]
        assert all(record["late"] == record["uid"] for record in late)
        each_once([record["uid"] for record in late], of("put_late"))
        if not of("put_keys"):
            return [one for _, one in told]
        tags = {int(key): tag["n"] for key, tag in client.call(keys, self.path)}
        each_once(list(tags), of("put_keys"))
        assert [tags[key] for key in sorted(tags)[:-1]] == [1] * (len(tags) - 1)
        return [one for _, one in told]


def stands_still(nodes: Cluster, path: str, moment: str, bucket: int) -> None:
    """The owner of a bucket halts at this moment, is replaced, and is let go on."""
    nodes.grow(2)
    workers = Work(nodes, path, few=True)
    client, old = nodes.client(), owner_of(path, bucket)
    client.call(ways_to, old.address, path, bucket)
    halted = owner(nodes, path, bucket)
    halted.begin(halt_at, moment)
    await_so(lambda: is_halted(halted), TAKEOVER, moment)
    await_takeover(path, {bucket: old.epoch})
    time.sleep(1)
    asking = client.begin(ask_directly)
    time.sleep(1)
    halted.go_on()
    answers = asking.result()
    stale = {op: answer for op, answer in answers.items() if answer != "StaleOwner"}
    assert not stale, f"answers of an owner that was replaced: {stale}"
    time.sleep(1)
    assert max(told.longest for told in workers.end()) < TAKEOVER
    if moment == "before rows are committed":
        put = len(client.call(records, path))
        stored = [lance.dataset(folder(path, b) / "data.lance").count_rows() for b in range(4)]
        assert sum(stored) == put, "rows of an owner that was replaced were committed"


# Clients that are killed at a bad moment


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_the_turn(path: str) -> None:
    """Killed with the turn to write the ledger."""
    with Queue("q", path) as queue, queue.engine.ledger.transaction() as tx:
        tx.execute("DELETE FROM runs")
        die()


def die_alone(path: str) -> None:
    """Killed while it keeps all others from committing."""
    with Queue("q", path) as queue, queue.engine.commit_lock:
        die()


def die_amid_a_put(path: str) -> None:
    """Killed when half of its rows are on their way."""
    from persisting_torch.cluster import peer

    class Dying(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield self[0]
            time.sleep(0.5)
            die()

    class Half:
        def __init__(self, table: Any) -> None:
            self.batches = table.to_batches(max_chunksize=1)

        def to_batches(self) -> Dying:
            return Dying(self.batches)

    peer.in_chunks = Half  # type: ignore[assignment]
    with Queue("q", path) as queue:
        queue.sync.put([{"uid": -1}, {"uid": -2}])
        queue.sync.flush()


def die_as_producer(path: str) -> None:
    """Killed while it has samples that it was to put a field into."""
    with Queue("q", path) as queue, queue.producer("rollout", essential=True):
        assert len(queue.sync.get_meta(["uid"], 8, "score"))
        die()


def claim_all(path: str, count: int) -> list[int]:
    """Claim so many samples for task "score"; how long that takes is for the test to say."""
    uids: list[int] = []
    with Queue("q", path) as queue:
        while len(uids) < count:
            batch = queue.sync.get_batch(["uid"], count, "score")
            uids += batch["uid"].tolist() if len(batch) else []
            time.sleep(PAUSE)
    return uids


def books(path: str) -> dict[str, int]:
    """What the queue itself says of task "train"."""
    with Queue("q", path) as queue:
        return queue.engine.books_of("train", "default")


# Halting a node at a given moment


def stand_still() -> None:
    """This process halts until somebody lets it go on."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)  # it takes a moment until all threads stand still


def halt() -> None:
    """This process stands still until somebody lets it go on, and is slow to notice then."""
    Node._drop = staticmethod(lambda kept, held: None)  # type: ignore[method-assign]
    stand_still()


def halt_at(moment: str) -> None:
    """Have this node halt once it gets to this moment the next time.

    To be begun, not called, where the moment comes often: perhaps before there is an answer.
    """
    from persisting_torch.cluster import service
    from persisting_torch.queue import journal, ledger, record, shards, storage, turns

    where: dict[str, tuple[Any, str, bool]] = {
        "before rows are committed": (storage.lance.LanceDataset, "commit", True),
        "after rows were committed": (storage.RowStore, "append", False),
        "before rows are entered": (shards.BucketCommitter, "_enter", True),
        "before a put is answered": (shards.BucketCommitter, "append", False),
        "before a turn is given": (turns.Turns, "_had", True),
        "before a commit": (service, "decode", True),
        "after it has looked whether it owns the ledger": (ledger.Ledger, "_alone", True),
        "in a commit": (service, "replay", True),
        "before a commit of a claim is answered": (record.Log, "_add", False),
        "before a change of a claim is stored": (journal.Journal, "put", True),
        "after a change of a claim was stored": (journal.Journal, "put", False),
        "before a snapshot is answered": (service, "content_of", False),
    }
    target, name, before = where[moment]
    whole = inspect.getattr_static(target, name)
    function = whole.__func__ if isinstance(whole, staticmethod) else whole
    armed = threading.Lock()

    def halting(*arguments: Any, **options: Any) -> Any:
        said = str(arguments) if "of a claim" in moment else "INTO claims"
        fits = "INTO claims" in said and "rank_batches" not in said
        now = fits and armed.acquire(blocking=False)
        if now and before:
            halt()
        answer = function(*arguments, **options)
        if now and not before:
            halt()
        return answer

    setattr(target, name, staticmethod(halting) if isinstance(whole, staticmethod) else halting)


def is_halted(member: Member) -> bool:
    status = Path(f"/proc/{member.pid}/status").read_text()
    return "\nState:\tT" in status


OPS: dict[str, dict[str, Any]] = {
    "alive": {},
    "describe": {"split": [None, None]},
    "snapshot": {},
    "follow": {"log": "", "number": 0, "wait": 0},
    "begin": {"token": "mine", "log": "", "number": 0},
    "commit": {"token": "mine", "statements": [], "before": ""},
    "settled": {"token": "mine"},
    "hold": {"token": "mine"},
    "figures": {"store": "data"},
    "tend": {},
}


def ways_to(address: str, path: str, bucket: int) -> None:
    """Connect to a node, once for each thing that it is to be asked for a bucket."""
    from persisting_torch.cluster.plane import Peer
    from persisting_torch.cluster.wire import Message

    header = {"queue": "q", "storage_path": path, "bucket": bucket}
    HELD["ways"] = {
        op: (Peer(address, None), Message({"op": op, **header, **more})) for op, more in OPS.items()
    }
    for peer, _ in HELD["ways"].values():
        peer.ask(Message({"op": "alive", **header}), 10.0)


def ask_directly(*ops: str) -> dict[str, str]:
    """What the node answers, asked for all of it at once; of an error its kind."""
    answers: dict[str, str] = {}

    def ask(op: str) -> None:
        peer, request = HELD["ways"][op]
        try:
            peer.ask(request, 30.0)
            answers[op] = "an answer"
        except PersistingError as error:
            answers[op] = type(error).__name__

    at_once([partial(ask, op) for op in ops or HELD["ways"]])
    return answers


def ask_here(path: str, number: int) -> str:
    """What this node itself answers for a bucket, or the kind of the error."""
    from persisting_torch.cluster.runtime import current
    from persisting_torch.cluster.wire import Message

    node = current().node
    assert node is not None
    header = {"op": "alive", "queue": "q", "storage_path": path, "bucket": number}
    try:
        node.answer(Message(header), None)
    except PersistingError as error:
        return type(error).__name__
    return "an answer"
