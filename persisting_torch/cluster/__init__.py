"""Queues on a cluster of machines: Pulsing tells who is there, Arrow Flight carries the data.

Names load their module at first use, so that neither is imported where no cluster is.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persisting_torch.cluster.joining import init, init_from_torchrun, shutdown

__all__ = ["init", "init_from_torchrun", "is_active", "shutdown"]

_MODULE_OF = {"init": "joining", "init_from_torchrun": "joining", "shutdown": "joining"}


def is_active() -> bool:
    """Whether this process is part of a cluster, by `init` or by `pulsing.init`, or uses one."""
    handle = sys.modules.get(f"{__name__}.handle")
    if handle is not None and handle.adopted() is not None:
        return True
    runtime = sys.modules.get(f"{__name__}.runtime")
    if runtime is not None and runtime.is_joined():
        return True
    pulsing = sys.modules.get("pulsing")
    return pulsing is not None and bool(pulsing.is_initialized())


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
