"""This machine and its processes: who is who, and who is alive."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path


@functools.cache
def host() -> str:
    """This machine's name and id, the same after it has booted again."""
    machine_id = Path("/etc/machine-id")
    number = machine_id.read_text().strip() if machine_id.exists() else ""
    return f"{socket.gethostname()}/{number}"


@functools.cache
def boot() -> str:
    """This run of this machine's kernel."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else ""


@functools.cache
def processes() -> str:
    """The processes that this one can see by their numbers: those of one kernel, or a container."""
    namespace = Path("/proc/self/ns/pid")
    return f"{boot()}/{os.readlink(namespace)}" if namespace.exists() else boot()


def born(pid: int) -> str:
    """When a process started, as the kernel counts; "" if there is none (or only its corpse)."""
    about = _about(pid)
    if about is None:
        return "" if Path("/proc/self").exists() else _known_alive(pid)
    return "" if about[0] in "ZX" else about[19]


def is_stopped(pid: int) -> bool:
    """Whether a process is halted by SIGSTOP or by a debugger."""
    about = _about(pid)
    return about is not None and about[0] in "Tt"


def _about(pid: int) -> list[str] | None:
    """What the kernel says of a process after its name, its state first."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()


def _known_alive(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        return "alive"
    return "alive"
