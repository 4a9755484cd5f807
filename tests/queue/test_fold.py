"""Late fields go into their rows: no value is lost, none comes back, and little is kept."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from persisting_torch import BatchMeta, Queue
from persisting_torch.queue import folding, upkeep
from persisting_torch.queue.fold import Fold, fold
from persisting_torch.queue.late import LateFields
from persisting_torch.queue.newest import Newest
from persisting_torch.queue.report import verify
from persisting_torch.queue.storage import RowStore
from persisting_torch.queue.tending import Tending
from tests.queue import children
from tests.queue.same import same

Model = dict[int, dict[str, Any]]


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upkeep comes only when it is called."""
    monkeypatch.setattr(Tending, "_begin", lambda self, what: False)


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


def late_runs(queue: Queue) -> list[tuple[str, ...]]:
    """The sets of fields of the late rows that count, one for each run."""
    queue.engine.books.follow()
    return [run.names for run in queue.engine.books.late.values()]


# The map of the newest

entered = st.lists(
    st.dictionaries(st.integers(0, 40), st.just(None), max_size=12).map(list), max_size=30
)


@given(entered, st.data())
def test_the_newest_row_of_each_sample_is_found(puts, data):
    newest, model, row = Newest(), {}, 0
    for put in puts:
        indexes = np.array(put, dtype=np.int64)
        newest.enter(indexes, np.arange(row, row + len(put), dtype=np.int64))
        for index in put:
            model[index] = row
            row += 1
        if data.draw(st.integers(0, 9)) == 0:
            first = data.draw(st.integers(0, row))
            newest.keep(np.array([first]), np.array([row]))
            model = {index: at for index, at in model.items() if at >= first}
    asked = np.array([*range(45), *range(44, -1, -3)])
    assert newest.find(asked).tolist() == [model.get(index, -1) for index in asked.tolist()]
    indexes, rows = newest.entries()
    assert dict(zip(indexes.tolist(), rows.tolist(), strict=True)) == model


def test_the_map_is_as_large_as_what_is_not_folded_wherever_the_indexes_lie(queue: Queue):
    newest = Newest()
    for start in range(0, 10**12, 10**10):
        newest.enter(np.arange(start, start + 100), np.arange(100) + start)
    assert len(newest) == 10_000
    newest.keep(np.array([99 * 10**10]), np.array([10**12]))
    assert len(newest) == 100


# What a fold does


def files_of(queue: Queue) -> set[str]:
    return {
        name
        for store in (queue.engine.rows, queue.engine.late.store)
        for name in os.listdir(os.path.join(store.path, "data"))
    }


def test_folded_values_are_in_the_rows_and_nothing_is_left_beside_them(tmp_path: Path):
    with Queue("q", tmp_path) as queue, Queue("q", tmp_path) as other:
        meta = queue.sync.put([{"x": n, "text": str(n)} for n in range(40)])
        queue.sync.flush()
        expected = [{"x": -n, "text": str(n), "y": torch.full((2,), n)} for n in range(40)]
        assert other.sync.get()[7]["x"] == 7
        queue.sync.put([{"x": -n, "y": torch.full((2,), n)} for n in range(40)], metadata=meta)
        assert same(other.sync.get(), expected)
        assert fold(queue.engine)
        assert late_runs(queue) == late_runs(other) == []
        assert queue.engine.late.store.dataset().count_rows() == 0
        assert same(queue.sync.get(), expected)
        assert same(other.sync.get(), expected)
        assert queue.engine.late.entries() == other.engine.late.entries() == {}
        assert verify(queue.engine) == verify(other.engine) == []
        rows = queue.engine.to_lance().to_table(columns=["x", "y"]).to_pylist()
        assert rows == [{"x": -n, "y": [n, n]} for n in range(40)]
        assert not fold(queue.engine), "there is nothing left to do"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1, 0.5),
        (0.5, 1),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(3), torch.zeros(0)),
        (3, torch.tensor(0.5)),
        ([], [1.5]),
    ],
)
def test_a_sample_has_its_value_in_one_column_also_where_the_type_changed(
    queue: Queue, before: Any, after: Any
):
    meta = queue.sync.put([{"v": before}, {"v": after}, {"v": before}])
    for sample, value in ((0, after), (1, before)):  # at first late.lance has only one column
        queue.sync.put([{"v": value}], metadata=part(meta, [sample]))
        wanted = queue.sync.get()
        rows = queue.engine.to_lance().to_table().to_pylist()
        assert same(queue.sync.get(), wanted)
    columns = [v.column for v in queue.engine.books.schema.fields["v"].variants]
    assert len(columns) == 2
    filled = [[column for column in columns if row[column] is not None] for row in rows]
    assert all(len(names) == 1 for names in filled)
    assert filled[0] != filled[1] == filled[2]


