"""Samplers choose, from the samples that are ready, those that make up a batch."""

from __future__ import annotations

from persisting_torch.samplers.base import BaseSampler
from persisting_torch.samplers.episodes import EpisodeSampler, WindowSampler
from persisting_torch.samplers.grpo import GRPOGroupNSampler
from persisting_torch.samplers.rank_aware import RankAwareSampler
from persisting_torch.samplers.seqlen import SeqlenBalancedSampler
from persisting_torch.samplers.sequential import SequentialSampler
from persisting_torch.samplers.shapes import as_episodes, as_windows, cut_episodes
from persisting_torch.samplers.shuffle import ShuffleSampler
from persisting_torch.samplers.staleness import MaxStaleness

__all__ = [
    "BaseSampler",
    "EpisodeSampler",
    "GRPOGroupNSampler",
    "MaxStaleness",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "ShuffleSampler",
    "WindowSampler",
    "as_episodes",
    "as_windows",
    "cut_episodes",
]
