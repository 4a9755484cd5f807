"""Upkeep of a dataset: few fragments and few versions, off the path of those who put and get.

Compaction rewrites neighbours in the order of row ids, never in that of Lance's fragment list, in
which a rewritten fragment stands last. The new files are written without the lock; under it, only
if nothing happened to their sources meanwhile, one commit puts them in place.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

from lance.fragment import FragmentMetadata

from persisting_torch.queue.fragments import Fragment, FragmentTable
from persisting_torch.queue.storage import FRAGMENT_BYTES, RowStore, data_files

LARGEST_FRAGMENT_BYTES = 64 << 20
FRAGMENTS_WANTED = 64  # beyond this many full ones, fragments grow
FANOUT = 8  # neighbours that make a merge worth while, and the step from tier to tier
GROWTH = 4  # a merge makes the rows' fragment at least so many times larger
SMALLEST_TIER_BYTES = 4 << 10
ROUND_BYTES = 256 << 20  # rewritten in one round, at most
DELETED_SHARE = 0.1  # of a fragment's rows, beyond which it is rewritten without them
PADDING_SHARE = 0.25  # of a row, that a merge may add to rows which lack a column

Group = list[Fragment]


@dataclass(frozen=True, slots=True)
class Merge:
    """Neighbouring fragments and those written to replace them."""

    sources: Group
    written: list[FragmentMetadata]


def compact(store: RowStore, lock: AbstractContextManager[object]) -> bool:
    """Rewrite some fragments into fewer; whether there was anything to do and it was done.

    Takes the commit lock itself, for the commit alone. Call again until it returns False. Rows
    keep their ids; only one process should compact a dataset at a time.
    """
    if not store.exists():
        return False
    table = store.table()
    groups = choose(table)
    if not groups:
        return False
    merges = [Merge(group, rewrite(table, group)) for group in groups]
    with lock:
        done = _replace(store, merges)
    if not done:
        for file in data_files([part for merge in merges for part in merge.written]):
            os.unlink(os.path.join(store.path, file))
    return done


def clean(store: RowStore, lock: AbstractContextManager[object], keep: int = 16) -> None:
    """Remove all but the newest `keep` versions, and files that only they need.

    Does so when there are more than four times as many: it holds the commit lock meanwhile.
    """
    if store.versions <= 4 * keep:
        return
    with lock:
        store.dataset().cleanup_old_versions(retain_versions=keep)


def choose(table: FragmentTable) -> list[Group]:
    """The fragments to rewrite now, in groups of neighbours.

    Size-tiered: from the smallest tier up, eight or more neighbours no larger than the tier are
    merged if that makes the largest of them at least four times larger. So a row is rewritten a
    logarithmic number of times, and neighbours cannot stay many and small.
    """
    fragments = [table.fragment(slot) for slot in range(len(table))]
    full = full_size(sum(fragment.bytes for fragment in fragments))
    chosen = _choose_tier(table, fragments, full)
    merged = {fragment.id for group in chosen for fragment in group}
    budget = ROUND_BYTES - sum(fragment.bytes for group in chosen for fragment in group)
    for fragment in fragments:
        if fragment.id not in merged and _holed(fragment) and fragment.bytes <= budget:
            budget -= fragment.bytes
            chosen.append([fragment])
    return chosen


def full_size(total: int) -> int:
    """Bytes of a fragment that is not merged further, in a dataset of so many bytes."""
    return min(max(total // FRAGMENTS_WANTED, FRAGMENT_BYTES), LARGEST_FRAGMENT_BYTES)


def _choose_tier(table: FragmentTable, fragments: Group, full: int) -> list[Group]:
    tier = SMALLEST_TIER_BYTES
    while tier < FANOUT * full:
        limit = min(tier, full // 2)
        groups = [
            group
            for run in _runs(table, fragments, limit)
            for group in _bounded(run)
            if len(group) >= FANOUT
            and sum(f.bytes for f in group) >= GROWTH * max(f.bytes for f in group)
        ]
        if groups:
            return groups[: 1 + ROUND_BYTES // (FANOUT * full)]
        tier *= FANOUT
    return []
