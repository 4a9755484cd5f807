"""Nodes on one machine that see each other as nodes on several machines do.

Each process has a mount namespace of its own, in which the storage path is a folder of its own.
That takes root.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Cluster, Member

NEW_MOUNTS, NEW_NETWORK = 0x00020000, 0x40000000
PRIVATE, BIND = 1 << 18 | 1 << 14, 1 << 12


def _succeed(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def see_own(path: str, own: str) -> None:
    """From now on `path` is for this process what `own` is for others."""
    libc = ctypes.CDLL(None, use_errno=True)
    _succeed(libc.unshare(NEW_MOUNTS))
    _succeed(libc.mount(b"none", b"/", None, PRIVATE, None))
    _succeed(libc.mount(own.encode(), path.encode(), None, BIND, None))


class OwnStorage(Cluster):
    """A cluster each of whose nodes has storage of its own, under a path that is the same for all.

    Clients have empty storage there.
    """

    def __init__(self, path: str, storage: Path) -> None:
        super().__init__()
        if os.geteuid():
            pytest.skip("needs root")
        self.path = path
        self.storage = storage

    def own(self, name: str) -> Path:
        """What a node has at the path."""
        folder = self.storage / (name or "client")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _join(self, member: Member, **options: Any) -> None:
        try:
            member.call(see_own, self.path, str(self.own(member.name)))
        except PermissionError:
            pytest.skip("needs the right to make mount namespaces")
        super()._join(member, **options)
