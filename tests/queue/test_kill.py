"""What was acknowledged survives SIGKILL: flushed samples once, claims for good."""

from __future__ import annotations

import collections
import itertools
import random
import signal
import time

import pytest
import torch

from persisting_torch import Queue
from persisting_torch.queue.report import verify
from tests.queue import children

KILLS = 50

COMMON = """
import json, random, sys
import torch
from tensordict import TensorDict
from persisting_torch import Queue

path, seed = sys.argv[1], int(sys.argv[2])
chance = random.Random(seed)
torch.manual_seed(seed)
queue = Queue("q", path, batch_size=10_000)
"""

WRITER = (
    COMMON
    + """
def sample(x):
    tokens = torch.randint(0, 1000, (chance.randint(0, 300),))
    return {"x": x, "tokens": tokens, "text": str(x) * (x % 50), "sum": int(tokens.sum()) + x}

x = seed * 1_000_000
while True:
    acknowledged = []
    for _ in range(chance.randint(1, 3)):
        samples = [sample(x + number) for number in range(chance.randint(1, 8))]
        meta = queue.sync.put(samples)
        acknowledged += zip(meta.global_indexes, range(x, x + len(samples)))
        x += len(samples)
    queue.sync.flush()
    print(json.dumps(acknowledged), flush=True)
"""
)

CLAIMER = (
    COMMON
    + """
while True:
    meta = queue.sync.get_meta(["x", "tokens", "sum"], chance.randint(1, 8), "train")
    if meta.size:
        print(json.dumps(meta.global_indexes), flush=True)
        batch = queue.sync.get_data(meta)
        sums = torch.stack([row.sum() for row in batch["tokens"].unbind()])
        assert (sums + batch["x"] == batch["sum"]).all()
"""
)

TENDER = (
    COMMON
    + """
print("[]", flush=True)
while True:
    queue.engine.tending.tend()
"""
)


def test_fifty_kills_lose_no_flushed_sample_and_forget_no_claim(tmp_path):
    chance = random.Random(20)
    places = [WRITER, WRITER, CLAIMER, CLAIMER, TENDER]
    everyone = collections.defaultdict(list)
    numbers = itertools.count()

    def replacement(script: str) -> children.Child:
        child = children.start(script, tmp_path, next(numbers))
        everyone[script].append(child)
        return child

    running = [replacement(script) for script in places]
    for _ in range(KILLS):
        place = chance.choices(range(len(places)), weights=[3, 3, 3, 3, 1])[0]
        child = running[place]
        child.await_line()
        time.sleep(chance.uniform(0, 0.15))
        child.send(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, child.err
        running[place] = replacement(places[place])
    for child in running:
        child.send(signal.SIGKILL)
        child.wait()

    flushed = dict(pair for child in everyone[WRITER] for line in child.lines for pair in line)
    claimed = [index for child in everyone[CLAIMER] for line in child.lines for index in line]
    assert len(flushed) > 200
    assert len(claimed) > 100
    assert len(set(claimed)) == len(claimed)

    with Queue("q", tmp_path) as queue:
        assert verify(queue.engine) == []
        records = queue.sync.get(limit=10_000_000)
        assert len(records) == len(queue)
        times = collections.Counter(record["x"] for record in records)
        assert set(times.values()) == {1}
        assert set(flushed.values()) <= set(times)
        for record in records:
            assert record["sum"] == int(record["tokens"].sum()) + record["x"]
            assert record["text"] == str(record["x"]) * (record["x"] % 50)

        indexes = sorted(flushed)
        batch = queue.engine.read_batch("default", indexes, ["x"])
        assert batch["x"].tolist() == [flushed[index] for index in indexes]

        rest = queue.sync.get_meta(["x"], 10_000_000, "train").global_indexes
        assert not set(rest) & set(claimed)
        unseen = len(records) - len(rest) - len(claimed)
        assert 0 <= unseen <= 8 * len(everyone[CLAIMER])
        assert queue.sync.get_meta(["x"], 1, "train").size == 0


DIE = """
import os, signal, sys
import torch
from persisting_torch import Queue
from persisting_torch.queue.commit import Committer
from persisting_torch.queue.storage import RowStore

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name):
    setattr(owner, name, die)

def after(owner, name):
    method = getattr(owner, name)
    def then_die(*arguments, **options):
        method(*arguments, **options)
        die()
    setattr(owner, name, then_die)

queue = Queue("q", sys.argv[1])
"""

# Where a flush is killed, and whether its samples are there afterwards.
POINTS = {
    "before the rows are written": ("before(RowStore, 'append')", False),
    "between the rows' files and their commit": ("before(RowStore, 'commit')", False),
    "right after the commit of the rows": ("after(RowStore, 'commit')", True),
    "before the ledger's entry": ("before(Committer, '_enter')", True),
    "within the ledger's entry": ("after(Committer, '_enter')", True),
}


@pytest.mark.parametrize(("patch", "landed"), POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("first", [True, False], ids=["the first flush", "a later flush"])
def test_a_flush_killed_at_any_point_is_in_the_queue_whole_or_not_at_all(
    tmp_path, patch, landed, first
):
    expected = []
    if not first:
        with Queue("q", tmp_path) as queue:
            queue.sync.put([{"x": x} for x in range(3)])
        expected = [0, 1, 2]
    child = children.start(
        DIE
        + patch
        + """
queue.sync.put([{"x": 10}, {"x": 11, "new": torch.ones(4)}])
queue.sync.put({"x": 12}, "other")
queue.sync.flush()
""",
        tmp_path,
    )
    assert child.wait() == -signal.SIGKILL, child.err
    expected += [10, 11, 12] if landed else []
    with Queue("q", tmp_path) as queue:
        assert [record["x"] for record in queue.sync.get()] == expected
        assert verify(queue.engine) == []
        queue.sync.put({"x": 20})
        queue.sync.flush()
        assert [record["x"] for record in queue.sync.get()] == [*expected, 20]
        taken = queue.sync.get_batch(["x"], 100)["x"].tolist()
        assert taken == [x for x in [*expected, 20] if x != 12]
        assert verify(queue.engine) == []


@pytest.mark.parametrize(("patch", "landed"), POINTS.values(), ids=POINTS)
def test_who_has_the_queue_open_settles_a_killed_flush_with_the_next_one(tmp_path, patch, landed):
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"x": 0})
        queue.sync.flush()
        child = children.start(DIE + patch + "\nqueue.sync.put({'x': 10})\nqueue.close()", tmp_path)
        assert child.wait() == -signal.SIGKILL, child.err
        queue.sync.put({"x": 1})
        queue.sync.flush()
        expected = [0, 10, 1] if landed else [0, 1]
        assert [record["x"] for record in queue.sync.get()] == expected
        assert verify(queue.engine) == []


