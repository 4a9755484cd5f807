"""One bucket's storage on its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from persisting_torch import QueueClosed
from persisting_torch.queue import LanceBackend, PersistingBackend


@pytest.mark.parametrize("kind", [LanceBackend, PersistingBackend])
def test_a_backend_puts_flushes_and_gets_in_order(tmp_path: Path, kind: type[LanceBackend]):
    async def main() -> None:
        backend = kind(3, tmp_path, batch_size=4)
        other = kind(3, str(tmp_path))
        await backend.put({"x": 0})
        await backend.put_batch([{"x": 1}, {"x": 2}])
        assert await backend.get() == [{"x": 0}, {"x": 1}, {"x": 2}]
        assert await other.get() == []
        await backend.put({"x": 3})
        assert await other.get(2, 1) == [{"x": 1}, {"x": 2}]
        await backend.put({"y": 4})
        await backend.flush()
        assert (await other.get(1, 4)) == [{"x": None, "y": 4}]
        stats = await backend.stats()
        assert (stats["bucket_id"], stats["total_count"], stats["buffer_size"]) == (3, 5, 0)
        backend.close()
        other.close()
        with pytest.raises(QueueClosed):
            await backend.get()

    asyncio.run(main())


def test_backends_of_other_buckets_keep_to_themselves_and_close_flushes(tmp_path: Path):
    async def main() -> None:
        one, two = LanceBackend(0, tmp_path), LanceBackend(1, tmp_path)
        await one.put({"x": 1})
        await two.put({"x": 2})
        one.close()
        two.close()
        again = LanceBackend(0, tmp_path)
        assert await again.get() == [{"x": 1}]
        again.close()

    asyncio.run(main())


def test_a_persisting_backend_counts_what_it_does(tmp_path: Path):
    async def main() -> None:
        backend = PersistingBackend(0, tmp_path, batch_size=2)
        await backend.put({"x": 1})
        await backend.put_batch([{"x": 2}, {"x": 3}])
        await backend.flush()
        metrics = backend.get_metrics()
        assert metrics["put"] == 3
        assert metrics["flush_calls"] == 1
        assert metrics["flush_samples"] == 3
        assert metrics["flush_seconds"] > 0
        assert metrics["since_seconds"] > 0
        assert (await backend.stats())["metrics"]["put"] == 3
        backend.close()

    asyncio.run(main())


def test_metrics_can_be_left_out(tmp_path: Path):
    async def main() -> None:
        backend = PersistingBackend(0, tmp_path, enable_metrics=False)
        plain = LanceBackend(1, tmp_path)
        for each in (backend, plain):
            await each.put({"x": 1})
            assert "metrics" not in await each.stats()
            each.close()

    asyncio.run(main())


def test_a_backend_is_one_to_pulsings_queue(tmp_path: Path):
    from pulsing.streaming import StorageBackend

    for bucket, kind in enumerate((LanceBackend, PersistingBackend)):
        backend = kind(bucket, tmp_path, zerocopy_mode="auto")
        assert isinstance(backend, StorageBackend)
        backend.close()


def test_a_backend_streams_counts_and_waits(tmp_path: Path):
    async def main() -> None:
        backend, other = LanceBackend(0, tmp_path), LanceBackend(0, tmp_path)
        assert backend.total_count() == 0
        await backend.put_batch([{"x": x} for x in range(5)])
        await backend.flush()
        assert backend.total_count() == other.total_count() == 5
        parts = [part async for part in other.get_stream(3, 1)]
        assert [record["x"] for part in parts for record in part] == [1, 2, 3]

        async def read() -> list[int]:
            stream = other.get_stream(7, 0, wait=True, timeout=30.0)
            return [record["x"] async for part in stream for record in part]

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        assert not reading.done()
        await backend.put_batch([{"x": 5}, {"x": 6}])
        await backend.flush()
        assert await reading == list(range(7))
        backend.close()
        other.close()

    asyncio.run(main())


def test_a_backend_has_tensors_claims_and_marks(tmp_path: Path):
    async def main() -> None:
        backend = LanceBackend(0, tmp_path)
        data = TensorDict({"x": torch.arange(6.0), "y": torch.arange(12).reshape(6, 2)}, [6])
        await backend.put_tensor(data, partition_id="p")
        meta = await backend.get_meta(["x", "y"], 2, task_name="t", partition_id="p")
        assert meta.global_indexes == [0, 1]
        whole = await backend.get_data(meta)
        assert torch.equal(whole["y"], data["y"][:2])
        part = await backend.get_data(meta.to_dict(), fields=["x"])
        assert list(part.keys()) == ["x"]
        assert torch.equal(part["x"], data["x"][:2])
        await backend.mark_consumed("t", [2, 3], "p")
        left = await backend.get_meta(["x"], 6, task_name="t", partition_id="p")
        assert left.global_indexes == [4, 5]
        await backend.reset_consumption("t", "p")
        await backend.clear([0], "p")
        again = await backend.get_meta(["x"], 6, task_name="t", partition_id="p")
        assert again.global_indexes == [1, 2, 3, 4, 5]
        backend.close()

    asyncio.run(main())
