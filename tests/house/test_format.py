"""docs/format.md says what is on disk: every table, column, type and file."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import get_args

import torch

from persisting_torch import BatchMeta, Queue
from persisting_torch.queue.dtypes import STORAGE
from persisting_torch.queue.fields import Kind
from persisting_torch.queue.ledger import TABLES

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
PACKED = {"first", "count", "members"}


def row_of(table: str) -> str:
    (row,) = re.findall(rf"^\| `{table}` \|.*$", PAGE, re.MULTILINE)
    return str(row)


def test_every_table_and_column_of_the_ledger_is_described() -> None:
    ledger = sqlite3.connect(":memory:")
    ledger.executescript(TABLES)
    tables = [
        name
        for (name,) in ledger.execute(
            "SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE TABLE%'"
        )
    ]
    for table in tables:
        if table.startswith("sqlite_"):
            continue
        row = row_of(table)
        columns = {name for _, name, *_ in ledger.execute(f"PRAGMA table_info({table})")}
        if "packed" in row:
            columns -= PACKED
        assert {name for name in columns if f"`{name}`" not in row} == set(), table


def test_every_kind_and_dtype_is_described() -> None:
    assert all(f"`{kind}`" in PAGE for kind in get_args(Kind))
    integers = {name for name in STORAGE if re.fullmatch(r"u?int\d+", name)}
    assert "int8 ... int64, uint8 ... uint64" in PAGE
    assert all(name in PAGE for name in STORAGE.keys() - integers)


def test_every_file_and_key_is_described(tmp_path: Path) -> None:
    with Queue("q", tmp_path) as queue:
        queue.sync.put([{"x": torch.zeros(2)}, {"x": torch.ones(2)}])
        queue.sync.put([{"y": 1}], metadata=BatchMeta([0], "default"))
        queue.sync.clear([1])
        queue.sync.seal()
        queue.engine.tending.tend()
        paths = [path for path in (tmp_path / "q").rglob("*") if ".lance/" not in str(path)]
        with queue.engine.ledger.reading() as tx:
            keys = [key for (key,) in tx.execute("SELECT key FROM meta")]
    undescribed = {path.name for path in paths if path.name.removesuffix(".turn") not in PAGE}
    assert undescribed == {"ledger.sqlite-wal", "ledger.sqlite-shm"}
    assert all(f"`{key}`" in row_of("meta") for key in keys)
