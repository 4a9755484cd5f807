"""Killed with SIGKILL at random moments, again and again, and resumed from what was on disk."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.exactly_once.stories import Story, every, merged

pytestmark = pytest.mark.slow

KILLS = 4
PACED: dict[str, Any] = {"samples": 480, "model": {"pace": 0.02}}
STORIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"trainer": {"accumulate_grad_batches": 4}},
    "epochs": {"trainer": {"limit_train_batches": 8, "max_epochs": 20}},
    "manual": {"model": {"manual": True}},
    "async": {"asynchronous": True},
}


@pytest.mark.parametrize("name", STORIES)
def test_four_kills_at_random_moments_leave_the_weights_of_a_straight_run(
    tmp_path: Path, name: str
) -> None:
    moments = random.Random(name)
    steps = 1 if name == "accumulate" else 2
    story = Story(tmp_path, **merged(PACED, STORIES[name]))
    for _ in range(KILLS):
        child = story.begin(keep=[every(steps)], resume=story.newest())
        time.sleep(moments.uniform(0.02, 0.6))
        child.send(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    story.run(keep=[every(steps)], resume=story.newest())
    story.assert_as_uninterrupted()
