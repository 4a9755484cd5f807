"""Conversations with samplers, recorded from TransferQueue 0.1.11 and held against ours.

Where `transferqueue` is installed, `python -m tests.samplers.transcripts` records them anew.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

RECORD = Path(__file__).with_name("transferqueue-0.1.11.json")
NAMES = ("SequentialSampler", "RankAwareSampler", "GRPOGroupNSampler", "SeqlenBalancedSampler")
SAMPLES = 40


class Lengths:
    """What a SeqlenBalancedSampler asks of a partition."""

    def __init__(self, lengths: list[float | None]) -> None:
        self._lengths = lengths

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, Any]]:
        told = [(index, self._lengths[index]) for index in indexes]
        return {index: {"total_lengths": length} for index, length in told if length is not None}


def invent(seed: int) -> dict[str, Any]:
    """A sampler to make and things to ask of it, usual and unusual."""
    r = random.Random(seed)
    name = r.choice(NAMES)
    least = 0 if r.random() < 0.1 else 1
    numbers = {"GRPOGroupNSampler": 1, "SeqlenBalancedSampler": 2}.get(name, 0)
    few = sorted(r.sample(range(SAMPLES), r.randint(0, 24)))
    most = r.choice([2, 1000])
    steps = []
    for _ in range(r.randint(1, 5)):
        asked = {
            "dp_rank": r.choice([0, 1, 2, -1]),
            "batch_index": r.choice([0, 1]),
            "task_name": r.choice("ab"),
            "partition_id": r.choice("xy"),
        }
        always = name == "RankAwareSampler" and r.random() < 0.9
        steps.append(
            {
                "batch_size": r.choice([0, 1, 2, 3, 4, 6, 8, 12, -1, -2]),
                "asked": {key: value for key, value in asked.items() if always or r.random() < 0.8},
                "partition": r.random() < 0.8,
                "shuffle": r.random() < 0.2,
                "forget": r.choice("xy") if r.random() < 0.1 else None,
                "restart": r.random() < 0.1,
            }
        )
    return {
        "sampler": name,
        "arguments": [r.randint(least, 4) for _ in range(numbers)],
        "ready": few if r.random() < 0.6 else list(range(r.randint(0, SAMPLES))),
        "lengths": [r.choice([r.randint(1, most), None]) for _ in range(SAMPLES)]
        if name == "SeqlenBalancedSampler"
        else [],
        "steps": steps,
    }


def play(samplers: ModuleType, story: dict[str, Any]) -> list[Any]:
    """What a sampler of this module answers; of errors, the type."""
    kind = getattr(samplers, story["sampler"])
    made = _answer(partial(kind, *story["arguments"]))
    if isinstance(made, str):
        return [made]
    sampler, ready, answers = made, list(story["ready"]), []
    partition = Lengths(story["lengths"])
    for number, step in enumerate(story["steps"]):
        shown = list(ready)
        if step["shuffle"]:
            random.Random(number).shuffle(shown)
        asked = dict(step["asked"], **({"partition": partition} if step["partition"] else {}))
        found = _answer(partial(sampler.sample, shown, step["batch_size"], **asked))
        cached = [
            sampler.has_cached_result("x", "a", config)
            for config in (None, {"dp_rank": 0, "batch_index": 0}, {"dp_rank": 1})
        ]
        answers.append([found if isinstance(found, str) else list(map(list, found)), cached])
        if not isinstance(found, str):
            ready = [index for index in ready if index not in found[1]]
        if step["forget"]:
            sampler.clear_cache(step["forget"])
        if step["restart"]:
            successor = kind(*story["arguments"])
            successor.load_checkpoint(sampler.save_checkpoint())
            sampler = successor
    return answers


def _answer(ask: Callable[[], Any]) -> Any:
    try:
        return copy.deepcopy(ask())
    except (AssertionError, TypeError, ValueError) as error:
        return type(error).__name__


def record(stories: int = 240) -> None:
    import transfer_queue.sampler

    told = [(story, play(transfer_queue.sampler, story)) for story in map(invent, range(stories))]
    lines = [
        json.dumps({"story": story, "answers": answers}, separators=(",", ":"))
        for story, answers in told
    ]
    RECORD.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    record()
