"""Upkeep of a bucket in the background: few fragments, few versions, a short ledger."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from persisting_torch.queue.clearing import reclaim
from persisting_torch.queue.commit import fold_arrivals
from persisting_torch.queue.fold import Folds, fold
from persisting_torch.queue.folding import Thrift
from persisting_torch.queue.look import fold_drops
from persisting_torch.queue.retention import Keeper
from persisting_torch.queue.threads import Background, undisturbed
from persisting_torch.queue.upkeep import clean, compact

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine
    from persisting_torch.queue.parts import Parts, Plain
    from persisting_torch.queue.shard import Shard

FLUSHES_BETWEEN = 32
MOST_FLUSHES = 256
LITTLE_BYTES = 16 << 20
QUIET_SECONDS = 0.5
MOST_LEDGER_ROWS = 1000
STOP_SECONDS = 60.0


class Tending:
    """Starts upkeep when it is due; one process of all does it at a time.

    Due are `FLUSHES_BETWEEN` flushes of little; where flushes bring much, upkeep that would write
    it all once more waits until nobody flushes, or until `MOST_FLUSHES`. So are many claims, and
    late fields in the first quiet moment.
    """

    def __init__(self, engine: Engine, parts: Parts) -> None:
        self._engine = engine
        self._lock = parts.upkeep_lock
        self._shards = parts.shards
        self._ledger_too = parts.tends_ledger
        self._flushes = 0
        self._bytes = 0
        self._late = 0
        self._claims = 0
        self._last_flush = 0.0
        self._thread: Background | None = None
        self._beginning = threading.Lock()
        self._reclaims = True
        self.keeper = Keeper(engine)
        self._folds = [Folds(shard) for shard in parts.shards]
        self._stopping = False
        self.error: Exception | None = None

    def note_flush(self, nbytes: int = 0) -> None:
        """Count a flush, and start upkeep if it is due."""
        self._flushes += 1
        self._bytes += nbytes
        self._last_flush = time.monotonic()
        if self._flushes >= MOST_FLUSHES or (
            self._flushes >= FLUSHES_BETWEEN and self._bytes < LITTLE_BYTES
        ):
            self._start()

    def note_late(self, nbytes: int) -> None:
        """Count a put of late fields likewise."""
        self._late += 1
        self.note_flush(nbytes)

    def tick(self) -> None:
        """Start upkeep that has waited for a quiet moment, or that many claims call for."""
        if not self._engine.place.writable or not (self._shards or self._ledger_too):
            return
        quiet = time.monotonic() - self._last_flush >= QUIET_SECONDS
        claims = self._engine.books.claims_seen - self._claims
        if (
            (quiet and (self._flushes >= FLUSHES_BETWEEN or self._late))
            or claims > MOST_LEDGER_ROWS
            or any(folds.due() for folds in self._folds)
        ):
            self._start()
        elif self.keeper.due():
            self._begin(self.retain)
        elif quiet and any(folds.rest_due() for folds in self._folds):
            self._begin(self.fold_rest)

    def _start(self) -> None:
        if not self._begin(self.tend):
            return
        self._flushes = self._bytes = self._late = 0
        self._claims = self._engine.books.claims_seen

    def _begin(self, what: Callable[[], bool]) -> bool:
        """Do it in a thread; False if the one before is not through."""
        with self._beginning:
            running = self._thread is not None and self._thread.is_alive()
            if running or self._stopping:
                return False
            self._thread = Background(partial(self._run, what))
            return True

    def _run(self, what: Callable[[], bool]) -> None:
        try:
            what()
        except Exception as error:
            self.error = error

    def tend(self) -> bool:
        """One whole round, now; False if another process is at it."""
        if not self._lock.acquire(0):
            self._late += 1  # that one may have begun before the newest late put: try again
            return False
        try:
            self._retain()
            for shard, folds in zip(self._shards, self._folds, strict=True):
                self._tend_rows(shard, folds)
            self._reclaim()
            if self._ledger_too:
                engine = self._engine
                with engine.ledger.transaction() as tx:
                    engine.claims.fold(tx, MOST_LEDGER_ROWS)
                    fold_arrivals(tx, MOST_LEDGER_ROWS)
                    fold_drops(tx, engine.books, MOST_LEDGER_ROWS)
            return True
        finally:
            self._lock.release()

    def _tend_rows(self, shard: Plain | Shard, folds: Folds) -> None:
        while not self._stopping and compact(shard.rows, shard.commit_lock):
            pass
        if not self._stopping:
            folds.run(lambda: self._stopping)
        for store in (shard.rows, shard.late.store):
            if store.exists() and not self._stopping:
                clean(store, shard.commit_lock)

    def retain(self) -> bool:
        """Delete what the queue's retention does not keep; False if another process is at upkeep.

        Small and often, since nothing is rewritten here.
        """
        if not self._lock.acquire(0):
            return False
        try:
            self._retain()
            self._reclaim()
            return True
        finally:
            self._lock.release()

    def _retain(self) -> None:
        if self._ledger_too:
            self.keeper.clear_consumed()
        self.remove_cleared()

    def _reclaim(self) -> None:
        if self._reclaims and self._engine.books.retention.deletes:
            again = [
                reclaim(store, shard.commit_lock)
                for shard in self._shards
                for store in (shard.rows, shard.late.store)
            ]
            self._reclaims = any(again)

    def remove_cleared(self) -> None:
        """Delete the rows of samples that were cleared since the last time."""
        removed = [shard.remove_rows() for shard in self._shards]
        if any(removed):
            self._reclaims = True

    def fold_rest(self) -> bool:
        """Fold also late fields of few samples; False if another process is at upkeep."""
        if not self._lock.acquire(0):
            return False
        try:
            for folds in self._folds:
                folds.run(lambda: self._stopping, Thrift.SPACE)
            return True
        finally:
            self._lock.release()

    def fold_all(self) -> None:
        """Bring all late fields into the rows, now."""
        for shard in self._shards:
            undisturbed(fold, shard, Thrift.NONE)

    def stop(self) -> None:
        """End upkeep at its next step, and wait for that."""
        with self._beginning:
            self._stopping = True
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
        self._lock.close()
