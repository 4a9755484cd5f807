"""Asking the owner of a bucket: who is held to be silent, and who only has bad news."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from persisting_torch import BucketUnavailable
from persisting_torch.cluster.bucket import Bucket
from persisting_torch.cluster.finder import Finder, Member, Target
from persisting_torch.cluster.plane import Server
from persisting_torch.cluster.wire import Message

TARGET = Target("q", "/data", 0)
Say = Callable[[], Message]


class Owner:
    """A process that says that it owns the bucket, and of anything else what the test wants.

    `knows`: the process that it says owns it instead; None where it sees none.
    """

    def __init__(self, name: str = "node") -> None:
        self.name = name
        self.knows: Owner | None = self
        self.say: Say = lambda: Message({})
        self.asked: list[str] = []
        self.server = Server("127.0.0.1", self.answer, None)
        self.member = Member(name, self.server.address)
        self.finder = Finder(lambda: [self.member], None)

    def answer(self, request: Message, table: Any) -> tuple[Message, None]:
        op = request.header["op"]
        self.asked.append(op)
        if op == "where":
            if self.knows is None:
                raise BucketUnavailable("it lies on storage that this node does not see")
            node, address = self.knows.name, self.knows.server.address
            own = {"address": address, "node": node, "epoch": 1, "incarnation": "i"}
            return Message(own), None
        return (Message({}) if op == "alive" else self.say()), None

    def close(self) -> None:
        self.finder.close()
        self.server.close()


@pytest.fixture
def owner() -> Iterator[Owner]:
    with closing(Owner()) as found:
        yield found


def ask(owner: Owner) -> None:
    bucket = Bucket(owner.finder, TARGET, limit=1.5)
    with pytest.raises(BucketUnavailable, match=r"waited 1.5 s for the owner of bucket 0"):
        bucket.ask("rows", seconds=1.2)


def test_an_owner_that_cannot_reach_another_is_not_silent(owner: Owner) -> None:
    def say() -> Message:
        time.sleep(1.1)
        raise BucketUnavailable("bucket 0 of queue 'q' has no owner that answers")

    owner.say = say
    ask(owner)
    assert not owner.finder.is_silent(owner.server.address)


def test_an_owner_that_does_not_answer_is_left_alone_for_a_while(owner: Owner) -> None:
    owner.say = lambda: time.sleep(1.4) or Message({})  # type: ignore[func-returns-value]
    ask(owner)
    assert owner.finder.is_silent(owner.server.address)


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "still the owner"])
def test_an_owner_that_was_silent_is_looked_for_once_before_it_is_asked_for_another_bucket(
    owner: Owner, replaced: bool
) -> None:
    with closing(Owner("other")) as other:
        other.knows = owner
        finder = Finder(lambda: [owner.member, other.member], None)
        targets = [Target("q", "/data", number) for number in range(8)]
        found = [finder.owner(target, time.monotonic() + 20) for target in targets]
        assert {one.node for one in found} == {"node"}
        if replaced:
            other.knows = other
        finder.forget(found[0], silent=True)
        other.asked.clear()
        for _ in range(3):
            now = [finder.owner(target, time.monotonic() + 20) for target in targets[1:]]
            assert {one.node for one in now} == {"other" if replaced else "node"}
        assert other.asked == ["where"] * len(targets[1:])
        finder.close()


def test_one_that_others_hold_to_be_dead_is_asked_where_no_other_knows_an_owner(
    owner: Owner,
) -> None:
    with closing(Owner("living")) as living, closing(Owner("dead")) as dead:
        doubtful = replace(owner.member, doubtful=True)
        finder = Finder(lambda: [doubtful, living.member], None)
        targets = [Target("q", "/data", number) for number in range(3)]
        assert finder.owner(targets[0], time.monotonic() + 20).node == "living"
        assert owner.asked == []
        living.knows = None
        assert finder.owner(targets[1], time.monotonic() + 20).node == "node"
        assert owner.asked == ["where"]
        living.knows = dead
        dead.close()
        with pytest.raises(BucketUnavailable, match=f"process at {dead.server.address} does not"):
            finder.owner(targets[2], time.monotonic() + 0.2)
        assert owner.asked == ["where"]
        finder.close()


def test_where_all_are_held_to_be_dead_those_that_answer_are_found(owner: Owner) -> None:
    finder = Finder(lambda: [replace(owner.member, doubtful=True)], None)
    assert finder.owner(TARGET, time.monotonic() + 20).node == "node"
    finder.close()
