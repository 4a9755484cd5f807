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


def born(pid: int) -> str:
    """When a process started, as the kernel counts; "" if there is none (or only its corpse)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "" if Path("/proc/self").exists() else _known_alive(pid)
    after_name = stat.rpartition(")")[2].split()
    return "" if after_name[0] in "ZX" else after_name[19]


def _known_alive(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        return "alive"
    return "alive"
