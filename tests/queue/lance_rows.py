"""Rows whose every value follows from their index, and stores filled with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyarrow as pa

from persisting_torch.queue.storage import RowStore

WIDTH = 16
COLUMNS = ["_index", "_partition", "tokens", "reward", "text", "ragged", "done"]
METADATA = {b"persisting_torch": b"{}"}
NO_LOCK = nullcontext()


def rows(indexes: Iterable[int], width: int = WIDTH) -> pa.Table:
    """One row for each index; row i holds values that only row i holds."""
    index = np.array(list(indexes), dtype=np.int64)
    tokens = (index[:, None] * 31 + np.arange(width)).astype(np.int64)
    return pa.table(
        {
            "_index": pa.array(index),
            "_partition": pa.array([f"train_{i % 3}" for i in index.tolist()]),
            "tokens": pa.FixedSizeListArray.from_arrays(pa.array(tokens.ravel()), width),
            "reward": pa.array(index.astype(np.float32) / 2),
            "text": pa.array([None if i % 7 == 0 else "x" * (i % 5) for i in index.tolist()]),
            "ragged": pa.array([[i] * (i % 4) for i in index.tolist()], pa.large_list(pa.int32())),
            "done": pa.array([i % 2 == 0 for i in index.tolist()]),
        },
        schema=pa.schema(
            [
                pa.field("_index", pa.int64(), nullable=False),
                pa.field("_partition", pa.string(), nullable=False),
                pa.field(
                    "tokens", pa.list_(pa.int64(), width), metadata={b"persisting_torch": b"{}"}
                ),
                pa.field("reward", pa.float32()),
                pa.field("text", pa.string()),
                pa.field("ragged", pa.large_list(pa.int32())),
                pa.field("done", pa.bool_()),
            ]
        ),
    )


def filled(path: Any, counts: Sequence[int], width: int = WIDTH, **options: Any) -> RowStore:
    """A store with one commit for each count; row id and index of a row are the same."""
    store = RowStore(str(path), **options)
    start = 0
    for count in counts:
        store.append(rows(range(start, start + count), width))
        start += count
    return store


def assert_reads(
    store: RowStore, ids: Iterable[int], columns: Sequence[str] = COLUMNS, width: int = WIDTH
) -> None:
    """The store answers these row ids with the rows of the same indexes, in this order."""
    wanted = list(ids)
    got = store.read(np.array(wanted, dtype=np.int64), columns)
    expected = rows(wanted, width).select(list(columns))
    assert got.schema.equals(expected.schema)
    for name in columns:
        assert got[name].combine_chunks().equals(expected[name].combine_chunks()), name
    got.validate(full=True)
