"""Provisional; the storage helper replaces this file."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from lance.optimize import Compaction

from persisting_torch.queue.storage import RowStore


def compact(store: RowStore, lock: AbstractContextManager[Any]) -> bool:
    if store.fragments < 32:
        return False
    dataset = store.dataset()
    options = {"target_rows_per_fragment": 10_000}
    plan = Compaction.plan(dataset, options)
    results = [task.execute(dataset) for task in plan.tasks]
    if not results:
        return False
    with lock:
        Compaction.commit(store.dataset(), results, options)
    store.refresh()
    return False


def clean(store: RowStore, lock: AbstractContextManager[Any], keep: int = 16) -> None:
    if store.versions > 4 * keep:
        with lock:
            store.dataset().cleanup_old_versions(older_than=timedelta(0), retain_versions=keep)
