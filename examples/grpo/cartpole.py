"""A small network learns to balance gymnasium's CartPole from comparing its own attempts.

The episodes of a group begin in the same state, so that their returns differ by what the policy
did. The evaluation plays from starts that training does not use.

    python examples/grpo/cartpole.py             # every process is killed once
    python examples/grpo/cartpole.py --no-kill

Exits with 1 if a rollout was trained twice or lost, or the mean return is below 400 of 500.
"""

from __future__ import annotations

import random
import sys
from functools import cached_property

import gymnasium
import numpy as np
import torch
from supervise import main
from task import Choices, Task
from tensordict import TensorDict
from torch import Tensor, nn

MOST_STEPS = 500
EVALUATED = 20  # episodes, from the starts 0 to 19
FURTHEST, STEEPEST = 2.4, 12 * np.pi / 180  # of the cart from the middle, and of the pole


class CartPole(Task):
    name = "cartpole"
    steps = 120
    group_size = 8
    groups_per_step = 4
    groups_per_put = 2
    learning_rate = 3e-3
    entropy_bonus = 0.0
    max_staleness = 4
    measure = "mean return of 20 episodes"
    wanted = 400.0
    judged = ("observation",)
    trained = ("observation", "action", "logprobs")

    @cached_property
    def environments(self) -> list[gymnasium.Env]:
        most = max(EVALUATED, self.group_size * self.groups_per_put)
        return [gymnasium.make("CartPole-v1") for _ in range(most)]

    def policy(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )

    def play(self, policy: nn.Module, groups: int, rng: random.Random) -> TensorDict:
        starts = [rng.randrange(EVALUATED, 2**31) for _ in range(groups)]
        episodes = self.episodes(policy, [s for s in starts for _ in range(self.group_size)])
        columns = {
            name: torch.nested.nested_tensor(list(parts), layout=torch.jagged)
            for name, parts in zip(self.trained, zip(*episodes, strict=True), strict=True)
        }
        return TensorDict(columns, batch_size=[len(episodes)])

    @torch.no_grad()
    def episodes(
        self, policy: nn.Module, starts: list[int], greedy: bool = False
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Observations [steps, 4], actions and their log-probabilities [steps] of each episode."""
        environments = self.environments[: len(starts)]
        seen = np.stack([e.reset(seed=s)[0] for e, s in zip(environments, starts, strict=True)])
        played: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in starts]
        going = list(range(len(starts)))
        while going:
            observation = torch.from_numpy(seen[going])
            of_all = policy(observation).log_softmax(-1)
            action = of_all.argmax(-1) if greedy else of_all.exp().multinomial(1).squeeze(1)
            logprob = of_all.gather(1, action[:, None]).squeeze(1)
            for at, episode in enumerate(going.copy()):
                played[episode].append((observation[at], action[at], logprob[at]))
                seen[episode], _, fell, timed_out, _ = environments[episode].step(int(action[at]))
                if fell or timed_out:
                    going.remove(episode)
        return [
            (torch.stack(observations), torch.stack(actions), torch.stack(logprobs))
            for observations, actions, logprobs in (zip(*steps, strict=True) for steps in played)
        ]

    def reward(self, rollouts: TensorDict) -> Tensor:
        """The part of the 500 steps for which the pole stands and the cart is in sight."""
        rewards = []
        for observation in rollouts["observation"].unbind():
            stands = (observation[:, 0].abs() <= FURTHEST) & (observation[:, 2].abs() <= STEEPEST)
            rewards.append(stands.sum() / MOST_STEPS)
        return torch.stack(rewards)

    def choices(self, policy: nn.Module, rollouts: TensorDict) -> Choices:
        of_all = policy(rollouts["observation"].values()).log_softmax(-1)
        steps = rollouts["action"].offsets().diff()
        return Choices(
            logprobs=of_all.gather(1, rollouts["action"].values()[:, None]).squeeze(1),
            logprobs_before=rollouts["logprobs"].values(),
            entropy=-(of_all.exp() * of_all).sum(-1),
            rollout=torch.arange(len(steps)).repeat_interleave(steps),
        )

    def evaluate(self, policy: nn.Module) -> float:
        """The mean return of episodes in which it does what it likes best."""
        episodes = self.episodes(policy, list(range(EVALUATED)), greedy=True)
        return sum(len(action) for _, action, _ in episodes) / len(episodes)


if __name__ == "__main__":
    sys.exit(main(CartPole()))
