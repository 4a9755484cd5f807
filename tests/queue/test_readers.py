"""Readers that share the records, and writers that flush."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from persisting_torch import (
    Queue,
)


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


def test_readers_share_the_records_without_overlap_or_gap(tmp_path: Path):
    async def main() -> None:
        async with Queue("q", tmp_path) as queue:
            await queue.put([{"n": n} for n in range(10)])
            readers = [queue.reader(rank, 3) for rank in range(3)]
            met: list[list[int]] = [[], [], []]

            async def read(limit: int) -> None:
                for reader, own in zip(readers, met, strict=True):
                    own += [record["n"] for record in await reader.get(limit)]

            await read(2)
            await queue.flush()
            await read(100)
            await queue.put([{"n": n} for n in range(10, 17)])
            await read(100)
            await read(100)
            assert met == [list(range(17))[rank::3] for rank in range(3)]
            readers[1].reset()
            assert [r["n"] for r in await readers[1].get(3)] == [1, 4, 7]
            streamed = [r["n"] async for records in readers[1].stream(2) for r in records]
            assert streamed == [10, 13]

    asyncio.run(main())


def test_a_reader_waits_for_its_own_records(tmp_path: Path):
    async def main() -> None:
        async with Queue("q", tmp_path) as queue:
            reader = queue.reader(1, 2)
            waiting = asyncio.create_task(reader.get(wait=True, timeout=10))
            await asyncio.sleep(0.02)
            await queue.put({"n": 0})
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await queue.put({"n": 1})
            assert [record["n"] for record in await waiting] == [1]
            assert await reader.get(wait=True, timeout=0.02) == []

    asyncio.run(main())


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(queue: Queue, rank: int, world_size: int):
    with pytest.raises(ValueError, match="rank"):
        queue.reader(rank, world_size)


def test_a_reader_takes_its_rank_from_torchruns_environment(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
):
    assert (queue.reader().rank, queue.reader().world_size) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (queue.reader().rank, queue.reader().world_size) == (3, 4)
    assert (queue.reader(1, 2).rank, queue.reader(1, 2).world_size) == (1, 2)


def test_a_writer_flushes_when_its_block_ends(tmp_path: Path):
    async def main() -> None:
        with Queue("q", tmp_path) as queue, Queue("q", tmp_path) as other:
            async with queue.writer() as writer:
                await writer.put({"n": 0})
                await writer.put_batch([{"n": 1}, {"n": 2}])
                assert await other.get() == []
            assert [record["n"] for record in await other.get()] == [0, 1, 2]

    asyncio.run(main())
