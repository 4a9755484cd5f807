"""The producers of a queue as its ledger knows them, and what has become of each."""

from __future__ import annotations

import os
import sqlite3
import time
from dataclasses import dataclass

from persisting_torch.queue.host import born, is_stopped, processes

SILENT_SECONDS = 10.0
HANGING_SECONDS = 60.0
LONGEST_STEP_SECONDS = 5.0
KEPT_SECONDS = 86_400.0
MOST_KEPT = 256


@dataclass(frozen=True, slots=True)
class Registered:
    """One producer's row; `host` says among which processes `pid` counts."""

    name: str
    host: str
    pid: int
    started: float
    born: str
    beat: float
    state: str
    cause: str | None
    essential: int

    @property
    def is_here(self) -> bool:
        return self.host == processes()

    @property
    def lives(self) -> bool:
        """Whether its process is there, or was heard of lately where it cannot be seen."""
        if self.state != "alive":
            return False
        heard = time.time() - self.beat < SILENT_SECONDS
        if not self.is_here:
            return heard
        return born(self.pid) == self.born and (heard or not is_stopped(self.pid))

    def __str__(self) -> str:
        return f"process {self.pid}" + ("" if self.is_here else " on another host")


def registered(tx: sqlite3.Connection) -> list[Registered]:
    """All producers that the ledger knows."""
    columns = "name, host, pid, started, born, beat, state, cause, essential"
    return [Registered(*row) for row in tx.execute(f"SELECT {columns} FROM producers")]


def forget_old(tx: sqlite3.Connection) -> None:
    """Keep of the producers that have ended those of a day, and not too many."""
    tx.execute(
        "DELETE FROM producers WHERE state != 'alive'"
        " AND name NOT IN (SELECT producer FROM leased)"
        " AND (beat < ? OR name NOT IN (SELECT name FROM producers WHERE state != 'alive'"
        " ORDER BY beat DESC LIMIT ?))",
        (time.time() - KEPT_SECONDS, MOST_KEPT),
    )


class Fates:
    """What has become of producers, as one process finds out by looking now and then.

    A silence is the time over which this process has looked and heard nothing, not what clocks
    say: a machine that was suspended has silenced nobody.
    """

    def __init__(self) -> None:
        self._heard: dict[str, tuple[float, float, float]] = {}

    def fate(self, one: Registered) -> str | None:
        """How a producer has ended; None for one that lives, or is done."""
        if one.state != "alive":
            return f"failed: {one.cause}" if one.state == "failed" else None
        if one.is_here and one.pid == os.getpid() and one.born == born(one.pid):
            return None
        silent = self._silence(one)
        if not one.is_here:
            if silent < SILENT_SECONDS:
                return None
            return f"failed: {one} was not heard of for {silent:.0f} s, its host may be lost"
        if born(one.pid) != one.born:
            ago = max(0.0, time.time() - one.beat)
            return f"failed: {one} died, {ago:.0f} s after its last beat"
        if silent >= SILENT_SECONDS and is_stopped(one.pid):
            return f"failed: {one} has been stopped (SIGSTOP, or a debugger) for {silent:.0f} s"
        if silent >= HANGING_SECONDS:
            return f"failed: {one} hangs, it lives and was not heard of for {silent:.0f} s"
        return None

    def _silence(self, one: Registered) -> float:
        now = time.monotonic()
        beat, looked, silent = self._heard.get(one.name, (one.beat, now, 0.0))
        silent = silent + min(now - looked, LONGEST_STEP_SECONDS) if beat == one.beat else 0.0
        self._heard[one.name] = (one.beat, now, silent)
        return silent
