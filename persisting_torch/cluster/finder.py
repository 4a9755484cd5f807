"""Who owns which bucket: asked of the nodes, in the order in which they would be given it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from persisting_torch.cluster.plane import Handler
from persisting_torch.cluster.secret import Credentials
from persisting_torch.cluster.ways import Far, Near, Way
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import BucketUnavailable, PersistingError
from persisting_torch.queue.place import Split

ASK_SECONDS = 2.0
SILENT_SECONDS = 6.0  # a little longer than it takes to replace an owner
NODES_KEPT_SECONDS = 2.0
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.25


@dataclass(frozen=True)
class Member:
    """A process that owns buckets: its name, the same after a restart, and its Flight address.

    `doubtful`: others hold it to be dead, so it is asked only if no other one answers.
    """

    name: str
    address: str
    doubtful: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Target:
    """A bucket of a queue, as every node knows it."""

    queue: str
    storage_path: str
    bucket: int
    split: Split | None = field(default=None, compare=False)
    """How a node is to make the queue where it is not there yet."""
    storage_options: Mapping[str, str] | None = field(default=None, compare=False, repr=False)
    """How a node is to reach the object store, if it has to open the bucket."""

    @property
    def header(self) -> dict[str, Any]:
        split = self.split and [self.split.num_buckets, self.split.bucket_column]
        return {
            "queue": self.queue,
            "storage_path": self.storage_path,
            "bucket": self.bucket,
            "split": split,
        }

    @property
    def opening(self) -> dict[str, Any]:
        """The header of a request that may have a node open the bucket."""
        options = self.storage_options
        return self.header | {"storage_options": dict(options) if options else None}

    def __str__(self) -> str:
        return f"bucket {self.bucket} of queue {self.queue!r}"


@dataclass(frozen=True, eq=False)
class Found:
    """The owner of a bucket, and a way to it."""

    target: Target
    way: Way
    node: str
    epoch: int
    incarnation: str

    @property
    def address(self) -> str:
        return self.way.address


def rank_nodes(nodes: Sequence[Member], target: Target) -> list[Member]:
    """Nodes in the order in which they should own a bucket, by rendezvous hashing.

    Highest random weight (Thaler and Ravishankar, "Using name-based mappings to increase hit
    rates", 1998): a node that leaves or joins moves only its own buckets. Doubtful ones come last.
    """

    def weight(node: Member) -> tuple[bool, bytes]:
        text = f"{node.name}\0{target.queue}\0{target.storage_path}\0{target.bucket}"
        return not node.doubtful, hashlib.blake2b(text.encode(), digest_size=8).digest()

    return sorted(nodes, key=weight, reverse=True)


class _Away(BucketUnavailable):
    """A bucket's owner is known, and does not answer."""


class Finder:
    """Finds the owners of buckets, and remembers them until it is told that they are gone.

    `discover` answers the nodes that are known from outside, by Pulsing or by a list.
    """

    def __init__(
        self, discover: Callable[[], Sequence[Member]], credentials: Credentials | None
    ) -> None:
        self._discover = discover
        self._credentials = credentials
        self._lock = threading.Lock()
        self._owners: dict[Target, Found] = {}
        self._ways: dict[str, Way] = {}
        self._silent: dict[str, float] = {}
        self._stayed: dict[Target, float] = {}
        self._nodes: tuple[float, list[Member]] = (-1e9, [])

    def serve_here(self, address: str, handler: Handler) -> None:
        """Say that this process's own node answers at this address: it is called directly."""
        with self._lock:
            self._ways[address] = Near(address, handler)

    def way(self, address: str) -> Way:
        """The way to the process whose Flight server listens there."""
        with self._lock:
            found = self._ways.get(address)
            if found is None:
                found = self._ways[address] = Far(address, self._credentials)
            return found

    def nodes(self, no_older: float = NODES_KEPT_SECONDS) -> list[Member]:
        """The nodes that are known, as of so many seconds ago at most."""
        with self._lock:
            when, nodes = self._nodes
        if time.monotonic() - when > no_older:
            nodes = list(self._discover())
            with self._lock:
                self._nodes = time.monotonic(), nodes
        return nodes

    def owner(self, target: Target, deadline: float) -> Found:
        """The owner of a bucket. Raises BucketUnavailable if none is found before the deadline."""
        with self._lock:
            known = self._owners.get(target)
        if known is not None and self.is_silent(known.address):
            return self._elsewhere(known)
        pause, no_older = FIRST_PAUSE, NODES_KEPT_SECONDS
        while known is None:
            known, trouble = self._look(target, self.nodes(no_older), deadline)
            if known is not None:
                with self._lock:
                    self._owners[target] = known
            elif time.monotonic() + pause >= deadline:
                raise BucketUnavailable(
                    f"{target} has no owner that answers: {trouble} Start its node again, or wait"
                    " longer."
                )
            else:
                time.sleep(pause)
                pause, no_older = min(2 * pause, LONGEST_PAUSE), LONGEST_PAUSE
        return known

    def _elsewhere(self, known: Found) -> Found:
        """Another owner, if one that was silent a moment ago has been replaced; itself if not.

        What it was asked by others was in vain, so it may cost seconds to find that out again, for
        each bucket. It is asked all the same if the next node knows of no other owner.
        """
        target, until = known.target, self._silent.get(known.address, 0.0)
        if self._stayed.get(target) == until:
            return known
        self._stayed[target] = until
        others = [node for node in self.nodes() if not self.is_silent(node.address)]
        if others:
            with suppress(PersistingError, OSError):
                known = self._ask(rank_nodes(others, target)[0], target)
                with self._lock:
                    self._owners[target] = known
        return known

    def _look(
        self, target: Target, nodes: list[Member], deadline: float
    ) -> tuple[Found | None, str]:
        """Ask the nodes in turn; the owner, or why there is none.

        Doubtful ones, which may be dead and cost seconds, only where no other one knows an owner.
        """
        trouble, is_away = "", False
        ranked = rank_nodes(nodes, target)
        for node in [node for node in ranked if not self.is_silent(node.address)] or ranked:
            if is_away and node.doubtful:
                break
            try:
                return self._ask(node, target), ""
            except (PersistingError, OSError) as error:
                is_away = is_away or isinstance(error, _Away)
                # That one which is dead does not answer says less than what a living one knows.
                trouble = trouble if trouble and node.doubtful else str(error)
            if time.monotonic() >= deadline:
                break
        return None, trouble or "there are no nodes."

    def _ask(self, node: Member, target: Target) -> Found:
        """The owner as a node knows it, if it lives; the node itself takes it if nobody lives."""
        answer = self._hear(node.address, "where", target)
        if "address" not in answer:
            raise BucketUnavailable(answer["why"])
        address = answer["address"]
        if address != node.address:
            if self.is_silent(address):
                raise _Away(f"its owner {answer['node']} at {address} does not answer.")
            try:
                self._hear(address, "alive", target)
            except BucketUnavailable as error:
                raise _Away(str(error)) from error
        return Found(
            target, self.way(address), answer["node"], answer["epoch"], answer["incarnation"]
        )

    def _hear(self, address: str, op: str, target: Target) -> dict[str, Any]:
        header = target.opening if op == "where" else target.header
        return self.hear(address, {"op": op, **header})

    def hear(self, address: str, question: dict[str, Any]) -> dict[str, Any]:
        """What a process answers at once; one that does not counts as silent for a while."""
        began = time.monotonic()
        try:
            answer = self.way(address).ask(Message(question), ASK_SECONDS).header
        except BucketUnavailable:
            if time.monotonic() - began > ASK_SECONDS / 2:
                self._note_silence(address)
            raise
        self._silent.pop(address, None)
        return answer

    def _note_silence(self, address: str) -> None:
        """It costs much to ask one that is halted, so it is left alone for a while."""
        self._silent[address] = time.monotonic() + SILENT_SECONDS

    def is_silent(self, address: str) -> bool:
        """Whether it did not answer a moment ago."""
        return time.monotonic() < self._silent.get(address, 0.0)

    def forget(self, owner: Found, *, silent: bool = False) -> None:
        """Look for the owner anew the next time; if it was silent, not first with its own node."""
        if silent:
            self._note_silence(owner.address)
        with self._lock:
            if self._owners.get(owner.target) is owner:
                del self._owners[owner.target]

    def close(self) -> None:
        with self._lock:
            ways = list(self._ways.values())
            self._ways.clear()
        for way in ways:
            way.close()
