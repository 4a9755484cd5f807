"""Every change of a ledger as the statements that made it, so that copies elsewhere can follow."""

from __future__ import annotations

import sqlite3
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

Statement = tuple[str, list[Any]]
"""SQL, and the parameters of each of its executions."""

Mark = tuple[str, int]
"""A place in the log of changes: the log's name, and the number of a change in it."""

KEPT = 4096  # changes
KEPT_BYTES = 16 << 20  # of all changes that are kept, about
WRITES = frozenset({"INSERT", "UPDATE", "DELETE", "REPLACE"})


class Recorder(sqlite3.Connection):
    """A connection that takes down the writing statements of a transaction."""

    taken: list[Statement] | None = None
    """What copies of the ledger in other processes are to do as well."""
    kept: list[Statement] | None = None
    """What the next owner is to find, where SQLite's file does not last: all of them."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if self._records and _writes(sql):
            self._take(sql, [parameters])
        return super().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        rows = list(parameters)
        if self._records and rows and _writes(sql):
            self._take(sql, rows)
        return super().executemany(sql, rows)

    def execute_untold(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Execute what other processes' copies of the ledger need not know."""
        if self.kept is not None and _writes(sql):
            self.kept.append((sql, [parameters]))
        return super().execute(sql, parameters)

    @property
    def _records(self) -> bool:
        return self.taken is not None or self.kept is not None

    def _take(self, sql: str, rows: list[Any]) -> None:
        for statements in (self.taken, self.kept):
            if statements is not None:
                statements.append((sql, rows))


def replay(connection: sqlite3.Connection, statements: Sequence[Statement]) -> None:
    """Do what another connection in the same state has done. In a transaction of the caller."""
    for sql, rows in statements:
        for parameters in rows:
            # Not executemany: a statement may answer rows (RETURNING).
            connection.execute(sql, parameters).fetchall()


def _writes(sql: str) -> bool:
    return sql.lstrip()[:7].rstrip().upper() in WRITES


def _size(statements: list[Statement]) -> int:
    return sum(
        len(sql) + sum(len(value) if isinstance(value, str | bytes) else 8 for value in parameters)
        for sql, rows in statements
        for parameters in rows
    )


@dataclass(frozen=True)
class Change:
    """One committed transaction: its number in the log, and what it did."""

    number: int
    statements: list[Statement]
    size: int = 0


class Log:
    """The newest changes of a ledger, for those who follow it, under a name that no other has."""

    def __init__(self) -> None:
        # Taken by itself: a signal in the condition's own __enter__ would leave it taken.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._begin()

    def _begin(self) -> None:
        self.id = uuid.uuid4().hex
        self.last = 0
        self._changes: deque[Change] = deque()
        self._bytes = 0

    @contextmanager
    def entry(self) -> Iterator[list[Statement]]:
        """A list that becomes the next change when the block, a transaction, ends well.

        Where it does not, whether the transaction was committed may be open: then the log begins
        anew, so that all who follow it begin with the ledger as it is.
        """
        statements: list[Statement] = []
        try:
            yield statements
            if statements:
                self._add(statements)
        except BaseException:
            if statements:
                with self._lock:
                    self._begin()
                    self._changed.notify_all()
            raise

    def _add(self, statements: list[Statement]) -> None:
        with self._lock:
            self._changes.append(Change(self.last + 1, statements, _size(statements)))
            self._bytes += self._changes[-1].size
            self.last += 1
            while len(self._changes) > KEPT or self._bytes > KEPT_BYTES:
                self._bytes -= self._changes.popleft().size
            self._changed.notify_all()

    def since(self, log: str, number: int) -> list[Change] | None:
        """The changes after this one; None if they are not kept, or it is of another log."""
        with self._lock:
            missing = self.last - number
            if log != self.id or missing < 0 or missing > len(self._changes):
                return None
            return list(islice(reversed(self._changes), missing))[::-1]

    def wait(self, log: str, number: int, seconds: float) -> None:
        """Until there are changes after this one, or the time is over."""
        with self._lock:
            self._changed.wait_for(lambda: (self.id, self.last) != (log, number), seconds)

    def end(self) -> None:
        """Let nobody wait any more: there will be no changes."""
        with self._lock:
            self._begin()
            self._changed.notify_all()