def test_rows_deleted_scattered_and_without_the_column_are_folded_into_right(queue: Queue):
    meta = queue.sync.put([{"x": n, "wide": torch.full((8,), float(n))} for n in range(60)])
    queue.sync.flush()
    queue.sync.put([{"late": n} for n in range(0, 60, 2)], metadata=part(meta, range(0, 60, 2)))
    queue.sync.clear(meta.global_indexes[:20:3])
    queue.engine.tending.tend()
    assert queue.engine.rows.table().fragment(0).positions.ids is not None
    more = queue.sync.put([{"x": n} for n in range(60, 90)])
    queue.sync.flush()
    queue.sync.clear(more.global_indexes[3:5])
    queue.engine.tending.remove_cleared()
    assert queue.engine.rows.table().fragment(1).live is not None
    queue.sync.put([{"wide": torch.zeros(8)}] * 9, metadata=part(more, range(11, 20)))
    queue.sync.put([{"late": -n} for n in range(30, 50)], metadata=part(meta, range(30, 50)))
    wanted = queue.sync.get(limit=100)
    assert len(wanted) == 81
    queue.engine.to_lance()
    assert same(queue.sync.get(limit=100), wanted)
    upkeep.compact(queue.engine.rows, queue.engine.commit_lock)
    assert same(queue.sync.get(limit=100), wanted)
    assert verify(queue.engine) == []


def part(meta: BatchMeta, positions: Any) -> BatchMeta:
    return meta.select_samples(list(positions))


def test_an_older_value_never_comes_to_light_again(queue: Queue):
    meta = queue.sync.put([{"x": n} for n in range(64)])
    queue.sync.flush()
    one, all_of_them = part(meta, [5]), meta
    queue.sync.put([{"a": "old", "b": "old"}], metadata=one)
    queue.sync.put([{"a": "new"}] * 64, metadata=all_of_them)
    queue.sync.put([{"c": "c"}], metadata=one)
    assert fold(queue.engine)
    assert late_runs(queue) == [("c",), ("b",)]
    assert queue.sync.get()[5] == {"x": 5, "a": "new", "b": "old", "c": "c"}
    with Queue("q", Path(queue.engine.place.root).parent) as other:
        assert other.sync.get()[5] == {"x": 5, "a": "new", "b": "old", "c": "c"}


def test_few_late_values_wait_and_their_puts_are_merged(queue: Queue):
    meta = queue.sync.put([{"x": n} for n in range(4096)])
    queue.sync.flush()
    wanted = {}
    for step in range(100):
        at = [(37 * step + n) % 4096 for n in range(2)]
        queue.sync.put([{"y": step}] * 2, metadata=part(meta, at))
        wanted |= dict.fromkeys(at, step)
        if step % 8 == 7:
            fold(queue.engine)
            assert 1 <= len(late_runs(queue)) <= 2 * folding.FANOUT
    assert queue.engine.rows.dataset().schema.names == ["_index", "_partition", "x", "y"]
    assert queue.engine.late.store.dataset().count_rows() <= 200
    got = queue.sync.get(limit=4096)
    assert {n: record["y"] for n, record in enumerate(got) if record["y"] is not None} == wanted
    for step in range(100, 130):
        queue.sync.put([{"y": step}] * 16, metadata=part(meta, range(16 * step, 16 * step + 16)))
    assert fold(queue.engine)
    assert late_runs(queue) == []


