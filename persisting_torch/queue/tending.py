"""Upkeep of a bucket in the background: few fragments, few versions, a short ledger."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from persisting_torch.queue.commit import fold_arrivals
from persisting_torch.queue.locks import FileLock
from persisting_torch.queue.look import fold_drops
from persisting_torch.queue.upkeep import clean, compact

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine

FLUSHES_BETWEEN = 32
MOST_FLUSHES = 256
LITTLE_BYTES = 16 << 20
QUIET_SECONDS = 0.5
MOST_LEDGER_ROWS = 1000
STOP_SECONDS = 60.0


class Tending:
    """Starts upkeep when it is due; one process of all does it at a time.

    Due are `FLUSHES_BETWEEN` flushes of little; where flushes bring much, upkeep that would write
    it all once more waits until nobody flushes, or until `MOST_FLUSHES`. So are many claims.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = FileLock(engine.place.upkeep_lock)
        self._flushes = 0
        self._bytes = 0
        self._claims = 0
        self._last_flush = 0.0
        self._thread: threading.Thread | None = None
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

    def tick(self) -> None:
        """Start upkeep that has waited for a quiet moment, or that many claims call for."""
        if not self._engine.place.writable:
            return
        quiet = time.monotonic() - self._last_flush >= QUIET_SECONDS
        claims = self._engine.books.claims_seen - self._claims
        if (quiet and self._flushes >= FLUSHES_BETWEEN) or claims > MOST_LEDGER_ROWS:
            self._start()

    def _start(self) -> None:
        running = self._thread is not None and self._thread.is_alive()
        if running or self._stopping:
            return
        self._flushes = self._bytes = 0
        self._claims = self._engine.books.claims_seen
        self._thread = threading.Thread(
            target=self._run, name="persisting_torch upkeep", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            self.tend()
        except Exception as error:
            self.error = error

    def tend(self) -> bool:
        """One whole round, now; False if another process is at it."""
        if not self._lock.acquire(0):
            return False
        try:
            engine = self._engine
            self.remove_cleared()
            for store in (engine.rows, engine.late.store):
                if store.exists() and not self._stopping:
                    while compact(store, engine.commit_lock) and not self._stopping:
                        pass
                    clean(store, engine.commit_lock)
            with engine.ledger.transaction() as tx:
                engine.claims.fold(tx, MOST_LEDGER_ROWS)
                fold_arrivals(tx, MOST_LEDGER_ROWS)
                fold_drops(tx, engine.books, MOST_LEDGER_ROWS)
            return True
        finally:
            self._lock.release()

    def remove_cleared(self) -> None:
        """Delete the rows of samples that were cleared since the last time."""
        engine = self._engine
        with engine.ledger.reading() as tx:
            engine.books.refresh(tx)
            found = tx.execute("SELECT value FROM meta WHERE key = 'removed'").fetchone()
            members = engine.books.cleared_indexes.copy()
            last = tx.execute("SELECT max(seq) FROM cleared").fetchone()[0] or 0
            if last <= (found[0] if found else 0):
                return
            indexes = np.array(members.to_array(), dtype=np.int64)
            rows = engine.books.runs.rows_of(indexes)
        with engine.commit_lock:
            engine.rows.delete(rows)
        with engine.ledger.transaction() as tx:
            tx.execute("INSERT OR REPLACE INTO meta VALUES ('removed', ?)", (last,))

    def stop(self) -> None:
        """End upkeep at its next step, and wait for that."""
        self._stopping = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)
        self._lock.close()
