"""Global batches as a task sees them: formed once, replayed, and how they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from persisting_torch import (
    GRPOGroupNSampler,
    Queue,
    WaitTimeout,
)
from persisting_torch.errors import PersistingError


@pytest.fixture
def queue(tmp_path: Path):
    with Queue("q", tmp_path) as opened:
        yield opened


def test_a_global_batch_is_formed_once_and_answered_identically(tmp_path: Path):
    with Queue("q", tmp_path) as queue:
        indexes = queue.sync.put([{"x": n} for n in range(10)]).global_indexes
        ask: dict[str, Any] = {"batch_size": 2, "dp_size": 2, "fields": ["x"], "timeout": 0}
        first = queue.engine.await_assignment("t", "default", 0, **ask)
        assert first is not None
        assert first.slices == (tuple(indexes[:2]), tuple(indexes[2:4]))
        assert queue.engine.await_assignment("t", "default", 0, **ask) == first
        with pytest.raises(WaitTimeout):
            queue.engine.await_assignment("t", "default", 2, **ask)
        with pytest.raises(PersistingError, match=r"2 ranks of 2 samples.*1 ranks of 2"):
            queue.engine.await_assignment("t", "default", 0, batch_size=2, timeout=0)
        queue.sync.seal()
        assert queue.engine.await_assignment("t", "default", 2, **ask) is None
    with Queue("q", tmp_path) as queue:
        assert queue.engine.await_assignment("t", "default", 0, **ask) == first
        queue.engine.commit_cursor("t", "default", 1)
        assert queue.engine.cursor("t", "default") == 1
        queue.engine.commit_cursor("t", "default", 0)
        assert queue.engine.cursor("t", "default") == 1
        assert queue.engine.books_of("t", "default") == {
            "put": 10,
            "once": 4,
            "twice": 0,
            "never": 6,
            "dropped": 0,
        }
        queue.sync.clear(indexes[:4])
        assert queue.engine.books_of("t", "default") == {
            "put": 10,
            "once": 4,
            "twice": 0,
            "never": 6,
            "dropped": 0,
        }


@pytest.mark.parametrize("last", ["pad", "split"])
def test_the_remainder_of_a_sealed_partition_keeps_whole_groups(queue: Queue, last: Any):
    indexes = queue.sync.put([{"x": n} for n in range(11)]).global_indexes
    queue.sync.seal()
    ask: dict[str, Any] = {"batch_size": 4, "dp_size": 2, "last": last, "timeout": 0}
    sampler = GRPOGroupNSampler(2)
    first = queue.engine.await_assignment("t", "default", 0, sampler=sampler, **ask)
    assert first is not None
    rest = queue.engine.await_assignment("t", "default", 1, sampler=sampler, **ask)
    assert rest is not None
    assert {index for part in rest.slices for index in part} == set(indexes[8:10])
    assert queue.engine.await_assignment("t", "default", 2, sampler=sampler, **ask) is None
