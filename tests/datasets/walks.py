"""Synthetic trajectories: walks whose steps tell who they are."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase

MOST_STEPS = 100


def walk(episode: int, steps: int, *, ends: bool = True) -> list[dict[str, Any]]:
    """The steps of one episode as records; `uid` is episode * 100 + step."""
    return [
        {
            "episode": episode,
            "step": step,
            "done": ends and step == steps - 1,
            "uid": torch.tensor(episode * MOST_STEPS + step),
            "x": torch.tensor([float(episode), float(step)]),
        }
        for step in range(steps)
    ]


def interleaved(walks: Iterable[list[dict[str, Any]]], seed: int) -> list[dict[str, Any]]:
    """The steps of several walks, those of each in order, as several producers would put them."""
    draw = random.Random(seed)
    queues = [list(reversed(each)) for each in walks if each]
    mixed = []
    while queues:
        chosen = draw.choice(queues)
        mixed.append(chosen.pop())
        queues = [each for each in queues if each]
    return mixed


def uids_of(batch: TensorDictBase) -> list[list[int]]:
    """The uids of each episode or window of a batch."""
    return [row.tolist() for row in batch["uid"].unbind()]


def episode_of(uids: list[int]) -> tuple[int, int, int]:
    """Episode, first step and number of steps; raises unless these follow one another."""
    first = uids[0]
    assert uids == list(range(first, first + len(uids)))
    assert first // MOST_STEPS == uids[-1] // MOST_STEPS
    return first // MOST_STEPS, first % MOST_STEPS, len(uids)
