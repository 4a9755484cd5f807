"""A position in the order of samples that only moves forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persisting_torch.queue.waiting import News

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine


class Stream:
    """A reader's position: the rows and the waiting samples that it has had."""

    def __init__(self, engine: Engine, offset: int = 0) -> None:
        self.engine = engine
        self.news = News(engine.hub, engine.ledger)
        self._skip = offset
        self._row = 0
        self._had: set[int] = set()

    def next(self, limit: int) -> list[dict[str, Any]]:
        """Up to `limit` further records; none if there are none now."""
        self.engine.check_open()
        if self._skip:
            skipped = self.engine.reads.advance(
                self._skip, self._row, self._had, self.engine.writes.waiting(), values=False
            )
            self._row = skipped.row
            self._skip -= skipped.count
            if self._skip:
                return []
        while True:
            moved = self.engine.reads.advance(
                limit, self._row, self._had, self.engine.writes.waiting()
            )
            self._row = moved.row
            if moved.records or not moved.count:
                return moved.records
