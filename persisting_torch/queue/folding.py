"""What a fold of late fields should do: which values go into the rows, and which are kept.

Where late values make up a fair share of what a fragment has of a field, they go into the fragment.
The others stay in `late.lance`, where one put is made of many small ones. Values may be folded only
together with all earlier ones of their fields, or an older one would come to light again: so puts
that have fields in common are folded together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from persisting_torch.queue.books import LateRun
from persisting_torch.queue.buffer import INDEX_COLUMN, Names
from persisting_torch.queue.fragments import FragmentTable, Int64s
from persisting_torch.queue.late import ranges
from persisting_torch.queue.newest import Bools, covered
from persisting_torch.queue.sets import set_of

if TYPE_CHECKING:
    from persisting_torch.queue.parts import Plain
    from persisting_torch.queue.shard import Shard

FOLDED_SHARE = 16  # one in so many rows of a fragment has a late value of a field that is folded
KEPT_SHARE = 0.75  # of the late rows at most is written again by a fold
FANOUT = 8  # puts, at least, that are made one
GROWTH = 4  # times larger than the largest of them is what they become
PADDING_BYTES = 64  # a row, at most, by which a fragment grows for the sake of few values
MOST_PUTS = 128  # with more of them everything is folded, whatever it costs


@dataclass(frozen=True, slots=True)
class Put:
    """What was appended to `late.lance` at once: runs that share no fragment with other runs."""

    runs: list[LateRun]

    @property
    def rows(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def names(self) -> set[str]:
        return {name for run in self.runs for name in run.names}

    @property
    def pattern(self) -> frozenset[Names]:
        return frozenset(run.names for run in self.runs)


@dataclass(frozen=True, slots=True)
class Values:
    """The newest late values of one field: their samples, late rows, and places in data.lance."""

    indexes: Int64s
    rows: Int64s
    slots: Int64s
    offsets: Int64s

    def where(self, chosen: Bools) -> Values:
        return Values(
            self.indexes[chosen], self.rows[chosen], self.slots[chosen], self.offsets[chosen]
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """Late rows to be written again for the sake of these fields."""

    names: Names
    indexes: Int64s
    rows: Int64s


@dataclass
class Plan:
    """What leaves `late.lance`, and where it goes. `table` tells of data.lance as it was then."""

    table: FragmentTable
    gone: list[LateRun] = field(default_factory=list)
    folded: dict[str, Values] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)

    def by_slot(self) -> dict[int, list[tuple[list[str], Int64s, Int64s]]]:
        """For each fragment what is folded into it: (names, physical offsets, late rows)."""
        found: dict[int, list[tuple[list[str], Int64s, Int64s]]] = {}
        for name, values in self.folded.items():
            order = np.argsort(values.slots, kind="stable")
            edges = np.flatnonzero(np.diff(values.slots[order])) + 1
            for here in np.split(order, edges):
                offsets, rows = values.offsets[here], values.rows[here]
                parts = found.setdefault(int(values.slots[here[0]]), [])
                for names, _, others in parts:
                    if np.array_equal(others, rows):
                        names.append(name)
                        break
                else:
                    parts.append(([name], offsets, rows))
        return dict(sorted(found.items()))


class Thrift(Enum):
    """What a fold may cost."""

    LITTLE = "little"  # of what it writes, the values are a fair share
    SPACE = "space"  # whatever it takes to write, if the rows do not become much larger by it
    NONE = "none"  # everything is folded


def plan(bucket: Plain | Shard, thrift: Thrift) -> Plan | None:
    """What to fold and to merge now; None if nothing."""
    with bucket.ledger.lock:
        bucket.books.follow()
        bucket.late.follow()
        runs = list(bucket.books.late.values())
        entries = bucket.late.entries()
        cleared = bucket.books.cleared_indexes.copy()
        places = {name: bucket.books.runs.rows_of(at) for name, (at, _) in entries.items()}
        schema = bucket.books.schema
        columns = {name: [v.column for v in schema.fields[name].variants] for name in entries}
    if not runs:
        return None
    _add_columns(bucket)
    found = Plan(bucket.rows.table())
    kept: dict[str, Values] = {}
    for family in families(puts_of(runs, bucket.late.store.table())):
        names = set().union(*(put.names for put in family))
        there = {
            name: _located(found.table, entries[name], places[name], cleared)
            for name in sorted(names & entries.keys())
        }
        folds = {
            name: np.ones(len(values.rows), dtype=bool)
            if thrift is Thrift.NONE or len(family) > MOST_PUTS
            else _pays(found.table, values.slots, columns[name], thrift)
            for name, values in there.items()
        }
        left = {name: values.where(~folds[name]) for name, values in there.items()}
        total = sum(put.rows for put in family)
        if _count_rows(left) <= KEPT_SHARE * total:
            found.gone += [run for put in family for run in put.runs]
            found.folded |= {name: values.where(folds[name]) for name, values in there.items()}
            kept |= left
        elif merged := choose(family):
            found.gone += [run for put in merged for run in put.runs]
            firsts, ends = ranges([run for put in merged for run in put.runs])
            kept |= {
                name: values.where(covered(values.rows, firsts, ends))
                for name, values in there.items()
            }
    found.folded = {name: values for name, values in found.folded.items() if len(values.rows)}
    found.kept = _kept(kept)
    return found if found.gone else None


def puts_of(runs: Sequence[LateRun], table: FragmentTable) -> list[Put]:
    """The puts that the runs are of: no two of them have rows in one fragment."""
    runs = sorted(runs, key=lambda run: run.first_row)
    firsts = np.searchsorted(table.firsts, [run.first_row for run in runs], side="right")
    ends = np.searchsorted(table.firsts, [run.first_row + run.count for run in runs])
    puts: list[Put] = []
    for run, begins_apart in zip(runs, [True, *(firsts[1:] > ends[:-1])], strict=True):
        if begins_apart:
            puts.append(Put([]))
        puts[-1].runs.append(run)
    return puts


def families(puts: Sequence[Put]) -> list[list[Put]]:
    """Puts that have fields in common, if only through others."""
    found: list[tuple[set[str], list[Put]]] = []
    for put in puts:
        names, members = put.names, [put]
        apart: list[tuple[set[str], list[Put]]] = []
        for other_names, others in found:
            if names & other_names:
                names, members = names | other_names, others + members
            else:
                apart.append((other_names, others))
        found = [*apart, (names, members)]
    return [members for _, members in found]


def choose(family: Sequence[Put]) -> list[Put]:
    """Puts of the same fields to make one of: from the smallest up, as many as pay.

    What they make is much larger than each of them, so a row is written again a logarithmic number
    of times.
    """
    alike: dict[frozenset[Names], list[Put]] = {}
    for put in family:
        alike.setdefault(put.pattern, []).append(put)
    chosen: list[Put] = []
    for puts in alike.values():
        puts.sort(key=lambda put: put.rows)
        sums = accumulate(put.rows for put in puts)
        pays = [n for n, rows in enumerate(sums, 1) if rows >= GROWTH * puts[n - 1].rows]
        if pays and pays[-1] >= FANOUT:
            chosen += puts[: pays[-1]]
    return chosen


def _add_columns(bucket: Plain | Shard) -> None:
    """Columns that only late fields have had so far; this costs no more than their names."""
    late = bucket.late.store.table().schema
    known = set(bucket.rows.table().schema.names) | {INDEX_COLUMN}
    lacking = [column for column in late if column.name not in known]
    if lacking:
        with bucket.commit_lock:
            bucket.rows.add_columns(pa.schema(lacking))


def _located(
    table: FragmentTable, entries: tuple[Int64s, Int64s], places: Int64s, cleared: BitMap64
) -> Values:
    """Late values by place, without those whose samples are gone."""
    slots, offsets = table.locate(places)
    there = (slots >= 0) & (places >= 0)
    gone = cleared & set_of(entries[0])
    if gone:
        there &= ~np.isin(entries[0], np.array(gone.to_array(), dtype=np.int64))
    return Values(*entries, slots, offsets).where(there)


def _pays(table: FragmentTable, slots: Int64s, columns: list[str], thrift: Thrift) -> Bools:
    """Which values belong to fragments that have late values of this field for many rows.

    Or, if only space counts, to those that have room for them already or need little.
    """
    late = np.bincount(slots, minlength=len(table))
    rows = np.array([table.positions[i].count for i in table.ids], dtype=np.int64)
    pays: Bools = late * FOLDED_SHARE >= rows
    if thrift is Thrift.SPACE:
        for slot in np.flatnonzero((late > 0) & ~pays).tolist():
            stored = table.fragment(slot).field_ids()
            lacking = [name for name in columns if table.field_ids.get(name) not in stored]
            padding = sum(table.width(name) or 8 for name in lacking if name in table.field_ids)
            pays[slot] = padding <= PADDING_BYTES
    return pays[slots]


def _count_rows(values: dict[str, Values]) -> int:
    return len(_distinct([part.rows for part in values.values()]))


def _kept(values: dict[str, Values]) -> list[Kept]:
    """Late rows by the set of fields for which each is kept, in the order of data.lance."""
    names = [name for name, part in values.items() if len(part.rows)]
    rows = _distinct([values[name].rows for name in names])
    masks = np.zeros((len(rows), len(names)), dtype=bool)
    indexes, slots, offsets = (np.empty(len(rows), dtype=np.int64) for _ in range(3))
    for number, name in enumerate(names):
        part = values[name]
        at = np.searchsorted(rows, part.rows)
        masks[at, number] = True
        indexes[at], slots[at], offsets[at] = part.indexes, part.slots, part.offsets
    found: list[Kept] = []
    if len(rows):
        patterns, which = np.unique(masks, axis=0, return_inverse=True)
        order = np.lexsort((offsets, slots))
        for number, pattern in enumerate(patterns):
            here = order[which.reshape(-1)[order] == number]
            chosen = tuple(name for name, has in zip(names, pattern, strict=True) if has)
            found.append(Kept(chosen, indexes[here], rows[here]))
    return found


def _distinct(arrays: list[Int64s]) -> Int64s:
    return np.unique(np.concatenate(arrays)) if arrays else np.empty(0, dtype=np.int64)
