"""From a queue to batches: an iterable dataset, its DataLoader, and a LightningDataModule.

Names load their module at first use, so that a DataLoader's worker never imports Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persisting_torch.datasets.consumption import ConsumptionCheckpoint
    from persisting_torch.datasets.dataset import PersistingDataset
    from persisting_torch.datasets.huggingface import feed_trainer, last_checkpoint
    from persisting_torch.datasets.loader import PersistingDataLoader
    from persisting_torch.datasets.module import PersistingDataModule

__all__ = [
    "ConsumptionCheckpoint",
    "PersistingDataLoader",
    "PersistingDataModule",
    "PersistingDataset",
    "feed_trainer",
    "last_checkpoint",
]

_MODULE_OF = {
    "ConsumptionCheckpoint": "consumption",
    "PersistingDataLoader": "loader",
    "PersistingDataModule": "module",
    "PersistingDataset": "dataset",
    "feed_trainer": "huggingface",
    "last_checkpoint": "huggingface",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
