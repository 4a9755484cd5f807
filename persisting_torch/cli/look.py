"""The commands that change nothing: ls, stats, head, tail, verify, export."""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persisting_torch.cli import show
from persisting_torch.cli.find import Found, Mistake, engine_of, queues
from persisting_torch.errors import PersistingError
from persisting_torch.queue.copying import ledger_of
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.objects import is_url

if TYPE_CHECKING:
    import pyarrow as pa

    from persisting_torch.queue.engine import Engine

STEP = 100
LOOK_SECONDS = 2.0
ROWS_EXPORTED_AT_ONCE = 4096


def ls(arguments: Namespace) -> int:
    """The queues under a path. Reads their ledgers only, with neither Lance nor torch."""
    path = arguments.path or arguments.storage_path
    found = [_summary(queue) for queue in queues(path, dict(arguments.storage_option))]
    if arguments.json:
        show.print_json(found)
    elif found:
        show.table(
            ["queue", "samples", "partitions", "sealed", "tasks", "size", "last put"],
            [_ls_row(queue) for queue in found],
        )
    else:
        print(f"no queues under {path if is_url(path) else os.path.abspath(path)}")
    return 0


def _summary(queue: Found) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": queue.name,
        "path": queue.root,
        "bytes": queue.files.size(queue.root),
        "samples": 0,
        "partitions": 0,
        "sealed_partitions": 0,
        "sealed": False,
        "tasks": 0,
        "last_put": None,
    }
    try:
        place = replace(queue.open(), writable=False)
        if place.files.exists(place.ledger):
            found.update(_figures(ledger_of(place)))
    except (PersistingError, sqlite3.DatabaseError) as error:
        found["error"] = str(error)
    return found


def _figures(ledger: Ledger) -> dict[str, Any]:
    try:
        with ledger.reading() as tx:
            names = ("samples", "partitions", "sealed_partitions", "sealed", "tasks", "last_put")
            figures = tx.execute(
                "SELECT (SELECT coalesce(max(first_row + count), 0) FROM runs)"
                " - (SELECT coalesce(sum(count), 0) FROM cleared),"
                " (SELECT count(*) FROM partitions), (SELECT count(sealed) FROM partitions),"
                " EXISTS (SELECT 1 FROM meta WHERE key = 'sealed'),"
                " (SELECT count(DISTINCT name) FROM tasks),"
                " (SELECT value FROM meta WHERE key = 'last_put')"
            ).fetchone()
            found = dict(zip(names, figures, strict=True))
            return {**found, "sealed": bool(found["sealed"])}
    finally:
        ledger.close()


def _ls_row(queue: dict[str, Any]) -> list[Any]:
    partly = f"{queue['sealed_partitions']} of them" if queue["sealed_partitions"] else "no"
    return [
        *(queue[name] for name in ("name", "samples", "partitions")),
        "yes" if queue["sealed"] else partly,
        queue["tasks"],
        show.size(queue["bytes"]),
        queue.get("error") or show.ago(queue["last_put"]),
    ]


def stats(arguments: Namespace) -> int:
    """All figures of a queue."""
    from persisting_torch.queue import report

    with engine_of(arguments) as engine:
        figures = report.stats(engine)
    if arguments.json:
        show.print_json(figures)
        return 0
    storage = figures["storage"]
    print(f"{figures['name']}  ({figures['path']})")
    print(f"{figures['persisted_count']} samples, last put {show.ago(figures['last_put'])}")
    print(
        f"{show.size(storage['bytes'])} on disk, {show.size(storage['ledger_bytes'])} of it ledger;"
        f" {storage['fragments']} fragments, {storage['versions']} versions"
    )
    _section(["field", "type"], list(figures["fields"].items()))
    _section(
        ["partition", "samples", "sealed"],
        [
            (name, one["samples"], "yes" if one["sealed"] else "no")
            for name, one in figures["partitions"].items()
        ],
    )
    _section(
        ["task", "partition", "taken", "leased", "available", "dropped", "cursor"],
        [
            (
                *(task, where, one["taken"], one["leased"], one["available"]),
                ", ".join(f"{count} {reason}" for reason, count in one["dropped"].items()) or 0,
                one["cursor"],
            )
            for task, places in figures["tasks"].items()
            for where, one in places.items()
        ],
    )
    _section(
        ["producer", "pid", "state", "leased", "last beat", "cause"],
        [
            (name, one["pid"], one["state"], one["leased"], show.ago(one["beat"]), one["cause"])
            for name, one in figures["producers"].items()
        ],
    )
    return 0


