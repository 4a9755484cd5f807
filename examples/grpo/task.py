"""What a task has to say, so that the processes can learn it."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass

from tensordict import TensorDict
from torch import Tensor, nn


@dataclass(frozen=True)
class Choices:
    """Every token said, or action taken, in a batch of rollouts, one after the other.

    logprobs: float32 [choices], by the policy in training, with its gradient.
    logprobs_before: float32 [choices], by the policy that made the rollout.
    entropy: float32 [choices], of the policy in training where it had to choose.
    rollout: int64 [choices], the place in the batch of the rollout that the choice is part of.
    """

    logprobs: Tensor
    logprobs_before: Tensor
    entropy: Tensor
    rollout: Tensor


class Task(ABC):
    """Something to learn, and the numbers that it is learnt with."""

    name: str
    steps: int  # optimizer steps of a whole run
    group_size: int  # rollouts of one prompt, or from one start
    groups_per_step: int  # a batch of the trainer is so many groups
    groups_per_put: int  # a rollout worker makes so many at once
    learning_rate: float  # at first; it falls linearly to a twentieth
    weight_decay: float = 0.01
    entropy_bonus: float
    max_staleness: int  # optimizer steps between the policy of a rollout and its training
    measure: str  # what `evaluate` gives
    wanted: float  # what `evaluate` has to give at the end
    judged: tuple[str, ...]  # the fields that the reward is made of
    trained: tuple[str, ...]  # the fields that the trainer reads, beside the advantage
    pad: dict[str, float] | None = None

    @property
    def batch_size(self) -> int:
        return self.groups_per_step * self.group_size

    @abstractmethod
    def policy(self) -> nn.Module:
        """A policy that has learnt nothing yet."""

    @abstractmethod
    def play(self, policy: nn.Module, groups: int, rng: random.Random) -> TensorDict:
        """`groups` groups of rollouts, batch size [groups * group_size], a group side by side."""

    @abstractmethod
    def reward(self, rollouts: TensorDict) -> Tensor:
        """float32 [rollouts], from the fields `judged`."""

    @abstractmethod
    def choices(self, policy: nn.Module, rollouts: TensorDict) -> Choices:
        """What the policy says of the choices in rollouts with the fields `trained`."""

    @abstractmethod
    def evaluate(self, policy: nn.Module) -> float:
        """How good the policy is, on problems that it is never trained on."""
