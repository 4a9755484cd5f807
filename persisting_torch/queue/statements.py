"""Changes of a ledger on the wire: SQL and parameters as JSON, their blobs beside it."""

from __future__ import annotations

from typing import Any

from persisting_torch.queue.record import Change, Statement


def encode(statements: list[Statement], offset: int = 0) -> tuple[list[Any], list[bytes]]:
    """Statements, and their blobs, which are numbered from `offset` on."""
    blobs: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, bytes | memoryview):
            blobs.append(bytes(value))
            return {"blob": offset + len(blobs) - 1}
        return value

    told = [
        [sql, [[plain(value) for value in parameters] for parameters in rows]]
        for sql, rows in statements
    ]
    return told, blobs


def decode(told: list[Any], blobs: list[bytes]) -> list[Statement]:
    def value_of(value: Any) -> Any:
        return blobs[value["blob"]] if isinstance(value, dict) else value

    return [
        (sql, [tuple(value_of(value) for value in parameters) for parameters in rows])
        for sql, rows in told
    ]


def encode_changes(changes: list[Change] | None) -> tuple[list[Any] | None, list[bytes]]:
    if changes is None:
        return None, []
    told: list[Any] = []
    blobs: list[bytes] = []
    for change in changes:
        statements, own = encode(change.statements, len(blobs))
        told.append([change.number, statements])
        blobs += own
    return told, blobs


def decode_changes(told: list[Any] | None, blobs: list[bytes]) -> list[Change] | None:
    if told is None:
        return None
    return [Change(number, decode(statements, blobs)) for number, statements in told]
