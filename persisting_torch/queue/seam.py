"""Where a queue finds the cluster, of which it knows nothing else."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine
    from persisting_torch.queue.place import Split

CLUSTER = "persisting_torch.cluster"


def is_distributed() -> bool:
    """Whether this process is part of a cluster: its queues are those of the cluster then."""
    if CLUSTER in sys.modules:
        return bool(sys.modules[CLUSTER].is_active())
    pulsing = sys.modules.get("pulsing")
    return pulsing is not None and bool(pulsing.is_initialized())


def open_distributed(
    queue: str, storage_path: str | os.PathLike[str], split: Split, **options: Any
) -> Engine:
    """The engine of a queue of the cluster that this process is part of."""
    way = import_module(f"{CLUSTER}.handle").adopted()
    finder = way.finder() if way else import_module(f"{CLUSTER}.runtime").current().finder
    engine: Engine = import_module(f"{CLUSTER}.engine").open_engine(
        finder, queue, storage_path, split, **options
    )
    return engine


def way_there() -> Any:
    """What another process needs to use the same queues; None where there is no cluster."""
    if not is_distributed():
        return None
    way = import_module(f"{CLUSTER}.handle").adopted()
    return way or import_module(f"{CLUSTER}.runtime").current().handle()


def take_way(way: Any) -> None:
    """Use the queues of the cluster from which this came, without being part of it."""
    if way is not None and not is_distributed():
        import_module(f"{CLUSTER}.handle").adopt(way)
