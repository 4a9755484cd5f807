"""Compaction and cleaning: few fragments, few versions, no row lost, moved or changed."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from lance import LanceOperation
from tensordict import TensorDict

from persisting_torch import Queue
from persisting_torch.queue import report, storage, upkeep
from persisting_torch.queue.locks import FileLock
from persisting_torch.queue.storage import RowStore
from persisting_torch.queue.tending import FLUSHES_BETWEEN, MOST_LEDGER_ROWS
from tests.queue.lance_rows import NO_LOCK, assert_reads, filled, rows

SPAWN = multiprocessing.get_context("spawn")


def compact_all(store: RowStore) -> int:
    """Rounds of compaction until nothing is left to do."""
    return sum(1 for _ in iter(lambda: upkeep.compact(store, NO_LOCK), False))


def data_files(path: Path) -> set[str]:
    return set(os.listdir(path / "data"))


@contextlib.contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """A lock before whose turn somebody else had the lock and did something."""
    action()
    yield


def test_nothing_to_compact(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path / "data.lance"))
    assert not upkeep.compact(store, NO_LOCK)
    upkeep.clean(store, NO_LOCK)
    assert not store.exists()
    store = filled(tmp_path / "data.lance", [10] * 7)
    assert not upkeep.compact(store, NO_LOCK)


def test_compaction_keeps_ids_values_and_the_order_of_rows_on_disk(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [20] * 30)
    fresh = RowStore(store.path)
    assert_reads(fresh, range(50))
    assert upkeep.compact(store, meanwhile(lambda: store.append(rows(range(600, 620)))))
    assert store.fragments == 2
    store.append(rows(range(620, 640)))
    assert store.rows == 640
    for reader in (store, fresh):
        assert_reads(reader, range(640))
        assert_reads(reader, np.random.default_rng(0).permutation(640))
    table = store.table()
    assert [table.fragment(slot).positions.ids for slot in range(3)] == [None] * 3
    assert table.fragment(0).row_ids().tolist() == list(range(600))


def test_the_tenth_of_the_rows_deleted_is_the_limit_for_keeping_them(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [100, 100])
    store.delete(np.arange(10))
    assert compact_all(store) == 0
    store.delete(np.array([50, 120]))
    assert compact_all(store) == 1
    assert store.dataset()._ds.count_deleted_rows() == 1
    live = np.setdiff1d(np.arange(200), [*range(10), 50, 120])
    assert_reads(store, live)
    assert_reads(store, live[::-1])
    with pytest.raises(KeyError, match="50"):
        store.read(np.array([49, 50]), ["_index"])
    assert store.rows == 200


def test_fragments_stay_few_and_rows_are_rewritten_seldom(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path / "data.lance"))
    appends, written, most = 400, 0, 0
    for step in range(appends):
        store.append(rows(range(10 * step, 10 * step + 10), width=256))
        if step % 16 == 15:
            seen = data_files(tmp_path / "data.lance")
            compact_all(store)
            new = data_files(tmp_path / "data.lance") - seen
            written += sum((tmp_path / "data.lance" / "data" / name).stat().st_size for name in new)
            upkeep.clean(store, NO_LOCK, keep=4)
            most = max(most, store.fragments)
    levels = math.log(appends, 8)
    size = sum(store.table().fragment(slot).bytes for slot in range(store.fragments))
    assert most <= 8 * levels
    assert written <= 2 * levels * size
    assert store.versions <= 4 * 4 + 20
    assert_reads(store, range(0, 4000, 3), width=256)


def test_full_fragments_are_left_alone_and_large_merges_are_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "FRAGMENT_BYTES", 100_000)
    counts = [*[40] * 40, 800, *[40] * 3, 800, *[40] * 40]
    store = filled(tmp_path / "data.lance", counts)
    before = {f.fragment_id for f in store.dataset().get_fragments()}
    compact_all(store)
    after = store.dataset().get_fragments()
    assert {40, 44} <= {f.fragment_id for f in after} & before
    new = [f.metadata.files[0].file_size_bytes for f in after if f.fragment_id not in before]
    assert len(new) > 2
    assert all(50_000 < size < 200_000 for size in new)
    assert_reads(store, range(store.rows))


def test_fragments_grow_with_the_data() -> None:
    assert upkeep.full_size(0) == upkeep.full_size(1 << 28) == 8 << 20
    assert upkeep.full_size(1 << 30) == 16 << 20
    assert upkeep.full_size(1 << 40) == 64 << 20


def test_rows_are_not_padded_with_wide_nulls(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path / "data.lance"))
    image = pa.field("image", pa.list_(pa.float32(), 4096))
    for step in range(20):
        table = rows(range(10 * step, 10 * step + 10))
        if 8 <= step < 11:
            table = table.append_column(image, pa.array([[0.5] * 4096] * 10, image.type))
        store.append(table)
    compact_all(store)
    assert store.fragments == 1 + 3 + 1
    narrow = store.table().fragment(0)
    assert narrow.bytes < 80 * 16384 / 4
    assert_reads(store, range(200))


def test_a_source_deleted_from_meanwhile_puts_the_merge_off(tmp_path: Path) -> None:
    path = tmp_path / "data.lance"
    store = filled(path, [10] * 10)
    other = RowStore(str(path))
    before = data_files(path)
    assert not upkeep.compact(store, meanwhile(lambda: other.delete(np.array([42]))))
    assert data_files(path) == before, "what was written in vain is gone"
    assert upkeep.compact(store, NO_LOCK)
    assert not upkeep.compact(store, NO_LOCK)
    assert_reads(store, [*range(42), *range(43, 100)])


def test_a_source_merged_by_somebody_else_puts_the_merge_off(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [10] * 10)
    other = RowStore(store.path)
    assert not upkeep.compact(store, meanwhile(lambda: compact_all(other) and None))
    assert_reads(store, range(100))
    assert store.fragments == 1


def test_appends_new_columns_and_cleaning_do_not_stop_a_merge(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [10] * 10)
    other = RowStore(store.path)

    def act() -> None:
        for step in range(5):
            start = 100 + 2 * step
            late = pa.array([step, step])
            other.append(rows([start, start + 1]).append_column(f"late_{step}", late))
        other.dataset().cleanup_old_versions(retain_versions=1)

    assert upkeep.compact(store, meanwhile(act))
    assert_reads(store, range(110))
    assert store.read(np.array([3, 105]), ["late_2"])["late_2"].to_pylist() == [None, 2]


def test_lance_refuses_a_rewrite_of_what_was_deleted_from_since(tmp_path: Path) -> None:
    """Should somebody commit without the lock, Lance itself keeps the rows right."""
    store = filled(tmp_path / "data.lance", [10] * 2)
    stale = store.table()
    fragments = [stale.fragment(slot) for slot in range(2)]
    written = upkeep._rewrite(stale, fragments, storage.FRAGMENT_BYTES)
    RowStore(store.path).delete(np.array([3]))
    group = LanceOperation.RewriteGroup([part.metadata for part in fragments], written)
    with pytest.raises(upkeep.CommitConflictError, match="preempted"):
        store.commit(stale.dataset, LanceOperation.Rewrite([group], []), [])
    store.refresh()
    assert_reads(store, [*range(3), *range(4, 20)])


def test_cleaning_waits_for_many_versions_and_keeps_the_newest(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [1] * 15)
    upkeep.clean(store, NO_LOCK, keep=4)
    assert store.versions == 16
    store.append(rows([15]))
    upkeep.clean(store, NO_LOCK, keep=4)
    assert store.versions == 4
    assert_reads(store, range(16))


def append_batches(path: str, lock: str, first: int, batches: int) -> None:
    """Append batches of rows; the reward of each names its row id as this process saw it."""
    store, commits = RowStore(path), FileLock(lock)
    for batch in range(batches):
        with commits:
            store.refresh()
            ids = np.arange(store.rows, store.rows + 5)
            indexes = range(first + 5 * batch, first + 5 * batch + 5)
            table = rows(indexes).append_column("row_id", pa.array(ids))
            store.append(table)


def tend(path: str, lock: str, ready: Event, stop: Event) -> None:
    """Compact and clean without rest."""
    store, commits = RowStore(path), FileLock(lock)
    ready.set()
    while not stop.is_set():
        upkeep.compact(store, commits)
        upkeep.clean(store, commits, keep=2)


def start(target: Callable[..., None], *arguments: object) -> BaseProcess:
    process = SPAWN.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def assert_rows_are_themselves(store: RowStore, ids: np.ndarray) -> None:
    got = store.read(ids, ["_index", "row_id", "tokens", "text"])
    assert got["row_id"].to_pylist() == ids.tolist()
    expected = rows(got["_index"].to_pylist()).select(["tokens", "text"])
    assert got.select(["tokens", "text"]).combine_chunks().equals(expected)


def test_processes_append_while_another_compacts_and_cleans(tmp_path: Path) -> None:
    path, lock = str(tmp_path / "data.lance"), str(tmp_path / "commit.lock")
    ready, stop = SPAWN.Event(), SPAWN.Event()
    tender = start(tend, path, lock, ready, stop)
    writers = [start(append_batches, path, lock, 10_000 * n, 80) for n in range(3)]
    store, chance = RowStore(path), np.random.default_rng(0)
    reads = 0
    while any(writer.is_alive() for writer in writers):
        store.refresh()
        if store.rows < 10:
            time.sleep(0.01)
            continue
        first = int(chance.integers(0, store.rows - 1))
        assert_rows_are_themselves(store, np.arange(first, min(store.rows, first + 60)))
        assert_rows_are_themselves(store, chance.integers(0, store.rows, 20))
        reads += 1
    stop.set()
    for process in (*writers, tender):
        process.join()
        assert process.exitcode == 0
    store.refresh()
    assert store.rows == 3 * 80 * 5
    assert_rows_are_themselves(store, np.arange(store.rows))
    indexes = store.dataset().to_table(columns=["_index"])["_index"].to_pylist()
    assert sorted(indexes) == sorted(10_000 * n + i for n in range(3) for i in range(400))
    assert reads > 10
    assert store.versions < 240, "versions were cleaned away meanwhile"


def test_killing_the_compaction_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    path, lock = str(tmp_path / "data.lance"), str(tmp_path / "commit.lock")
    store, commits = RowStore(path), FileLock(lock)
    chance = np.random.default_rng(1)
    deleted: list[int] = []
    merged = 0
    for kill in range(6):
        ready, stop = SPAWN.Event(), SPAWN.Event()
        tender = start(tend, path, lock, ready, stop)
        assert ready.wait(60)
        moment = time.monotonic() + float(chance.uniform(0.2, 0.5))
        step = 0
        while time.monotonic() < moment or step < 20:
            with commits:
                first = store.rows if store.exists() else 0
                store.append(rows(range(first, first + 10)))
                if step % 5 == kill % 5:
                    store.delete(np.array([first + 1, first + 2]))
                    deleted += [first + 1, first + 2]
            time.sleep(0.005)
            step += 1
        tender.kill()
        tender.join()
        store.refresh()
        merged += store.fragments < store.rows // 10
        live = np.setdiff1d(np.arange(store.rows), deleted)
        assert_reads(store, live)
    assert merged > 3, "the compaction was at work when it was killed"
    store.dataset().validate()
    compact_all(store)
    assert_reads(store, live)
    assert store.fragments < 20


def test_upkeep_of_large_flushes_waits_for_a_quiet_moment_and_comes(tmp_path: Path) -> None:
    td = TensorDict({"x": torch.zeros(256, 1024)}, [256])
    with Queue("q", tmp_path, batch_size=1) as queue:
        for _ in range(FLUSHES_BETWEEN + 8):
            queue.sync.put(td)
        assert queue.engine.rows.fragments >= FLUSHES_BETWEEN
        deadline = time.monotonic() + 30
        while queue.engine.rows.fragments > FLUSHES_BETWEEN // 2:
            assert time.monotonic() < deadline, "no upkeep came"
            time.sleep(0.1)
        assert report.verify(queue.engine) == []


def test_many_claims_are_folded_though_nobody_flushes(tmp_path: Path) -> None:
    with Queue("q", tmp_path, batch_size=10_000) as queue:
        queue.sync.put([{"x": i} for i in range(2 * MOST_LEDGER_ROWS)])
        queue.sync.flush()
        for _ in range(MOST_LEDGER_ROWS + 10):
            queue.sync.get_meta(["x"], 1)
        deadline = time.monotonic() + 30
        while True:
            with queue.engine.ledger.reading() as tx:
                claims = tx.execute("SELECT count(*) FROM claims").fetchone()[0]
            if claims < MOST_LEDGER_ROWS:
                break
            assert time.monotonic() < deadline, "no fold came"
            time.sleep(0.1)
        assert queue.sync.get_meta(["x"], 1).global_indexes == [MOST_LEDGER_ROWS + 10]