def test_a_value_for_one_row_does_not_fill_a_fragment(queue: Queue):
    meta = queue.sync.put([{"x": n} for n in range(1000)])
    queue.sync.flush()
    queue.sync.put([{"image": torch.ones(10_000)}], metadata=part(meta, [500]))
    queue.sync.put([{"reward": 1.0}] * 1000, metadata=meta)
    fold(queue.engine)
    assert late_runs(queue) == [("image",)]
    assert (
        sum(os.path.getsize(f.path) for f in os.scandir(queue.engine.rows.path + "/data")) < 10**5
    )
    assert queue.sync.get(limit=1, offset=500)[0]["image"].sum() == 10_000


def test_a_few_values_are_folded_in_a_quiet_time_unless_they_need_much_room(queue: Queue):
    engine = queue.engine
    meta = queue.sync.put([{"x": n, "image": torch.zeros(100)} for n in range(1000)])
    queue.sync.flush()
    queue.sync.put([{"x": -1, "image": torch.ones(100), "y": 1}], metadata=part(meta, [500]))
    queue.sync.put([{"wide": torch.ones(1000)}], metadata=part(meta, [7]))
    wanted = queue.sync.get(limit=1000)
    engine.tending.tend()
    assert sorted(late_runs(queue)) == [("image", "x", "y"), ("wide",)]
    assert engine.tending.fold_rest()
    assert late_runs(queue) == [("wide",)]
    assert same(queue.sync.get(limit=1000), wanted)
    assert not engine.tending._folds[0].rest_due(), "not again for the same"


def test_rows_that_are_not_listed_do_not_tie_puts_together(queue: Queue):
    meta = queue.sync.put([{"x": n} for n in range(4096)])
    queue.sync.flush()
    for at in range(0, 40, 2):
        queue.sync.put([{"y": at}, {"y": at}], metadata=part(meta, [at, at + 1]))

    def others() -> None:
        queue.sync.put([{"y": -1}], metadata=part(meta, [39]))

    with once_after(Fold, "_write", others):
        assert fold(queue.engine)
    queue.sync.put([{"z": 1}, {"z": 1, "w": 1}], metadata=part(meta, [0, 1]))
    queue.engine.books.follow()
    runs = list(queue.engine.books.late.values())
    puts = folding.puts_of(runs, queue.engine.late.store.table())
    assert sorted(put.rows for put in puts) == [1, 2, 39]
    assert {len(put.runs) for put in puts} == {1, 2}


def test_late_values_of_cleared_samples_go_with_them(queue: Queue):
    meta = queue.sync.put([{"x": n} for n in range(100)])
    queue.sync.flush()
    queue.sync.put([{"y": 1}, {"y": 2}], metadata=part(meta, [3, 50]))
    queue.sync.clear([meta.global_indexes[3]])
    queue.engine.tending.tend()
    queue.sync.clear([meta.global_indexes[50]])
    queue.engine.tending.tend()
    assert late_runs(queue) == []
    assert verify(queue.engine) == []


# Side by side


@contextmanager
def once_after(owner: type, name: str, action: Callable[[], object]) -> Iterator[None]:
    """Do something right after the method was called the next time."""
    method, done = getattr(owner, name), []

    def then_act(*arguments: Any, **options: Any) -> Any:
        answer = method(*arguments, **options)
        if not done:
            done.append(True)
            action()
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, then_act)
        yield
    assert done


def clean(queue: Queue) -> None:
    for store in (queue.engine.rows, queue.engine.late.store):
        store.dataset().cleanup_old_versions(retain_versions=1)


