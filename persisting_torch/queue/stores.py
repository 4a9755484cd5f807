"""The rows of all buckets as one store, for those who read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from persisting_torch.queue.places import by_bucket
from persisting_torch.queue.runs import Int64s


class Store(Protocol):
    """Rows that can be read by their number."""

    path: str

    def exists(self) -> bool: ...

    def refresh(self) -> int: ...

    def read(self, rows: Int64s, columns: Sequence[str]) -> pa.Table: ...

    @property
    def version(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def fragments(self) -> int: ...

    @property
    def versions(self) -> int: ...


class ManyStores:
    """The stores of the buckets together. `pack` gives bucket and row of row numbers, packed."""

    def __init__(
        self, path: str, stores: Sequence[Store], pack: Callable[[Int64s], Int64s]
    ) -> None:
        self.path = path
        self.stores = stores
        self._pack = pack

    def exists(self) -> bool:
        return any(store.exists() for store in self.stores)

    def refresh(self) -> int:
        """Move to the newest versions; a number that rises with each of them."""
        return sum([store.refresh() for store in self.stores])

    @property
    def version(self) -> int:
        return sum(store.version for store in self.stores)

    @property
    def rows(self) -> int:
        return sum(store.rows for store in self.stores)

    @property
    def fragments(self) -> int:
        return sum(store.fragments for store in self.stores if store.exists())

    @property
    def versions(self) -> int:
        return sum(store.versions for store in self.stores)

    def read(self, rows: Int64s, columns: Sequence[str]) -> pa.Table:
        """See RowStore.read."""
        packed = self._pack(np.asarray(rows, dtype=np.int64))
        if len(packed) and packed.min() < 0:
            raise KeyError(f"the queue has no row {rows[int(np.argmin(packed))]}")
        parts = [(at, self.stores[b].read(own, columns)) for b, at, own in by_bucket(packed)]
        if len(parts) == 1:
            return parts[0][1]
        if not parts:
            return pa.table({})
        return _interleaved(parts, len(packed))


def _interleaved(parts: Sequence[tuple[Int64s, pa.Table]], count: int) -> pa.Table:
    """One table of tables whose rows belong at these positions. One may lack columns of others."""
    fields = {field.name: field for _, table in parts for field in table.schema}
    if not fields:
        return pa.table({})
    order = np.empty(count, dtype=np.int64)
    order[np.concatenate([at for at, _ in parts])] = np.arange(count)
    columns = {}
    for name, field in fields.items():
        chunks = [
            table[name].combine_chunks()
            if name in table.column_names
            else pa.nulls(len(at), field.type)
            for at, table in parts
        ]
        columns[name] = pa.concat_arrays(_plain(chunks)).take(pa.array(order))
    nullable = [field.with_nullable(True) for field in fields.values()]
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(nullable))


def _plain(chunks: Sequence[pa.Array | pa.ChunkedArray]) -> list[pa.Array]:
    return [
        part
        for chunk in chunks
        for part in (chunk.chunks if isinstance(chunk, pa.ChunkedArray) else [chunk])
    ]
