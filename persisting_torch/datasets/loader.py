"""A DataLoader that reads ahead of a PersistingDataset and knows where its loop is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from persisting_torch.datasets.dataset import PersistingDataset
from persisting_torch.datasets.delivery import Delivery, Source
from persisting_torch.datasets.prefetch import Prefetcher
from persisting_torch.datasets.reading import Pass, identity
from persisting_torch.datasets.workers import Workers


class PersistingDataLoader(DataLoader[Any]):
    """Loads the batches of a PersistingDataset, in order, ahead of the loop.

    With `num_workers=0` a thread of this process reads up to `prefetch_batches` batches ahead (0:
    none; each is read when it is asked for), which is the fastest way unless `transform` is slow
    Python. With worker processes each reads `prefetch_factor` (default `prefetch_batches`) ahead;
    they start by forkserver, or spawn where that is missing, so `transform`, `sampler` and
    `collate_fn` have to pickle. The order of batches is the same in all cases. A worker that was
    killed, or is stopped for longer than the dataset's `timeout`, is told by a PersistingError.

    `state_dict` and `load_state_dict` make a loop resumable, also when taken or loaded in the
    middle of it: a state taken in the body of the loop counts the batch in hand as used. Under a
    Lightning Trainer use PersistingDataModule, or add ConsumptionCheckpoint to the Trainer.

    The other arguments are those of `torch.utils.data.DataLoader`. The batch size is the dataset's,
    so `batch_size` stays None; samplers, `shuffle`, `drop_last` and `in_order=False` have no
    meaning here. `persistent_workers=True` keeps the workers of a consuming dataset where the next
    iteration goes on with the batch that they would give next.

    Raises ValueError for arguments that contradict the above.

    >>> import tempfile, torch
    >>> from persisting_torch import PersistingDataset, Queue
    >>> queue = Queue("rollouts", tempfile.mkdtemp())
    >>> _ = queue.sync.put([{"reward": torch.tensor(float(i))} for i in range(6)])
    >>> queue.sync.seal()
    >>> loader = PersistingDataLoader(PersistingDataset(queue, batch_size=2))
    >>> for batch in loader:
    ...     state = loader.state_dict()  # goes into a checkpoint, beside the weights
    ...     break
    >>> loader = PersistingDataLoader(PersistingDataset(queue, batch_size=2))
    >>> loader.load_state_dict(state)
    >>> [batch["reward"].tolist() for batch in loader]
    [[2.0, 3.0], [4.0, 5.0]]
    """

    dataset: PersistingDataset

    def __init__(
        self,
        dataset: PersistingDataset,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_batches: int = 2,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        if not isinstance(dataset, PersistingDataset):
            raise TypeError(
                f"dataset must be a PersistingDataset, got {type(dataset).__name__}. Other"
                " datasets go with torch.utils.data.DataLoader."
            )
        if batch_size is not None:
            raise ValueError(
                f"batch_size={batch_size} was given to PersistingDataLoader, but the dataset makes"
                f" its batches itself (of {dataset.batch_size}). Leave it out here."
            )
        if prefetch_batches < 0:
            raise ValueError(f"prefetch_batches must be 0 or more, got {prefetch_batches}.")
        if not in_order:
            raise ValueError("in_order=False would lose count of the batches; leave it True.")
        if num_workers > 0:
            multiprocessing_context = _start_method(multiprocessing_context)
            prefetch_factor = prefetch_factor or max(1, prefetch_batches)
        super().__init__(
            dataset,
            None,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn or identity,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.prefetch_batches = prefetch_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        kept = self._iterator
        if isinstance(kept, Delivery) and kept.goes_on_with(self.dataset.cursor.following):
            return kept
        delivery = self.dataset.deliver(self._open_source)
        self._iterator = delivery if self.persistent_workers else None  # type: ignore[assignment]
        return delivery

    def state_dict(self) -> dict[str, Any]:
        """The cursor of the dataset; see `PersistingDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, before or during an iteration."""
        self.dataset.load_state_dict(state)

    def saved(self, path: str | os.PathLike[str]) -> None:
        """Say that the newest state is at `path`; see `PersistingDataset.saved`."""
        self.dataset.saved(path)

    def set_epoch(self, epoch: int) -> None:
        """Fix the order of the next pass; see `PersistingDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)

    def close(self) -> None:
        """End the iteration in progress, and the thread or workers that read ahead for it."""
        self._iterator = None
        self.dataset.end_delivery()

    def _open_source(self, reading: Pass) -> Source:
        reading.collate = self.collate_fn
        if self.num_workers > 0:
            return Workers(reading, self)
        read = reading.read
        if self.pin_memory and torch.accelerator.is_available():
            read = partial(_read_pinned, reading, torch.accelerator.current_device_index())
        if self.prefetch_batches == 0:
            return read(threading.Event())
        return Prefetcher(read, self.prefetch_batches)


def _start_method(wanted: str | BaseContext | None) -> str | BaseContext:
    """How workers start: never by fork, which Lance does not survive."""
    if wanted is None:
        known = torch.multiprocessing.get_all_start_methods()
        return "forkserver" if "forkserver" in known else "spawn"
    method = wanted if isinstance(wanted, str) else wanted.get_start_method()
    if method == "fork":
        raise ValueError(
            "multiprocessing_context='fork' was given to PersistingDataLoader, and an open queue"
            " does not survive a fork. Use 'forkserver' or 'spawn'."
        )
    return wanted


def _read_pinned(reading: Pass, device: int, stop: threading.Event) -> Source:
    """Batches in pinned memory, allocated for the accelerator that the main thread uses."""
    torch.accelerator.set_device_index(device)
    for number, batch in reading.read(stop):
        yield number, pinned(batch)  # type: ignore[no-untyped-call]
