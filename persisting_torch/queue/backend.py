"""One bucket's storage on its own, for those who place buckets themselves."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase

from persisting_torch.queue.meta import BatchMeta
from persisting_torch.queue.queue import Queue


class _Bucket(Queue):
    """A queue of this machine, whatever cluster the process is part of."""

    _may_be_distributed = False


class LanceBackend:
    """The records of one bucket under `storage_path`; `options` are those of Queue.

    Waiting records are flushed at `batch_size`, at `flush`, and when the process ends. Fits where
    Pulsing's own queue takes a storage backend: `pulsing.streaming.register_backend("lance",
    LanceBackend)`. One process at a time has to own the bucket then, which that queue does not
    ensure as `Queue` under Pulsing does.
    """

    def __init__(
        self,
        bucket_id: int,
        storage_path: str | os.PathLike[str],
        batch_size: int = 100,
        **options: Any,
    ) -> None:
        self.bucket_id = bucket_id
        self._queue = _Bucket(f"bucket_{bucket_id}", storage_path, batch_size=batch_size, **options)
        self.flush = self._queue.flush
        self.mark_consumed = self._queue.mark_consumed
        self.reset_consumption = self._queue.reset_consumption
        self.clear = self._queue.clear
        self.get_meta = self._queue.get_meta

    async def put(self, record: dict[str, Any]) -> BatchMeta:
        """Put one record. Raises as Queue.put does."""
        return await self._queue.put(record)

    async def put_batch(self, records: Sequence[dict[str, Any]]) -> BatchMeta:
        """Put many records, all or none."""
        return await self._queue.put_batch(records)

    async def put_tensor(
        self, data: TensorDictBase, partition_id: str = "default", **options: Any
    ) -> BatchMeta:
        """Put the samples of a TensorDict; `options` are those of Queue.put."""
        return await self._queue.put(data, partition_id, **options)

    async def get(self, limit: int = 100, offset: int = 0) -> list[dict[str, Any]]:
        """Up to `limit` records after the first `offset`, in put order."""
        return await self._queue.get(limit, offset)

    async def get_stream(
        self, limit: int = 100, offset: int = 0, wait: bool = False, timeout: float | None = None
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Lists of records in order, `limit` in all. It waits and ends as Queue.stream does."""
        async for records in self._queue.stream(limit, offset, wait, timeout):
            yield records

    async def get_data(
        self, meta: BatchMeta | Mapping[str, Any], fields: Sequence[str] | None = None
    ) -> TensorDict:
        """The samples that `meta`, or its `to_dict()`, names; of `fields` only, if these are given.

        Raises KeyError for samples that the bucket does not hold.
        """
        named = meta if isinstance(meta, BatchMeta) else BatchMeta.from_dict(dict(meta))
        return await self._queue.get_data(named if fields is None else named.select_fields(fields))

    async def stats(self) -> dict[str, Any]:
        """As Queue.stats, with the bucket's id."""
        return {"bucket_id": self.bucket_id, **await self._queue.stats()}

    def total_count(self) -> int:
        """Records of the bucket, waiting ones included."""
        return len(self._queue)

    def close(self) -> None:
        """Flush and give everything back."""
        self._queue.close()


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
        return self._queue.engine.metrics.report()
