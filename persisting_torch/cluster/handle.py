"""The way to a cluster for processes that do not join it, such as the workers of a DataLoader."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from persisting_torch.cluster.finder import Finder, Member
from persisting_torch.cluster.peer import refuse_after_fork
from persisting_torch.cluster.secret import Credentials
from persisting_torch.errors import BucketUnavailable


@dataclass(frozen=True)
class Handle:
    """The nodes that were known when this was made, and the credentials; small, can be pickled.

    Who has it can do all that a member can do: it holds the cluster's secret.
    """

    nodes: tuple[Member, ...]
    credentials: Credentials | None

    def finder(self) -> Finder:
        """The finder of this process, which keeps the list of nodes fresh by asking them."""
        refuse_after_fork()
        with _lock:
            found = _finders.get(self)
            if found is None:
                nodes = _Nodes(self.nodes)
                found = _finders[self] = Finder(nodes, self.credentials)
                nodes.finder = found
            return found


class _Nodes:
    """The nodes, as the first of those tells that were known before; the same if none answers."""

    finder: Finder

    def __init__(self, nodes: tuple[Member, ...]) -> None:
        self._given = nodes
        self._known = nodes

    def __call__(self) -> list[Member]:
        for node in sorted(dict.fromkeys((*self._known, *self._given)), key=self._doubt):
            try:
                answer = self.finder.hear(node.address, {"op": "nodes"})
            except BucketUnavailable:
                continue  # whoever asks it for a bucket will say so
            told = tuple(Member(*known) for known in answer["nodes"])
            if told:
                self._known = told
                break
        return list(self._known)

    def _doubt(self, node: Member) -> tuple[bool, bool]:
        return self.finder.is_silent(node.address), node.doubtful


def adopt(handle: Handle) -> None:
    """From now on, queues of this process are those of that cluster, which it does not join."""
    global _adopted
    _adopted = handle


def adopted() -> Handle | None:
    """The way to the cluster that this process uses without being part of it."""
    return _adopted


_adopted: Handle | None = None
_finders: dict[Handle, Finder] = {}
_lock = threading.Lock()