@pytest.mark.parametrize("cleaned", [False, True])
@pytest.mark.parametrize("step", ["find", "overlay"])
def test_a_fold_between_the_steps_of_a_read_is_not_missed(tmp_path: Path, step: str, cleaned: bool):
    with Queue("q", tmp_path) as queue, Queue("q", tmp_path) as reader:
        meta = queue.sync.put([{"x": n, "z": n} for n in range(40)])
        queue.sync.flush()
        queue.sync.put(
            [{"x": 100 + n, "y": n} for n in range(0, 40, 2)], metadata=part(meta, range(0, 40, 2))
        )
        assert reader.sync.get()[2] == {"x": 102, "y": 2, "z": 2}
        queue.sync.put([{"x": 200 + n} for n in range(10)], metadata=part(meta, range(10)))

        def others() -> None:
            queue.engine.to_lance()
            if cleaned:
                clean(queue)

        for read in (reader.sync.get, lambda: reader.engine.read_batch("default", range(40))):
            with once_after(
                LateFields if step == "find" else RowStore,
                "find" if step == "find" else "read",
                others,
            ):
                got = read()
            values = [r["x"] for r in got] if isinstance(got, list) else got["x"].tolist()
            assert values == [200 + n if n < 10 else n + 100 * (n % 2 == 0) for n in range(40)]
            queue.sync.put([{"x": 200 + n} for n in range(10)], metadata=part(meta, range(10)))


def test_late_rows_folded_before_another_process_has_looked_at_them(tmp_path: Path):
    with Queue("q", tmp_path) as queue, Queue("q", tmp_path) as reader:
        meta = queue.sync.put([{"x": n} for n in range(40)])
        queue.sync.flush()
        reader.sync.get()
        queue.sync.put([{"y": n} for n in range(40)], metadata=meta)

        def others() -> None:
            queue.sync.put([{"y": -1}], metadata=part(meta, [0]))
            queue.engine.to_lance()
            clean(queue)

        reader.engine.books.follow()
        others()
        with reader.engine.ledger.lock:
            reader.engine.late.follow()
        assert [record["y"] for record in reader.sync.get()] == [-1, *range(1, 40)]


def test_what_is_put_while_a_fold_writes_is_newer_than_it(queue: Queue):
    meta = queue.sync.put([{"x": n} for n in range(64)])
    queue.sync.flush()
    queue.sync.put([{"y": n} for n in range(64)], metadata=meta)
    queue.sync.put([{"z": n} for n in (1, 2)], metadata=part(meta, [1, 2]))

    def others() -> None:
        queue.sync.put([{"y": -7, "z": -7}], metadata=part(meta, [1]))

    with once_after(Fold, "_write", others):
        assert fold(queue.engine)
    got = queue.sync.get()
    assert [record["y"] for record in got] == [0, -7, *range(2, 64)]
    assert [record["z"] for record in got[:4]] == [None, -7, 2, None]
    assert fold(queue.engine, folding.Thrift.NONE)
    assert queue.sync.get() == got


def test_a_fold_that_a_compaction_or_a_fold_came_before_is_prepared_again(tmp_path: Path):
    with Queue("q", tmp_path) as queue, Queue("q", tmp_path) as other:
        metas = []
        for start in range(0, 160, 10):
            metas.append(queue.sync.put([{"x": n} for n in range(start, start + 10)]))
            queue.sync.flush()
        for meta in metas:
            queue.sync.put([{"y": index} for index in meta.global_indexes], metadata=meta)
        wanted = queue.sync.get(limit=200)
        with once_after(
            Fold, "_write", lambda: upkeep.compact(other.engine.rows, other.engine.commit_lock)
        ):
            assert fold(queue.engine)
        assert queue.engine.rows.fragments == 1
        assert queue.sync.get(limit=200) == wanted
        before = files_of(queue)
        queue.sync.put([{"y": -1}] * 10, metadata=metas[3])
        with once_after(Fold, "_write", other.engine.to_lance):
            assert not fold(queue.engine), "the other one did it"
        assert len(files_of(queue) - before) == 2, "of the late put and of one fold"
        assert [r["y"] for r in queue.sync.get(limit=200)[28:42]] == [28, 29, *[-1] * 10, 40, 41]
        assert verify(queue.engine) == []


def test_a_fold_that_is_told_to_stop_leaves_everything_as_it_was(queue: Queue):
    for _ in range(2):
        meta = queue.sync.put([{"x": n} for n in range(10)])
        queue.sync.flush()
        queue.sync.put([{"y": n} for n in range(10)], metadata=meta)
    before = files_of(queue)
    assert not fold(queue.engine, stop=lambda: True)
    answers = iter([False, False, True])  # before the second fragment
    assert not fold(queue.engine, stop=lambda: next(answers, True))
    assert files_of(queue) == before
    assert queue.engine.books.folds == 0


