"""The command line on queues in an object store: idle, and in use by another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch
from tensordict import TensorDict

from persisting_torch import Queue
from persisting_torch.cli import main
from persisting_torch.queue import copying, journal
from persisting_torch.queue.copying import Follower
from persisting_torch.queue.journal import Position
from persisting_torch.queue.objects import ObjectFiles
from persisting_torch.queue.place import find_queues, open_place
from tests.queue import children, object_store

ROOT = Path(__file__).parents[1]
HOLDER = """
    import json, sys
    from persisting_torch import Queue
    with Queue("rollouts", sys.argv[1], storage_options=json.loads(sys.argv[2])) as queue:
        queue.sync.put([{"x": 100 + i} for i in range(3)])
        queue.sync.flush()
        print("{}", flush=True)
        import time; time.sleep(60)
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with object_store.standing_in() as endpoint:
        yield endpoint


@pytest.fixture
def options(endpoint: str) -> dict[str, str]:
    return object_store.options_for(endpoint)


@pytest.fixture
def url(endpoint: str, options: dict[str, str]) -> str:
    """A storage path with two queues, `rollouts` and an empty one, and something else."""
    url = f"{object_store.new_bucket(endpoint)}/some/folder"
    with Queue("rollouts", url, storage_options=options) as queue:
        queue.sync.put([{"x": n} for n in range(20)], "train")
        claimed = queue.sync.get_meta(["x"], 8, "score", "train")
        scores = TensorDict({"score": torch.full((8,), 0.5)}, batch_size=[8])
        queue.sync.put(scores, "train", metadata=claimed)
    Queue("with/slash ü", url, storage_options=options).close()
    ObjectFiles(url, options).create(f"{url}/other/file", b"something else")
    return url


