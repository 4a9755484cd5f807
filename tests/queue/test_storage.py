"""The row store: appends, row ids, reads in any order, deletes, durability."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from lance.fragment import LanceFragment, RowIdSequence

from persisting_torch.queue import reading
from persisting_torch.queue.blocks import Block, BlockCache, Coming
from persisting_torch.queue.layout import BlockKey, Layout
from persisting_torch.queue.storage import FRAGMENT_BYTES, RowStore, data_files
from tests.queue.lance_rows import COLUMNS, assert_reads, filled, rows


def test_a_store_opens_nothing_until_rows_come(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path / "data.lance"))
    assert not store.exists()
    assert (store.version, store.rows, store.fragments, store.versions) == (0, 0, 0, 0)
    assert store.refresh() == 0
    assert store.read(np.empty(0, dtype=np.int64), COLUMNS).num_rows == 0
    with pytest.raises(KeyError, match="no Lance dataset"):
        store.read(np.array([0]), COLUMNS)
    with pytest.raises(FileNotFoundError):
        store.dataset()
    store.delete(np.array([0]))
    assert not (tmp_path / "data.lance").exists()


def test_rows_get_the_next_row_ids_in_commit_order(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [3, 1, 5])
    assert store.rows == 9
    found = store.dataset().scanner(columns=["_index"], with_row_id=True).to_table()
    assert found["_rowid"].to_pylist() == found["_index"].to_pylist() == list(range(9))


def test_row_ids_go_on_after_deletes_compaction_new_columns_cleanup_and_reopening(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data.lance"
    store = filled(path, [10, 10, 10])
    store.delete(np.arange(15, 30))  # a whole fragment at the end, and half of one
    assert store.rows == 30
    store.append(rows(range(30, 32)))
    lance.dataset(str(path)).optimize.compact_files()
    store.refresh()
    assert store.rows == 32
    store.append(rows(range(32, 34)).append_column("late", pa.array([1, 2])))
    store.delete(np.arange(30, 34))
    store.dataset().cleanup_old_versions(retain_versions=1)
    store = RowStore(str(path))
    store.refresh()
    assert store.rows == 34
    store.delete(np.arange(34))
    store.append(rows([34]))
    assert RowStore(str(path)).refresh() == store.version
    assert store.rows == 35
    assert_reads(store, [34])


def test_the_row_ids_of_a_fragment_stand_in_its_metadata(tmp_path: Path) -> None:
    dataset = filled(tmp_path / "data.lance", [4, 3]).dataset()
    ids = []
    for fragment in dataset.get_fragments():
        assert fragment.metadata.row_id_meta is not None
        ids += list(RowIdSequence.from_inline_metadata(fragment.metadata.row_id_meta))
    assert ids == list(range(7))


def test_a_handle_that_lags_behind_appends_after_what_others_appended(tmp_path: Path) -> None:
    path = tmp_path / "data.lance"
    one = filled(path, [4])
    other = RowStore(str(path))
    other.append(rows(range(4, 6)))
    assert one.rows == 4
    one.append(rows(range(6, 9)))
    assert one.rows == 9
    assert_reads(one, range(9))


def test_what_others_appended_is_read_after_a_refresh_or_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "data.lance"
    one = filled(path, [4])
    other = RowStore(str(path))
    assert_reads(other, [3])
    one.append(rows(range(4, 6)))
    assert other.rows == 4
    assert_reads(other, [5, 0])
    assert other.rows == 6
    one.append(rows(range(6, 7)))
    assert other.refresh() == one.version
    assert other.rows == 7


def test_rows_come_back_in_the_order_asked_for_and_as_often(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [7, 20, 1, 40])
    assert_reads(store, [67, 3, 3, 0, 28, 27, 26, 3])
    assert_reads(store, range(67, -1, -1))
    assert_reads(store, [*range(30), *range(30)])
    assert_reads(store, range(5, 60), ["reward", "_index"])
    assert_reads(store, [])


def test_unknown_and_deleted_row_ids_are_named(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [10, 10])
    store.delete(np.array([4, 15, 16]))
    for ids in ([4], [3, 4, 5], [19, 20], [-1, 0], list(range(20)), [0, 1, 10**12]):
        gone = [i for i in ids if i in (4, 15, 16) or not 0 <= i < 20]
        with pytest.raises(KeyError) as error:
            store.read(np.array(ids), ["_index"])
        assert ", ".join(map(str, gone)) in str(error.value)
    assert_reads(store, [5, 3, 14, 17])
    assert_reads(store, range(5, 15))


def test_deleting_twice_or_what_is_not_there_does_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [10, 10])
    store.delete(np.arange(8, 12))
    store.delete(np.arange(8, 14))
    version = store.version
    store.delete(np.array([100, -5]))
    store.delete(np.empty(0, dtype=np.int64))
    assert store.version == version
    assert store.dataset().count_rows() == 14
    assert_reads(store, [7, 14])


def test_columns_may_come_later_and_may_be_missing(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [3])
    late = pa.field("late", pa.list_(pa.float32(), 2), metadata={b"persisting_torch": b"{1}"})
    values = pa.array([[1, 2], [3, 4]], late.type)
    store.append(rows([3, 4]).append_column(late, values))
    store.append(rows([5]).select(["_index", "_partition", "tokens"]))
    store.append(rows([6]).append_column(late, pa.nulls(1, late.type)))
    got = store.read(np.array([4, 0, 5, 6]), ["late", "never", "reward"])
    assert got.column_names == ["late", "reward"]
    assert got["late"].to_pylist() == [[3, 4], None, None, None]
    assert got["reward"].to_pylist() == [2.0, 0.0, None, 3.0]
    assert got.schema.field("late").metadata == late.metadata
    for ids in (np.arange(7), np.array([0])):
        assert store.read(ids, ["late"]).schema == got.schema.remove(1)
        assert store.read(ids, ["never"]).num_rows == len(ids)


def test_a_huge_append_is_one_commit_of_fragments_of_about_eight_megabytes(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [1], width=512)
    version = store.version
    store.append(rows(range(1, 9001), width=512))
    assert store.version == version + 1
    sizes = [f.metadata.files[0].file_size_bytes for f in store.dataset().get_fragments()[1:]]
    assert all(0.6 * FRAGMENT_BYTES < size < 1.5 * FRAGMENT_BYTES for size in sizes)
    assert_reads(store, [0, 8999, 4500], width=512)


def test_what_one_handle_has_staged_another_appends(tmp_path: Path) -> None:
    path = tmp_path / "data.lance"
    writer, owner = RowStore(str(path)), RowStore(str(path))
    assert writer.stage(rows(range(3))) is None  # there is no dataset yet
    owner.append(rows(range(2)))
    more = rows(range(2, 5)).append_column("late", pa.array([1, 2, 3]))
    assert writer.stage(more) is None  # nor such a column
    staged = writer.stage(rows(range(2, 5)))
    assert staged is not None
    owner.append(rows([5]).append_column("late", pa.array([1])))
    assert owner.knows(staged)
    owner.append_written(staged)
    assert owner.rows == 6
    assert owner.read(np.arange(6), ["_index"])["_index"].to_pylist() == [0, 1, 5, 2, 3, 4]


def test_staged_files_that_nobody_appends_are_cleaned_away_after_a_week(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [1, 1, 1])
    paths = []
    for first in (3, 5):
        staged = store.stage(rows(range(first, first + 2)))
        assert staged is not None
        paths += [tmp_path / "data.lance" / name for name in data_files(staged)]
    eight_days_ago = time.time() - 8 * 24 * 3600
    os.utime(paths[0], (eight_days_ago, eight_days_ago))
    store.dataset().cleanup_old_versions(retain_versions=1)
    assert [path.exists() for path in paths] == [False, True]


def test_files_that_are_not_there_or_of_another_dataset_are_not_known(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [1])
    staged = store.stage(rows(range(1, 3)))
    assert staged is not None
    other = filled(tmp_path / "other.lance", [1])
    assert not other.knows(staged)
    assert not RowStore(str(tmp_path / "none.lance")).knows(staged)
    store.discard(data_files(staged))
    assert not store.knows(staged)


@pytest.mark.parametrize("seed", range(4))
def test_any_request_reads_right_whatever_happened_to_the_fragments(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs, gathers and scattered rows over fragments that are clean, deleted from, compacted."""
    monkeypatch.setattr("persisting_torch.queue.layout.BLOCK_BYTES", 4000)
    monkeypatch.setattr(reading, "LONG_RUN_BYTES", 8000)
    chance = np.random.default_rng(seed)
    store = filled(tmp_path / "data.lance", chance.integers(1, 60, 12).tolist())
    live = np.arange(store.rows)
    for step in range(60):
        if step in (10, 25, 40):
            doomed = chance.choice(live, 25, replace=False)
            store.delete(doomed)
            live = np.setdiff1d(live, doomed)
        if step in (15, 45):  # mixes the order of rows in fragments and of fragments
            store.dataset().optimize.compact_files(target_rows_per_fragment=70)
            store.refresh()
        if step in (20, 30):
            store.append(rows(range(store.rows, store.rows + 30)))
            live = np.append(live, np.arange(store.rows - 30, store.rows))
        start, count = int(chance.integers(0, len(live))), int(chance.integers(1, 90))
        window = live[start : start + count]
        assert_reads(store, window)
        assert_reads(store, chance.permutation(window))
        assert_reads(store, np.sort(chance.choice(live, count)), ["_index", "ragged"])
        assert_reads(store, window[:: int(chance.integers(1, 4))], ["tokens", "text"])


