"""Buckets follow the nodes: each is handed over to the node that would be given it today.

Whoever is asked first takes the buckets that nobody owns, so those who start first have all of
them. Once a second each node looks whether another one is to have one of its buckets, by
rendezvous hashing over those that are there for a while already and see the same files. It gives
one bucket up, in order, and has the other take it at once; whoever asks meanwhile asks again.

A bucket only ever moves to a node of a greater weight than its owner's. So nodes that see different
members may disagree about who is to have it, but never send it to and fro.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from persisting_torch.cluster.finder import Member, Target, rank_nodes
from persisting_torch.cluster.plane import Peer
from persisting_torch.cluster.secret import Credentials
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import PersistingError
from persisting_torch.queue.ownership import read_owner
from persisting_torch.queue.place import found_at, open_place
from persisting_torch.queue.threads import Background

if TYPE_CHECKING:
    from persisting_torch.cluster.keeping import Key
    from persisting_torch.cluster.node import Node

log = logging.getLogger(__name__)

STABLE_SECONDS = 10.0  # for which a node has to be a member before it is handed anything
APART_SECONDS = 1.0  # between two buckets that a node hands over
TAKE_SECONDS = 5.0  # in which the new owner has to take a bucket
LEFT_ALONE_SECONDS = 60.0  # for which a node that did not is handed nothing
ASK_SECONDS = 2.0
PAUSE_SECONDS = 0.1


def owner_seen(key: Key, options: dict[str, str] | None) -> str:
    """The incarnation of a bucket's owner as this machine's files tell; "" if they do not."""
    if found_at(key.queue, key.storage_path, options) is None:
        return ""
    place = open_place(key.queue, key.storage_path, storage_options=options)
    place = place.of_bucket(key.bucket)
    owner = read_owner(place.bucket, place.files)
    return "" if owner is None else owner.incarnation


class Mover:
    """Hands the buckets of one node over to others, one at a time."""

    def __init__(self, node: Node, credentials: Credentials | None) -> None:
        self._node = node
        self._credentials = credentials
        self._since: dict[Member, float] = {}
        self._left_alone: dict[tuple[str, ...], float] = {}
        self._due = 0.0
        self._round: Background | None = None
        self._ended = False

    def look(self) -> None:
        """Begin a round if one is due. Returns at once."""
        running = self._round is not None and self._round.is_alive()
        if not running and not self._ended and time.monotonic() >= self._due:
            self._round = Background(self._go_round)

    def end(self, limit: float) -> None:
        """Begin nothing more, and wait for what is under way, `limit` seconds at most."""
        self._ended = True
        if self._round is not None:
            self._round.join(limit)

    def _go_round(self) -> None:
        try:
            self._move_one()
        except Exception as error:  # the next round may do better
            if not self._ended:
                expected = isinstance(error, PersistingError | OSError)
                log.warning(
                    "%s cannot hand buckets over: %s",
                    self._node.name,
                    error,
                    exc_info=not expected,
                )
        finally:
            self._due = time.monotonic() + APART_SECONDS

    def _move_one(self) -> None:
        stable = self._stable(self._node.discover())
        for key in self._node.owned():
            for to in self._better(key, stable):
                if self._ended:
                    return
                if self._sees(to, key) and self._hand_over(key, to):
                    return

    def _stable(self, members: Sequence[Member]) -> list[Member]:
        """Those of the other nodes that have been members without a break for long enough."""
        now, own = time.monotonic(), self._node.member
        others = [
            node
            for node in members
            if own.name != node.name and own.address != node.address and not node.doubtful
        ]
        self._since = {node: self._since.get(node, now) for node in others}
        self._left_alone = {key: until for key, until in self._left_alone.items() if until > now}
        return [node for node, since in self._since.items() if now - since >= STABLE_SECONDS]

    def _better(self, key: Key, stable: Sequence[Member]) -> Iterator[Member]:
        """The nodes that come before this one, but for those that are left alone for now."""
        own = self._node.member
        ranked = rank_nodes([own, *stable], Target(*key))
        for node in takewhile(lambda node: node is not own, ranked):
            alone = (node.address,), (node.address, key.queue, key.storage_path)
            if self._left_alone.keys().isdisjoint(alone):
                yield node

    def _sees(self, node: Member, key: Key) -> bool:
        """Whether a node answers, and finds in the bucket's folder that this one owns it."""
        try:
            seen = self._ask(node, "sees", key)["incarnation"]
        except PersistingError as error:
            log.info("%s is handed nothing: %s", node.name, error)
            self._leave_alone(node.address)
            return False
        if seen != self._node.incarnation:
            self._leave_alone(node.address, key.queue, key.storage_path)
        return bool(seen == self._node.incarnation)

    def _leave_alone(self, *what: str) -> None:
        self._left_alone[what] = time.monotonic() + LEFT_ALONE_SECONDS

    def _hand_over(self, key: Key, to: Member) -> bool:
        """Whether it was given up: not while somebody has the queue alone."""
        if not self._node.give_up(key, TAKE_SECONDS):
            return False
        taken = False
        try:
            taken = self._is_taken(key, to)
        finally:
            self._node.want_again(key)
            if not taken:
                self._leave_alone(to.address)
        if taken:
            log.info("%s has handed %s over to %s", self._node.name, key, to.name)
        elif not self._ended:
            log.warning("%s did not take %s, which was handed over to it", to.name, key)
            self._node.answer(Message({"op": "where", **key._asdict()}), None)
        return True

    def _is_taken(self, key: Key, to: Member) -> bool:
        """Have the new owner take it, so that the first who asks for it need not wait."""
        deadline = time.monotonic() + TAKE_SECONDS
        while not self._ended and time.monotonic() < deadline:
            try:
                address = self._ask(to, "where", key).get("address")
            except PersistingError:
                address = None
            if address is None and self._node.is_free(key):
                return False  # it does not even try
            if address not in (None, self._node.member.address):
                return True
            time.sleep(PAUSE_SECONDS)  # it is at it, or sees the files as they were a moment ago
        return False

    def _ask(self, node: Member, op: str, key: Key) -> dict[str, Any]:
        peer = Peer(node.address, self._credentials)
        header = {"op": op, **key._asdict(), "storage_options": self._node.options_for(key)}
        try:
            return peer.ask(Message(header), ASK_SECONDS).header
        finally:
            peer.close()
