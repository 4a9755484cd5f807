"""Lightning callbacks that work with a queue, and `policy`, which reads what one of them publishes.

Names load their module at first use, so that a rollout worker gets `policy` without Lightning.
ConsumptionCheckpoint is defined beside the data module that installs it, since imports point from
here to `persisting_torch.datasets` and never back.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persisting_torch.callbacks.monitor import QueueMonitor
    from persisting_torch.callbacks.predictions import QueuePredictionWriter
    from persisting_torch.callbacks.publisher import PolicyPublisher
    from persisting_torch.callbacks.rollout import RolloutCallback
    from persisting_torch.datasets.consumption import ConsumptionCheckpoint
    from persisting_torch.queue.policies import Policy, PolicyWeights, policy

__all__ = [
    "ConsumptionCheckpoint",
    "Policy",
    "PolicyPublisher",
    "PolicyWeights",
    "QueueMonitor",
    "QueuePredictionWriter",
    "RolloutCallback",
    "policy",
]

_MODULE_OF = {
    "ConsumptionCheckpoint": "datasets.consumption",
    "Policy": "queue.policies",
    "PolicyPublisher": "callbacks.publisher",
    "PolicyWeights": "queue.policies",
    "QueueMonitor": "callbacks.monitor",
    "QueuePredictionWriter": "callbacks.predictions",
    "RolloutCallback": "callbacks.rollout",
    "policy": "queue.policies",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"persisting_torch.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
