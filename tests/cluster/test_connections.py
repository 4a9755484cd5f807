"""Connections on which nothing comes any more, as after a network that was away for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pyarrow as pa
import pytest

from persisting_torch import BucketUnavailable
from persisting_torch.cluster.peer import Peer
from persisting_torch.cluster.plane import Server
from persisting_torch.cluster.secret import Credentials, credentials
from persisting_torch.cluster.ways import MOST_IN_FLIGHT, Far
from persisting_torch.cluster.wire import Message
from tests.cluster.relay import Relay

TABLE = pa.table({"a": range(100)})
HEADER = {"op": "rows", "queue": "q", "storage_path": "/data", "bucket": 0}

CALLS = {
    "ask": lambda peer, timeout: peer.ask(Message(HEADER), timeout),
    "get": lambda peer, timeout: peer.get(Message(HEADER), timeout),
    "put": lambda peer, timeout: peer.put(Message(HEADER), TABLE, timeout),
}


@pytest.fixture(params=[None, "a secret of tests"], ids=["open", "secured"])
def secret(request: pytest.FixtureRequest) -> Credentials | None:
    return request.param and credentials(request.param)


@pytest.fixture
def relay(secret: Credentials | None) -> Iterator[Relay]:
    def handler(request: Message, table: pa.Table | None) -> tuple[Message, pa.Table]:
        return Message({"op": request.header["op"]}), TABLE

    with ExitStack() as stack:
        server = stack.enter_context(closing(Server("127.0.0.1", handler, secret)))
        yield stack.enter_context(closing(Relay(server.address)))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_call_after_one_without_an_answer_has_a_new_connection(
    relay: Relay, secret: Credentials | None, call: Callable[[Peer, float], object]
) -> None:
    with closing(Peer(relay.address, secret)) as peer:
        call(peer, 20.0)
        call(peer, 20.0)
        assert relay.connections == 1
        relay.cut()
        with pytest.raises(BucketUnavailable, match="did not answer in time"):
            call(peer, 0.5)
        call(peer, 20.0)
        call(peer, 20.0)
        assert relay.connections == 2


def test_calls_that_are_left_alone_keep_no_others_out(
    relay: Relay, secret: Credentials | None
) -> None:
    with closing(Far(relay.address, secret)) as way, ThreadPoolExecutor(MOST_IN_FLIGHT) as pool:
        way.get(Message(HEADER), 20.0)
        relay.cut()
        left = [pool.submit(way.get, Message(HEADER), 600.0) for _ in range(MOST_IN_FLIGHT)]
        for one in left:
            with pytest.raises(BucketUnavailable, match="did not answer in time"):
                one.result(30)
        answered = threading.Event()
        asked = threading.Thread(
            target=lambda: way.ask(Message(HEADER), 600.0) and answered.set(), daemon=True
        )
        asked.start()
        assert answered.wait(30)
        asked.join()


def test_calls_that_a_process_is_at_count_though_they_were_left_alone() -> None:
    at_work, over = 0, threading.Event()

    def handler(request: Message, table: pa.Table | None) -> tuple[Message, pa.Table]:
        nonlocal at_work
        at_work += request.header["op"] == "rows"
        over.wait(60)
        return Message({}), TABLE

    with ExitStack() as stack:
        server = stack.enter_context(closing(Server("127.0.0.1", handler, None)))
        stack.callback(over.set)
        way = stack.enter_context(closing(Far(server.address, None)))
        pool = stack.enter_context(ThreadPoolExecutor(2 * MOST_IN_FLIGHT))
        calls = [pool.submit(way.get, Message(HEADER), 60.0) for _ in range(2 * MOST_IN_FLIGHT)]
        for call in calls:
            with pytest.raises(BucketUnavailable, match="did not answer in time"):
                call.result(30)
        assert at_work == MOST_IN_FLIGHT
        over.set()
