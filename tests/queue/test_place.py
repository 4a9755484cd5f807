"""Where a queue lives: names, paths, formats, permissions, hosts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import tempfile
import time
from pathlib import Path

import pytest

from persisting_torch import (
    BucketUnavailable,
    FormatError,
    KVInterface,
    PersistingError,
    Queue,
    SchemaError,
    StaleOwner,
)
from persisting_torch.errors import FlushFailed
from persisting_torch.queue import lease, place
from persisting_torch.queue.place import find_queues
from persisting_torch.queue.report import verify
from tests.queue import children

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

NAMES = {
    "separators": "a/b\\c",
    "climbing": "../../etc/passwd",
    "dots": "..",
    "a dot": ".",
    "hidden": ".hidden",
    "dotted": "obs.image.0",
    "ending in a dot": "end.",
    "spaces": " a b ",
    "a space": " ",
    "emoji": "🙂/🙂",
    "quotes": 'it\'s "so" `so` %2F %',
    "SQL": "x'; DROP TABLE runs; --",
    "newline": "a\nb\tc",
    "300 characters": "n" * 300,
    "a home": "~",
    "index": "_index",
    "partition": "_partition",
    "row id": "_rowid",
    "row address": "_rowaddr",
    "distance": "_distance",
    "an option": "-rf",
    "a wildcard": "*?[x]",
    "an at sign": "x@1",
    "composed": "é",
}


def tree(path: Path) -> set[str]:
    """All that lies under a folder, queue folders as they are named."""
    return {str(found.relative_to(path)) for found in path.rglob("*")}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_any_name_of_a_queue_works_or_is_refused_and_stays_in_its_folder(tmp_path: Path, name: str):
    storage = tmp_path / "outer" / "storage"
    storage.mkdir(parents=True)
    if len(name) == 300:
        with pytest.raises(SchemaError, match=r"300 bytes as a folder name.*Choose a shorter one"):
            Queue(name, storage)
        assert tree(tmp_path) == {"outer", "outer/storage"}
        return
    with Queue(name, storage) as queue:
        queue.sync.put({"x": 1})
    assert len(list(storage.iterdir())) == 1
    assert len(list((tmp_path / "outer").iterdir())) == len(list(tmp_path.iterdir())) == 1
    assert find_queues(storage) == [name]
    with Queue(name, storage) as queue:
        assert queue.sync.get() == [{"x": 1}]


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "n" * 1001, 3, None, b"x"])
def test_a_name_that_is_no_text_is_refused(tmp_path: Path, name):
    with pytest.raises(SchemaError, match="queue name"):
        Queue(name, tmp_path)
    with Queue("q", tmp_path) as queue:
        before = tree(tmp_path)
        with pytest.raises(SchemaError, match="partition_id"):
            queue.sync.put({"x": 1}, name)
        with pytest.raises(SchemaError, match="field"):
            queue.sync.put({name: 1})
        with pytest.raises(SchemaError, match="key"):
            asyncio.run(KVInterface(queue).kv_put(name, {"x": 1}, "p"))
        with pytest.raises(SchemaError, match="task_name"):
            queue.sync.get_meta(["x"], 1, name)
        assert tree(tmp_path) == before


def test_any_name_of_a_partition_key_task_and_field_works(tmp_path: Path):
    names = list(NAMES.values())

    async def put() -> None:
        with Queue("q", tmp_path) as queue:
            keys = KVInterface(queue)
            await queue.put({name: number for number, name in enumerate(names)}, "fields")
            for number, name in enumerate(names):
                await queue.put({"x": number}, name)
                await keys.kv_put(name, {"x": number}, "keys", tag={name: number})
            await queue.flush()
            for number, name in enumerate(names):
                meta = await queue.get_meta([name], 1, name, "fields")
                assert (await queue.get_data(meta)).get(name).item() == number

    asyncio.run(put())

    async def look() -> None:
        with Queue("q", tmp_path) as queue:
            keys = KVInterface(queue)
            records = await queue.get(limit=1000)
            assert {name: records[0][name] for name in names} == {n: i for i, n in enumerate(names)}
            tags = dict(await keys.kv_list("keys"))
            assert tags == {name: {name: number} for number, name in enumerate(names)}
            for number, name in enumerate(names):
                assert (await queue.get_batch(["x"], 1, "t", name))["x"].tolist() == [number]
                found = await keys.kv_batch_get([name], "keys", ["x"])
                assert found["x"].tolist() == [number]
            assert verify(queue.engine) == []

    asyncio.run(look())
    assert {path.name for path in tmp_path.iterdir()} == {"q"}


def test_names_that_differ_only_in_case_or_composition_are_different_names(tmp_path: Path):
    alike = ["Rollouts", "rollouts", "ROLLOUTS", "\u00e9", "e\u0301"]
    for number, name in enumerate(alike):
        with Queue(name, tmp_path) as queue:
            queue.sync.put({"x": number})
    assert find_queues(tmp_path) == sorted(alike)
    with Queue("rollouts", tmp_path) as queue:
        assert queue.sync.get() == [{"x": 1}]
        queue.sync.put({name: number for number, name in enumerate(alike)})
        for number, name in enumerate(alike):
            queue.sync.put({"x": number}, name)
        queue.sync.flush()
        record = queue.sync.get(offset=1, limit=1)[0]
        assert [record[name] for name in alike] == list(range(5))
        for number, name in enumerate(alike):
            assert queue.sync.get_batch(["x"], 9, "t", name)["x"].tolist() == [number]
            assert queue.sync.get_batch([name], 9, f"t-{name}")[name].tolist() == [number]


# Formats


def test_a_queue_of_a_later_format_is_refused(tmp_path: Path):
    Queue("q", tmp_path).close()
    mark = tmp_path / "q" / "queue.json"
    described = json.loads(mark.read_text())
    assert described["format"] == 2
    mark.write_text(json.dumps({**described, "format": 3, "news": []}))
    with pytest.raises(FormatError, match=r"'q' at .*/q has format 3; .* up to format 2. Upgrade"):
        Queue("q", tmp_path)
    assert json.loads(mark.read_text())["format"] == 3


def test_a_ledger_of_a_later_format_is_refused(tmp_path: Path):
    Queue("q", tmp_path).close()
    ledger = tmp_path / "q" / "bucket-0" / "ledger.sqlite"
    with sqlite3.connect(ledger) as connection:
        connection.execute("UPDATE meta SET value = 3 WHERE key = 'format'")
    connection.close()
    with pytest.raises(FormatError, match=r"'q'.*ledger\.sqlite has format 3; .*format 2. Upgrade"):
        Queue("q", tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"name": "q"}', '{"format": "x", "name": "q"}', "\ufffd\0"]
)
def test_a_damaged_description_is_refused_with_what_it_should_say(tmp_path: Path, text: str):
    Queue("q", tmp_path).close()
    mark = tmp_path / "q" / "queue.json"
    mark.write_text(text)
    with pytest.raises(FormatError, match=r"/q/queue\.json is damaged .* should read \{\"format"):
        Queue("q", tmp_path)
    mark.write_bytes(b"\xff\xfe{")
    with pytest.raises(FormatError, match=r"/q/queue\.json is damaged"):
        Queue("q", tmp_path)


def test_the_description_of_another_queue_is_refused(tmp_path: Path):
    Queue("q", tmp_path).close()
    os.rename(tmp_path / "q", tmp_path / "p")
    with pytest.raises(FormatError, match=r"/p of queue 'p' says it is queue 'q'"):
        Queue("p", tmp_path)


def make_database(path: Path, table: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"CREATE TABLE {table} (key TEXT, value)")
    connection.close()


DAMAGE = {
    "torn": lambda path: os.truncate(path, 3000),
    "overwritten": lambda path: path.write_text("no database at all " * 1000),
    "emptied": lambda path: path.write_text(""),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "another database": lambda path: (path.unlink(), make_database(path, "things")),
    "without a format": lambda path: (path.unlink(), make_database(path, "meta")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_ledger_is_refused_by_path_and_with_a_remedy(tmp_path: Path, damage):
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"x": 1})
    damage(tmp_path / "q" / "bucket-0" / "ledger.sqlite")
    with pytest.raises(FormatError, match=r"'q'.*ledger\.sqlite.*Restore it from a copy"):
        Queue("q", tmp_path)


# What stands in the way


def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "thesis.tex").write_text("mine")
    with pytest.raises(
        FormatError, match=r"/q is a folder that holds other things.*Choose another"
    ):
        Queue("q", tmp_path)
    assert tree(tmp_path) == {"q", "q/thesis.tex"}


def test_an_empty_folder_becomes_a_queue(tmp_path: Path):
    (tmp_path / "q").mkdir()
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"x": 1})


def test_a_file_in_the_place_of_a_queue_is_refused(tmp_path: Path):
    (tmp_path / "q").write_text("mine")
    with pytest.raises(FormatError, match=r"/q is a file, not a folder.*move that file away"):
        Queue("q", tmp_path)
    assert (tmp_path / "q").read_text() == "mine"


@pytest.mark.parametrize("below", ["", "further/down"])
def test_a_file_on_the_way_is_refused(tmp_path: Path, below: str):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FormatError, match=r"/file.* is a file, not a folder.*another storage_path"):
        Queue("q", tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "url", ["s3://", "s3://bucket/a?b", "gs://x", "hdfs://name:9000/x", Path("s3://b")]
)
def test_a_url_is_refused(tmp_path: Path, url, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PersistingError, match=r"(s3|gs|hdfs):/.* is a URL.*Give a local path"):
        Queue("q", url)
    assert not list(tmp_path.iterdir())


def test_a_storage_path_may_be_a_path_relative_or_of_the_home_folder(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for storage, folder in [
        ("data", tmp_path / "data"),
        (Path("other/data"), tmp_path / "other" / "data"),
        ("~/data", tmp_path / "home" / "data"),
        (Path("~"), tmp_path / "home"),
    ]:
        with Queue("q", storage) as queue:
            monkeypatch.chdir("/")
            queue.sync.put({"x": 1})
            queue.sync.flush()
            monkeypatch.chdir(tmp_path)
        assert (folder / "q" / "queue.json").exists()
    monkeypatch.setenv("HOME", "/")
    with Queue("q") as queue:
        queue.sync.put({"x": 1})
    assert (tmp_path / "data" / "q" / "queue.json").exists()


# Permissions


@pytest.fixture
def public():
    """A folder that other users can reach."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


