"""Lightning callbacks that work with a queue.

ConsumptionCheckpoint is defined beside the data module that installs it, since imports point from
here to `persisting_torch.datasets` and never back.
"""

from __future__ import annotations

from persisting_torch.datasets.consumption import ConsumptionCheckpoint

__all__ = ["ConsumptionCheckpoint"]