# Cost


def test_who_puts_late_fields_does_not_read_them_back(queue: Queue, monkeypatch):
    meta = queue.sync.put([{"x": n} for n in range(10)])
    queue.sync.flush()
    reads: list[object] = []
    read = RowStore.read
    monkeypatch.setattr(RowStore, "read", lambda *a: reads.append(a) or read(*a))
    for step in range(5):
        queue.sync.put(
            [{"y": step, "z": step} if n % 2 else {"y": step} for n in range(10)], metadata=meta
        )
        with queue.engine.ledger.lock:
            queue.engine.late.follow()
    assert not reads
    assert queue.engine.read_batch("default", meta.global_indexes, ["y"])["y"].tolist() == [4] * 10


def test_a_long_run_of_late_fields_leaves_little_in_memory_and_in_the_ledger(queue: Queue):
    engine = queue.engine
    for step in range(60):
        meta = queue.sync.put([{"x": n} for n in range(20)])
        queue.sync.flush()
        queue.sync.put([{"y": n} for n in range(20)], metadata=meta)
        queue.sync.put([{"z": n} for n in range(20)], metadata=meta)
        if step > 2:
            queue.sync.clear([index - 60 for index in meta.global_indexes])
        if step % 4 == 3:
            engine.tending.tend()
            assert engine.late.entries() == {}
            assert engine.books.late == {}
    with engine.ledger.reading() as tx:
        assert tx.execute("SELECT count(*) FROM late").fetchone() == (0,)
    assert len(engine.late._written) <= 64
    assert engine.late.store.fragments == 0
    assert verify(engine) == []


# Death

DIE = """
import os, signal, sys
import torch
from persisting_torch import BatchMeta, Queue
from persisting_torch.queue import fold as folds
from persisting_torch.queue.commit import Committer
from persisting_torch.queue.fold import Fold, fold
from persisting_torch.queue.storage import RowStore

def at(owner, name, number, before):
    method = getattr(owner, name)
    calls = []
    def count(*arguments, **options):
        calls.append(name)
        if len(calls) == number and before:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = method(*arguments, **options)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer
    setattr(owner, name, count)

queue = Queue("q", sys.argv[1])
"""

DEATHS = [
    "at(folds, 'write_columns', 1, False)",
    "at(Fold, '_write_kept', 1, False)",
    "at(Fold, '_fits', 1, True)",
    "at(RowStore, 'commit', 1, True)",
    "at(RowStore, 'commit', 1, False)",
    "at(Committer, 'append_kept', 1, True)",
    "at(RowStore, 'append_written', 1, True)",
    "at(RowStore, 'append_written', 1, False)",
    "at(Committer, '_enter', 1, True)",
    "at(Committer, '_enter', 1, False)",
    "at(folds, 'sweep', 1, True)",
    "at(RowStore, 'delete', 1, True)",
    "at(RowStore, 'delete', 1, False)",
]


@pytest.mark.parametrize("death", DEATHS)
def test_a_fold_killed_at_any_point_changes_no_answer(tmp_path: Path, death: str):
    with Queue("q", tmp_path) as queue:
        meta = queue.sync.put([{"x": n, "t": torch.full((3,), n)} for n in range(64)])
        queue.sync.flush()
        queue.sync.put([{"x": -n, "y": n} for n in range(64)], metadata=meta)
        queue.sync.put([{"z": 1, "x": 500}, {"z": 2, "x": 0.5}], metadata=part(meta, [7, 40]))
        wanted = queue.sync.get(limit=100)
        child = children.start(DIE + death + "\nfold(queue.engine)", tmp_path)
        assert child.wait() == -signal.SIGKILL, child.err
        assert same(queue.sync.get(limit=100), wanted)
        with Queue("q", tmp_path) as other:
            assert same(other.sync.get(limit=100), wanted)
            assert verify(other.engine) == []
        queue.sync.put([{"y": -5, "z": -5}], metadata=part(meta, [7]))
        wanted[7] = wanted[7] | {"y": -5, "z": -5}
        assert same(queue.sync.get(limit=100), wanted)
        for _ in range(2):
            queue.engine.tending.tend()
            assert same(queue.sync.get(limit=100), wanted)
        queue.engine.to_lance()
        assert late_runs(queue) == []
        assert queue.engine.late.store.dataset().count_rows() == 0
        with Queue("q", tmp_path) as other:
            assert same(other.sync.get(limit=100), wanted)
            assert verify(other.engine) == []


