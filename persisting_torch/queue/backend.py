"""One bucket's storage on its own, as a distributed queue's owners use it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from persisting_torch.queue.engine import Engine
from persisting_torch.queue.meta import BatchMeta
from persisting_torch.queue.place import open_place
from persisting_torch.queue.report import stats
from persisting_torch.queue.threads import in_thread


class LanceBackend:
    """The records of one bucket under `storage_path`; `options` are those of Queue.

    Waiting records are flushed at `batch_size`, at `flush`, and when the process ends.
    """

    def __init__(
        self,
        bucket_id: int,
        storage_path: str | os.PathLike[str],
        batch_size: int = 100,
        **options: Any,
    ) -> None:
        self.bucket_id = bucket_id
        self._engine = Engine(
            open_place(f"bucket_{bucket_id}", storage_path), batch_size=batch_size, **options
        )

    async def put(self, record: dict[str, Any]) -> BatchMeta:
        """Put one record. Raises as Queue.put does."""
        meta = self._engine.writes.put(record)
        if self._engine.writes.wants_flush(meta):
            await self.flush()
        return meta

    async def put_batch(self, records: Sequence[dict[str, Any]]) -> BatchMeta:
        """Put many records, all or none."""
        meta = await in_thread(self._engine.writes.put, records)
        if self._engine.writes.wants_flush(meta):
            await self.flush()
        return meta

    async def get(self, limit: int = 100, offset: int = 0) -> list[dict[str, Any]]:
        """Up to `limit` records after the first `offset`, in put order."""
        return await in_thread(self._engine.records, limit, offset)

    async def flush(self) -> None:
        """Write what waits in memory."""
        await in_thread(self._engine.flush)

    async def stats(self) -> dict[str, Any]:
        """As Queue.stats, with the bucket's id."""
        return {"bucket_id": self.bucket_id, **await in_thread(stats, self._engine)}

    def close(self) -> None:
        """Flush and give everything back."""
        self._engine.close()


class PersistingBackend(LanceBackend):
    """A LanceBackend that can count what it does."""

    def __init__(
        self,
        bucket_id: int,
        storage_path: str | os.PathLike[str],
        batch_size: int = 100,
        enable_metrics: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            bucket_id, storage_path, batch_size, enable_metrics=enable_metrics, **options
        )

    def get_metrics(self) -> dict[str, float]:
        """Counts and seconds of puts, flushes and reads since the backend was made."""
        return self._engine.metrics.report()
