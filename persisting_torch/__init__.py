"""A durable queue that PyTorch trains from: every sample exactly once, through crashes and resumes.

The names below load their subpackage at first use, so that a process which only puts samples never
pays for Lightning, and one that only asks for the version pays for nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from persisting_torch.errors import (
    BucketUnavailable,
    FormatError,
    PersistingError,
    ProducerFailed,
    QueueClosed,
    QueueSealed,
    SchemaError,
    StaleOwner,
    WaitTimeout,
)

if TYPE_CHECKING:
    from persisting_torch.callbacks import ConsumptionCheckpoint
    from persisting_torch.datasets import (
        PersistingDataLoader,
        PersistingDataModule,
        PersistingDataset,
    )
    from persisting_torch.queue import BatchMeta, KVInterface, Queue, QueueReader, QueueWriter
    from persisting_torch.samplers import (
        BaseSampler,
        GRPOGroupNSampler,
        RankAwareSampler,
        SequentialSampler,
        ShuffleSampler,
    )

__version__ = "0.1.0"

__all__ = [
    "BaseSampler",
    "BatchMeta",
    "BucketUnavailable",
    "ConsumptionCheckpoint",
    "FormatError",
    "GRPOGroupNSampler",
    "KVInterface",
    "PersistingDataLoader",
    "PersistingDataModule",
    "PersistingDataset",
    "PersistingError",
    "ProducerFailed",
    "Queue",
    "QueueClosed",
    "QueueReader",
    "QueueSealed",
    "QueueWriter",
    "RankAwareSampler",
    "SchemaError",
    "SequentialSampler",
    "ShuffleSampler",
    "StaleOwner",
    "WaitTimeout",
    "__version__",
]

_ROOM_OF = {
    "BatchMeta": "queue",
    "KVInterface": "queue",
    "Queue": "queue",
    "QueueReader": "queue",
    "QueueWriter": "queue",
    "BaseSampler": "samplers",
    "GRPOGroupNSampler": "samplers",
    "RankAwareSampler": "samplers",
    "SequentialSampler": "samplers",
    "ShuffleSampler": "samplers",
    "PersistingDataLoader": "datasets",
    "PersistingDataModule": "datasets",
    "PersistingDataset": "datasets",
    "ConsumptionCheckpoint": "callbacks",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOM_OF})
