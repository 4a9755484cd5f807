"""Reading a queue's records in order, each rank its share."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from persisting_torch.queue.threads import in_thread

if TYPE_CHECKING:
    from persisting_torch.queue.queue import Queue

STEP = 100


class QueueReader:
    """One rank's share of a queue's records, from where it stopped reading.

    Rank r of world_size W reads the r-th, (r + W)-th, ... record in order; where the queue has
    several buckets, at least W of them, the records of the r-th, (r + W)-th, ... bucket, once they
    are flushed. Rank and world size come from the arguments, else from torch.distributed, else from
    torchrun's environment, else 0 of 1. Reading marks nothing.

    `get_meta`, `get_data` and `get_batch` are the queue's own: they claim, from all that is ready,
    whatever the reader's share is, and no two readers of a task get the same sample.
    """

    def __init__(
        self, queue: Queue, rank: int | None = None, world_size: int | None = None
    ) -> None:
        self.queue = queue
        self.rank, self.world_size = _place(rank, world_size)
        buckets = range(self.rank, queue.num_buckets, self.world_size)
        by_bucket = 1 < queue.num_buckets >= self.world_size > 1
        self._buckets = buckets if by_bucket else None
        self.get_meta, self.get_data = queue.get_meta, queue.get_data
        self.get_batch = queue.get_batch
        self.reset()

    async def get(
        self, limit: int = 100, wait: bool = False, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """Up to `limit` further records of this rank's share.

        With `wait`, waits up to `timeout` seconds for the first (None: as long as it takes, see
        `Queue.stream`); none once the whole queue is sealed and read. Raises ProducerFailed when
        it waits and no producer is left.
        """
        async for records in self.stream(limit, wait=wait, timeout=timeout):
            return records
        return []

    async def stream(
        self, limit: int | None = None, wait: bool = False, timeout: float | None = None
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Lists of further records, `limit` in all (None: no limit).

        It waits and ends as `Queue.stream` does. Raises ProducerFailed when it waits and no
        producer is left.
        """
        from persisting_torch.queue.queue import _deadline

        left, deadline = limit, _deadline(timeout)
        while left is None or left > 0:
            share = STEP if left is None else min(left, STEP)
            records, met = await in_thread(self._step, share)
            if records:
                left = None if left is None else left - len(records)
                yield records
                deadline = _deadline(timeout)
            elif not met and (not wait or not await self._stream.wait_async(deadline)):
                return

    def _step(self, share: int) -> tuple[list[dict[str, Any]], int]:
        """This rank's part of the next records, `share` at most, and how many were met."""
        if self._buckets is not None:
            self.queue.engine.flush()
            records = self._stream.next(share)
            return records, len(records)
        until = (self.rank - self._met) % self.world_size
        records = self._stream.next(until + (share - 1) * self.world_size + 1)
        own = records[until :: self.world_size]
        self._met += len(records)
        return own, len(records)

    def reset(self) -> None:
        """Begin again at the first record."""
        self._stream = self.queue.engine.stream(buckets=self._buckets)
        self._met = 0

    async def __aenter__(self) -> QueueReader:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None or world_size is None:
        found = _found_place()
        rank = found[0] if rank is None else rank
        world_size = found[1] if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank {rank} is not in a world of {world_size}: it must be 0 to world_size - 1."
        )
    return rank, world_size


def _found_place() -> tuple[int, int]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
