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
    QueueFull,
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
        EpisodeSampler,
        GRPOGroupNSampler,
        MaxStaleness,
        RankAwareSampler,
        SeqlenBalancedSampler,
        SequentialSampler,
        ShuffleSampler,
        WindowSampler,
        as_episodes,
        as_windows,
        cut_episodes,
    )

__version__ = "0.1.0"

__all__ = [
    "BaseSampler",
    "BatchMeta",
    "BucketUnavailable",
    "ConsumptionCheckpoint",
    "EpisodeSampler",
    "FormatError",
    "GRPOGroupNSampler",
    "KVInterface",
    "MaxStaleness",
    "PersistingDataLoader",
    "PersistingDataModule",
    "PersistingDataset",
    "PersistingError",
    "ProducerFailed",
    "Queue",
    "QueueClosed",
    "QueueFull",
    "QueueReader",
    "QueueSealed",
    "QueueWriter",
    "RankAwareSampler",
    "SchemaError",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "ShuffleSampler",
    "StaleOwner",
    "WaitTimeout",
    "WindowSampler",
    "__version__",
    "as_episodes",
    "as_windows",
    "cut_episodes",
]

_ROOM_OF = {
    "BatchMeta": "queue",
    "KVInterface": "queue",
    "Queue": "queue",
    "QueueReader": "queue",
    "QueueWriter": "queue",
    "BaseSampler": "samplers",
    "EpisodeSampler": "samplers",
    "GRPOGroupNSampler": "samplers",
    "MaxStaleness": "samplers",
    "RankAwareSampler": "samplers",
    "SeqlenBalancedSampler": "samplers",
    "SequentialSampler": "samplers",
    "ShuffleSampler": "samplers",
    "WindowSampler": "samplers",
    "as_episodes": "samplers",
    "as_windows": "samplers",
    "cut_episodes": "samplers",
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
