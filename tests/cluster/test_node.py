"""A node and the buckets that it owns, whatever answers for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from persisting_torch.cluster.keeping import Key
from persisting_torch.cluster.node import Node
from persisting_torch.cluster.plane import Peer
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import StaleOwner
from persisting_torch.queue import ownership as owners
from persisting_torch.queue.ownership import Ownership


class Service:
    """Answers for a bucket, and says nothing."""

    def __init__(self, key: Key, ownership: Ownership) -> None:
        self.key = key
        self.ownership = ownership

    def answer(self, request: Message, table: Any) -> Any:
        return Message({}), None

    def settle(self, limit: float, *, anyway: bool) -> bool:
        return True

    def close(self) -> None: ...

    def abandon(self) -> None: ...


Ask = Callable[..., dict[str, Any]]


@contextmanager
def opened(path: Path, service: type[Service]) -> Iterator[tuple[Node, Ask]]:
    """A node, and a way to ask it for a bucket of a queue of four."""
    node = Node("a", "127.0.0.1", None, service)
    peer = Peer(node.server.address, None)
    key = {"queue": "q", "storage_path": str(path)}

    def ask(op: str, bucket: int = 0) -> dict[str, Any]:
        return peer.ask(
            Message({"op": op, **key, "bucket": bucket, "split": [4, None]}), 5.0
        ).header

    try:
        yield node, ask
    finally:
        peer.close()
        node.close()


class Replaced(Service):
    """Its node has another after it before it fails."""

    def answer(self, request: Message, table: Any) -> Any:
        owner = self.ownership.owner
        assert Ownership.take(self.ownership.bucket, owner.epoch, "b", "b", "b:1") is not None
        time.sleep(2 * owners.TRUSTED_SECONDS)
        raise KeyError("there is no such sample")


def test_an_owner_that_was_replaced_does_not_even_say_that_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(owners, "TRUSTED_SECONDS", 0.1)
    with opened(tmp_path, Replaced) as (_, ask):
        assert ask("where")["node"] == "a"
        with pytest.raises(StaleOwner, match="taken over from this process"):
            ask("figures")


class Closing(Service):
    """Bucket 0 is closed once the others are; these only when all of them are about to be."""

    others = threading.Barrier(3, timeout=10.0)
    closed: list[int] = []  # noqa: RUF012

    def close(self) -> None:
        if self.key.bucket:
            self.others.wait()
        self.closed.append(self.key.bucket)


def test_buckets_are_closed_together_and_the_ledger_last(tmp_path: Path):
    with opened(tmp_path, Closing) as (node, ask):
        assert [ask("where", bucket)["node"] for bucket in range(4)] == ["a"] * 4
        node.close()
        assert sorted(Closing.closed[:3]) == [1, 2, 3]
        assert Closing.closed[3:] == [0]
