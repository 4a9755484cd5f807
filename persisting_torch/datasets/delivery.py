"""The loop's end of a pass: hands out batches and keeps the cursor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persisting_torch.datasets.cursor import Cursor
    from persisting_torch.datasets.dataset import PersistingDataset
    from persisting_torch.datasets.reading import Pass

Source = Iterator[tuple[int, Any]]


class Delivery(Iterator[Any]):
    """Iterates over a dataset's batches for one loop.

    `open_source` turns a pass into an iterator of (number, batch); if that has a `close` method, it
    is called when the delivery ends. Nothing is opened or read before the first batch is asked for.
    A seek of the cursor takes effect with the next batch.
    """

    def __init__(self, dataset: PersistingDataset, open_source: Callable[[Pass], Source]) -> None:
        self._dataset = dataset
        self._open_source = open_source
        self._source: Source | None = None
        self._began_at: tuple[Cursor, int] | None = None
        self._ended = False
        self._following: int | None = None

    def __iter__(self) -> Delivery:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        began = time.perf_counter()
        try:
            self._dataset.settle()
            number, batch = next(self._current_source())
        except BaseException:
            self.close()
            raise
        finally:
            self._dataset.waited_seconds += time.perf_counter() - began
        self._dataset.batches_given += 1
        self._following = number + 1
        self._dataset.cursor.hand_out(number)
        return batch

    def _current_source(self) -> Source:
        cursor = self._dataset.cursor
        if self._source is None or self._began_at != (cursor, cursor.seeks):
            self._close_source()
            self._source = self._open_source(self._dataset.begin())
            self._began_at = (cursor, cursor.seeks)
        return self._source

    def goes_on_with(self, number: int | None) -> bool:
        """Whether the next batch will be this one, without any new pass."""
        return not self._ended and self._source is not None and self._following == number

    def close(self) -> None:
        """End the iteration, and whatever reads ahead for it."""
        self._ended = True
        self._close_source()

    def _close_source(self) -> None:
        source, self._source = self._source, None
        close = getattr(source, "close", None)
        if close is not None:
            close()
