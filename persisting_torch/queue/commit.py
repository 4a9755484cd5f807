"""Rows and ledger in step: a flush is in both or in neither, whenever the process dies.

Under the lock that all processes share, a note of what is about to be appended goes into the
ledger, the rows go into Lance, and the note becomes part of the books. Who finds a note that
somebody left behind looks whether the rows landed: if so the note is entered, if not it is dropped.
"""

from __future__ import annotations

import base64
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lance.fragment import FragmentMetadata
from pyroaring import BitMap64

from persisting_torch.queue.books import Books
from persisting_torch.queue.buffer import Arrivals, Composed, Names
from persisting_torch.queue.late import LateBatch
from persisting_torch.queue.leases import finish
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.locks import Lock
from persisting_torch.queue.sets import Packed, pack_set, unpack_set
from persisting_torch.queue.storage import RowStore

if TYPE_CHECKING:
    from persisting_torch.queue.producers import Finishing

FEW_RUNS = 8  # that stand in the ledger one by one


@dataclass
class Committer:
    """Appends to a bucket's two Lance datasets and enters the rows in its ledger."""

    ledger: Ledger
    books: Books
    lock: Lock
    rows: RowStore
    late: RowStore
    writer: str = ""

    def append(self, composed: Composed) -> None:
        """Commit new samples; they are durable, and visible to all, when this returns."""
        self._append(composed)
        self.books.follow()

    def _append(self, composed: Composed) -> None:
        with self.lock:
            self.recover()
            table = composed.table
            self._commit(
                "data",
                len(table),
                lambda: self.rows.append(table),
                self._note(composed),
                composed.arrivals,
            )

    def _note(self, composed: Composed) -> dict[str, Any]:
        return {"runs": composed.runs, "keys": composed.keys, "writer": self.writer}

    def append_late(
        self,
        late: LateBatch,
        partition: str,
        keys: list[tuple[str, str, int, str | None]],
        finishing: Finishing,
    ) -> int:
        """Commit fields of samples that exist already; likewise. Returns the first late row.

        What that finishes is entered with it. Raises StaleOwner where it is nobody's to finish.
        """
        note = {
            "late": [(names, len(indexes)) for names, indexes in late.arrivals],
            "keys": keys,
            "finished": [
                (work.producer.name, *as_text(pack_set(work.members))) for work in finishing.parts
            ],
            "writer": self.writer,
        }
        arrivals: Arrivals = {}
        for names, indexes in late.arrivals:
            arrivals[partition, names] = BitMap64(indexes.tolist())
        with self.lock:
            self.recover()
            table = late.table
            return self._commit(
                "late",
                len(table),
                lambda: self.late.append(table),
                note,
                arrivals,
                finishing.check,
            )

    def append_kept(
        self,
        fragments: list[FragmentMetadata],
        kept: list[tuple[Names, int]],
        gone: list[int],
        version: int,
    ) -> None:
        """Enter that rows have left `late`, with the lock held and notes settled.

        `gone` are the numbers of the ledger's rows in `late`. What they held is in this `version`
        of data.lance or later, or in the rows of `fragments`, written to late.lance, which are
        committed for it: `kept` has (names, how many rows hold just these) in their order.
        """
        note: dict[str, Any] = {"late": kept, "keys": [], "gone": gone, "folded": version}
        if fragments:
            count = sum(length for _, length in kept)
            self._commit("late", count, lambda: self.late.append_written(fragments), note, {})
        else:
            with self.ledger.transaction() as tx:
                self.books.refresh(tx)
                self._enter(tx, "late", 0, note | {"arrivals": []})

    def _commit(
        self,
        which: str,
        count: int,
        append: Callable[[], None],
        note: dict[str, Any],
        came: Arrivals,
        check: Callable[[sqlite3.Connection], None] | None = None,
    ) -> int:
        store = self._store(which)
        store.refresh()
        first_row = store.rows
        with self.ledger.transaction() as tx:
            self.books.refresh(tx)
            if check is not None:
                check(tx)
            self._number(tx, note, came)
            tx.execute(
                "INSERT INTO pending VALUES (?, ?, ?, ?)",
                (which, first_row, count, json.dumps(note)),
            )
        append()
        with self.ledger.transaction() as tx:
            self._enter(tx, which, first_row, note)
        return first_row

    def _number(self, tx: sqlite3.Connection, note: dict[str, Any], came: Arrivals) -> None:
        """Put the ledger's numbers for partitions and sets of fields into a note."""
        note["arrivals"] = [
            (
                self.books.partition_id(tx, partition),
                self.books.field_set_id(tx, names),
                *as_text(pack_set(members)),
            )
            for (partition, names), members in came.items()
        ]
        note["keys"] = [
            (self.books.partition_id(tx, partition), key, index, tag)
            for partition, key, index, tag in note["keys"]
        ]

    def _store(self, which: str) -> RowStore:
        return self.rows if which == "data" else self.late

    def recover(self) -> bool:
        """Settle a note left behind, with the lock held; whether its rows had landed."""
        with self.ledger.reading() as tx:
            left = tx.execute("SELECT store, first_row, count, note FROM pending").fetchall()
        landed = False
        for which, first_row, count, note in left:
            store = self._store(which)
            store.refresh()
            landed = store.rows >= first_row + count
            with self.ledger.transaction() as tx:
                if landed:
                    self._enter(tx, which, first_row, json.loads(note))
                else:
                    tx.execute("DELETE FROM pending WHERE store = ?", (which,))
        return landed

    def _enter(
        self, tx: sqlite3.Connection, which: str, first_row: int, note: dict[str, Any]
    ) -> None:
        if which == "data":
            _enter_runs(tx, note["runs"], first_row)
        else:
            for names, length in note["late"]:
                if names:
                    tx.execute(
                        "INSERT INTO late (field_set, first_row, count) VALUES (?, ?, ?)",
                        (self.books.field_set_id(tx, tuple(names)), first_row, length),
                    )
                first_row += length
            if "gone" in note:
                _enter_fold(tx, note["gone"], note["folded"])
        for partition, field_set, first, length, members in note["arrivals"]:
            _enter_arrival(tx, partition, field_set, *from_text(first, length, members))
        for producer, *packed in note.get("finished", ()):
            finish(tx, unpack_set(*from_text(*packed)), producer=producer)
        tx.executemany(
            "INSERT INTO keys VALUES (?, ?, ?, ?) ON CONFLICT (partition, key)"
            " DO UPDATE SET tag = coalesce(excluded.tag, tag)",
            note["keys"],
        )
        if "writer" in note:
            tx.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)",
                (("last_put", time.time()), ("last_writer", note["writer"])),
            )
        tx.execute("DELETE FROM pending WHERE store = ?", (which,))


