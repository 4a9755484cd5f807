"""A queue as an iterable dataset of batches."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch.utils.data import IterableDataset, get_worker_info

from persisting_torch.datasets.arguments import Last, check_arguments
from persisting_torch.datasets.cursor import Cursor
from persisting_torch.datasets.delivery import Delivery, Source
from persisting_torch.datasets.handle import QueueHandle
from persisting_torch.datasets.ranks import Ranks, discover
from persisting_torch.datasets.reading import Listing, Pass, list_samples
from persisting_torch.errors import PersistingError
from persisting_torch.queue.look import needs_of
from persisting_torch.queue.names import check_name
from persisting_torch.queue.past import is_remote
from persisting_torch.samplers import BaseSampler, ShuffleSampler
from persisting_torch.samplers.staleness import PolicyVersion

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from persisting_torch.queue import Queue

log = logging.getLogger(__name__)


class PersistingDataset(IterableDataset[Any]):
    """Batches of a queue's samples: each once, for training, or all of them in every epoch.

    Yields TensorDicts of batch size [batch_size] (or what `transform` makes of them), whose fields
    are those named in `fields` (None: all; "_index" gives the samples' int64 global indexes).

    With `consume=True` it follows the task's global batches 0, 1, 2, ..., each of
    batch_size * dp_size samples, formed once, remembered by the queue and answered identically
    ever after; this rank gets its slice. It waits for samples that are still to come, and ends
    when the partition is sealed and nothing is left: the remainder that fills no global batch is
    dropped, padded by repetition, or split in smaller slices, as `last` says. In a plain loop a
    batch counts as consumed when the next one is asked for, so that a process that starts anew
    begins with the batch that the one before had in hand. A loop with checkpoints keeps
    `state_dict` in them instead, in one before the first batch already, and under a Trainer
    ConsumptionCheckpoint decides.

    With `consume=False` every iteration is one pass over the samples that are ready when it
    begins, and nothing is marked. All ranks get the same number of batches, and every sample
    comes: a remainder is split over the ranks (padded with `last="pad"`), and where it is smaller
    than the number of ranks some get a sample that another has too.

    Args:
        queue: the queue, or its name under `storage_path`; a name must be that of a queue that
            exists. Worker processes open it anew.
        batch_size: samples a batch on each data-parallel rank; or episodes, windows, whatever it is
            that the sampler counts.
        task_name: the consumer; tasks consume independently.
        sampler: chooses the samples of each global batch; default is the order of arrival. With
            `consume=False` only one that counts something else than samples has a meaning.
        dp_rank, dp_size: the data-parallel rank and the number of ranks; by default they are found
            (see `persisting_torch.datasets.ranks.discover`).
        device_mesh: a torch DeviceMesh to find them in: its data-parallel dimensions count, so that
            tensor-parallel peers get identical batches.
        timeout: seconds to wait for a batch (None: 1800; float("inf"): for ever). What is missing
            is said in the log meanwhile, and by the error at the end.
        pad: for ragged fields, the value to pad them with; without it they come as jagged tensors.
        shuffle_seed: draw samples at random: of those that are ready when a batch is formed, or,
            with `consume=False`, anew for each epoch (see `set_epoch`).
        transform: applied to each batch where it is read (in the prefetching thread or a worker).
        policy_version: the version of the policy in training, which MaxStaleness compares samples
            with, as a number or a function that tells it. It is asked for whenever a batch is to be
            formed: ahead of the loop by as many batches as are prefetched, and in worker processes
            a copy of the function is, which sees nothing of what happens here. Without it, the
            newest version that a PolicyPublisher announced for the queue counts, in every process.

    Raises, when a batch is asked for: PersistingError where there is no such queue or no sample has
    the named fields; WaitTimeout; ProducerFailed.

    >>> import tempfile, torch
    >>> from persisting_torch import Queue
    >>> queue = Queue("rollouts", tempfile.mkdtemp())
    >>> _ = queue.sync.put([{"reward": torch.tensor(float(i))} for i in range(5)])
    >>> queue.sync.seal()
    >>> for batch in PersistingDataset(queue, batch_size=2, last="split"):
    ...     print(batch["reward"])
    tensor([0., 1.])
    tensor([2., 3.])
    tensor([4.])
    """

    def __init__(
        self,
        queue: Queue | str,
        *,
        storage_path: str | os.PathLike[str] = "./data",
        batch_size: int,
        fields: list[str] | None = None,
        task_name: str = "train",
        partition_id: str = "default",
        sampler: BaseSampler | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        device_mesh: DeviceMesh | None = None,
        consume: bool = True,
        last: Last = "drop",
        timeout: float | None = None,
        pad: dict[str, float] | None = None,
        shuffle_seed: int | None = None,
        transform: Callable[[TensorDictBase], Any] | None = None,
        policy_version: PolicyVersion = None,
    ) -> None:
        super().__init__()
        check_arguments(
            batch_size, fields, sampler, consume, last, timeout, shuffle_seed, policy_version
        )
        self.handle = QueueHandle(queue, storage_path)
        self.batch_size = batch_size
        self.fields = None if fields is None else list(fields)
        self.task_name = check_name(task_name, "task_name")
        self.partition_id = check_name(partition_id, "partition_id")
        self.consume = consume
        self.last = last
        self.timeout = timeout
        self.pad = pad
        self.shuffle_seed = shuffle_seed
        self.transform = transform
        self.policy_version = policy_version
        self.sampler = sampler
        if consume and shuffle_seed is not None:
            self.sampler = ShuffleSampler(shuffle_seed)
        self.cursor = Cursor()
        self.waited_seconds = 0.0
        """How long the loops of this process have waited for batches, all in all."""
        self.batches_given = 0
        """How many batches they got."""
        self._epoch = 0
        self._listing: Listing | None = None
        self._resumed: dict[str, Any] | None = None
        self._newest: weakref.ref[Delivery] | None = None
        self._ranks: Ranks | None = None
        if dp_rank is not None or dp_size is not None or device_mesh is not None:
            self._ranks = discover(dp_rank, dp_size, device_mesh=device_mesh)

    @property
    def ranks(self) -> Ranks:
        """The data-parallel rank; found when first needed, and fixed from then on."""
        if self._ranks is None:
            self._ranks = discover()
        return self._ranks

    @property
    def identity(self) -> tuple[str, str, str]:
        """Queue, partition and task ("" without consumption): whose cursor this is."""
        return self.handle.name, self.partition_id, self.task_name if self.consume else ""

    @property
    def required(self) -> list[str] | None:
        """The fields that a sample must have; None if any will do."""
        return [*(self.fields or ()), *needs_of(self.sampler)] or None

    @property
    def global_batch_size(self) -> int:
        """Samples of a batch over all ranks."""
        return self.batch_size * self.ranks.size

    def set_epoch(self, epoch: int) -> None:
        """Fix the order of the next pass with `consume=False` and a `shuffle_seed`.

        Without a call the passes of one process are epochs 0, 1, 2, ...
        """
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is None:
            return self.deliver(Pass.read_inline)
        if self.consume:
            return _refuse_worker(self.handle.name)
        return (batch for _, batch in self.begin())

    def deliver(self, open_source: Callable[[Pass], Source]) -> Delivery:
        """An iteration that reads its passes through `open_source`.

        A consumer has one place in the stream, so its earlier iteration ends here.
        """
        if self.consume:
            self.end_delivery()
        delivery = Delivery(self, open_source)
        self._newest = weakref.ref(delivery)
        return delivery

    def end_delivery(self) -> None:
        """End the newest iteration, if somebody still holds it, and what reads ahead for it."""
        delivery = None if self._newest is None else self._newest()
        if delivery is not None:
            delivery.close()

    # The cursor

    def state_dict(self) -> dict[str, Any]:
        """The cursor, as primitives: global batches below "k" are used.

        In a plain loop the batch in hand counts as used. Taking a state says that the one taken
        before it has been saved: its batches are then committed as consumed. Under a Trainer it
        is what optimizer steps have covered. With `consume=False` it is the place in the epoch,
        with what it takes to list the same samples in the same order again, and to go on after
        them with batches of another size.

        Raises PersistingError in the worker of a plain DataLoader, if the dataset consumes.
        """
        cursor = self.cursor
        if cursor.driven:
            return self.state_at(cursor.used)
        if not self.consume:
            return self.state_at(cursor.reached())
        if get_worker_info() is not None:
            raise _refusal(self.handle.name)
        if cursor.state_taken is not None:
            self.commit(cursor.state_taken)
        cursor.state_taken = cursor.reached()
        if cursor.state_taken is None:
            cursor.state_taken = self.handle.engine.cursor(self.task_name, self.partition_id)
        return self.state_at(cursor.state_taken)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, also in the middle of an iteration.

        Raises ValueError where it is the state of another queue, partition or task.
        """
        told = (state["queue"], state["partition"], state["task"])
        if told != self.identity:
            raise ValueError(
                f"the state is of task {told[2]!r} on {told[0]}/{told[1]}, and this dataset is of"
                f" task {self.identity[2]!r} on {self.handle.name}/{self.partition_id}. Load the"
                " state that this dataset's loader gave."
            )
        if self.cursor.driven:
            return
        self.restore(state)
        self.cursor.state_taken = state["k"]

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state, whoever keeps it."""
        if not self.consume:
            self._resumed = state
        self.cursor.seek(state["k"])

    def go_on_from(self, former: PersistingDataset) -> None:
        """Take the place of another dataset of the same identity."""
        self.cursor = former.cursor
        self._epoch = former._epoch
        self._resumed = former._resumed

    def end_pass(self) -> None:
        """The epoch is over, also where its pass was cut short."""
        self._listing = None

    def state_at(self, k: int | None) -> dict[str, Any]:
        """The state that goes on with batch k: of the task, or of the pass in progress.

        A pass that is over goes on with the next epoch.
        """
        name, partition, task = self.identity
        state = {"k": k, "queue": name, "partition": partition, "task": task}
        if self.consume:
            return state
        if self._resumed is not None:
            return self._resumed
        listing = self._listing
        if listing is None or k is None or k >= len(listing.slices):
            start = {"k": 0, "epoch": self._epoch, "skip": 0, "below": None, "samples": None}
            return state | start | {"size": self.global_batch_size}
        return state | {
            "epoch": listing.epoch,
            "skip": listing.skip,
            "below": listing.below,
            "samples": listing.samples,
            "size": self.global_batch_size,
        }

    def settle(self) -> None:
        """The loop asks for more: what it holds counts as used, unless a Trainer counts."""
        cursor = self.cursor
        if cursor.driven or not cursor.holding:
            return
        while cursor.finish():
            pass
        cursor.step()
        if cursor.state_taken is None and cursor.used is not None:
            self.commit(cursor.used)

    def commit(self, k: int) -> None:
        """Tell the queue that all batches below k are consumed. Rank 0 speaks for all."""
        if self.consume and self.ranks.rank == 0:
            self.handle.engine.commit_cursor(self.task_name, self.partition_id, k)

    def saved(self, path: str | os.PathLike[str], k: int | None = None) -> None:
        """Say that a state is saved at `path`, to be resumed from as long as it is there.

        The state is the newest that `state_dict` gave, or that of batch k. Its batches then count
        as consumed, and a queue with a retention (see Queue) keeps the batches after it until the
        file, folder or fsspec URL is gone. Rank 0 speaks for all. Raises ValueError before the
        first state.
        """
        if k is None:
            k = self.cursor.state_taken
        if k is None:
            raise ValueError(
                f"saved({os.fspath(path)!r}) was called before state_dict(), so there is no state"
                " of this loader that could be there."
            )
        if self.consume and self.ranks.rank == 0:
            place = os.fspath(path)
            self.handle.engine.note_checkpoint(
                self.task_name,
                self.partition_id,
                place if is_remote(place) else os.path.abspath(place),
                k,
            )
        if not self.cursor.driven:
            self.commit(k)

    # Reading

    def begin(self) -> Pass:
        """A new pass: from the cursor on, or over all that is ready now."""
        if not self.consume:
            return self._begin_listing()
        cursor = self.cursor
        if cursor.state_taken is not None:
            self.commit(cursor.state_taken)
        if cursor.position is None:
            cursor.seek(self.handle.engine.cursor(self.task_name, self.partition_id))
        assert cursor.position is not None
        self.handle.engine.recut(
            self.task_name,
            self.partition_id,
            cursor.position,
            batch_size=self.batch_size,
            dp_size=self.ranks.size,
        )
        cursor.begin(cursor.position)
        return Pass(self, cursor.position, None)

    def _begin_listing(self) -> Pass:
        """A pass over all that is ready; the first one after a state was loaded goes on there."""
        state, self._resumed = self._resumed, None
        start, skip, below = 0, 0, None
        if state is not None:
            self._epoch = state["epoch"]
            start, skip, below = state["k"], state["skip"], state["below"]
            if state["size"] != self.global_batch_size:
                start, skip = 0, skip + start * state["size"]
        listing = list_samples(self, self._epoch, below, skip)
        if start + skip and state is not None and listing.samples != state["samples"]:
            log.warning(
                "epoch %d over partition %r of queue %r had %d samples when its state was taken and"
                " has %d now, so it does not go on exactly",
                listing.epoch,
                self.partition_id,
                self.handle.name,
                state["samples"],
                listing.samples,
            )
        self._epoch += 1
        self._listing = listing
        self.cursor.begin(start)
        return Pass(self, start, listing.slices)

    def close(self) -> None:
        """Close the queue, where this dataset opened it; a later iteration opens it again."""
        self.handle.close()

    def __getstate__(self) -> dict[str, Any]:
        self.ranks  # noqa: B018  (found here, since a worker must not ask)
        return self.__dict__ | {"cursor": Cursor(), "_newest": None, "_listing": None}


def _refuse_worker(queue: str) -> Iterator[Any]:
    raise _refusal(queue)
    yield


def _refusal(queue: str) -> PersistingError:
    return PersistingError(
        f"the dataset of queue {queue!r} consumes, and in a worker of a plain DataLoader it cannot"
        " know which batches have reached the loop. Use PersistingDataLoader, which can, or"
        " num_workers=0."
    )
