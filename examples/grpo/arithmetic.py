"""A small transformer learns addition from nothing but whether its answers are right.

Problems are a+b= with a below 100 and b below 5, as characters. The policy continues them with
characters until it says the full stop; at first that is noise, and there is no other teacher than
the reward. A fifth of the problems is held out.

    python examples/grpo/arithmetic.py             # every process is killed once
    python examples/grpo/arithmetic.py --no-kill

Exits with 1 if a rollout was trained twice or lost, or fewer than 80 % of the answers to the
problems held out are right.
"""

from __future__ import annotations

import random
import sys

import torch
from model import Transformer, generate
from supervise import main
from task import Choices, Task
from tensordict import TensorDict
from torch import Tensor, nn

CHARACTERS = "0123456789+=."
END = CHARACTERS.index(".")
LONGEST_PROBLEM, LONGEST_ANSWER = len("99+4="), len("103.")


def encode(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Characters as int64 [texts, LONGEST_PROBLEM], padded on the right, and their numbers."""
    tokens = torch.zeros(len(texts), LONGEST_PROBLEM, dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor([CHARACTERS.index(each) for each in text])
    return tokens, torch.tensor([len(text) for text in texts])


def ragged(rows: Tensor, lengths: Tensor) -> Tensor:
    """The first `lengths` of each row, as a jagged tensor."""
    parts = [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def split(tokens: Tensor) -> tuple[str, str]:
    """The problem, and what was answered."""
    text = "".join(CHARACTERS[token] for token in tokens.tolist())
    problem, _, answer = text.partition("=")
    return problem, answer


def right_answer(problem: str) -> str:
    return f"{sum(int(number) for number in problem.split('+'))}."


class Arithmetic(Task):
    name = "arithmetic"
    steps = 800
    group_size = 16
    groups_per_step = 32
    groups_per_put = 16
    learning_rate = 3e-3
    weight_decay = 0.1
    entropy_bonus = 0.3  # with half of it, wrong answers settle before the right ones are found
    max_staleness = 4
    measure = "accuracy on problems held out"
    wanted = 0.8
    judged = ("tokens",)
    trained = ("tokens", "prompt_length", "logprobs")
    pad = {"tokens": -1, "logprobs": 0.0}  # noqa: RUF012

    def __init__(self) -> None:
        problems = [f"{a}+{b}=" for a in range(100) for b in range(5)]
        random.Random(0).shuffle(problems)
        self.held_out, self.problems = problems[:100], problems[100:]

    def policy(self) -> nn.Module:
        return Transformer(len(CHARACTERS), LONGEST_PROBLEM + LONGEST_ANSWER)

    def play(self, policy: nn.Module, groups: int, rng: random.Random) -> TensorDict:
        chosen = rng.choices(self.problems, k=groups)
        prompts, prompt_lengths = encode([text for text in chosen for _ in range(self.group_size)])
        tokens, logprobs, lengths = generate(
            policy, prompts, prompt_lengths, most=LONGEST_ANSWER, end=END
        )
        return TensorDict(
            {
                "tokens": ragged(tokens, lengths),
                "logprobs": ragged(logprobs, lengths),
                "prompt_length": prompt_lengths,
            },
            batch_size=[len(tokens)],
        )

    def reward(self, rollouts: TensorDict) -> Tensor:
        """1 for the right answer; else up to 0.3, as part of its characters is right."""
        rewards = []
        for tokens in rollouts["tokens"].unbind():
            problem, answer = split(tokens)
            right = right_answer(problem)
            hits = sum(a == b for a, b in zip(answer, right, strict=False))
            part = hits / max(len(answer), len(right))
            rewards.append(1.0 if answer == right else 0.3 * part)
        return torch.tensor(rewards)

    def choices(self, policy: nn.Module, rollouts: TensorDict) -> Choices:
        tokens = rollouts["tokens"]
        places = torch.arange(1, tokens.shape[1])
        said = (places >= rollouts["prompt_length"][:, None]) & (tokens[:, 1:] >= 0)
        of_all = policy(tokens.clamp(min=0))[:, :-1].log_softmax(-1)[said]
        return Choices(
            logprobs=of_all.gather(1, tokens[:, 1:][said][:, None]).squeeze(1),
            logprobs_before=rollouts["logprobs"][:, 1:][said],
            entropy=-(of_all.exp() * of_all).sum(-1),
            rollout=said.nonzero()[:, 0],
        )

    def evaluate(self, policy: nn.Module) -> float:
        """The part of the problems held out that it answers rightly, saying what it likes best."""
        prompts, prompt_lengths = encode(self.held_out)
        tokens, _, lengths = generate(
            policy, prompts, prompt_lengths, most=LONGEST_ANSWER, end=END, greedy=True
        )
        answered = [
            split(row[:length]) for row, length in zip(tokens, lengths.tolist(), strict=True)
        ]
        return sum(right_answer(p) == a for p, a in answered) / len(answered)


if __name__ == "__main__":
    sys.exit(main(Arithmetic()))
