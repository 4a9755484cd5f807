"""Training that is interrupted and resumed, and what its weights and the queue's books say then."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from persisting_torch import Queue
from tests.exactly_once.model import Lineage, fill
from tests.exactly_once.processes import Child, start

SAMPLES = 240
VALIDATION_SAMPLES = 12
FIT = "tests.exactly_once.training:fit"


def merged(*orders: dict[str, Any]) -> dict[str, Any]:
    """Later values win; dictionaries are merged one level deep."""
    result: dict[str, Any] = {}
    for order in orders:
        for name, value in order.items():
            if isinstance(value, dict) and isinstance(result.get(name), dict):
                value = result[name] | value
            result[name] = value
    return result


def every(steps: int, **options: Any) -> dict[str, Any]:
    """The arguments of a ModelCheckpoint that keeps a file for every so many steps."""
    return {"filename": "{step}", "every_n_train_steps": steps, "save_top_k": -1} | options


class Story:
    """Runs over one queue, one after the other, that differ from `common` in what befalls them."""

    def __init__(self, folder: Path, *, filled: bool = True, **common: Any) -> None:
        self.folder = folder
        self.common = merged({"samples": SAMPLES}, common)
        if filled:
            fill(folder, self.common["samples"])
            if "val_partition_id" in self.common.get("data", {}):
                fill(folder, VALIDATION_SAMPLES, partition=self.common["data"]["val_partition_id"])

    def begin(self, **order: Any) -> Child:
        order = merged(self.common, order)
        for name in ("resume", "weights"):
            if order.get(name) is not None:
                order[name] = str(self.folder / order[name])
        return start(FIT, folder=str(self.folder), **order)

    def run(self, *, status: int = 0, **order: Any) -> Child:
        """A run that ends with this exit status."""
        child = self.begin(**order)
        assert child.wait() == status, child.err
        return child

    def newest(self) -> str | None:
        """The checkpoint of the latest step, if there is one."""
        found = sorted(self.folder.glob("step=*.ckpt"), key=lambda file: int(file.stem[5:]))
        return found[-1].name if found else None

    @property
    def end(self) -> Lineage:
        return Lineage.in_file(self.folder / "end.ckpt")

    @property
    def books(self) -> dict[str, int]:
        with Queue("q", self.folder) as queue:
            return queue.engine.books_of("train", "default")

    def assert_each_sample_once(self) -> None:
        assert self.end.trained == [1] * self.common["samples"]
        put = self.common["samples"]
        assert self.books == {"put": put, "once": put, "twice": 0, "never": 0, "dropped": 0}

    def assert_as_uninterrupted(self, *, same_steps: bool = True) -> None:
        """Each sample once, in the order of a run that nothing befell; also the very weights.

        `same_steps=False` where the interruption has moved the bounds of optimizer steps.
        """
        self.assert_each_sample_once()
        straight = uninterrupted_like(self)
        assert self.end.order == straight.order
        if same_steps:
            assert self.end.steps == straight.steps
            assert_same_weights(self.end, straight)


def assert_same_weights(some: Lineage, others: Lineage) -> None:
    for name, weights in others.weights.items():
        assert torch.equal(some.weights[name], weights), name


def uninterrupted_like(story: Story) -> Lineage:
    """The end of the same story if nothing had befallen it."""
    return _uninterrupted(json.dumps(story.common))


@functools.cache
def _uninterrupted(common: str) -> Lineage:
    with tempfile.TemporaryDirectory(prefix="uninterrupted-") as folder:
        story = Story(Path(folder), **json.loads(common))
        story.run()
        return story.end
