"""One pass over a dataset's batches, read where it is iterated: in place, a thread, or workers."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch.utils.data import IterableDataset, get_worker_info

from persisting_torch.datasets.ranks import Ranks
from persisting_torch.errors import PersistingError
from persisting_torch.queue.look import needs_of, unit_of

if TYPE_CHECKING:
    from persisting_torch.datasets.dataset import PersistingDataset
    from persisting_torch.queue.assignments import Assignment

Slices = list[NDArray[np.int64]]

GRACE_SECONDS = 5.0

log = logging.getLogger(__name__)


class Pass(IterableDataset[tuple[int, Any]]):
    """The batches of a dataset from number `start` on, as (number, batch).

    Pickled into W workers, the w-th reads every W-th batch, so that a loader that asks them in turn
    gets all batches in order. `slices` are this rank's samples by batch number, where nothing is
    consumed. `lifeline`, in a worker, is a pipe whose closing (the loader's end, or its process's
    death) ends a wait for samples, and then the worker.
    """

    def __init__(self, dataset: PersistingDataset, start: int, slices: Slices | None) -> None:
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
        if self.slices is None:
            found = self._assigned(numbers, stop)
        else:
            found = _listed(self.slices, numbers, stop)
        for number, indexes in found:
            yield number, self.collate(self._load(indexes))

    def read_inline(self) -> Iterator[tuple[int, Any]]:
        """The same where nobody stops it."""
        return self.read(threading.Event())

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        stop = threading.Event()
        if self.lifeline is not None:
            threading.Thread(target=_watch, args=(self.lifeline, stop), daemon=True).start()
        return self.read(stop)

    def _load(self, indexes: Sequence[int]) -> Any:
        data = self.dataset
        fields, extra = data.fields, []
        if fields is not None:
            extra = [name for name in getattr(data.sampler, "shaped_by", ()) if name not in fields]
            fields = [*fields, *extra]
        batch: TensorDictBase = data.handle.engine.read_batch(
            data.partition_id, indexes, fields, pad=data.pad
        )
        shape = getattr(data.sampler, "shape", None)
        if shape is not None:
            batch = shape(batch, data.pad)
            for name in extra:
                batch = _without(batch, name)
        return batch if data.transform is None else data.transform(batch)

    def _assigned(
        self, numbers: Iterable[int], stop: threading.Event
    ) -> Iterator[tuple[int, Sequence[int]]]:
        """This rank's slices of the task's global batches, until the partition's end."""
        for k in numbers:
            assignment = self._await(k, stop)
            if assignment is None:
                if k == 0 and not stop.is_set():
                    explain_no_batch(self.dataset)
                return
            yield k, assignment.slices[self.dataset.ranks.rank]

    def _await(self, k: int, stop: threading.Event) -> Assignment | None:
        data = self.dataset
        return data.handle.engine.await_assignment(
            data.task_name,
            data.partition_id,
            k,
            batch_size=data.batch_size,
            dp_size=data.ranks.size,
            fields=data.fields,
            sampler=data.sampler,
            last=data.last,
            timeout=data.timeout,
            stop=stop,
            sampling={} if data.policy_version is None else {"policy_version": data.policy_version},
        )


def _without(batch: TensorDictBase, name: str) -> TensorDictBase:
    """The batch without a field, which may be nested as its name says."""
    path = (name,) if name in set(batch.keys()) else tuple(name.split("."))
    rest: TensorDictBase = batch.exclude(path)
    return rest if len(path) == 1 else rest.filter_empty_()  # type: ignore[no-untyped-call]


def identity(batch: Any) -> Any:
    """Leaves a batch as it is; DataLoader's own collate function does not know TensorDicts."""
    return batch


@dataclass(frozen=True)
class Listing:
    """What a pass without consumption goes over: one rank's batches of an epoch.

    They hold the `samples` samples (or what the sampler counts) that were ready, all of them with
    indexes less than `below`, but for the first `skip` of the epoch's order, which batches of
    another size have covered.
    """

    epoch: int
    below: int
    samples: int
    skip: int
    slices: Slices


def list_samples(
    dataset: PersistingDataset, epoch: int, below: int | None = None, skip: int = 0
) -> Listing:
    """The samples that are ready now (of those with indexes less than `below`) for an epoch.

    Raises PersistingError where no sample of the partition has the named fields.
    """
    samples = dataset.handle.engine.snapshot(dataset.partition_id, dataset.required)
    if below is not None:
        samples = samples[samples < below]
    end = int(samples.max()) + 1 if len(samples) else 0
    if not len(samples):
        check_fields(dataset)
        log.warning(
            "partition %r of queue %r has no samples yet, so a pass over it gives no batch",
            dataset.partition_id,
            dataset.handle.name,
        )
    parts = None
    if dataset.sampler is not None:
        parts = dataset.handle.engine.list_all(dataset.partition_id, dataset.sampler, samples)
        samples = np.arange(len(parts))
    if dataset.shuffle_seed is not None:
        samples = np.random.default_rng((dataset.shuffle_seed, epoch)).permutation(samples)
    slices = cut(samples[skip:], dataset.batch_size, dataset.ranks, pad=dataset.last == "pad")
    if parts is not None:
        slices = [np.concatenate([parts[at] for at in numbers]) for numbers in slices]
    return Listing(epoch, end, len(samples), skip, slices)


def cut(samples: NDArray[np.int64], batch_size: int, ranks: Ranks, *, pad: bool) -> Slices:
    """One rank's batches of these samples: as many as every other rank has.

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


def _listed(
    slices: Slices, numbers: Iterable[int], stop: threading.Event
) -> Iterator[tuple[int, Sequence[int]]]:
    for number in numbers:
        if number >= len(slices) or stop.is_set():
            return
        yield number, slices[number].tolist()


def explain_no_batch(dataset: PersistingDataset) -> None:
    """The partition is sealed and not even its first global batch could be formed: say why."""
    check_fields(dataset)
    ready = len(dataset.handle.engine.snapshot(dataset.partition_id, dataset.required))
    log.warning(
        "partition %r of queue %r is sealed with %d samples ready, which make no global batch"
        " of %d %s; last='split' or 'pad' would give them",
        dataset.partition_id,
        dataset.handle.name,
        ready,
        dataset.batch_size * dataset.ranks.size,
        unit_of(dataset.sampler),
    )


def check_fields(dataset: PersistingDataset) -> None:
    """Raise PersistingError where there are samples, and none of them has the named fields."""
    engine = dataset.handle.engine
    there = len(engine.snapshot(dataset.partition_id, None))
    if not there or len(engine.snapshot(dataset.partition_id, dataset.required)):
        return
    where = "`fields` and `sampler`" if needs_of(dataset.sampler) else "`fields`"
    raise PersistingError(
        f"none of the {there} samples of {dataset.handle.name}/{dataset.partition_id} has all of"
        f" the fields {dataset.required}. Check the names in {where}, and what the producers put."
    )


def _watch(lifeline: Connection, stop: threading.Event) -> None:
    """End this worker when its loader has ended.

    A DataLoader tells its workers to end unless its process was killed. They would notice that by
    their parent, which in the case of forkserver is not that process and lives as long as they do.
    """
    lifeline.poll(None)
    stop.set()
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