@pytest.mark.parametrize(("patch", "landed"), POINTS.values(), ids=POINTS)
def test_late_fields_killed_at_any_point_are_there_whole_or_not_at_all(tmp_path, patch, landed):
    with Queue("q", tmp_path) as queue:
        meta = queue.sync.put([{"x": x} for x in range(4)])
    child = children.start(
        DIE
        + patch
        + """
from persisting_torch import BatchMeta
meta = BatchMeta([0, 1, 2, 3], "default")
queue.sync.put([{"late": torch.full((2,), x)} for x in range(4)], metadata=meta)
""",
        tmp_path,
    )
    assert child.wait() == -signal.SIGKILL, child.err
    with Queue("q", tmp_path) as queue:
        assert verify(queue.engine) == []
        ready = queue.sync.get_meta(["x", "late"], 10)
        assert ready.size == (4 if landed else 0)
        queue.sync.put([{"late": torch.full((2,), -x)} for x in range(4)], metadata=meta)
        records = queue.sync.get()
        assert [record["late"].tolist() for record in records] == [[-x, -x] for x in range(4)]
        assert queue.sync.get_meta(["x", "late"], 10).size == (0 if landed else 4)


@pytest.mark.parametrize(
    "patch",
    [
        "before(place.Path, 'replace')",
        "before(place.FileLock, '__enter__')",
        "after(place.FileLock, 'acquire')",
        "before(parts, 'Ledger')",
        "before(ledger.Ledger, '_make_tables')",
        "after(ledger.Ledger, '_make_tables')",
        "before(engine, 'take_lease')",
    ],
)
def test_a_queue_whose_making_was_killed_is_made_by_the_next(tmp_path, patch):
    script = (
        DIE.replace('queue = Queue("q", sys.argv[1])', "")
        + "from persisting_torch.queue import engine, ledger, parts, place\n"
        + patch
        + '\nqueue = Queue("q", sys.argv[1])'
    )
    child = children.start(script, tmp_path)
    assert child.wait() == -signal.SIGKILL, child.err
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"t": torch.ones(3)})
        assert len(queue) == 1
        assert queue.sync.get()[0]["t"].tolist() == [1, 1, 1]


def test_a_claim_killed_before_its_commit_leaves_the_samples_to_others(tmp_path):
    with Queue("q", tmp_path) as queue:
        queue.sync.put([{"x": x} for x in range(4)])
        queue.sync.flush()
        child = children.start(
            DIE
            + """
from persisting_torch.queue import claims
after(claims, "take")
queue.sync.get_meta(["x"], 2)
""",
            tmp_path,
        )
        assert child.wait() == -signal.SIGKILL, child.err
        assert queue.sync.get_meta(["x"], 10).global_indexes == [0, 1, 2, 3]
