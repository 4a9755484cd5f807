"""Large puts of a process that sees the storage: it writes the rows, and tells the owner."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from persisting_torch import BucketUnavailable, Queue
from persisting_torch.cluster.remote import NEAR_BYTES
from persisting_torch.errors import FlushFailed
from persisting_torch.queue.threads import Background
from tests.cluster.nodes import Cluster, Member, buckets_owned, shut_down

WIDTH = 128
ROWS = 2 * NEAR_BYTES // (WIDTH * 8)


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster() as cluster:
        cluster.grow(2)
        yield cluster


@pytest.fixture(scope="module")
def client(shared: Cluster) -> Member:
    return shared.client()


def batch(number: int, rows: int = ROWS) -> TensorDict:
    ids = torch.arange(rows) + number * ROWS
    return TensorDict({"id": ids, "x": ids[:, None].expand(rows, WIDTH)}, batch_size=[rows])


def appenders(queue: Queue) -> list[Any]:
    return list(queue.engine.committer.appenders)  # type: ignore[attr-defined]


def asked(queue: Queue) -> list[str]:
    """What the owners are asked for from now on, in its order."""
    ops: list[str] = []
    for appender in appenders(queue):
        for way in ("ask", "put"):
            note(appender.bucket, way, ops)
    return ops


def note(bucket: Any, way: str, ops: list[str]) -> None:
    call = getattr(bucket, way)

    def noting(op: str, *given: Any, **options: Any) -> Any:
        ops.append(op)
        return call(op, *given, **options)

    setattr(bucket, way, noting)


def the_first_time(appender: Any, instead: Callable[[Callable[[], Any]], Any]) -> None:
    """Let this happen instead of the first `append_written`, given what would do it."""
    ask, done = appender.bucket.ask, []

    def asking(op: str, *given: Any, **options: Any) -> Any:
        if op != "append_written" or done:
            return ask(op, *given, **options)
        done.append(op)
        return instead(lambda: ask(op, *given, **options))

    appender.bucket.ask = asking


def ids_and_values(queue: Queue) -> list[int]:
    """The ids of all samples, whose values are what was put."""
    queue.sync.reset_consumption("check")
    meta = queue.sync.get_meta(["id", "x"], len(queue), "check")
    data = queue.sync.get_data(meta)
    assert (data["x"] == data["id"][:, None]).all()
    return data["id"].tolist()


def put_some(path: str, num_buckets: int) -> tuple[list[str], list[int]]:
    with Queue("q", path, num_buckets=num_buckets, batch_size=10) as queue:
        ops = asked(queue)
        for number in range(4):
            queue.sync.put(batch(number))
        queue.sync.put(batch(4, 20))
        return ops, ids_and_values(queue)


def test_large_puts_send_no_rows_once_the_fields_are_known(client: Member, tmp_path: Path) -> None:
    ops, ids = client.call(put_some, str(tmp_path), 1)
    assert ops == ["append", *3 * ["append_written"], "append"]
    assert ids == list(range(4 * ROWS + 20))


def test_several_buckets_are_written_alike(client: Member, tmp_path: Path) -> None:
    ops, ids = client.call(put_some, str(tmp_path), 2)
    assert ops.count("append_written") == 6
    assert sorted(ids) == list(range(4 * ROWS + 20))


def put_with_trouble(path: str, trouble: str) -> tuple[list[str], list[int], int]:
    with Queue("q", path, num_buckets=2, batch_size=10) as queue:
        queue.sync.put(batch(0))
        first, second = appenders(queue)
        if trouble == "the answer is lost":
            the_first_time(first, _lose_answer)
        elif trouble == "the request is lost":
            the_first_time(second, _lose_request)
        ops = asked(queue)
        with pytest.raises(FlushFailed, match="lost"):
            queue.sync.put(batch(1))
        waiting = len(queue)
        queue.sync.put(batch(2))
        return ops, ids_and_values(queue), waiting


def _lose_answer(ask: Callable[[], Any]) -> Any:
    ask()
    raise BucketUnavailable("the answer was lost")


def _lose_request(ask: Callable[[], Any]) -> Any:
    raise BucketUnavailable("the request was lost")


@pytest.mark.parametrize("trouble", ["the answer is lost", "the request is lost"])
def test_what_a_failed_put_has_left_is_put_once(
    client: Member, tmp_path: Path, trouble: str
) -> None:
    _, ids, waiting = client.call(put_with_trouble, str(tmp_path), trouble)
    assert waiting == 2 * ROWS
    assert sorted(ids) == list(range(3 * ROWS))


def tell_twice(path: str) -> tuple[list[bool], list[int]]:
    """One put, told of twice by the same files, as by who did not hear the answer."""
    with Queue("q", path, num_buckets=1, batch_size=10) as queue:
        queue.sync.put(batch(0))
        told: list[bool] = []
        (appender,) = appenders(queue)

        def twice(ask: Callable[[], Any]) -> Any:
            told.extend(ask().header["done"] for _ in range(2))
            return ask()

        the_first_time(appender, twice)
        queue.sync.put(batch(1))
        return told, ids_and_values(queue)


def test_an_owner_that_is_told_twice_takes_the_rows_once(client: Member, tmp_path: Path) -> None:
    told, ids = client.call(tell_twice, str(tmp_path))
    assert told == [True, True]
    assert ids == list(range(2 * ROWS))


def put_what_the_owner_does_not_see(path: str) -> tuple[list[str], list[int]]:
    with Queue("q", path, num_buckets=1, batch_size=10) as queue:
        queue.sync.put(batch(0))
        (appender,) = appenders(queue)
        near = appender.store.near()
        stage = near.stage

        def unseen(table: Any) -> Any:
            written = stage(table)
            near.discard([f"data/{file.path}" for part in written for file in part.files])
            return written

        near.stage = unseen
        ops = asked(queue)
        queue.sync.put(batch(1))
        near.stage = _refused
        queue.sync.put(batch(2))
        return ops, ids_and_values(queue)


def _refused(table: Any) -> Any:
    raise PermissionError("this process may only read there")


def leave_in_a_put() -> None:
    """Have this node leave when rows were entered, and their put is not answered yet."""
    from persisting_torch.cluster.replica import Replica

    mark, leaving = Replica.mark, []

    def slow(replica: Replica) -> Any:
        if not leaving:
            leaving.append(Background(shut_down))
            deadline = time.monotonic() + 1.0
            while not replica.closed and time.monotonic() < deadline:
                time.sleep(0.01)
        return mark(replica)

    Replica.mark = slow  # type: ignore[method-assign]


def put_three(path: str, rows: int) -> list[int]:
    with Queue("q", path, num_buckets=1, batch_size=1) as queue:
        for number in range(3):
            queue.sync.put(batch(number, rows))
        return ids_and_values(queue)


@pytest.mark.parametrize("rows", [8, ROWS], ids=["sent", "written"])
def test_a_put_is_answered_or_done_elsewhere_when_its_owner_leaves(
    tmp_path: Path, rows: int
) -> None:
    with Cluster() as nodes:
        nodes.grow(2)
        client = nodes.client()
        first = client.call(put_three, str(tmp_path), rows)
        (owner,) = [node for node in nodes.nodes if node.call(buckets_owned)]
        owner.call(leave_in_a_put)
        found = client.call(put_three, str(tmp_path), rows)
    assert len(first) == 3 * rows
    assert sorted(found) == sorted(first + first)


def test_rows_are_sent_where_files_do_not_reach_the_owner(client: Member, tmp_path: Path) -> None:
    ops, ids = client.call(put_what_the_owner_does_not_see, str(tmp_path))
    assert ops == ["append_written", "append", "append"]
    assert ids == list(range(3 * ROWS))


def put_and_die(path: str) -> None:
    queue = Queue("q", path, num_buckets=1, batch_size=10)
    queue.sync.put(batch(0))
    the_first_time(appenders(queue)[0], lambda ask: os.kill(os.getpid(), signal.SIGKILL))
    queue.sync.put(batch(1))


def put_and_read(path: str) -> list[int]:
    with Queue("q", path, batch_size=10) as queue:
        queue.sync.put(batch(2))
        return ids_and_values(queue)


def test_files_of_a_writer_that_died_are_nobodys_rows(shared: Cluster, tmp_path: Path) -> None:
    writer = shared.client()
    writer.begin(put_and_die, str(tmp_path))
    writer.await_end()
    assert len(list(tmp_path.glob("*/bucket-0/data.lance/data/*"))) == 2
    ids = shared.client().call(put_and_read, str(tmp_path))
    assert ids == [*range(ROWS), *range(2 * ROWS, 3 * ROWS)]
