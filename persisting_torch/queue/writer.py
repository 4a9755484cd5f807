"""Writing to a queue, flushed when the block ends."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from persisting_torch.queue.meta import BatchMeta

if TYPE_CHECKING:
    from persisting_torch.queue.queue import Queue


class QueueWriter:
    """Puts into a queue; `close`, or the end of an `async with` block, flushes what it put."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    async def put(
        self,
        data: dict[str, Any] | Sequence[dict[str, Any]] | TensorDictBase,
        partition_id: str = "default",
    ) -> BatchMeta:
        """See Queue.put."""
        return await self.queue.put(data, partition_id)

    async def put_batch(
        self, records: Sequence[dict[str, Any]], partition_id: str = "default"
    ) -> BatchMeta:
        """See Queue.put_batch."""
        return await self.queue.put_batch(records, partition_id)

    async def flush(self) -> None:
        """See Queue.flush."""
        await self.queue.flush()

    async def close(self) -> None:
        """Flush; the queue stays open."""
        await self.queue.flush()

    async def __aenter__(self) -> QueueWriter:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
