"""Queues that earlier releases wrote: opened, read, converted once, and gone on with."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from persisting_torch import KVInterface, Queue
from persisting_torch.errors import FormatError
from persisting_torch.queue.host import boot
from persisting_torch.queue.report import verify

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
TOKENS = torch.arange(48).reshape(16, 3)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A queue in the format of the first release, with something of everything in it."""
    with tarfile.open(Path(__file__).parent / "formats" / "format-1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "rollouts"


def format_of(queue: Path) -> tuple[int, int]:
    with sqlite3.connect(queue / "bucket-0" / "ledger.sqlite") as ledger:
        (of_ledger,) = ledger.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    ledger.close()
    return json.loads((queue / "queue.json").read_text())["format"], of_ledger


def check_all_is_there(queue: Queue) -> None:
    records = queue.sync.get(100)
    assert [record["prompt"] for record in records if record["prompt"]] == [
        "2 + 2",
        "keyed",
        "3 + 3",
    ]
    tokens = [record["tokens"] for record in records if record["tokens"] is not None]
    assert torch.equal(torch.stack(tokens), TOKENS[1:])
    rewards = [float(record["reward"]) for record in records if record["reward"] is not None]
    assert rewards == [1.0, 1.0, 1.5, 2.0, 2.5]
    assert asyncio.run(KVInterface(queue).kv_list("keyed")) == [("a", {"n": 1})]
    assert queue.engine.cursor("fit", "train") == 1
    assert queue.engine.books.is_sealed("val")
    assert verify(queue.engine) == []


def test_a_queue_of_format_1_is_converted_with_all_that_it_holds(old: Path) -> None:
    assert format_of(old) == (1, 1)
    with Queue("rollouts", old.parent) as queue:
        check_all_is_there(queue)
        assert asyncio.run(queue.stats())["producers"]["rollout-0"]["state"] == "done"
    assert format_of(old) == (2, 2)
    with Queue("rollouts", old.parent) as queue:
        check_all_is_there(queue)


def test_a_converted_queue_goes_on_where_it_stood(old: Path) -> None:
    with Queue("rollouts", old.parent) as queue:
        sync = queue.sync
        replayed = queue.engine.await_assignment("fit", "train", 1, batch_size=2, dp_size=2)
        assert replayed is not None
        assert replayed.slices == ((6, 7), (8, 9))
        fresh = queue.engine.await_assignment("fit", "train", 2, batch_size=2, dp_size=2)
        assert fresh is not None
        assert fresh.slices == ((10, 11), (12, 13))
        assert sync.get_meta(["tokens"], 2, "score", "train").global_indexes == [5, 6]
        meta = sync.put(TensorDict({"tokens": TOKENS[:2]}, batch_size=[2]), "train")
        assert min(meta.global_indexes) > 16
        sync.put(
            TensorDict({"reward": torch.ones(2)}, batch_size=[2]),
            "train",
            metadata=meta.select_fields(["tokens"]),
        )
        queue.engine.tending.tend()
        with queue.producer("rollout-0"):
            sync.put(TensorDict({"tokens": TOKENS[2:4]}, batch_size=[2]), "train")
        assert verify(queue.engine) == []


def test_a_reader_that_may_not_write_sees_an_old_queue_and_changes_nothing(old: Path) -> None:
    before = (old / "bucket-0" / "ledger.sqlite").read_bytes()
    code = (
        "import asyncio, ctypes, os, sys\n"
        "if os.environ.pop('AGAIN', None) is None:\n"
        f"    ctypes.CDLL(None).prctl({PR_CAPBSET_DROP}, {CAP_DAC_OVERRIDE}, 0, 0, 0)\n"
        "    os.execve(sys.executable, sys.orig_argv, {**os.environ, 'AGAIN': '1'})\n"
        "from persisting_torch import Queue\n"
        "with Queue('rollouts', sys.argv[1]) as queue:\n"
        "    stats = asyncio.run(queue.stats())\n"
        "    print(len(queue.sync.get(100)), stats['tasks']['score']['train']['taken'],"
        " stats['producers']['rollout-0']['state'])\n"
    )
    paths = [old, *old.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    run = subprocess.run(
        [sys.executable, "-c", code, str(old.parent)],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )
    for path in paths:
        path.chmod(path.stat().st_mode | 0o200)
    assert run.stdout.split() == ["18", "4", "done"], run.stderr
    assert (old / "bucket-0" / "ledger.sqlite").read_bytes() == before
    assert format_of(old) == (1, 1)


def test_an_old_queue_that_its_own_release_has_open_is_refused_and_left_alone(old: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with sqlite3.connect(old / "bucket-0" / "ledger.sqlite") as ledger:
            ledger.execute(
                "INSERT INTO leases VALUES ('here', ?, ?, 1, 'this-host', ?)",
                (boot(), sleeper.pid, time.time() + 30),
            )
        ledger.close()
        with pytest.raises(FormatError, match=rf"older format, and process {sleeper.pid} on this"):
            Queue("rollouts", old.parent)
        assert format_of(old) == (1, 1)
    finally:
        sleeper.kill()
        sleeper.wait()
    with Queue("rollouts", old.parent) as queue:
        check_all_is_there(queue)


@pytest.mark.parametrize("stage", ["ledger", "mark"])
def test_a_conversion_that_was_killed_is_done_by_the_next_opening(old: Path, stage: str) -> None:
    code = (
        "import os, sys\n"
        "from persisting_torch import Queue\n"
        "from persisting_torch.queue import ledger, place\n"
        "def die(*_): os.kill(os.getpid(), 9)\n"
        + (
            "ledger.FROM_1_TO_2 = ledger.FROM_1_TO_2 + 'SELECT die();'\n"
            "connect = ledger.sqlite3.connect\n"
            "def connecting(*args, **named):\n"
            "    made = connect(*args, **named)\n"
            "    made.create_function('die', 0, die)\n"
            "    return made\n"
            "ledger.sqlite3.connect = connecting\n"
            if stage == "ledger"
            else "ledger.raise_format = die\n"
        )
        + "Queue('rollouts', sys.argv[1])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(old.parent)],
        timeout=120,
        env=ENVIRONMENT,
    )
    assert run.returncode == -9
    assert format_of(old) == ((1, 1) if stage == "ledger" else (1, 2))
    with Queue("rollouts", old.parent) as queue:
        check_all_is_there(queue)
    assert format_of(old) == (2, 2)
