"""Retention: what is consumed is deleted, no more and no earlier, and nothing grows with it."""

from __future__ import annotations

import datetime
import random
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from persisting_torch import KVInterface, Queue
from persisting_torch.errors import PersistingError
from persisting_torch.queue import clearing, report, retention
from persisting_torch.queue.books import Books
from tests.queue import children

FLUSH = 100
WIDTH = 512  # int64 of each sample, so that files are worth something


def fill(queue: Queue, samples: int, first: int = 0, partition: str = "default") -> None:
    """Samples first, first + 1, ..., each flush a fragment of its own."""
    for start in range(first, first + samples, FLUSH):
        x = torch.arange(start, start + FLUSH)
        rows = {"x": x, "wide": x.unsqueeze(1).repeat(1, WIDTH)}
        queue.sync.put(TensorDict(rows, batch_size=[FLUSH]), partition)
        queue.sync.flush()


def train(queue: Queue, batches: range, task: str = "train", size: int = 50) -> list[list[int]]:
    """Batches of a training run, consumed as a plain loop does; their values of x."""
    seen = []
    for k in batches:
        found = queue.engine.await_assignment(task, "default", k, batch_size=size, timeout=20)
        assert found is not None
        seen.append(queue.engine.read_batch("default", found.slices[0], ["x"])["x"].tolist())
        queue.engine.commit_cursor(task, "default", k + 1)
    return seen


def retain(queue: Queue) -> None:
    assert queue.engine.tending.retain()


def values(queue: Queue) -> list[int]:
    """x of all samples, in order."""
    return [int(record["x"]) for record in queue.sync.get(limit=1_000_000)]


