"""The queue: durable samples, given out exactly once. Start at `queue.py`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persisting_torch.queue.backend import LanceBackend, PersistingBackend
    from persisting_torch.queue.kv import KVInterface
    from persisting_torch.queue.meta import BatchMeta
    from persisting_torch.queue.queue import Queue
    from persisting_torch.queue.reader import QueueReader
    from persisting_torch.queue.writer import QueueWriter

__all__ = [
    "BatchMeta",
    "KVInterface",
    "LanceBackend",
    "PersistingBackend",
    "Queue",
    "QueueReader",
    "QueueWriter",
]

_MODULE_OF = {
    "BatchMeta": "meta",
    "KVInterface": "kv",
    "LanceBackend": "backend",
    "PersistingBackend": "backend",
    "Queue": "queue",
    "QueueReader": "reader",
    "QueueWriter": "writer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
