"""Tables in pieces of about equal size, for what is fast with neither few rows nor many."""

from __future__ import annotations

import pyarrow as pa


def in_pieces(table: pa.Table, nbytes: int) -> pa.Table:
    """The same table in batches of about so many bytes, without a copy."""
    rows = max(1, table.num_rows * nbytes // max(1, table.nbytes))
    return pa.Table.from_batches(table.to_batches(max_chunksize=rows), schema=table.schema)