def rows_in(queue: Queue, table: str) -> int:
    with queue.engine.ledger.reading() as tx:
        return int(tx.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "GRACE_SECONDS", 0.0)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No round but those that the test makes."""
    monkeypatch.setattr(retention.Keeper, "due", lambda self: False)


pytestmark = pytest.mark.usefixtures("by_hand")


# The four settings


def test_by_default_nothing_is_deleted(tmp_path: Path) -> None:
    with Queue("q", tmp_path) as queue:
        fill(queue, 400)
        train(queue, range(8))
        retain(queue)
        assert len(queue) == 400
        assert queue.sync.stats()["retention"] == "all"


def test_consumed_deletes_what_is_trained_and_says_so(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 1000)
        train(queue, range(12))
        retain(queue)
        assert values(queue) == list(range(600, 1000))
        assert len(queue) == 400
        assert queue.to_lance().count_rows() == 400
        stats = queue.sync.stats()
        assert stats["storage"]["deleted"]["samples"] == 600
        assert stats["storage"]["deleted"]["bytes"] > 600 * WIDTH * 8
        assert stats["retention"] == "consumed"
        assert report.verify(queue.engine) == []


def test_a_number_of_rows_keeps_so_many_and_all_that_is_not_consumed(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention=500) as queue:
        fill(queue, 400)
        train(queue, range(8))
        retain(queue)
        assert len(queue) == 400
        fill(queue, 600, first=400)
        retain(queue)
        assert values(queue) == list(range(400, 1000))  # untrained from 400 on
        train(queue, range(8, 20))
        retain(queue)
        assert values(queue) == list(range(500, 1000))


@pytest.mark.parametrize("given", [0.4, datetime.timedelta(seconds=0.4)], ids=str)
def test_seconds_keep_what_was_put_so_lately(tmp_path: Path, given: Any) -> None:
    with Queue("q", tmp_path, retention=given) as queue:
        fill(queue, 200)
        train(queue, range(4))
        retain(queue)
        assert len(queue) == 200
        time.sleep(0.5)
        fill(queue, 200, first=200)
        train(queue, range(4, 8))
        retain(queue)
        assert values(queue) == list(range(200, 400))
        time.sleep(0.5)
        retain(queue)
        assert len(queue) == 0
        assert rows_in(queue, "clock") <= 2


@pytest.mark.parametrize("wrong", ["some", 0, -1, True, 0.0, -2.5, float("nan"), float("inf"), []])
def test_a_setting_that_is_none_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match="retention must be 'all', 'consumed', a number of rows"):
        Queue("q", tmp_path, retention=wrong)


def test_the_setting_is_the_queues_and_stays_with_it(tmp_path: Path) -> None:
    Queue("q", tmp_path, retention="consumed").close()
    with Queue("q", tmp_path) as queue, Queue("q", tmp_path) as other:
        assert queue.sync.stats()["retention"] == "consumed"
        Queue("q", tmp_path, retention=7).close()
        fill(queue, 200)
        train(queue, range(4))
        retain(other)
        assert other.sync.stats()["retention"] == "7"
        assert len(queue) == len(other) == 7
        Queue("q", tmp_path, retention="all").close()
        fill(queue, 200, first=200)
        train(queue, range(4, 8))
        retain(other)
        assert len(queue) == 207


# Who is done with a sample


def test_a_sample_stays_until_every_task_of_its_partition_is_done_with_it(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 400)
        train(queue, range(8), "one")
        train(queue, range(2), "two")
        retain(queue)
        assert values(queue) == list(range(100, 400))
        train(queue, range(2, 8), "two")
        retain(queue)
        assert len(queue) == 0


def test_a_partition_that_no_task_has_taken_from_is_not_touched(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 100, partition="val")
        fill(queue, 100)
        train(queue, range(2))
        retain(queue)
        assert len(queue) == 100
        assert len(queue.engine.snapshot("val")) == 100


def test_a_task_is_known_from_an_empty_mark_on(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        queue.sync.mark_consumed("learner", [])
        fill(queue, 200)
        train(queue, range(4), "scorer")
        retain(queue)
        assert len(queue) == 200


def test_what_get_meta_gave_out_can_be_fetched_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 200)
        meta = queue.sync.get_meta(["x"], 200)
        retain(queue)
        retain(queue)
        assert queue.sync.get_data(meta)["x"].tolist() == list(range(200))
        monkeypatch.setattr(retention, "GRACE_SECONDS", 0.0)
        retain(queue)
        assert len(queue) == 0
        with pytest.raises(KeyError, match="cleared, or consumed and deleted"):
            queue.sync.get_data(meta)


@pytest.mark.usefixtures("no_grace")
def test_what_a_producer_has_claimed_and_not_finished_stays(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 200)
        with queue.producer("scorer"):
            meta = queue.sync.get_meta(["x"], 200, "score")
            retain(queue)
            retain(queue)
            assert len(queue) == 200
            scores = TensorDict({"score": torch.ones(200)}, batch_size=[200])
            queue.sync.put(scores, metadata=meta)
            retain(queue)
            retain(queue)
            assert len(queue) == 0


@pytest.mark.usefixtures("no_grace")
def test_a_sample_that_is_claimed_anew_after_a_reset_is_not_due_at_once(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 100)
        queue.sync.get_meta(["x"], 100)
        retain(queue)
        queue.sync.reset_consumption("default")
        queue.sync.get_meta(["x"], 100)
        retain(queue)
        assert len(queue) == 100
        retain(queue)
        assert len(queue) == 0


def test_batches_of_several_ranks_stay_until_the_slowest_has_read_them(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 2400)
        for k in range(20):
            queue.engine.await_assignment("train", "default", k, batch_size=50, dp_size=2)
        queue.engine.commit_cursor("train", "default", 20)
        retain(queue)
        assert len(queue) == 2400 - (20 - 16) * 100


# Checkpoints


def test_a_checkpoint_keeps_its_batches_until_its_file_is_gone(tmp_path: Path) -> None:
    paths = [tmp_path / "two.ckpt", tmp_path / "sharded"]
    paths[0].touch()
    paths[1].mkdir()
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 1000)
        seen = train(queue, range(16))
        queue.engine.note_checkpoint("train", "default", str(paths[0]), 2)
        queue.engine.note_checkpoint("train", "default", str(paths[1]), 6)
        retain(queue)
        assert values(queue)[0] == 100
        paths[0].unlink()
        retain(queue)
        assert values(queue)[0] == 300
        assert train(queue, range(6, 16)) == seen[6:]
        paths[1].rmdir()
        retain(queue)
        assert values(queue)[0] == 800
        assert rows_in(queue, "checkpoints") == 0


def test_a_remote_checkpoint_is_looked_for_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "there.ckpt").touch()
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 400)
        train(queue, range(8))
        queue.engine.note_checkpoint("train", "default", "nosuchfilesystem://x/y", 4)
        queue.engine.note_checkpoint("train", "default", f"file://{tmp_path}/there.ckpt", 2)
        queue.engine.note_checkpoint("train", "default", f"file://{tmp_path}/gone.ckpt", 1)
        retain(queue)
        assert values(queue)[0] == 100
        assert rows_in(queue, "checkpoints") == 2


def test_a_batch_that_was_deleted_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "late.ckpt"
    path.touch()
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 400)
        train(queue, range(8))
        queue.engine.note_checkpoint("train", "default", str(path), 6)
        retain(queue)
        said = r"batch 3 of task 'train' on q/default is gone: .*retention.*late.ckpt \(batch 6\)"
        with pytest.raises(PersistingError, match=said):
            queue.engine.await_assignment("train", "default", 3, batch_size=50)
        with pytest.raises(PersistingError, match=said):
            queue.engine.recut("train", "default", 3, batch_size=10)
        queue.engine.recut("train", "default", 6, batch_size=10)
        assert train(queue, range(6, 7), size=10) == [list(range(300, 310))]


def test_after_a_reset_what_is_gone_stays_gone(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 400)
        train(queue, range(6))
        retain(queue)
        queue.sync.reset_consumption("train")
        assert train(queue, range(1)) == [list(range(300, 350))]
        books = queue.engine.books_of("train", "default")
        assert books == {"put": 400, "once": 50, "twice": 0, "never": 350, "dropped": 0}


def test_the_books_count_what_is_gone_as_trained_once(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 400)
        train(queue, range(6))
        retain(queue)
        train(queue, range(6, 7))
        assert rows_in(queue, "assignments") == 1
        books = queue.engine.books_of("train", "default")
        assert books == {"put": 400, "once": 350, "twice": 0, "never": 50, "dropped": 0}


# What goes with a sample


def test_keys_notes_and_late_fields_go_with_their_samples(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        kv = KVInterface(queue)
        keys = [f"k{n}" for n in range(100)]
        kv.sync.kv_batch_put(keys, [{"x": n} for n in range(100)], "default", [{"n": 1}] * 100)
        fill(queue, 100, first=100)
        every = queue.engine.snapshot("default")
        meta = queue.sync.get_meta(["x"], 200, "score")
        scores = TensorDict({"score": torch.arange(200.0)}, batch_size=[200])
        queue.sync.put(scores, metadata=meta)
        queue.engine.reset("score", "default")
        for k in range(2):
            queue.engine.await_assignment("score", "default", k, batch_size=50)
        queue.engine.commit_cursor("score", "default", 2)
        retain(queue)
        assert values(queue) == list(range(100, 200))
        assert kv.sync.kv_list("default") == []
        assert rows_in(queue, "keys") == 0
        queue.engine.tending.tend()
        late = queue.engine.late.store
        assert not late.exists() or late.dataset().count_rows() <= 100
        assert report.verify(queue.engine) == []
        left = queue.engine.read_batch("default", every[100:], ["score"])["score"]
        assert left.tolist() == [float(n) for n in range(100, 200)]


@pytest.mark.usefixtures("no_grace")
def test_answers_to_ranks_go_with_their_samples(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 200)
        for batch, size in enumerate((50, 50, 30)):
            queue.sync.get_meta(["x"], size, dp_rank=0, batch_index=batch)
        retain(queue)
        retain(queue)
        assert rows_in(queue, "rank_batches") == 1
        again = queue.sync.get_meta(["x"], 30, dp_rank=0, batch_index=2)
        assert queue.sync.get_data(again)["x"].tolist() == list(range(100, 130))


# Order, and nothing grows


def test_readers_and_streams_go_on_over_what_is_gone(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 600)
        stream = queue.engine.stream()
        first = [int(record["x"]) for record in stream.next(150)]
        train(queue, range(8))
        retain(queue)
        rest = [int(record["x"]) for _ in range(4) for record in stream.next(150)]
        assert first == list(range(150))
        assert rest == list(range(400, 600))
        assert [int(r["x"]) for r in queue.sync.get(limit=3, offset=10)] == [410, 411, 412]
        assert queue.sync.get(limit=3, offset=200) == []
        assert list(queue.engine.snapshot("default")) == list(range(400, 600))


def test_a_restart_finds_the_same(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 600)
        seen = train(queue, range(9))
        retain(queue)
    with Queue("q", tmp_path) as queue:
        assert values(queue) == list(range(400, 600)) or values(queue) == list(range(450, 600))
        assert train(queue, range(9, 12)) == [
            list(range(start, start + 50)) for start in range(450, 600, 50)
        ]
        assert len(seen) == 9
        retain(queue)
        assert len(queue) == 0
        fill(queue, 100, first=600)
        assert values(queue) == list(range(600, 700))
    with Queue("q", tmp_path) as queue:
        assert values(queue) == list(range(600, 700))
        assert report.verify(queue.engine) == []


def test_neither_ledger_nor_memory_nor_files_grow_with_what_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clearing, "MOST_ENTRIES", 4)
    monkeypatch.setattr(clearing, "RECLAIM_BYTES", 1 << 20)
    with Queue("q", tmp_path, retention="consumed") as one, Queue("q", tmp_path) as two:
        sizes = []
        for turn in range(12):
            for number, queue in enumerate((one, two, one, two)):
                fill(queue, 100, first=400 * turn + 100 * number)
            train(one, range(8 * turn, 8 * turn + 8))
            retain(two)
            storage = one.sync.stats()["storage"]
            sizes.append(storage["bytes"] - storage["ledger_bytes"])
        assert len(one) == len(two) == 0
        for table, most in (("assignments", 0), ("runs", 1), ("cleared", 5), ("past", 1)):
            assert rows_in(one, table) <= most
        two.engine.books.follow()
        for queue in (one, two):
            books = queue.engine.books
            assert len(books.runs) <= 1
            sets = (books.gone, books.cleared_indexes, books.partitions["default"].arrived)
            assert all(len(members.serialize()) < 400 for members in sets)
            assert books.rows == 4800
        with Queue("q", tmp_path) as fresh:
            assert fresh.engine.books.gone == one.engine.books.gone
            assert len(fresh) == 0
        assert max(sizes[6:]) <= 1.25 * max(sizes[1:6])
        assert report.verify(one.engine) == []


def test_space_comes_back_though_versions_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clearing, "RECLAIM_BYTES", 1 << 20)
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 1000)
        before = queue.sync.stats()["storage"]["bytes"]
        train(queue, range(18))
        retain(queue)
        fill(queue, 100, first=1000)
        fill(queue, 100, first=1100)
        retain(queue)
        assert queue.sync.stats()["storage"]["bytes"] < 0.6 * before


def test_the_journal_of_the_ledger_shrinks_again_after_a_long_read(tmp_path: Path) -> None:
    with Queue("q", tmp_path) as queue:
        reader = sqlite3.connect(queue.engine.place.ledger, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM meta").fetchone()

        def write(times: int) -> int:
            for _ in range(times):
                with queue.engine.ledger.transaction() as tx:
                    tx.execute("INSERT OR REPLACE INTO meta VALUES ('x', ?)", (bytes(1 << 20),))
            return Path(queue.engine.place.ledger + "-wal").stat().st_size

        assert write(20) > 20 << 20
        reader.close()
        assert write(10) < 10 << 20


# Killed, and beside others

KILLED = """
import os, signal, sys
from persisting_torch import Queue
from persisting_torch.queue import retention, clearing, storage

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def then_die(name, owner):
    real = getattr(owner, name)
    def done(*arguments, **options):
        real(*arguments, **options)
        die()
    setattr(owner, name, done)