def _enter_runs(tx: sqlite3.Connection, runs: Sequence[Sequence[int]], first_row: int) -> None:
    """Enter runs of samples whose rows follow one another; many that rise as one set."""
    rising = all(first + count <= after for (first, count), (after, _) in pairwise(runs))
    if rising and len(runs) > FEW_RUNS:
        members = BitMap64()
        for first, count in runs:
            members.add_range(first, first + count)
        tx.execute(
            "INSERT INTO runs (first_index, count, first_row, members) VALUES (?, ?, ?, ?)",
            (members.min(), len(members), first_row, members.serialize()),
        )
        return
    for first_index, length in runs:
        _enter_run(tx, first_index, length, first_row)
        first_row += length


def _enter_run(tx: sqlite3.Connection, first_index: int, count: int, first_row: int) -> None:
    before = tx.execute(
        "SELECT seq, first_index, count, first_row FROM runs"
        " WHERE first_row + count = ? AND members IS NULL",
        (first_row,),
    ).fetchone()
    if before is not None and before[1] + before[2] == first_index:
        seq, first_index, already, first_row = before
        count += already
        tx.execute("DELETE FROM runs WHERE seq = ?", (seq,))
    tx.execute(
        "INSERT INTO runs (first_index, count, first_row) VALUES (?, ?, ?)",
        (first_index, count, first_row),
    )


def _enter_fold(tx: sqlite3.Connection, gone: list[int], version: int) -> None:
    tx.executemany("DELETE FROM late WHERE seq = ?", [(seq,) for seq in gone])
    tx.execute(
        "INSERT INTO meta VALUES ('folded', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1"
    )
    tx.execute(
        "INSERT INTO meta VALUES ('folded_version', ?)"
        " ON CONFLICT (key) DO UPDATE SET value = max(value, excluded.value)",
        (version,),
    )


def _enter_arrival(
    tx: sqlite3.Connection,
    partition: int,
    field_set: int,
    first: int,
    count: int,
    members: bytes | None,
) -> None:
    if members is None:
        before = tx.execute(
            "SELECT seq, first, count FROM arrivals"
            " WHERE partition = ? AND field_set = ? AND first + count = ? AND members IS NULL",
            (partition, field_set, first),
        ).fetchone()
        if before is not None:
            seq, first, already = before
            count += already
            tx.execute("DELETE FROM arrivals WHERE seq = ?", (seq,))
    tx.execute(
        "INSERT INTO arrivals (partition, field_set, first, count, members) VALUES (?, ?, ?, ?, ?)",
        (partition, field_set, first, count, members),
    )


def as_text(packed: Packed) -> tuple[int, int, str | None]:
    first, count, members = packed
    return first, count, None if members is None else base64.b64encode(members).decode()


def from_text(first: int, count: int, members: str | None) -> Packed:
    return first, count, None if members is None else base64.b64decode(members)


def fold_arrivals(tx: sqlite3.Connection, most: int) -> None:
    """Join a field set's arrivals in a partition into one row where there are more than `most`."""
    crowded = tx.execute(
        "SELECT partition, field_set FROM arrivals GROUP BY partition, field_set"
        " HAVING count(*) > ?",
        (most,),
    ).fetchall()
    for partition, field_set in crowded:
        members = BitMap64()
        where = "WHERE partition = ? AND field_set = ?"
        for packed in tx.execute(
            f"SELECT first, count, members FROM arrivals {where}", (partition, field_set)
        ):
            members |= unpack_set(*packed)
        tx.execute(f"DELETE FROM arrivals {where}", (partition, field_set))
        tx.execute(
            "INSERT INTO arrivals (partition, field_set, first, count, members)"
            " VALUES (?, ?, ?, ?, ?)",
            (partition, field_set, *pack_set(members)),
        )
