"""A bucket as those see it who do not own it: whoever its owner is, asked until it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from persisting_torch.cluster.finder import Finder, Found, Target
from persisting_torch.cluster.ways import Near
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import BucketUnavailable, StaleOwner

LONGEST_WAIT_SECONDS = 60.0
ANSWER_SECONDS = 10.0
DATA_SECONDS = 60.0
SILENT_SECONDS = 1.0
FIND_SECONDS = 5.0
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.5

Told = TypeVar("Told")


class Bucket:
    """One bucket of a queue, by messages to its owner. Thread-safe.

    Every call finds the owner, asks it, and asks again where it is gone or has been replaced, for
    `limit` seconds in all; so what it asks for has to bear being done twice. Raises
    BucketUnavailable then, and whatever the owner raises.
    """

    def __init__(self, finder: Finder, target: Target, limit: float | None = None) -> None:
        self.target = target
        self.limit = LONGEST_WAIT_SECONDS if limit is None else limit
        self._finder = finder

    def owner(self) -> Found:
        """Its owner, as far as is known; found if none is."""
        return self._finder.owner(self.target, time.monotonic() + self.limit)

    def ask(
        self,
        op: str,
        header: dict[str, Any] | None = None,
        attached: Sequence[bytes] = (),
        *,
        seconds: float = ANSWER_SECONDS,
        limit: float | None = None,
    ) -> Message:
        """An answer without data, each within `seconds`, all within `limit`; 0: asked only once."""
        request = self._message(op, header, attached)
        return self._call(lambda owner: owner.way.ask(request, seconds), limit)

    def get(
        self,
        op: str,
        header: dict[str, Any] | None = None,
        attached: Sequence[bytes] = (),
        *,
        seconds: float = DATA_SECONDS,
    ) -> tuple[Message, pa.Table]:
        """An answer with a table."""
        request = self._message(op, header, attached)
        return self._call(lambda owner: owner.way.get(request, seconds))

    def put(
        self,
        op: str,
        header: dict[str, Any] | None,
        table: pa.Table,
        attached: Sequence[bytes] = (),
        *,
        seconds: float = DATA_SECONDS,
    ) -> Message:
        """Send a table."""
        request = self._message(op, header, attached)
        return self._call(lambda owner: owner.way.put(request, table, seconds))

    def _message(
        self, op: str, header: dict[str, Any] | None, attached: Sequence[bytes]
    ) -> Message:
        return Message({**(header or {}), "op": op, **self.target.header}, attached)

    def _call(self, say: Callable[[Found], Told], limit: float | None = None) -> Told:
        limit = self.limit if limit is None else limit
        deadline = time.monotonic() + limit
        pause = FIRST_PAUSE
        while True:
            owner = self._finder.owner(self.target, deadline if limit else deadline + FIND_SECONDS)
            began = time.monotonic()
            try:
                return say(owner)
            except (BucketUnavailable, StaleOwner) as error:
                gone = isinstance(error, BucketUnavailable)
                # What is asked once belongs to a turn, which may be over while its owner is not.
                if gone or limit:
                    long = time.monotonic() - began > SILENT_SECONDS
                    self._finder.forget(owner, silent=long and _is_silent(owner, error))
                if not limit:
                    raise
                if time.monotonic() + pause >= deadline:
                    raise BucketUnavailable(
                        f"waited {limit:g} s for the owner of {self.target}: {error}"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _is_silent(owner: Found, error: BucketUnavailable | StaleOwner) -> bool:
    """Whether the owner itself did not answer, instead of telling of another one that does not."""
    relayed = isinstance(error, StaleOwner) or error.relayed
    return not relayed and not isinstance(owner.way, Near)