NOBODY = """
import os, signal, sys, time
import torch
from persisting_torch import FormatError, PersistingError, Queue
from persisting_torch.queue.report import stats, verify

os.setgroups([])
os.setgid(65534)
os.setuid(65534)

def error_of(call):
    try:
        call()
    except Exception as error:
        assert isinstance(error, PersistingError), repr(error)
        return str(error)
    raise AssertionError("not refused")
"""

READ = (
    NOBODY
    + """
queue = Queue("q", sys.argv[1])
records = queue.sync.get()
assert [record["x"] for record in records] == [0, 1, 2], records
assert [record["late"] for record in records] == [0, 1, 2], records
assert len(queue) == 3
assert queue.sync.stats()["total_count"] == 3
assert sum(len(part) for part in queue.sync.stream()) == 3
assert queue.engine.read_batch("default", [2, 0], ["x"])["x"].tolist() == [2, 0]
assert verify(queue.engine) == []
for call in (
    lambda: queue.sync.put({"x": 9}),
    lambda: queue.sync.get_meta(["x"], 1),
    lambda: queue.sync.clear([0]),
    lambda: queue.sync.seal(),
    lambda: queue.sync.mark_consumed("t", [0]),
    lambda: queue.sync.reset_consumption("t"),
):
    error = error_of(call)
    assert "'q' is read-only" in error and "/q/bucket-0" in error and "Open it as" in error, error
queue.sync.flush()
print("true", flush=True)
"""
)


