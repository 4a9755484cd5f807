"""Samplers choose, from the samples that are ready, those that make up a batch."""

from __future__ import annotations

from persisting_torch.samplers.base import BaseSampler
from persisting_torch.samplers.grpo import GRPOGroupNSampler
from persisting_torch.samplers.rank_aware import RankAwareSampler
from persisting_torch.samplers.sequential import SequentialSampler
from persisting_torch.samplers.shuffle import ShuffleSampler

__all__ = [
    "BaseSampler",
    "GRPOGroupNSampler",
    "RankAwareSampler",
    "SequentialSampler",
    "ShuffleSampler",
]