def test_rows_are_never_handed_out_twice_from_the_same_memory(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [4000], width=64)

    def tokens(first: int, count: int) -> torch.Tensor:
        table = store.read(np.arange(first, first + count), ["tokens"])
        return torch.cat([torch.from_dlpack(c.flatten()) for c in table["tokens"].chunks])

    def spoil(first: int, count: int) -> int:
        table = store.read(np.arange(first, first + count), ["tokens"])
        (chunk,) = table["tokens"].chunks
        torch.from_dlpack(chunk.flatten()).fill_(-1)
        address: int = chunk.flatten().buffers()[1].address
        return address

    addresses = [spoil(first, 500) for first in range(0, 4000, 500)]
    assert len(set(addresses)) == 1, "slices of one block, without a copy"
    for first in (0, 1500, 1499, 0):
        assert tokens(first, 500)[::64].tolist() == [31 * i for i in range(first, first + 500)]
        spoil(first, 500)


def test_threads_read_while_another_appends_and_deletes(tmp_path: Path) -> None:
    store = filled(tmp_path / "data.lance", [200])
    stop = threading.Event()
    failures: list[BaseException] = []

    def read(seed: int) -> None:
        chance = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                first, last = 100, store.rows
                start = int(chance.integers(first, last - 1))
                assert_reads(store, range(start, min(last, start + 40)), ["_index", "tokens"])
                assert_reads(store, chance.integers(first, last, 20), ["tokens", "text"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for step in range(40):
        store.append(rows(range(store.rows, store.rows + 20)))
        store.delete(np.array([step]))
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert store.rows == 1000


def test_a_reader_whose_files_were_cleaned_away_finds_the_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "data.lance"
    writer = filled(path, [50, 50, 50])
    readers = [RowStore(str(path)) for _ in range(3)]
    assert_reads(readers[0], range(20))
    assert_reads(readers[1], [9, 140])
    readers[2].refresh()
    writer.dataset().optimize.compact_files()
    writer.append(rows([150]))
    cleaned = writer.dataset().cleanup_old_versions(older_than=timedelta(0))
    assert cleaned.data_files_removed == 3
    assert_reads(readers[0], range(60, 100))
    assert_reads(readers[1], [140, 3, 70])
    assert_reads(readers[2], range(150))


def test_with_fsync_files_reach_the_disk_before_the_manifest_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    path = tmp_path / "data.lance"
    store = filled(path, [5], fsync=True)
    assert {str(path), str(tmp_path)} <= set(synced)
    synced.clear()
    store.append(rows(range(5, 10)).append_column("late", pa.array([1] * 5)))
    store.delete(np.array([1]))
    names = [os.path.relpath(name, path) for name in synced]
    (data,) = LanceFragment(store.dataset(), 1).metadata.files
    manifests = [f"_versions/{2**64 - 1 - version}.manifest" for version in (3, 4, 5)]
    deletions = [name for name in names if name.startswith("_deletions/")]
    assert len(deletions) == 1
    order = [f"data/{data.path}", "data", manifests[1], *deletions, "_deletions", manifests[2]]
    assert [name for name in names if name in order] == order
    assert manifests[0] in names
    assert names.count("_versions") == 3
    assert sum(name.startswith("_transactions/") for name in names) == 3


def test_an_append_costs_the_same_after_many(tmp_path: Path) -> None:
    store = RowStore(str(tmp_path / "data.lance"))
    spent = []
    for step in range(200):
        batch = rows(range(10 * step, 10 * step + 10))
        start = time.perf_counter()
        store.append(batch)
        spent.append(time.perf_counter() - start)
    assert np.median(spent[-50:]) < 6 * np.median(spent[10:60])


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[BlockKey]:
    """The blocks that were read from files."""
    read: list[BlockKey] = []
    load = BlockCache._load

    def watched(cache: BlockCache, layout: Layout, slot: int, key: BlockKey) -> pa.Table:
        read.append(key)
        return load(cache, layout, slot, key)

    monkeypatch.setattr(BlockCache, "_load", watched)
    return read


@pytest.mark.parametrize("size", [1, 48, 250, 700])
def test_a_pass_in_order_reads_every_block_once(
    tmp_path: Path, loads: list[BlockKey], size: int
) -> None:
    store = filled(tmp_path / "data.lance", [2000] * 3, width=512)
    for first in range(0, 6000, size):
        ids = np.arange(first, min(first + size, 6000))
        assert store.read(ids, ["tokens"])["tokens"][0].as_py()[0] == 31 * first
    assert len({key for key in loads if key.rows > size}) == 3
    assert len(loads) - 3 <= 2, "the first requests of a stream may be read singly"


def test_ranks_that_read_their_share_of_each_batch_read_every_block_once(
    tmp_path: Path, loads: list[BlockKey]
) -> None:
    store = filled(tmp_path / "data.lance", [2000] * 3, width=512)
    for first in range(32, 6000 - 32, 128):
        store.read(np.arange(first, first + 32), ["tokens"])
    assert len([key for key in loads if key.rows == 2000]) == 3
    assert len(loads) <= 5


def test_long_runs_are_read_in_one_piece_and_ahead(tmp_path: Path, loads: list[BlockKey]) -> None:
    store = filled(tmp_path / "data.lance", [2500, 2500], width=512)
    tables = [store.read(np.arange(i, i + 1250), ["tokens"]) for i in range(0, 5000, 1250)]
    assert [len(table["tokens"].chunks) for table in tables] == [1] * 4
    assert sorted((key.start, key.rows) for key in loads) == [(0, 1250)] * 2 + [(1250, 1250)] * 2


def test_rows_far_apart_read_no_blocks(tmp_path: Path, loads: list[BlockKey]) -> None:
    store = filled(tmp_path / "data.lance", [2000] * 20, width=512)
    chance = np.random.default_rng(0)
    for _ in range(20):
        store.read(chance.integers(0, 40_000, 64), ["tokens"])
    assert not loads


def test_the_cache_stays_within_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persisting_torch.queue.blocks.CACHE_BYTES", 20 << 20)
    store = filled(tmp_path / "data.lance", [2000] * 6, width=512)
    for first in range(0, 12_000, 2000):
        store.read(np.arange(first, first + 250), ["tokens"])
    cache = store._reader._cache
    assert sum(cache._sizes.values()) <= 20 << 20
    assert set(cache._sizes) <= set(cache._blocks)


def test_a_block_on_its_way_anew_does_not_hold_up_who_ends_its_predecessor(tmp_path: Path) -> None:
    cache = BlockCache(str(tmp_path))
    key = BlockKey(("a",), ("x",), 0, 4)
    old = Block(pa.table({"x": [0, 1, 2, 3]}))
    cache._blocks[key] = Coming()  # not here yet: it was forgotten and is being read again
    found: list[pa.Table | None] = []
    reader = threading.Thread(
        target=lambda: found.append(cache.hand_out_of(old, key, 0, 4)), daemon=True
    )
    reader.start()
    reader.join(10)
    assert not reader.is_alive()
    assert found[0] is not None
    assert found[0]["x"].to_pylist() == [0, 1, 2, 3]
    assert key in cache._blocks
