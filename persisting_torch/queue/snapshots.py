"""A whole ledger as bytes, for a copy of it to begin with."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

from persisting_torch.errors import PersistingError


def content_of(connection: sqlite3.Connection) -> bytes:
    """A database as the bytes of a file."""
    with tempfile.TemporaryDirectory(prefix="persisting_torch-") as folder:
        file = Path(folder) / "ledger.sqlite"
        target = sqlite3.connect(file)
        try:
            connection.backup(target)
        finally:
            target.close()
        return file.read_bytes()


def restore(connection: sqlite3.Connection, content: bytes) -> None:
    """Make a database in memory what the file with this content is."""
    with tempfile.TemporaryDirectory(prefix="persisting_torch-") as folder:
        file = Path(folder) / "ledger.sqlite"
        file.write_bytes(content)
        source = sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True)
        try:
            source.backup(connection)
        except sqlite3.DatabaseError as error:
            raise PersistingError(f"the owner sent a ledger that is none: {error}") from error
        finally:
            source.close()
