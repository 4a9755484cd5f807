"""The command line, on real queues: idle, in use by another process, and read-only."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from tensordict import TensorDict

from persisting_torch import MaxStaleness, Queue, QueueSealed, SequentialSampler
from persisting_torch.cli import main

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
COMMAND = [sys.executable, "-m", "persisting_torch.cli"]
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A storage path with two queues: `rollouts` and an empty one."""
    with Queue("rollouts", tmp_path) as queue:
        put = queue.sync.put
        put({"prompt": "2 + 2", "reward": 1.5, "raw": b"\x00\xff", "info": {"steps": [1, 2]}})
        put({"prompt": "3 + 3", "reward": float("nan"), "obs": torch.zeros(2, 3)})
        ids = torch.arange(40 * 100).reshape(40, 100)
        put(TensorDict({"ids": ids}, batch_size=[40]), "val")
        meta = queue.sync.get_meta(["ids"], 10, "score", "val")
        put(TensorDict({"score": torch.full((10,), 0.5)}, batch_size=[10]), "val", metadata=meta)
    Queue("with/slash ü", tmp_path).close()
    return tmp_path


@pytest.fixture
def command(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process; (exit code, stdout, stderr)."""
    monkeypatch.chdir(data)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments, *(() if arguments[0] == "ls" else ("--storage-path", str(data)))])
        return (code, *capsys.readouterr())

    return run


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=ENVIRONMENT,
        **options,
    )


@contextmanager
def writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process with the queue open; it obeys put, wait (a put that is not flushed), end."""
    code = """
        import sys
        from persisting_torch import Queue
        with Queue("rollouts", sys.argv[1], batch_size=1000) as queue:
            print("open", flush=True)
            for line in sys.stdin:
                for number in range(20 if line.strip() == "put" else 1):
                    queue.sync.put({"prompt": line.strip()}, "live")
                    if line.strip() == "put":
                        queue.sync.flush()
                print("done", flush=True)
    """
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "open\n"
    try:
        yield other
    finally:
        other.kill()
        other.communicate()


def tell(other: subprocess.Popen[str], order: str) -> None:
    assert other.stdin is not None
    assert other.stdout is not None
    print(order, file=other.stdin, flush=True)
    assert other.stdout.readline() == "done\n"


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


# Looking


def test_ls_tells_the_queues_of_a_path(command: Any, data: Path) -> None:
    code, out, _ = command("ls", str(data), "--json")
    assert code == 0
    first, second = json.loads(out)
    assert (first["name"], second["name"]) == ("rollouts", "with/slash ü")
    assert first["path"] == str(data / "rollouts")
    assert [first[name] for name in ("samples", "partitions", "tasks")] == [42, 2, 1]
    assert (first["sealed"], first["sealed_partitions"]) == (False, 0)
    assert first["last_put"] > 0
    assert first["bytes"] > 0
    assert second["samples"] == 0


def test_ls_shows_a_table_and_goes_on_past_a_queue_that_it_cannot_read(
    command: Any, data: Path
) -> None:
    (data / "later").mkdir()
    (data / "later" / "queue.json").write_text('{"format": 7, "name": "later"}')
    code, out, _ = command("ls", str(data))
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split()[:3] == ["queue", "samples", "partitions"]
    assert "has format 7" in lines[1]
    assert lines[2].split()[:3] == ["rollouts", "42", "2"]


def test_a_terminal_gets_a_drawn_table(data: Path) -> None:
    pytest.importorskip("rich")
    shown, terminal = pty.openpty()
    run = subprocess.run([*COMMAND, "ls", str(data)], stdout=terminal, check=False, env=ENVIRONMENT)
    text = os.read(shown, 1 << 16).decode()
    os.close(terminal)
    os.close(shown)
    assert run.returncode == 0
    assert "\u2502 rollouts" in text


def test_ls_and_help_load_neither_torch_nor_lance(data: Path) -> None:
    code = """
        import sys
        from persisting_torch.cli import main
        main(["ls", sys.argv[1]])
        try:
            main(["--help"])
        except SystemExit:
            print(*sys.modules)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(data)],
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT,
    )
    loaded = set(run.stdout.splitlines()[-1].split())
    assert not {"torch", "lance", "pyarrow", "lightning", "pulsing"} & loaded


def test_stats_tells_fields_partitions_and_tasks(command: Any) -> None:
    code, out, _ = command("stats", "rollouts", "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["persisted_count"] == 42
    assert figures["partitions"]["val"] == {"samples": 40, "sealed": False}
    assert figures["tasks"]["score"]["val"] == {
        "taken": 10,
        "available": 30,
        "dropped": {},
        "leased": 0,
        "cursor": 0,
    }
    assert figures["fields"]["obs"] == "float32 tensor of shape (2, 3)"
    _, text, _ = command("stats", "rollouts")
    assert "42 samples" in text
    assert "float32 tensor of shape (2, 3)" in text


def test_stats_tells_what_was_dropped_and_why(command: Any, data: Path) -> None:
    with Queue("aging", data) as queue:
        queue.sync.put([{"policy_version": version} for version in (1, 1, 5)])
        sampler = MaxStaleness(SequentialSampler(), max_staleness=1)
        queue.sync.get_meta([], 1, "train", sampler=sampler, policy_version=5)
    assert "2 stale" in command("stats", "aging")[1]
    figures = json.loads(command("stats", "aging", "--json")[1])
    assert figures["tasks"]["train"]["default"]["dropped"] == {"stale": 2}


def test_stats_tells_what_producers_have_claimed_and_not_finished(command: Any, data: Path) -> None:
    with Queue("judged", data) as queue, queue.producer("judge-0"):
        queue.sync.put([{"x": n} for n in range(5)])
        queue.sync.get_meta(["x"], 3, "judge")
        lines = [line.split() for line in command("stats", "judged")[1].splitlines()]
    assert ["judge", "default", "3", "3", "2", "0", "0"] in lines
    assert ["task", "partition", "taken", "leased", "available", "dropped", "cursor"] in lines
    [producer] = [line for line in lines if line[:1] == ["judge-0"]]
    assert producer[2:4] == ["alive", "3"]


def test_head_tells_the_first_samples_in_order(command: Any) -> None:
    _, out, _ = command("head", "rollouts", "-n", "3", "--json")
    first, second, third = json.loads(out)
    assert first["prompt"] == "2 + 2"
    assert first["reward"] == 1.5
    assert first["raw"] == {"bytes": 2, "base64": "AP8="}
    assert first["info"] == {"steps": [1, 2]}
    assert first["ids"] is None
    assert second["reward"] == "NaN"
    assert second["obs"] == {"dtype": "float32", "shape": [2, 3], "values": [[0.0] * 3] * 2}
    assert third["ids"] == {"dtype": "int64", "shape": [100]}
    assert third["score"] == {"dtype": "float32", "shape": [], "values": 0.5}


def test_head_shows_each_field_in_a_line(command: Any) -> None:
    _, out, _ = command("head", "rollouts", "-n", "1", "--offset", "1")
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert lines[0] == ["#1"]
    assert ["prompt", "'3 + 3'"] in lines
    assert ["obs", "float32 (2, 3) [[0, 0, 0], [0, 0, 0]]"] in lines


def test_tail_tells_the_last_samples_a_line_each(command: Any) -> None:
    _, out, _ = command("tail", "rollouts", "-n", "2", "--json")
    assert [json.loads(line)["ids"]["shape"] for line in out.splitlines()] == [[100], [100]]
    _, out, _ = command("tail", "rollouts", "-n", "1")
    assert out.startswith("#41\n")


def test_a_queue_is_found_by_name_and_by_the_path_of_its_folder(command: Any, data: Path) -> None:
    for given in ("with/slash ü", str(data / "with%2Fslash %C3%BC"), "./with%2Fslash %C3%BC/"):
        code, out, _ = command("verify", given, "--json")
        assert code == 0
        assert json.loads(out) == {"name": "with/slash ü", "samples": 0, "faults": []}


def test_verify_finds_rows_that_are_gone_and_exits_with_1(command: Any, data: Path) -> None:
    assert command("verify", "rollouts")[0] == 0
    lance.dataset(str(data / "rollouts/bucket-0/data.lance")).delete("_index >= 0")
    code, out, _ = command("verify", "rollouts", "--json")
    assert code == 1
    assert "cannot be read" in json.loads(out)["faults"][0]


def test_verify_finds_late_fields_that_are_gone(command: Any, data: Path) -> None:
    shutil.rmtree(data / "rollouts/bucket-0/late.lance")
    code, out, _ = command("verify", "rollouts")
    assert code == 1
    assert "late fields in rows 0 to 9 cannot be read" in out


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_export_writes_all_samples_with_their_late_fields(
    command: Any, tmp_path: Path, ending: str
) -> None:
    target = tmp_path / f"samples.{ending}"
    code, out, _ = command("export", "rollouts", str(target), "--json")
    assert code == 0
    assert json.loads(out)["samples"] == 42
    table = (
        parquet.read_table(target)
        if ending == "parquet"
        else pa.ipc.open_file(str(target)).read_all()
    )
    assert len(set(table["_index"].to_pylist())) == 42
    assert table["_partition"].to_pylist() == ["default"] * 2 + ["val"] * 40
    assert table["score"].to_pylist() == [None] * 2 + [0.5] * 10 + [None] * 30
    fixed = [type_ for type_ in table.schema.types if pa.types.is_fixed_size_list(type_)]
    assert bool(fixed) == (ending == "arrow")  # older readers of Parquet know none with nulls
    assert not list(tmp_path.glob(".*.part"))


# Looking after


def test_compact_leaves_fewer_fragments_and_every_sample(command: Any, data: Path) -> None:
    with Queue("rollouts", data) as queue:
        for number in range(20):
            queue.sync.put({"prompt": str(number)})
            queue.sync.flush()
        records = queue.sync.get(limit=100)
    code, out, _ = command("compact", "rollouts", "--json")
    told = json.loads(out)
    assert (code, told["done"]) == (0, True)
    assert told["after"]["fragments"] < told["before"]["fragments"]
    with Queue("rollouts", data) as queue:
        after = queue.sync.get(limit=100)
    assert [record["prompt"] for record in after] == [record["prompt"] for record in records]
    assert command("verify", "rollouts")[0] == 0


def test_reset_lets_a_task_begin_anew(command: Any) -> None:
    code, out, _ = command("reset", "rollouts", "--task", "score", "--yes", "--json")
    assert code == 0
    assert json.loads(out)["reset"] == {"val": 10}
    _, out, _ = command("stats", "rollouts", "--json")
    assert json.loads(out)["tasks"]["score"]["val"]["available"] == 40


@pytest.mark.parametrize(("answer", "code", "available"), [("y\n", 0, 40), ("", 1, 30)])
def test_reset_asks_first(
    command: Any, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, available: int
) -> None:
    read, write = os.pipe()
    os.write(write, answer.encode())
    os.close(write)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        found, _, err = command("reset", "rollouts", "--task", "score")
    assert found == code
    assert "10 samples of 'val'" in err
    _, out, _ = command("stats", "rollouts", "--json")
    assert json.loads(out)["tasks"]["score"]["val"]["available"] == available


def test_seal_seals_one_partition_or_the_whole_queue(command: Any, data: Path) -> None:
    _, out, _ = command("seal", "rollouts", "--partition", "val", "--json")
    assert json.loads(out) == {"name": "rollouts", "partition": "val"}
    _, out, _ = command("stats", "rollouts", "--json")
    partitions = json.loads(out)["partitions"]
    assert [partitions[name]["sealed"] for name in ("default", "val")] == [False, True]
    assert "1 of them" in command("ls", str(data))[1]
    assert command("seal", "rollouts")[0] == 0
    assert json.loads(command("ls", str(data), "--json")[1])[0]["sealed"] is True
    with Queue("rollouts", data) as queue, pytest.raises(QueueSealed):
        queue.sync.put({"prompt": "too late"}, "new")


# Mistakes


@pytest.mark.parametrize(
    "arguments",
    [
        ("stats",),
        ("head",),
        ("tail",),
        ("verify",),
        ("compact",),
        ("seal",),
        ("reset", "--task", "score", "--yes"),
        ("export", "x.arrow"),
    ],
)
def test_an_unknown_queue_is_not_made_and_the_error_lists_those_there(
    command: Any, data: Path, arguments: tuple[str, ...]
) -> None:
    before = files(data)
    code, out, err = command(arguments[0], "rolouts", *arguments[1:])
    assert (code, out) == (2, "")
    assert "no queue 'rolouts'" in err
    assert "Its queues are: rollouts, with/slash ü." in err
    assert files(data) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reset", "rollouts", "--task", "scores", "--yes"), "no task 'scores'. There is: score."),
        (
            ("reset", "rollouts", "--task", "score", "--partition", "va", "--yes"),
            "nothing in partition 'va'. There is: val.",
        ),
        (
            ("seal", "rollouts", "--partition", "vall"),
            "no partition 'vall'. There is: default, val.",
        ),
        (("export", "rollouts", "samples.csv"), "neither .parquet nor .arrow"),
        (("ls", "nowhere"), "no folder nowhere"),
    ],
)
def test_a_mistake_exits_with_2_and_says_what_there_is(
    command: Any, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_an_error_of_the_package_is_a_message_without_a_traceback(command: Any, data: Path) -> None:
    (data / "rollouts" / "queue.json").write_text('{"format": 7, "name": "rollouts"}')
    code, _, err = command("stats", "rollouts")
    assert code == 1
    assert err.startswith("persisting-torch: queue 'rollouts'")
    assert "format 7" in err
    (data / "copied").mkdir()
    (data / "copied" / "queue.json").write_text('{"format": 1, "name": "rollouts"}')
    code, _, err = command("stats", "copied")
    assert code == 1
    assert "says it is queue 'rollouts'" in err


def test_a_damaged_ledger_is_a_message_without_a_traceback(command: Any, data: Path) -> None:
    ledger = data / "rollouts/bucket-0/ledger.sqlite"
    ledger.write_bytes(b"not a database, " * 1000)
    for name in ("stats", "verify", "compact"):
        code, _, err = command(name, "rollouts")
        assert code == 1
        assert err.startswith("persisting-torch: ")
    assert command("ls", str(data))[0] == 0


# In use, and read-only


def test_the_commands_work_on_a_queue_in_use_and_flush_nobody_elses_samples(
    command: Any, data: Path
) -> None:
    with writer(data) as other:
        tell(other, "put")
        tell(other, "wait")
        run = process("tail", "rollouts", "-n", "2", "--json", "--storage-path", str(data))
        assert [json.loads(line)["prompt"] for line in run.stdout.splitlines()] == ["put", "put"]
        assert json.loads(command("ls", str(data), "--json")[1])[0]["samples"] == 62
        for arguments in (("verify",), ("compact",), ("seal", "--partition", "val")):
            code, _, err = command(arguments[0], "rollouts", *arguments[1:])
            assert code == 0, err
        tell(other, "put")  # flushes what waited
        _, out, _ = command("verify", "rollouts", "--json")
        assert json.loads(out) == {"name": "rollouts", "samples": 83, "faults": []}


def test_tail_follows_another_process_until_it_is_stopped(data: Path) -> None:
    with writer(data) as other:
        tail = subprocess.Popen(
            [*COMMAND, "tail", "-f", str(data / "rollouts"), "-n", "1", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        assert tail.stdout is not None
        assert json.loads(tail.stdout.readline())["ids"]["shape"] == [100]
        tell(other, "put")
        found = [json.loads(tail.stdout.readline())["prompt"] for _ in range(20)]
        assert found == ["put"] * 20
        tail.terminate()
        _, errors = tail.communicate(timeout=60)
    assert tail.returncode == 128 + 15
    assert errors == ""


def test_a_read_only_queue_can_be_looked_at_and_nothing_else(data: Path) -> None:
    folder = data / "rollouts"
    looks = [["ls", str(data)], *([look, str(folder)] for look in ("stats", "head", "verify"))]
    before = files(folder)
    with read_only(folder):
        for arguments, (code, out, err) in zip(looks, as_anybody(looks), strict=True):
            assert code == 0, (arguments, err)
            assert "2 + 2" in out or "42" in out
        changes = [[care, str(folder)] for care in ("seal", "compact")]
        for code, _, err in as_anybody(changes):
            assert code == 1
            assert "is read-only" in err
    assert files(folder) == before


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    yield
    for path in paths:
        path.chmod(path.stat().st_mode | 0o200)


def as_anybody(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """Runs commands in another process to which file modes apply, whoever runs the tests."""
    code = f"""
        import contextlib, ctypes, io, json, os, sys
        if os.environ.pop("AGAIN", None) is None:
            ctypes.CDLL(None).prctl({PR_CAPBSET_DROP}, {CAP_DAC_OVERRIDE}, 0, 0, 0)
            os.execve(sys.executable, sys.orig_argv, {{**os.environ, "AGAIN": "1"}})
        from persisting_torch.cli import main
        found = []
        for command in json.loads(sys.argv[1]):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(command)
            found.append((code, out.getvalue(), err.getvalue()))
        print(json.dumps(found))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert run.returncode == 0, run.stderr
    return [tuple(answer) for answer in json.loads(run.stdout)]


def test_output_that_nobody_reads_ends_the_command_quietly(data: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [*COMMAND, "ls", str(data)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (0, "")
