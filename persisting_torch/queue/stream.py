"""A position in the order of samples that only moves forward."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from persisting_torch.queue.patience import FIRST_NOTICE_OF_A_STREAM_SECONDS, Patience
from persisting_torch.queue.producers import Vigil
from persisting_torch.queue.reads import Moved
from persisting_torch.queue.report import supply
from persisting_torch.queue.threads import in_thread
from persisting_torch.queue.waiting import News

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine

log = logging.getLogger(__name__)


class Stream:
    """A reader's position: the rows and the waiting samples that it has had.

    With `buckets`, only of samples in these, once they are flushed.
    """

    def __init__(
        self, engine: Engine, offset: int = 0, buckets: Sequence[int] | None = None
    ) -> None:
        self.engine = engine
        self._buckets = buckets
        self.news = News(engine.hub, engine.ledger)
        self._vigil = Vigil(engine.producers)
        self._patience = Patience(log, FIRST_NOTICE_OF_A_STREAM_SECONDS)
        self._over = False
        self._skip = offset
        self._row = 0
        self._had: set[int] = set()

    def next(self, limit: int) -> list[dict[str, Any]]:
        """Up to `limit` further records; none if there are none now."""
        self.engine.check_open()
        if self._skip:
            skipped = self._advance(self._skip, values=False)
            self._row = skipped.row
            self._skip -= skipped.count
            if self._skip:
                self._over = skipped.sealed
                return []
        while True:
            moved = self._advance(limit, values=True)
            self._row = moved.row
            if moved.records:
                self._vigil.begin()
                self._patience.begin()
            if moved.records or not moved.count:
                self._over = moved.sealed and not moved.records
                return moved.records

    def _advance(self, limit: int, *, values: bool) -> Moved:
        waiting = [] if self._buckets is not None else self.engine.writes.waiting()
        return self.engine.reads.advance(
            limit, self._row, self._had, waiting, self._buckets, values=values
        )

    def wait(self, deadline: float) -> bool:
        """Whether there may be further records before `deadline` (of time.monotonic).

        Never in a queue that is sealed as a whole. A wait without an end says in the log now and
        then what is missing. Raises ProducerFailed when no producer is left.
        """
        if self._over:
            return False
        while not (fresh := self.news.wait(min(deadline, self._vigil.due))):
            if time.monotonic() >= deadline:
                return False
            self._watch()
        self._watch()
        return fresh

    async def wait_async(self, deadline: float) -> bool:
        """The same without holding up the event loop."""
        if self._over:
            return False
        while not (fresh := await self.news.wait_async(min(deadline, self._vigil.due))):
            if time.monotonic() >= deadline:
                return False
            await in_thread(self._watch)
        if self._vigil.is_due:
            await in_thread(self._watch)
        return fresh

    def _watch(self) -> None:
        if self._vigil.watch():
            self._patience.check(self._what_is_missing)

    def _what_is_missing(self, waited: float) -> str:
        place, books = self.engine.place, self.engine.books
        with self.engine.ledger.reading() as tx:
            books.refresh(tx)
            flushed = books.rows - len(books.gone)
            told = supply(tx)
        return (
            f"waited {waited:g} s for further records of queue {place.queue!r} at {place.root}, of"
            f" whatever partition; {flushed} samples are flushed; {told}. Start or check the"
            " producers, seal the queue if no more will come, or give stream() a timeout."
        )