OVERWRITER = """
import json, random, sys
from persisting_torch import BatchMeta, Queue
path, name, step, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
chance = random.Random(seed)
queue = Queue("q", path)
while True:
    count = chance.choice([1, 3, 30, 200])
    first = chance.randrange(200 - count + 1)
    chosen = list(range(first, first + count))
    if chance.random() < 0.5:
        chosen = chance.sample(range(200), count)
    print(json.dumps([step, chosen]), flush=True)
    queue.sync.put([{name: step} for _ in chosen], metadata=BatchMeta(chosen, "default"))
    print(json.dumps(step), flush=True)
    step += 1
"""

FOLDER = """
import random, sys
from persisting_torch import Queue
from persisting_torch.queue.fold import fold
from persisting_torch.queue.folding import Thrift
path, seed = sys.argv[1], int(sys.argv[4])
chance = random.Random(seed)
queue = Queue("q", path)
print("[]", flush=True)
while True:
    if chance.random() < 0.7:
        fold(queue.engine, chance.choice(list(Thrift)))
    else:
        queue.engine.tending.tend()
"""


class Overwriting:
    """What writers of one field, killed and replaced, have said that they would and did write."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.said: dict[int, list[int]] = {}
        self.done: set[int] = set()

    def hear(self, child: children.Child) -> None:
        for line in child.lines:
            if isinstance(line, int):
                self.done.add(line)
            else:
                self.said[line[0]] = line[1]

    def least(self) -> dict[int, int]:
        """For each sample the newest value that was acknowledged."""
        found = dict.fromkeys(range(200), -1)
        for step in sorted(self.done):
            found |= dict.fromkeys(self.said[step], step)
        return found

    def allows(self, index: int, value: int, least: int) -> bool:
        return value == least or (value > least and index in self.said.get(value, ()))


@pytest.mark.parametrize(
    "kills", [20, pytest.param(120, marks=[pytest.mark.slow, pytest.mark.soak])]
)
def test_writers_and_folds_killed_at_random_lose_no_late_value(tmp_path: Path, kills: int):
    chance = random.Random(kills)
    fields = [Overwriting("a"), Overwriting("b")]
    places = [(OVERWRITER, fields[0]), (OVERWRITER, fields[1]), (FOLDER, None), (FOLDER, None)]
    with Queue("q", tmp_path) as queue:
        queue.sync.put([{"x": n, "a": -1, "b": -1} for n in range(200)])
        queue.sync.flush()
        started = itertools.count()

        def start(script: str, field: Overwriting | None) -> children.Child:
            step = 0 if field is None else 1 + max(field.said, default=0)
            name = "" if field is None else field.name
            return children.start(script, tmp_path, name, step, next(started))

        running = [start(*place) for place in places]
        folds, reads = 0, 0
        for _ in range(kills):
            until = time.monotonic() + chance.uniform(0.05, 0.4)
            while time.monotonic() < until:
                least = {}
                for field, child in zip(fields, running, strict=False):
                    field.hear(child)
                    least[field.name] = field.least()
                indexes = chance.sample(range(200), 64)
                batch = queue.engine.read_batch("default", indexes, ["a", "b", "x"])
                for field, child in zip(fields, running, strict=False):
                    field.hear(child)
                    for index, value in zip(indexes, batch[field.name].tolist(), strict=True):
                        assert field.allows(index, value, least[field.name][index])
                assert batch["x"].tolist() == indexes
                reads += 1
            number = chance.randrange(len(places))
            running[number].await_line()
            running[number].send(signal.SIGKILL)
            assert running[number].wait() == -signal.SIGKILL, running[number].err
            script, killed = places[number]
            if killed is not None:
                killed.hear(running[number])
            running[number] = start(script, killed)
        for child in running:
            child.send(signal.SIGKILL)
            child.wait()
        for field, child in zip(fields, running, strict=False):
            field.hear(child)
        folds = queue.engine.books.folds
        assert folds > kills // 4
        assert reads > kills
        final = queue.sync.get(limit=200)
        for field in fields:
            assert len(field.done) > kills
            for index, least in field.least().items():
                assert field.allows(index, final[index][field.name], least)
        assert verify(queue.engine) == []
        queue.engine.to_lance()
        with Queue("q", tmp_path) as other:
            assert other.sync.get(limit=200) == final == queue.sync.get(limit=200)


# At random

VALUES: dict[str, Callable[[random.Random], Any]] = {
    "number": lambda chance: chance.choice([chance.randint(-9, 9), chance.random()]),
    "tokens": lambda chance: torch.randint(0, 99, (chance.choice([3, 3, 0, 1, 5]),)),
    "image": lambda chance: torch.rand(2, 3),
    "text": lambda chance: "x" * chance.randint(0, 5),
    "flag": lambda chance: chance.random() < 0.5,
    "list": lambda chance: [chance.randint(0, 9)] * chance.randint(0, 3),
    "obs.pixel": lambda chance: torch.randint(0, 9, (2,), dtype=torch.uint8),
}


READER = """
import sys, torch
from persisting_torch import Queue
with Queue("q", sys.argv[1]) as queue:
    torch.save(queue.sync.get(limit=10**6), sys.argv[2])
