"""One bucket's storage on its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

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