@pytest.fixture
def command(url: str, options: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process; (exit code, stdout, stderr)."""
    told = [text for one in options.items() for text in ("--storage-option", "=".join(one))]

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments, "--storage-path", url, *told])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def holder(url: str, options: dict[str, str]) -> Iterator[children.Child]:
    """Another process that has the queue, with three more samples flushed."""
    child = children.start(HOLDER, url, json.dumps(options))
    child.await_line()
    yield child
    child.send(9)
    child.wait()


def objects(url: str, options: dict[str, str]) -> dict[str, str]:
    import obstore

    listed = obstore.list(ObjectFiles(url, options)._store)
    return {entry["path"]: entry["e_tag"] for entries in listed for entry in entries}


def test_the_queues_under_a_url_are_found(url: str, options: dict[str, str]) -> None:
    assert find_queues(url, options) == ["rollouts", "with/slash ü"]
    assert find_queues(f"{url}/", options) == ["rollouts", "with/slash ü"]
    assert find_queues(f"{url}/nothing/here", options) == []
    assert find_queues(url.rpartition("/")[0], options) == []


def test_looking_at_a_queue_works_and_changes_nothing_in_the_store(
    command: Any, url: str, options: dict[str, str], tmp_path: Path
) -> None:
    before = objects(url, options)
    code, out, err = command("ls", "--json")
    assert (code, err) == (0, "")
    found = {queue["name"]: queue for queue in json.loads(out)}
    assert list(found) == ["rollouts", "with/slash ü"]
    assert found["rollouts"]["samples"] == 20
    assert found["rollouts"]["path"] == f"{url}/rollouts"
    assert found["rollouts"]["bytes"] > 1000
    assert found["with/slash ü"]["samples"] == 0
    assert found["with/slash ü"]["bytes"] > 1000
    assert "error" not in found["with/slash ü"]

    figures = json.loads(command("stats", "rollouts", "--json")[1])
    assert figures["persisted_count"] == 20
    assert figures["tasks"]["score"]["train"]["taken"] == 8
    assert figures["storage"]["ledger_bytes"] > 0

    records = json.loads(command("head", "rollouts", "-n", "2", "--offset", "7", "--json")[1])
    assert [(one["x"], one["score"] is not None) for one in records] == [(7, True), (8, False)]
    lines = command("tail", "rollouts", "-n", "2", "--json")[1].splitlines()
    assert [json.loads(line)["x"] for line in lines] == [18, 19]
    for queue in found.values():
        for named in (queue["name"], queue["path"]):
            assert json.loads(command("stats", named, "--json")[1])["name"] == queue["name"]

    code, out, _ = command("verify", "rollouts")
    assert (code, out) == (0, "rollouts: 20 samples, no faults\n")

    file = tmp_path / "rollouts.parquet"
    assert command("export", "rollouts", str(file))[0] == 0
    table = parquet.read_table(file)
    assert table["x"].to_pylist() == list(range(20))
    assert table["score"].null_count == 12
    assert objects(url, options) == before


def test_verify_finds_rows_that_are_gone(command: Any, url: str, options: dict[str, str]) -> None:
    files = ObjectFiles(url, options)
    folder = f"{url}/rollouts/bucket-0/data.lance/data"
    files.remove([f"{folder}/{name}" for name in files.names(folder)])
    code, out, _ = command("verify", "rollouts")
    assert code == 1
    assert "cannot be read" in out


def test_compact_reset_and_seal_work_on_a_queue_that_nobody_has(
    command: Any, url: str, options: dict[str, str]
) -> None:
    code, out, _ = command("compact", "rollouts", "--json")
    assert code == 0
    assert json.loads(out)["done"]
    assert command("reset", "rollouts", "--task", "score", "--yes")[0] == 0
    assert command("seal", "rollouts")[0] == 0
    figures = json.loads(command("stats", "rollouts", "--json")[1])
    assert figures["tasks"]["score"]["train"]["taken"] == 0
    assert figures["partitions"]["train"]["sealed"]


def test_a_queue_that_another_process_has_can_be_looked_at_and_not_changed(
    command: Any, holder: children.Child
) -> None:
    assert json.loads(command("stats", "rollouts", "--json")[1])["persisted_count"] == 23
    lines = command("tail", "rollouts", "-n", "4", "--json")[1].splitlines()
    assert [json.loads(line)["x"] for line in lines] == [19, 100, 101, 102]
    assert command("verify", "rollouts")[0] == 0
    for arguments in (("seal",), ("compact",), ("reset", "--task", "score", "--yes")):
        code, out, err = command(arguments[0], "rollouts", *arguments[1:])
        assert (code, out) == (1, "")
        assert "is open in process " in err
        assert f":{holder.pid}; in an object store one process at a time has a queue" in err
    assert holder.status is None


def test_tail_follows_a_queue_that_another_process_has(url: str, options: dict[str, str]) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "AWS_ACCESS_KEY_ID": options["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": options["aws_secret_access_key"],
        "AWS_REGION": options["aws_region"],
        "AWS_ENDPOINT": options["aws_endpoint"],
        "AWS_ALLOW_HTTP": "true",
    }
    with Queue("rollouts", url, storage_options=options) as queue:
        command = [sys.executable, "-m", "persisting_torch.cli", "tail", "-f", "-n", "1", "--json"]
        follower = subprocess.Popen(
            [*command, f"{url}/rollouts"], stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            assert follower.stdout is not None
            assert json.loads(follower.stdout.readline())["x"] == 19
            for x in (77, 78):
                queue.sync.put({"x": x})
                queue.sync.flush()
                assert json.loads(follower.stdout.readline())["x"] == x
        finally:
            follower.kill()
            follower.wait()


def test_an_unknown_queue_is_not_made_and_the_error_lists_those_there(
    command: Any, url: str, options: dict[str, str]
) -> None:
    before = objects(url, options)
    for arguments in (("stats", "rolouts"), ("seal", "rolouts"), ("head", f"{url}/rolouts")):
        code, out, err = command(*arguments)
        assert (code, out) == (2, "")
        assert f"there is no queue 'rolouts' under {url}. " in err
        assert "Its queues are: rollouts, with/slash ü." in err
    assert objects(url, options) == before


def test_what_cannot_be_reached_is_a_message_without_a_traceback(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("s3://nowhere/folder", "ftp://host/folder"):
        for arguments in (("ls", path), ("stats", f"{path}/q")):
            code, out, err = command(*arguments)
            assert (code, out) == (1, "")
            assert err.startswith("persisting-torch: ")
            assert path in err
    with pytest.raises(SystemExit) as ended:
        main(["ls", "s3://bucket", "--storage-option", "aws_region"])
    assert ended.value.code == 2
    assert "'aws_region' is not of the form NAME=VALUE" in capsys.readouterr().err


def test_a_copy_follows_through_new_owners_and_new_snapshots(
    url: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SNAPSHOT_CHANGES", 3)
    place = open_place("rollouts", url, storage_options=options)
    follower = Follower(place, str(tmp_path / "ledger.sqlite"))

    def known() -> int:
        follower.follow()
        query = "SELECT max(first_row + count) FROM runs"
        return int(follower._copy.execute(query).fetchone()[0])

    assert known() == 20
    count, first = 20, follower._at
    assert first is not None
    for _ in range(3):
        with Queue("rollouts", url, storage_options=options) as queue:
            for _ in range(2):
                queue.sync.put({"x": count})
                queue.sync.flush()
                count += 1
                assert known() == count
            hold = queue.engine.ledger.hold
            while hold.kept.journal.snapshot_due():
                time.sleep(0.05)
            if hold.kept._snapshots is not None:
                hold.kept._snapshots.join(20)
            queue.sync.put({"x": count})
            queue.sync.flush()
            count += 1
        assert known() == count
    assert follower._at is not None
    assert follower._at > Position(first.epoch + 2, 0)
    follower.close()


def test_a_copy_leaves_no_folder_behind(
    url: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying.tempfile, "tempdir", str(tmp_path))
    place = open_place("rollouts", url, storage_options=options)
    copying.CopiedLedger(place).close()
    files = ObjectFiles(f"{url}/rollouts", options)
    folder = f"{place.ledger}/snapshots"
    files.remove([f"{folder}/{name}" for name in files.names(folder)])
    with pytest.raises(copying.PersistingError, match="holds nothing yet"):
        copying.CopiedLedger(place)
    assert list(tmp_path.iterdir()) == []