"""


class World:
    """A queue through two handles, and what it is to hold."""

    def __init__(self, path: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        torch.manual_seed(seed)
        self.handles = [Queue("q", path), Queue("q", path)]
        self.model: Model = {}

    def handle(self) -> Queue:
        return self.chance.choice(self.handles)

    def sample(self, names: list[str]) -> dict[str, Any]:
        return {name: VALUES[name](self.chance) for name in names}

    def names(self, most: int) -> list[str]:
        return self.chance.sample(list(VALUES), self.chance.randint(1, most))

    def put(self) -> None:
        queue, names = self.handle(), self.names(3)
        data = [self.sample(names) for _ in range(self.chance.randint(1, 12))]
        meta = queue.sync.put(data)
        queue.sync.flush()
        self.model.update(zip(meta.global_indexes, data, strict=True))

    def put_late(self) -> None:
        if not self.model:
            return
        known = list(self.model)
        if self.chance.random() < 0.5:
            known = known[-20:]
        chosen = self.chance.sample(known, self.chance.randint(1, len(known)))
        names = self.names(3)
        data = [self.sample(names) for _ in chosen]
        if self.chance.random() < 0.2:
            for sample in data:
                sample[self.chance.choice(names)] = None
        self.handle().sync.put(data, metadata=BatchMeta(chosen, "default"))
        for index, sample in zip(chosen, data, strict=True):
            self.model[index] = self.model[index] | {
                name: value for name, value in sample.items() if value is not None
            }

    def clear(self) -> None:
        if len(self.model) > 10:
            gone = self.chance.sample(list(self.model), self.chance.randint(1, 4))
            self.handle().sync.clear(gone)
            for index in gone:
                del self.model[index]

    def tend(self) -> None:
        self.handle().engine.tending.tend()

    def fold(self) -> None:
        fold(self.handle().engine, self.chance.choice(list(folding.Thrift)))

    def compact(self) -> None:
        engine = self.handle().engine
        engine.tending.remove_cleared()
        if engine.rows.exists():
            upkeep.compact(engine.rows, engine.commit_lock)

    def clean(self) -> None:
        engine = self.handle().engine
        with engine.commit_lock:
            for store in (engine.rows, engine.late.store):
                if store.exists():
                    store.dataset().cleanup_old_versions(retain_versions=1)

    def read(self) -> None:
        queue = self.handle()
        if self.model and self.chance.random() < 0.5:
            chosen = self.chance.choices(list(self.model), k=self.chance.randint(1, 30))
            known = queue.engine.books.schema.fields
            name = self.chance.choice(list(known) or [""])
            if name and known[name].variants:
                batch = queue.engine.read_batch("default", chosen, [name])
                values = batch.get(known[name].path)
                values = values.unbind() if isinstance(values, torch.Tensor) else values.tolist()
                for got, index in zip(values, chosen, strict=True):
                    wanted = self.model[index].get(name)
                    assert_alike(got, wanted)
        else:
            self.check(queue)

    def check(self, queue: Queue) -> None:
        self.check_records(queue.sync.get(limit=10**6))

    def check_in_another_process(self, path: Path) -> None:
        children.run(READER, path, path / "records")
        self.check_records(torch.load(path / "records", weights_only=False))

    def check_records(self, got: list[dict[str, Any]]) -> None:
        assert len(got) == len(self.model)
        for record, sample in zip(got, self.model.values(), strict=True):
            for name, value in record.items():
                assert_alike(value, sample.get(name))

    def step(self) -> None:
        actions = [self.put, self.put_late, self.put_late, self.read, self.fold]
        actions += [self.chance.choice([self.clear, self.tend, self.compact, self.clean])]
        self.chance.choice(actions)()

    def close(self) -> None:
        for queue in self.handles:
            queue.close()


def assert_alike(got: Any, wanted: Any) -> None:
    if isinstance(got, torch.Tensor) and isinstance(wanted, list):
        got = got.tolist()
    if isinstance(got, torch.Tensor) and not isinstance(wanted, torch.Tensor):
        got = got.item()
    if isinstance(wanted, torch.Tensor):
        assert same(got, wanted), (got, wanted)
    else:
        assert got == wanted, (got, wanted)
        assert (got is None) == (wanted is None)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small numbers are many: folds, merges and compactions come often."""
    monkeypatch.setattr(folding, "FOLDED_SHARE", 3)
    monkeypatch.setattr(folding, "FANOUT", 3)
    monkeypatch.setattr(folding, "GROWTH", 2)
    monkeypatch.setattr(folding, "MOST_PUTS", 20)
    monkeypatch.setattr(upkeep, "FANOUT", 2)
    monkeypatch.setattr(upkeep, "GROWTH", 1)


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))]


