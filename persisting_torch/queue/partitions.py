"""What the partitions of a queue hold, what is ready and what is taken: a part of Queue's methods.

The answers are those of the moment, for all processes; what still waits in this one is flushed
first. A partition that nobody has put into is empty, and no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from pyroaring import BitMap64

from persisting_torch.queue.meta import BatchMeta
from persisting_torch.queue.threads import in_thread

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine

Status = tuple[torch.Tensor, torch.Tensor]


class SyncPartitions:
    """The methods about partitions without await. See Partitions."""

    _engine: Engine

    def get_partition_list(self) -> list[str]:
        """See Queue.get_partition_list."""
        self._engine.check_open()
        waiting = {chunk.partition for chunk in self._engine.writes.waiting()}
        with self._engine.ledger.reading() as tx:
            self._engine.books.refresh(tx)
            known = self._engine.books.partitions.values()
            held = [part.name for part in known if part.name not in waiting and part.present]
        return sorted([*waiting, *held])

    def peek_meta(
        self, fields: Sequence[str] | None = None, partition_id: str = "default"
    ) -> BatchMeta:
        """See Queue.peek_meta."""
        indexes = self._engine.snapshot(partition_id, fields)
        names = self._engine.reads.names_of(fields)
        return BatchMeta(indexes, partition_id, names, self._engine.custom.of(indexes))

    def get_consumption_status(self, task_name: str, partition_id: str = "default") -> Status:
        """See Queue.get_consumption_status."""
        present, taken = self._consumption(task_name, partition_id)
        return _tensor(present), _told(present, [taken])[:, 0]

    def check_consumption_status(self, task_name: str, partition_id: str = "default") -> bool:
        """See Queue.check_consumption_status."""
        present, taken = self._consumption(task_name, partition_id)
        return bool(present) and present <= taken

    def get_production_status(self, fields: Sequence[str], partition_id: str = "default") -> Status:
        """See Queue.get_production_status."""
        present, having = self._production(fields, partition_id)
        return _tensor(present), _told(present, having)

    def check_production_status(self, fields: Sequence[str], partition_id: str = "default") -> bool:
        """See Queue.check_production_status."""
        present, having = self._production(fields, partition_id)
        return bool(present) and all(present <= ready for ready in having)

    def set_custom_meta(self, metadata: BatchMeta) -> None:
        """See Queue.set_custom_meta."""
        engine = self._engine
        engine.check_open(writing=True)
        engine.writes.flush_partition(metadata.partition_id)
        engine.custom.enter(metadata.partition_id, metadata.global_indexes, metadata.custom_meta)

    def clear_partition(self, partition_id: str) -> None:
        """See Queue.clear_partition."""
        indexes = self._engine.snapshot(partition_id)
        if len(indexes):
            self._engine.clear(partition_id, indexes.tolist())

    def _tasks_of(self, partition: str) -> list[str]:
        self._engine.check_open()
        self._engine.books.follow()
        with self._engine.ledger.lock:
            return [task for task, where in self._engine.books.tasks if where == partition]

    def _consumption(self, task: str, partition: str) -> tuple[BitMap64, BitMap64]:
        """The samples of the partition, and those that the task has taken."""
        self._engine.snapshot(partition)
        with self._engine.ledger.lock:
            known = self._engine.books.tasks.get((task, partition))
            taken = BitMap64() if known is None else BitMap64(known.taken)
            return self._engine.books.ready_whoever_took(partition, frozenset()), taken

    def _production(self, fields: Sequence[str], partition: str) -> tuple[BitMap64, list[BitMap64]]:
        """The samples of the partition, and for each field those that have all of it."""
        self._engine.snapshot(partition)
        with self._engine.ledger.lock:
            ready = self._engine.books.ready_whoever_took
            needed = [frozenset(self._engine.reads.names_of([field])) for field in fields]
            return ready(partition, frozenset()), [ready(partition, names) for names in needed]


class Partitions:
    """The methods of a queue about what its partitions hold."""

    sync: SyncPartitions

    async def get_partition_list(self) -> list[str]:
        """The names of the partitions that hold samples, sorted."""
        return await in_thread(self.sync.get_partition_list)

    async def peek_meta(
        self, fields: Sequence[str] | None = None, partition_id: str = "default"
    ) -> BatchMeta:
        """All samples of a partition that have all `fields`, whoever took them. Takes nothing."""
        return await in_thread(self.sync.peek_meta, fields, partition_id)

    async def get_consumption_status(self, task_name: str, partition_id: str = "default") -> Status:
        """Which samples of a partition a task has taken.

        Returns the global indexes, int64 [n], and for each 1 (taken) or 0, int8 [n].
        """
        return await in_thread(self.sync.get_consumption_status, task_name, partition_id)

    async def check_consumption_status(self, task_name: str, partition_id: str = "default") -> bool:
        """Whether a task has taken all samples that the partition holds; False if it is empty.

        More may come to a partition that is not sealed.
        """
        return await in_thread(self.sync.check_consumption_status, task_name, partition_id)

    async def get_production_status(
        self, fields: Sequence[str], partition_id: str = "default"
    ) -> Status:
        """Which samples of a partition have which fields.

        Returns the global indexes, int64 [n], and for each sample and field, in the order given,
        1 (there) or 0, int8 [n, len(fields)].
        """
        return await in_thread(self.sync.get_production_status, fields, partition_id)

    async def check_production_status(
        self, fields: Sequence[str], partition_id: str = "default"
    ) -> bool:
        """Whether all samples that the partition holds have all fields; False if it is empty."""
        return await in_thread(self.sync.check_production_status, fields, partition_id)

    async def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Keep the `custom_meta` of these samples: `get_meta` and `peek_meta` give it back.

        It takes the place of what was kept for them before. For a sample that has a key it is the
        tag. Raises SchemaError for what JSON cannot hold, KeyError for samples that are not there.
        """
        await in_thread(self.sync.set_custom_meta, metadata)

    async def clear_partition(self, partition_id: str) -> None:
        """Remove all samples of a partition for good, with their keys. It may be put into again."""
        await in_thread(self.sync.clear_partition, partition_id)


def _tensor(indexes: BitMap64) -> torch.Tensor:
    return torch.from_numpy(np.array(indexes.to_array(), dtype=np.int64))


def _told(samples: BitMap64, sets: Sequence[BitMap64]) -> torch.Tensor:
    """For each sample and set whether it is in, int8 [len(samples), len(sets)]."""
    rows = np.array(samples.to_array())
    told = np.zeros((len(rows), len(sets)), dtype=np.int8)
    for column, members in enumerate(sets):
        told[:, column] = np.isin(rows, np.array((samples & members).to_array()))
    return torch.from_numpy(told)