def _section(headers: list[str], rows: list[tuple[Any, ...]]) -> None:
    if rows:
        print()
        show.table(headers, rows)


def head(arguments: Namespace) -> int:
    """The first samples, in order."""
    with engine_of(arguments) as engine:
        records = engine.records(arguments.n, arguments.offset)
        if arguments.json:
            show.print_json(records)
        else:
            for number, values in enumerate(records, arguments.offset):
                print(show.record(number, values))
    return 0


def tail(arguments: Namespace) -> int:
    """The last samples; with --follow also those that come, until interrupted."""
    with engine_of(arguments) as engine:
        number = max(0, engine.count() - arguments.n)
        stream = engine.stream(number)
        while True:
            records = stream.next(STEP)
            for values in records:
                if arguments.json:
                    show.print_json(values, indent=None)
                else:
                    print(show.record(number, values))
                number += 1
            sys.stdout.flush()
            if not records and not arguments.follow:
                return 0
            while not records and not stream.news.wait(time.monotonic() + LOOK_SECONDS):
                engine.ledger.catch_up()  # from an object store, from which no news come


def verify(arguments: Namespace) -> int:
    """Whether ledger and rows agree; 1 if they do not."""
    from persisting_torch.queue import report

    with engine_of(arguments) as engine:
        samples = engine.count()
        faults = report.verify(engine)
        name = engine.place.queue
    if arguments.json:
        show.print_json({"name": name, "samples": samples, "faults": faults})
    else:
        print(*faults, sep="\n", end="\n" if faults else "")
        print(f"{name}: {samples} samples, {len(faults) or 'no'} faults")
    return 1 if faults else 0


def export(arguments: Namespace) -> int:
    """All committed samples into a Parquet or Arrow file, as the columns that the queue stores."""
    target = Path(arguments.file)
    if target.suffix not in (".parquet", ".arrow"):
        raise Mistake(f"{target} ends in neither .parquet nor .arrow, so its format is not known.")
    with engine_of(arguments) as engine:
        draft = target.with_name(f".{target.name}.part")
        try:
            count = _write(_tables(engine), draft, target.suffix)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
        name = engine.place.queue
    if arguments.json:
        show.print_json({"name": name, "samples": count, "file": str(target.absolute())})
    else:
        print(f"{name}: {count} samples written to {target}")
    return 0


def _tables(engine: Engine) -> Iterator[pa.Table]:
    """Committed samples in order, late fields in place; the first table is an empty one."""
    import pyarrow as pa

    from persisting_torch.queue.gone import present_between

    with engine.ledger.lock:
        with engine.ledger.reading() as tx:
            engine.books.refresh(tx)
        engine.late.follow()
        books, names = engine.books, list(engine.books.schema.fields)
        columns = [v.column for field in books.schema.fields.values() for v in field.variants]
        schema = pa.schema(
            [
                pa.field("_index", pa.int64(), nullable=False),
                pa.field("_partition", pa.string(), nullable=False),
                *map(books.schema.arrow_field, columns),
            ]
        )
        yield schema.empty_table()
        gone = books.gone.copy()
        for start in range(0, books.rows, ROWS_EXPORTED_AT_ONCE):
            rows = present_between(gone, start, min(start + ROWS_EXPORTED_AT_ONCE, books.rows))
            if len(rows):
                table = engine.rows.read(rows, schema.names[:2])
                values = engine.reads.table(rows, books.runs.indexes_of(rows), names)
                for at, column in enumerate(values.schema):
                    if column.name in columns:
                        table = table.append_column(column, values[at])
                yield pa.table([_column(table, field) for field in schema], schema=schema)


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    import pyarrow as pa

    at = table.schema.get_field_index(field.name)
    return pa.nulls(len(table), field.type) if at < 0 else table.column(at)


def _varying(type_: pa.DataType) -> pa.DataType:
    """A type with lists of any length, since pyarrow before 26 reads no others with nulls."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(type_) or pa.types.is_list(type_):
        return pa.list_(_varying(type_.value_type))
    return type_


def _write(tables: Iterator[pa.Table], path: Path, ending: str) -> int:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    schema = next(tables).schema
    if ending == ".parquet":
        schema = pa.schema([field.with_type(_varying(field.type)) for field in schema])
        writer = parquet.ParquetWriter(path, schema)
    else:
        writer = pa.ipc.new_file(str(path), schema)
    count = 0
    with writer:
        for table in tables:
            writer.write_table(table.cast(schema))
            count += len(table)
    return count
