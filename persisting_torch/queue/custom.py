"""What users note about samples: a dict for each, that JSON can hold, kept in the ledger.

The note of a sample that has a key is the tag of that key.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from persisting_torch.errors import SchemaError
from persisting_torch.queue.again import again
from persisting_torch.queue.books import Books
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.runs import Int64s
from persisting_torch.queue.sets import set_of

ANY = "SELECT EXISTS (SELECT 1 FROM custom), EXISTS (SELECT 1 FROM keys)"
CLOSE = 8  # samples of a range so many times as long are read for the sake of those asked for


class CustomMeta:
    """The notes of one bucket's samples."""

    def __init__(self, ledger: Ledger, books: Books) -> None:
        self.ledger = ledger
        self.books = books

    def of(self, indexes: Sequence[int] | Int64s) -> list[dict[str, Any]] | None:
        """One dict for each sample, in order; None where no sample has any."""
        if not len(indexes):
            return None
        wanted = np.asarray(indexes, dtype=np.int64)
        with self.ledger.reading() as tx:
            if not any(tx.execute(ANY).fetchone()):
                return None
            notes = _find(tx, "custom", "note", wanted) | _find(tx, "keys", "tag", wanted)
        if not notes:
            return None
        return [json.loads(notes.get(index, "{}")) for index in wanted.tolist()]

    @again
    def enter(
        self, partition: str, indexes: Sequence[int], notes: Sequence[Mapping[str, Any]]
    ) -> None:
        """Let these be the notes of the samples. An empty dict takes a note away.

        Raises SchemaError for what JSON cannot hold, KeyError for samples that are not there.
        """
        texts = [
            _text_of(note, f"sample {index}") for index, note in zip(indexes, notes, strict=True)
        ]
        with self.ledger.transaction() as tx:
            self.books.refresh(tx)
            unknown = self.books.strays(partition, indexes)
            unknown = unknown or list(self.books.cleared_indexes & set_of(indexes))[:10]
            if unknown:
                raise KeyError(
                    f"{self.ledger.place.queue}/{partition} holds no samples with global indexes"
                    f" {unknown}; nothing was noted."
                )
            for index, text in zip(indexes, texts, strict=True):
                tag = tx.execute("UPDATE keys SET tag = ? WHERE sample = ?", (text, index))
                if not tag.rowcount and text is not None:
                    tx.execute("INSERT OR REPLACE INTO custom VALUES (?, ?)", (index, text))
                elif not tag.rowcount:
                    tx.execute("DELETE FROM custom WHERE sample = ?", (index,))


def _text_of(note: Mapping[str, Any], of: str) -> str | None:
    """A note as JSON, None for an empty one. Raises SchemaError for what JSON cannot hold."""
    try:
        return json.dumps(dict(note)) if note else None
    except (TypeError, ValueError) as error:
        raise SchemaError(
            f"the custom meta of {of} cannot be stored: {error}. It holds what JSON can hold; put"
            " other values in fields."
        ) from error


def _find(tx: sqlite3.Connection, table: str, column: str, indexes: Int64s) -> dict[int, str]:
    """The texts of those samples that have one, and perhaps of some that lie among them."""
    ask = f"SELECT sample, {column} FROM {table} WHERE {column} IS NOT NULL AND sample"
    low, high = int(indexes.min()), int(indexes.max())
    if high - low < CLOSE * len(indexes):
        rows = tx.execute(f"{ask} BETWEEN ? AND ?", (low, high))
    else:
        wanted = json.dumps(indexes.tolist())
        rows = tx.execute(f"{ask} IN (SELECT value FROM json_each(?))", (wanted,))
    return dict(rows.fetchall())
