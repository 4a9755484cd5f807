"""How far a consumer has come in the sequence of global batches 0, 1, 2, ..."""

from __future__ import annotations

from collections import deque


class Cursor:
    """Counts global batches from the moment they are handed out to the moment they are used.

    A batch is handed out when the loop gets it, finished when the loop is done with it, and used
    when an optimizer step has covered it. A pass that begins anew begins with the first batch that
    is not finished: what was handed out and dropped (a prefetched batch at the end of an epoch) is
    handed out again, what is finished is not. A checkpoint holds `used`, so that a resumed run
    repeats exactly what no optimizer step of the restored weights had covered.

    Whoever moves the cursor owns it. In a plain loop that is the loader: asking for the next batch
    finishes and uses the one before. Under a Trainer it is ConsumptionCheckpoint (`driven`).

    It is used from one thread, that of the loop.
    """

    def __init__(self) -> None:
        self.position: int | None = None
        """The batch that the next pass begins with; None before the ledger was asked."""
        self.used: int | None = None
        """All batches below it are used; None before the ledger was asked."""
        self.driven = False
        """Whether a Trainer's callback moves this cursor."""
        self.state_taken: int | None = None
        """In a plain loop: the cursor of the newest state that was taken or loaded."""
        self.seeks = 0
        """Rises with each seek, so that a running pass sees that it has to start again."""
        self.overtaken = False
        """Whether a seek came while batches were handed out, which their holder now has to drop."""
        self._handed: deque[int] = deque()

    @property
    def holding(self) -> bool:
        """Whether batches are handed out and not finished."""
        return bool(self._handed)

    def seek(self, k: int) -> None:
        """Begin the next pass with batch k, all before it used; a running pass starts again."""
        self.overtaken = self.overtaken or self.holding
        self._handed.clear()
        self.position = self.used = k
        self.seeks += 1

    def begin(self, k: int) -> None:
        """A new pass begins with batch k: what is handed out and not finished no longer counts."""
        if self.position != k:
            self.position = self.used = k
        self._handed.clear()
        self.overtaken = False

    def hand_out(self, k: int) -> None:
        """Batch k goes to the loop."""
        self._handed.append(k)

    def finish(self) -> bool:
        """The loop is done with the oldest batch that it holds; False if it holds none."""
        if not self._handed:
            return False
        self.position = self._handed.popleft() + 1
        return True

    def step(self) -> None:
        """An optimizer step has covered all finished batches."""
        self.used = self.position

    @property
    def following(self) -> int | None:
        """The batch that a pass beginning now begins with."""
        return self.position if self.driven else self.reached()

    def reached(self) -> int | None:
        """The batch after the newest handed out: a plain loop's state counts that as used."""
        return self._handed[-1] + 1 if self._handed else self.position