retention.Keeper.due = lambda self: False
moment = sys.argv[2]
if moment == "entered":
    storage.RowStore.delete = die
elif moment == "deleted":
    then_die("delete", storage.RowStore)
elif moment == "entering":
    then_die("enter_cleared", retention)
elif moment == "pruned":
    then_die("prune", retention.past)
elif moment == "forgotten":
    then_die("forget_runs", clearing)
with Queue("q", sys.argv[1]) as queue:
    queue.engine.tending.retain()
"""


@pytest.mark.parametrize("moment", ["entering", "pruned", "entered", "deleted", "forgotten"])
def test_a_deletion_that_is_killed_is_carried_out_by_the_next(tmp_path: Path, moment: str) -> None:
    with Queue("q", tmp_path, retention="consumed") as queue:
        fill(queue, 600)
        train(queue, range(9))
    children.run(KILLED, tmp_path, moment, status=-9)
    with Queue("q", tmp_path) as queue:
        assert report.verify(queue.engine) == []
        assert values(queue)[-150:] == list(range(450, 600))
        retain(queue)
        assert report.verify(queue.engine) == []
        assert len(queue) <= 200
        assert values(queue)[-150:] == list(range(450, 600))
        assert queue.to_lance().count_rows() == len(queue)
        books = queue.engine.books_of("train", "default")
        assert (books["once"], books["never"]) == (450, 150)
        assert train(queue, range(9, 12))[-1] == list(range(550, 600))


CONSUMER = """
import sys, time
from persisting_torch import Queue
from persisting_torch.queue import retention, clearing

