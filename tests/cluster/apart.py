"""Nodes on one machine that see each other as nodes on several machines do.

Each process has a mount namespace of its own, in which the storage path is a folder of its own.
That takes root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
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


def run(*command: str, inside: Member | None = None) -> None:
    """A command in the namespaces of a process."""
    enter = [] if inside is None else ["nsenter", "-t", str(inside.pid), "-n", "-m"]
    subprocess.run([*enter, *command], check=True, capture_output=True)


def leave_network() -> None:
    """This process has a network of its own, with nothing in it, and mounts of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    _succeed(libc.unshare(NEW_MOUNTS | NEW_NETWORK))
    _succeed(libc.mount(b"none", b"/", None, PRIVATE, None))


class Network(Cluster):
    """A cluster each of whose processes is a machine of its own in one network.

    Its switch is in the network of a process that does nothing else. They share storage.
    """

    def __init__(self) -> None:
        super().__init__(passphrase="the sea is wide")
        if os.geteuid() or not shutil.which("ip") or not shutil.which("nsenter"):
            pytest.skip("needs root, ip and nsenter")
        self.switch = Member()
        self.others.append(self.switch)
        self._count = 0
        try:
            self.switch.call(leave_network)
            run("ip", "link", "add", "switch", "type", "bridge", inside=self.switch)
            run("ip", "link", "set", "switch", "up", inside=self.switch)
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__(None, None, None)
            pytest.skip(f"needs the right to make networks: {error}")

    def machine(self, member: Member) -> str:
        """Make the process a machine of its own; its address."""
        self._count += 1
        ip, port = f"10.77.0.{self._count}", f"port{self._count}"
        member.call(leave_network)
        run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth", inside=self.switch)
        run("ip", "link", "set", "eth", "netns", str(member.pid), inside=self.switch)
        run("ip", "link", "set", port, "master", "switch", inside=self.switch)
        run("ip", "link", "set", port, "up", inside=self.switch)
        run("ip", "address", "add", f"{ip}/24", "dev", "eth", inside=member)
        run("ip", "link", "set", "eth", "up", inside=member)
        run("ip", "link", "set", "lo", "up", inside=member)
        member.port = port
        return ip

    def _join(self, member: Member, **options: Any) -> None:
        options["addr"] = f"{self.machine(member)}:7000"
        super()._join(member, **options)

    def cut(self, member: Member) -> None:
        run("ip", "link", "set", member.port, "down", inside=self.switch)

    def mend(self, member: Member) -> None:
        run("ip", "link", "set", member.port, "up", inside=self.switch)

    def hide(self, member: Member, path: str) -> None:
        """Let it find nothing in the folder, as if the machine that has it were out of reach."""
        run("mount", "-t", "tmpfs", "none", path, inside=member)

    def show(self, member: Member, path: str) -> None:
        run("umount", path, inside=member)


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