@pytest.mark.parametrize("seed", SEEDS)
def test_writers_of_any_fields_lose_nothing_whatever_comes_between(
    tmp_path: Path, seed: int, eager: None, monkeypatch: pytest.MonkeyPatch
):
    """Puts, overwriting, clears, folds and merges at random, through two handles and a third.

    While a fold has written and not yet committed, others put, clear, compact and fold; after each
    of its commits, others read.
    """
    world = World(tmp_path, seed)
    depth = 0
    write, commit = Fold._write, RowStore.commit

    def write_and_wait(self: Fold, stop: Callable[[], bool]) -> bool:
        nonlocal depth
        done = write(self, stop)
        depth += 1
        if depth == 1:
            for _ in range(world.chance.choice([0, 1, 1, 3])):
                world.step()
        depth -= 1
        return done

    def commit_and_read(self: RowStore, *arguments: Any) -> None:
        commit(self, *arguments)
        if folding_now:
            world.read()

    folding_now: list[bool] = []
    steps = Fold._commit

    def commit_fold(self: Fold) -> None:
        world.read()
        folding_now.append(True)
        steps(self)
        folding_now.pop()
        world.read()

    monkeypatch.setattr(Fold, "_write", write_and_wait)
    monkeypatch.setattr(Fold, "_commit", commit_fold)
    monkeypatch.setattr(RowStore, "commit", commit_and_read)
    try:
        for _ in range(60):
            world.step()
        for queue in world.handles:
            world.check(queue)
            assert verify(queue.engine) == []
        depth = 1
        world.check_in_another_process(tmp_path)
        with Queue("q", tmp_path) as third:
            third.engine.to_lance()
            assert late_runs(third) == []
            world.check(third)
        for queue in world.handles:
            world.check(queue)
    finally:
        world.close()