retention.EVERY_SECONDS = 0.05
clearing.RECLAIM_BYTES = 1 << 20
with Queue("q", sys.argv[1]) as queue:
    for k in range(int(sys.argv[2])):
        found = queue.engine.await_assignment("train", "default", k, batch_size=50, timeout=60)
        batch = queue.engine.read_batch("default", found.slices[0], ["x", "wide"])
        assert batch["x"].tolist() == list(found.slices[0]), (k, batch["x"])
        assert (batch["wide"] == batch["x"].unsqueeze(1)).all()
        queue.engine.commit_cursor("train", "default", k + 1)
    while len(queue):
        queue.engine.tending.retain()
"""


def test_a_producer_and_a_trainer_in_two_processes_while_it_is_deleted(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed", batch_size=FLUSH) as queue:
        child = children.start(CONSUMER, tmp_path, 80)
        fill(queue, 4000)
        assert child.wait() == 0, child.err
        assert len(queue) == 0
        assert values(queue) == []
        assert queue.engine.books_of("train", "default")["once"] == 4000
        assert report.verify(queue.engine) == []


# Against a model


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 1 << 30))
@pytest.mark.usefixtures("no_grace")
def test_whatever_happens_only_what_all_are_done_with_goes(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    draw = random.Random(seed)
    path = tmp_path_factory.mktemp("model")
    put: list[int] = []
    batches: list[list[int]] = []
    cursor, claimed, files = 0, set(), dict[str, int]()
    gone: set[int] = set()
    setting: Any = draw.choice(["consumed", "consumed", 40])
    with Queue("q", path, retention=setting, batch_size=1000) as queue, Queue("q", path) as other:
        queue.sync.mark_consumed("train", [])
        queue.sync.mark_consumed("claim", [])
        for _ in range(30):
            at = draw.choice([queue, other])
            action = draw.choice(
                ["put", "put", "train", "train", "claim", "claim", "save", "retain"]
            )
            if action == "put":
                count = draw.randrange(1, 30)
                meta = at.sync.put([{"x": len(put) + n} for n in range(count)])
                at.sync.flush()
                assert len(meta.global_indexes) == count
                put += range(len(put), len(put) + count)
            elif action == "train":
                left = [x for x in put if x not in gone and not any(x in b for b in batches)]
                if len(left) >= 8:
                    found = at.engine.await_assignment(
                        "train", "default", len(batches), batch_size=8
                    )
                    assert found is not None
                    batch = at.engine.read_batch("default", found.slices[0], ["x"])
                    batches.append(batch["x"].tolist())
                if len(batches) - cursor > 2:
                    cursor = draw.randrange(cursor, len(batches) + 1)
                    at.engine.commit_cursor("train", "default", cursor)
            elif action == "claim":
                meta = at.sync.get_meta(["x"], draw.randrange(1, 40), "claim")
                claimed |= set(at.sync.get_data(meta)["x"].tolist()) if meta.size else set()
            elif action == "save" and draw.random() < 0.5 and batches:
                name = str(path / f"{draw.randrange(3)}.ckpt")
                Path(name).touch()
                files[name] = draw.randrange(min(cursor, *files.values(), cursor), len(batches) + 1)
                at.engine.note_checkpoint("train", "default", name, files[name])
            elif action == "save" and files:
                name = draw.choice(list(files))
                Path(name).unlink()
                del files[name]
            elif action == "retain":
                retain(at)
                left = values(at)
                gone = set(put) - set(left)
                safe = min([cursor, *files.values()])
                assert left == [x for x in put if x not in gone]
                trained = {x for batch in batches[:safe] for x in batch}
                assert gone <= trained & claimed
                if setting != "consumed":
                    assert len(left) >= min(len(put), 40)
                assert len(other) == len(queue) == len(left)
                for k in range(safe, len(batches)):
                    found = at.engine.await_assignment("train", "default", k, batch_size=8)
                    assert found is not None
                    batch = at.engine.read_batch("default", found.slices[0], ["x"])
                    assert batch["x"].tolist() == batches[k]
        once = len({x for batch in batches[:cursor] for x in batch})
        assert other.engine.books_of("train", "default")["once"] == once
        assert report.verify(other.engine) == []


def test_a_mirror_that_slept_meanwhile_agrees_with_a_new_one(tmp_path: Path) -> None:
    with Queue("q", tmp_path, retention="consumed") as one, Queue("q", tmp_path) as two:
        fill(one, 100)
        sleeper = Books(two.engine.ledger)
        with two.engine.ledger.reading() as tx:
            sleeper.refresh(tx)
        for turn in range(1, 6):
            fill(two if turn % 2 else one, 100, first=100 * turn)
            train(one, range(2 * turn, 2 * turn + 1) if turn > 1 else range(3))
            retain(one)
        with two.engine.ledger.reading() as tx:
            sleeper.refresh(tx)
        with Queue("q", tmp_path) as fresh:
            books = fresh.engine.books
            assert sleeper.gone == books.gone
            assert sleeper.rows == books.rows == 600
            left = books.partitions["default"].present
            assert sleeper.runs.rows_of_set(left) == books.runs.rows_of_set(left)
