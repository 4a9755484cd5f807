"""Upkeep of a dataset: few fragments and few versions, off the path of those who put and get.

Compaction rewrites neighbours in the order of row ids, never in that of Lance's fragment list, in
which a rewritten fragment stands last. The new files are written without the lock; under it, and
only if nothing happened to their sources meanwhile, one commit puts them in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from lance import LanceOperation
from lance.commit import CommitConflictError
from lance.fragment import FragmentMetadata, LanceFragment, RowIdSequence, write_fragments

from persisting_torch.queue.fragments import Fragment, FragmentTable, Int64s
from persisting_torch.queue.storage import FRAGMENT_BYTES, RowStore, data_files

LARGEST_FRAGMENT_BYTES = 64 << 20
FULL_FRAGMENTS = 64  # with more of them than this, fragments grow
FANOUT = 8  # neighbours that make a merge worth while, and the step from tier to tier
GROWTH = 4  # a merge is at least so many times larger than its largest part
SMALLEST_TIER_BYTES = 4 << 10
ROUND_BYTES = 256 << 20  # rewritten in one round, about
BATCH_BYTES = 4 << 20
DELETED_SHARE = 0.1  # of a fragment's rows, beyond which it is rewritten without them
PADDING_SHARE = 0.25  # of a row; a merge fills columns that a row lacks with nulls, in full width
PADDING_BYTES = 64
TOO_MANY = 128  # fragments, with which padding is the lesser evil

Group = list[Fragment]


@dataclass(frozen=True, slots=True)
class Merge:
    """Neighbouring fragments, and those written to replace them."""

    sources: Group
    written: list[FragmentMetadata]


def compact(store: RowStore, lock: AbstractContextManager[object]) -> bool:
    """Rewrite some fragments into fewer; whether there was anything to do and it was done.

    Call it until it returns False. It takes the commit lock itself, for the commit alone. Rows keep
    their ids. One process at a time should compact a dataset.
    """
    if not store.exists():
        return False
    table = store.table()
    fragments = [table.fragment(slot) for slot in range(len(table))]
    full = full_size(sum(fragment.bytes for fragment in fragments))
    merges = [
        Merge(group, _rewrite(table, group, full)) for group in choose(table, fragments, full)
    ]
    if not merges:
        return False
    with lock:
        done = _replace(store, merges)
    if not done:
        store.discard(data_files([part for merge in merges for part in merge.written]))
    return done


def clean(store: RowStore, lock: AbstractContextManager[object], keep: int = 16) -> None:
    """Remove all but the newest `keep` versions, and the files that no other version needs.

    Waits until there are more than four times as many, since it holds the commit lock meanwhile.
    """
    if store.versions > 4 * keep:
        with lock:
            store.dataset().cleanup_old_versions(retain_versions=keep)


def full_size(total: int) -> int:
    """Bytes of a fragment that needs no merging, in a dataset of so many bytes."""
    return min(max(total // FULL_FRAGMENTS, FRAGMENT_BYTES), LARGEST_FRAGMENT_BYTES)


def choose(table: FragmentTable, fragments: Group, full: int) -> list[Group]:
    """The fragments to rewrite now, in groups of neighbours.

    Size-tiered: from the smallest tier up, eight or more neighbours no larger than the tier are
    merged if that makes something four times larger than the largest of them. So a row is rewritten
    a logarithmic number of times, and small neighbours do not stay many.
    """
    chosen: list[Group] = []
    tier = SMALLEST_TIER_BYTES
    while not chosen and tier < FANOUT * full:
        chosen = [run for run in _runs(table, fragments, min(tier, full // 2)) if _pays(run)]
        tier *= FANOUT
    merged = {fragment.id for group in chosen for fragment in group}
    chosen += [[part] for part in fragments if part.id not in merged and _mostly_deleted(part)]
    return _first_bytes(chosen, ROUND_BYTES)


def _runs(table: FragmentTable, fragments: Group, limit: int) -> Iterator[Group]:
    """Neighbours that are no larger than the limit and may be merged with each other."""
    run: Group = []
    size = 0
    for fragment in fragments:
        if run and not (
            fragment.bytes <= limit
            and size < ROUND_BYTES
            and (len(fragments) > TOO_MANY or _padding_is_small(table, run[-1], fragment))
        ):
            yield run
            run, size = [], 0
        if fragment.bytes <= limit:
            run.append(fragment)
            size += fragment.bytes
    if run:
        yield run


def _pays(run: Group) -> bool:
    sizes = [fragment.bytes for fragment in run]
    return len(sizes) >= FANOUT and sum(sizes) >= GROWTH * max(sizes)


def _padding_is_small(table: FragmentTable, one: Fragment, other: Fragment) -> bool:
    lacking = one.field_ids() ^ other.field_ids()
    padding = sum(
        table.width(name) or 8 for name, field_id in table.field_ids.items() if field_id in lacking
    )
    row_bytes = min(part.bytes / part.positions.count for part in (one, other))
    return padding <= max(PADDING_SHARE * row_bytes, PADDING_BYTES)


def _mostly_deleted(fragment: Fragment) -> bool:
    return fragment.metadata.num_deletions > DELETED_SHARE * fragment.positions.count


def _first_bytes(groups: list[Group], limit: int) -> list[Group]:
    """As many of the groups as have so many bytes, but one at least."""
    first: list[Group] = []
    size = 0
    for group in groups:
        size += sum(fragment.bytes for fragment in group)
        if first and size > limit:
            break
        first.append(group)
    return first


def _rewrite(table: FragmentTable, group: Group, full: int) -> list[FragmentMetadata]:
    """Write the live rows of the group, in its order, to new files of about the full size."""
    ids = np.concatenate([fragment.row_ids() for fragment in group])
    row_bytes = max(1, sum(f.bytes for f in group) // sum(f.positions.count for f in group))
    stored = set().union(*(fragment.field_ids() for fragment in group))
    reader = table.dataset.scanner(
        columns=[name for name, field_id in table.field_ids.items() if field_id in stored],
        fragments=[LanceFragment(table.dataset, fragment.id) for fragment in group],
        batch_size=max(1, BATCH_BYTES // row_bytes),
        batch_readahead=2,
        fragment_readahead=1,
        scan_in_order=True,
    ).to_reader()
    files = max(1, round(len(ids) * row_bytes / full))
    written: list[FragmentMetadata] = write_fragments(
        reader, table.dataset, mode="append", max_rows_per_file=math.ceil(len(ids) / files)
    )
    rows = [part.physical_rows for part in written]
    if sum(rows) != len(ids):
        raise RuntimeError(
            f"compaction of {table.dataset.uri} wrote {sum(rows)} rows in place of {len(ids)} and"
            " committed nothing. The data is as it was; please report this."
        )
    for part, own in zip(written, np.split(ids, np.cumsum(rows)[:-1]), strict=True):
        part.row_id_meta = _sequence(own).to_inline_metadata()
    return written


def _sequence(ids: Int64s) -> RowIdSequence:
    if (np.diff(ids) == 1).all():
        return RowIdSequence(range(int(ids[0]), int(ids[-1]) + 1))
    return RowIdSequence(pa.array(ids, pa.uint64()))


def _replace(store: RowStore, merges: list[Merge]) -> bool:
    """Commit the merges, with the lock held; False if a source is not what it was."""
    table = store.table()
    now = {table.ids[slot]: slot for slot in range(len(table))}
    groups = []
    for merge in merges:
        if any(part.id not in now for part in merge.sources):
            return False
        sources = [table.fragment(now[part.id]) for part in merge.sources]
        if any(a.state != b.state for a, b in zip(sources, merge.sources, strict=True)):
            return False
        groups.append(
            LanceOperation.RewriteGroup(
                old_fragments=[part.metadata for part in sources], new_fragments=merge.written
            )
        )
    written = [part for merge in merges for part in merge.written]
    try:
        store.commit(table.dataset, LanceOperation.Rewrite(groups, []), data_files(written))
    except CommitConflictError:
        return False  # somebody commits without the lock
    return True
