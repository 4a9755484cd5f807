"""One pass over a dataset's batches, read where it is iterated: in place, a thread, or workers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from persisting_torch.datasets.ranks import Ranks

if TYPE_CHECKING:
    from persisting_torch.datasets.dataset import PersistingDataset


class Pass(IterableDataset[tuple[int, Any]]):
    """The batches of a dataset from number `start` on, as (number, batch).

    Pickled into W workers, the w-th reads every W-th batch, so that a loader that asks them in turn
    gets all batches in order. `slices` are this rank's samples by batch number, where nothing is
    consumed. `lifeline`, in a worker, is a pipe whose closing (the loader's end, or its process's
    death) ends a wait for samples.
    """

    def __init__(
        self,
        dataset: PersistingDataset,
        start: int,
        slices: list[NDArray[np.int64]] | None,
    ) -> None:
        super().__init__()
        self.dataset = dataset
        self.start = start
        self.slices = slices
        self.collate: Callable[[Any], Any] = identity
        self.lifeline: Connection | None = None

    def read(self, stop: threading.Event) -> Iterator[tuple[int, Any]]:
        """This process's share of the batches, until `stop` is set."""
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        numbers = itertools.count(self.start + first, stride)
        for number, batch in self.dataset.read(numbers, self.slices, stop):
            yield number, self.collate(batch)

    def read_inline(self) -> Iterator[tuple[int, Any]]:
        """The same where nobody stops it."""
        return self.read(threading.Event())

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        stop = threading.Event()
        if self.lifeline is not None:
            threading.Thread(target=_watch, args=(self.lifeline, stop), daemon=True).start()
        return self.read(stop)


def identity(batch: Any) -> Any:
    """Leaves a batch as it is; DataLoader's own collate function does not know TensorDicts."""
    return batch


def cut(
    samples: NDArray[np.int64], batch_size: int, ranks: Ranks, *, pad: bool
) -> list[NDArray[np.int64]]:
    """One rank's batches of all samples: as many as every other rank has.

    A remainder is padded to a full global batch with samples from the front, or split over the
    ranks as evenly as it goes, with padding only where it has fewer samples than there are ranks.
    """
    whole = batch_size * ranks.size
    full = len(samples) - len(samples) % whole
    batches = list(samples[:full].reshape(-1, ranks.size, batch_size)[:, ranks.rank])
    rest = samples[full:]
    if len(rest):
        least = whole if pad else ranks.size
        if len(rest) < least:
            rest = np.concatenate([rest, np.resize(samples, least - len(rest))])
        batches.append(np.array_split(rest, ranks.size)[ranks.rank])
    return batches


def _watch(lifeline: Connection, stop: threading.Event) -> None:
    lifeline.poll(None)
    stop.set()
