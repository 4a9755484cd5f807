"""How long a queue keeps what its tasks have consumed: the setting, as given and as stored."""

from __future__ import annotations

import json
import math
import sqlite3
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

Kind = Literal["all", "consumed", "rows", "seconds"]
Given: TypeAlias = "Literal['all', 'consumed'] | int | float | timedelta"


@dataclass(frozen=True)
class Retention:
    """What is kept of the consumed samples: `amount` rows or seconds, all, or none."""

    kind: Kind
    amount: float = 0

    @property
    def deletes(self) -> bool:
        return self.kind != "all"

    def __str__(self) -> str:
        """As the argument of a Queue would be written."""
        return repr(self.kind) if self.kind in ("all", "consumed") else f"{self.amount!r}"

    def to_json(self) -> str:
        plain = self.kind in ("all", "consumed")
        return json.dumps(self.kind if plain else {self.kind: self.amount})


KEEP_ALL = Retention("all")


def parse_retention(given: Given, queue: str) -> Retention:
    """The setting that was given for a queue. Raises ValueError for what is none."""
    if isinstance(given, timedelta):
        return parse_retention(given.total_seconds(), queue)
    if given == "all" or given == "consumed":
        return Retention(given)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return Retention("rows", given)
    if isinstance(given, float) and given > 0 and math.isfinite(given):
        return Retention("seconds", given)
    raise ValueError(
        f"queue {queue!r}: retention must be 'all', 'consumed', a number of rows (an int of at"
        f" least 1), or seconds (a float or timedelta above 0), got {given!r}."
    )


def read_retention(tx: sqlite3.Connection) -> Retention:
    """The setting that the ledger holds; "all" if none was ever given."""
    found = tx.execute("SELECT value FROM meta WHERE key = 'retention'").fetchone()
    stored = json.loads(found[0]) if found else "all"
    if isinstance(stored, str):
        return Retention("consumed" if stored == "consumed" else "all")
    [(kind, amount)] = stored.items()
    return Retention(kind, amount)


def store_retention(tx: sqlite3.Connection, retention: Retention) -> None:
    """Make it the queue's setting, for all processes."""
    tx.execute("INSERT OR REPLACE INTO meta VALUES ('retention', ?)", (retention.to_json(),))