def fill(queue: Queue) -> None:
    meta = queue.sync.put([{"x": x} for x in range(3)])
    queue.sync.put([{"late": x} for x in range(3)], metadata=meta)


@as_root
def test_a_queue_that_may_only_be_read_can_be_read_when_nobody_writes_it(public: Path):
    with Queue("q", public) as queue:
        fill(queue)
    before = tree(public)
    children.run(READ + "queue.close()", public)
    assert tree(public) == before


@as_root
def test_a_queue_that_may_only_be_read_can_be_read_while_it_is_written(public: Path):
    with Queue("q", public) as queue:
        fill(queue)
        child = children.start(
            READ
            + """
for records in queue.sync.stream(limit=1, offset=3, wait=True, timeout=30):
    assert [record["x"] for record in records] == [3]
queue.close()
""",
            public,
        )
        child.await_line()
        queue.sync.put({"x": 3})
        queue.sync.flush()
        assert child.wait() == 0, child.err
        queue.sync.put({"x": 4})
    with Queue("q", public) as queue:
        assert len(queue) == 5


@as_root
def test_a_queue_that_may_only_be_read_can_be_read_after_its_writer_was_killed(public: Path):
    child = children.start(
        """
        import os, signal, sys
        from persisting_torch import Queue
        queue = Queue("q", sys.argv[1])
        meta = queue.sync.put([{"x": x} for x in range(3)])
        queue.sync.put([{"late": x} for x in range(3)], metadata=meta)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        public,
    )
    assert child.wait() == -signal.SIGKILL
    children.run(READ, public)


@as_root
def test_a_parent_that_may_not_be_written_is_refused(public: Path):
    child = children.run(
        NOBODY
        + """
import json
print(json.dumps(error_of(lambda: Queue("q", sys.argv[1]))))
print(json.dumps(error_of(lambda: Queue("q", sys.argv[1] + "/deeper"))))
""",
        public,
    )
    for error in child.lines:
        assert "'q' cannot be opened at " in error
        assert str(public) in error
        assert "ermission denied. Check that the storage_path" in error
    assert not list(public.iterdir())


@as_root
def test_a_queue_that_may_not_even_be_read_is_refused(public: Path):
    with Queue("q", public) as queue:
        fill(queue)
    for path, mode in [
        (public / "q", 0o700),
        (public / "q" / "queue.json", 0o600),
        (public / "q" / "bucket-0", 0o700),
        (public / "q" / "bucket-0" / "ledger.sqlite", 0o600),
    ]:
        before = path.stat().st_mode
        path.chmod(mode)
        child = children.run(
            NOBODY
            + """
import json
print(json.dumps(error_of(lambda: Queue("q", sys.argv[1]))))
""",
            public,
        )
        assert str(public / "q") in child.lines[0]
        assert "'q'" in child.lines[0]
        path.chmod(before)


# Hosts


def other_host(path: Path, boot: str, host: str, expires: float) -> None:
    """Enter what a process on another machine, or before a reboot, would have left."""
    connection = sqlite3.connect(path / "q" / "bucket-0" / "ledger.sqlite")
    connection.execute(
        "INSERT INTO leases (host, boot, pid, handle, name, expires) VALUES (?, ?, 77, 1, ?, ?)",
        (host, boot, host, time.time() + expires),
    )
    connection.commit()
    connection.close()


def leases(path: Path) -> list[tuple[str, int]]:
    connection = sqlite3.connect(path / "q" / "bucket-0" / "ledger.sqlite")
    found = connection.execute("SELECT host, pid FROM leases").fetchall()
    connection.close()
    return found


def test_a_queue_open_on_another_host_is_refused_until_its_lease_ends(tmp_path: Path):
    Queue("q", tmp_path).close()
    other_host(tmp_path, "another boot", "gpu-17", 1.5)
    with pytest.raises(
        BucketUnavailable, match=r"'q' at .*/q is open on host 'gpu-17'.*cluster mode"
    ):
        Queue("q", tmp_path)
    time.sleep(1.6)
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"x": 1})
        assert leases(tmp_path) == [(lease.host(), os.getpid())]
    assert leases(tmp_path) == []


def test_a_queue_left_open_by_this_host_before_it_booted_again_is_taken_over(tmp_path: Path):
    Queue("q", tmp_path).close()
    other_host(tmp_path, "the boot before", lease.host(), 1000)
    with Queue("q", tmp_path):
        assert leases(tmp_path) == [(lease.host(), os.getpid())]


def test_a_container_on_the_same_kernel_may_share_the_queue(tmp_path: Path):
    Queue("q", tmp_path).close()
    other_host(tmp_path, lease.boot(), "container", 1000)
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"x": 1})


def test_each_handle_has_its_lease_and_closing_leaves_none(tmp_path: Path):
    one, two = Queue("q", tmp_path), Queue("q", tmp_path)
    assert len(leases(tmp_path)) == 2
    one.close()
    assert len(leases(tmp_path)) == 1
    two.close()
    assert leases(tmp_path) == []


def test_a_lease_is_renewed(tmp_path: Path, monkeypatch):
    with Queue("q", tmp_path) as queue:
        monkeypatch.setattr(lease, "LEASE_SECONDS", 1000.0)
        queue.engine._lease_due = 0.0
        deadline = time.monotonic() + 10
        while expiry(tmp_path) < time.time() + 500:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(leases(tmp_path)) == 1
        queue.sync.put({"x": 1})


def expiry(path: Path) -> float:
    connection = sqlite3.connect(path / "q" / "bucket-0" / "ledger.sqlite")
    (found,) = connection.execute("SELECT max(expires) FROM leases").fetchone()
    connection.close()
    return float(found)


def test_a_queue_that_another_host_took_meanwhile_refuses_all_but_to_be_closed(tmp_path: Path):
    queue, idle = Queue("q", tmp_path), Queue("q", tmp_path)
    queue.sync.put({"x": 1})
    other_host(tmp_path, "another boot", "gpu-17", 1000)
    for handle in (queue, idle):
        handle.engine._lease_due = 0.0
        with pytest.raises(StaleOwner, match=r"'q' was taken over.*Close it.*'gpu-17'"):
            ask_for(handle, 10)
        for refused in (
            lambda handle=handle: handle.sync.put({"x": 2}),
            lambda handle=handle: handle.sync.get(),
            lambda handle=handle: handle.sync.get_meta(["x"], 1),
        ):
            with pytest.raises(StaleOwner):
                refused()
    idle.close()
    with pytest.raises(FlushFailed, match=r"1 samples could not be written.*taken over"):
        queue.close()
    queue.engine.intake.buffer.take()
    queue.close()


def ask_for(queue: Queue, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        len(queue)
        time.sleep(0.01)


# Network file systems. A stand-in: this machine has none, so the look at the mount table is faked.


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        *((kind, True) for kind in ("nfs", "nfs4", "cifs", "9p", "lustre", "fuse.sshfs")),
        *((kind, False) for kind in ("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "")),
    ],
)
def test_file_systems_of_the_network_are_known(tmp_path: Path, monkeypatch, kind, network):
    monkeypatch.setattr(place, "file_system", lambda path: kind)
    with Queue("q", tmp_path) as queue:
        assert queue.engine.place.network is network


def test_the_file_system_of_a_folder_is_found():
    assert place.file_system("/proc") == "proc"


ON_NFS = """
import sys
from persisting_torch import Queue
from persisting_torch.queue import place

place.file_system = lambda path: "nfs4"
queue = Queue("q", sys.argv[1], batch_size=3)
for x in range(40):
    queue.sync.put({"x": int(sys.argv[2]) * 100 + x})
queue.sync.flush()
took = []
while meta := queue.sync.get_meta(["x"], 4).global_indexes:
    took += meta
print(took, flush=True)
"""


def test_on_a_network_file_system_the_ledger_needs_no_shared_memory(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(place, "file_system", lambda path: "nfs4")
    queue = Queue("q", tmp_path)
    both = [children.start(ON_NFS, tmp_path, number) for number in range(2)]
    assert [child.wait() for child in both] == [0, 0], [child.err for child in both]
    took = [index for child in both for index in child.lines[0]]
    took += queue.sync.get_meta(["x"], 1000).global_indexes
    assert len(took) == len(set(took)) == len(queue) == 80
    assert verify(queue.engine) == []
    bucket = tmp_path / "q" / "bucket-0"
    mode = queue.engine.ledger.connection.execute("PRAGMA journal_mode").fetchone()[0]
    assert mode in ("delete", "truncate", "persist")
    assert not list(bucket.glob("*-wal")) + list(bucket.glob("*-shm"))
    queue.close()


def test_a_queue_moved_onto_a_network_file_system_changes_its_journal(tmp_path: Path, monkeypatch):
    with Queue("q", tmp_path) as queue:
        queue.sync.put({"x": 1})
    monkeypatch.setattr(place, "file_system", lambda path: "nfs4")
    with Queue("q", tmp_path) as queue:
        assert queue.sync.get() == [{"x": 1}]
        queue.sync.put({"x": 2})
        queue.sync.flush()
        assert not list((tmp_path / "q" / "bucket-0").glob("*-shm"))
    monkeypatch.undo()
    with Queue("q", tmp_path) as queue:
        assert len(queue) == 2


def test_a_queue_that_another_process_is_just_making_is_opened(tmp_path: Path):
    folder = tmp_path / "q"
    folder.mkdir()
    (folder / ".make.lock.turn").touch()  # the first of its files, before the lock itself
    with Queue("q", tmp_path) as queue:
        assert queue.sync.get() == []
