"""Whatever interrupts a Trainer, however it is configured: each sample once, in the same order."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from persisting_torch import Queue
from tests.exactly_once.stories import VALIDATION_SAMPLES, Story, every, merged
from tests.exactly_once.training import FAILED

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"trainer": {"accumulate_grad_batches": 4}},
    "bf16-mixed": {"trainer": {"precision": "bf16-mixed"}},
    "bf16-true": {"trainer": {"precision": "bf16-true"}},
    "manual": {"model": {"manual": True}},
    "manual-accumulate": {"model": {"manual": True, "accumulate": 4}},
    "shuffled": {"data": {"shuffle_seed": 3}},
    "workers": {"data": {"num_workers": 2}},
}
EPOCHS = {"trainer": {"limit_train_batches": 8, "max_epochs": 9}}
VALIDATION = {
    "data": {"val_partition_id": "val"},
    "trainer": {"val_check_interval": 6, "num_sanity_val_steps": 2},
}

Scenario = Callable[[Story, int], None]
SCENARIOS: dict[str, tuple[Scenario, dict[str, Any]]] = {}


def scenario(**common: Any) -> Callable[[Scenario], Scenario]:
    """A function that is given a story, and how many batches make an optimizer step."""

    def enter(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = function, common
        return function

    return enter


@scenario(**EPOCHS)
def epoch_end(story: Story, per_step: int) -> None:
    story.run(keep=[{"filename": "{epoch}", "save_top_k": -1}], event=["stop", 24])
    story.run(resume="epoch=2.ckpt")


@scenario()
def mid_epoch(story: Story, per_step: int) -> None:
    story.run(keep=[every(20 // per_step)], event=["stop", 30])
    story.run(resume=f"step={20 // per_step}.ckpt")


@scenario(**merged(EPOCHS, {"model": {"one_cycle": True}}))
def estimated_stepping_batches(story: Story, per_step: int) -> None:
    story.run(keep=[every(4 // per_step)], event=["stop", 22])
    story.run(resume=f"step={20 // per_step}.ckpt", keep=[every(8 // per_step)], event=["stop", 28])
    story.run(resume=f"step={24 // per_step}.ckpt")


@scenario()
def exception(story: Story, per_step: int) -> None:
    story.run(on_exception=True, event=["raise", 21], status=FAILED)
    story.run(resume="on_exception.ckpt")


@scenario()
def sigkill(story: Story, per_step: int) -> None:
    story.run(keep=[every(8 // per_step)], event=["sigkill", 19], status=-signal.SIGKILL)
    story.run(resume=story.newest())


@scenario()
def sigterm(story: Story, per_step: int) -> None:
    story.run(on_exception=True, event=["sigterm", 20])
    assert not (story.folder / "end.ckpt").exists()
    story.run(resume="on_exception.ckpt")


@scenario(**EPOCHS)
def limit_train_batches(story: Story, per_step: int) -> None:
    story.run(keep=[every(4 // per_step)], event=["sigkill", 37], status=-signal.SIGKILL)
    story.run(resume=story.newest())


@scenario()
def max_steps(story: Story, per_step: int) -> None:
    story.run(keep=[every(4 // per_step)], trainer={"max_steps": 20 // per_step})
    story.run(
        keep=[every(4 // per_step)], trainer={"max_steps": 40 // per_step}, resume=story.newest()
    )
    story.run(resume=story.newest())


@scenario(**VALIDATION)
def validation(story: Story, per_step: int) -> None:
    story.run(keep=[every(4 // per_step)], event=["sigkill", 27], status=-signal.SIGKILL)
    child = story.run(resume=story.newest())
    assert f"validated {6 * VALIDATION_SAMPLES} {VALIDATION_SAMPLES}\n" in child.out
    with Queue("q", story.folder) as queue:
        assert queue.engine.books_of("train", "val")["never"] == VALIDATION_SAMPLES


@scenario()
def older_file(story: Story, per_step: int) -> None:
    best = every(4 // per_step, monitor="loss", save_top_k=3)
    story.run(keep=[best])
    kept = sorted(story.folder.glob("step=*.ckpt"), key=lambda file: int(file.stem[5:]))
    assert len(kept) == 3
    story.run(resume=kept[0].name)


@scenario()
def asynchronous_checkpoints(story: Story, per_step: int) -> None:
    story.run(
        asynchronous=True,
        keep=[every(4 // per_step)],
        event=["sigkill", 31],
        status=-signal.SIGKILL,
    )
    story.run(asynchronous=True, resume=story.newest())


QUICK = [(name, "plain") for name in SCENARIOS] + [
    ("mid_epoch", name) for name in CONFIGURATIONS if name not in ("plain", "workers")
]
ALL = [
    (name, configuration)
    for name in SCENARIOS
    for configuration in CONFIGURATIONS
    if configuration != "workers" or name in ("sigkill", "limit_train_batches", "exception")
]


@pytest.mark.parametrize(
    ("name", "configuration"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow, id="-".join(pair))
        for pair in ALL
    ],
)
def test_an_interrupted_run_ends_as_one_that_nothing_befell(
    tmp_path: Path, name: str, configuration: str
) -> None:
    act, common = SCENARIOS[name]
    story = Story(tmp_path, **merged(common, CONFIGURATIONS[configuration]))
    act(story, 4 if "accumulate" in configuration else 1)
    story.assert_as_uninterrupted()


def stopped(story: Story) -> None:
    story.run(event=["save and stop", 22])
    story.run(resume="stopped.ckpt")


def failed(story: Story) -> None:
    story.run(on_exception=True, event=["raise", 23], status=FAILED)
    story.run(resume="on_exception.ckpt")


def terminated(story: Story) -> None:
    story.run(on_exception=True, event=["sigterm", 22])
    story.run(resume="on_exception.ckpt")


@pytest.mark.parametrize("act", [stopped, failed, terminated])
@pytest.mark.parametrize("configuration", ["accumulate", "manual-accumulate"])
def test_a_checkpoint_in_mid_accumulation_repeats_what_is_in_no_step(
    tmp_path: Path, configuration: str, act: Callable[[Story], None]
) -> None:
    story = Story(tmp_path, **CONFIGURATIONS[configuration])
    act(story)
    story.assert_as_uninterrupted(same_steps=False)


def test_without_checkpoints_a_run_that_begins_anew_goes_on_with_the_batch_in_hand(
    tmp_path: Path,
) -> None:
    story = Story(tmp_path)
    story.run(event=["sigkill", 20], status=-signal.SIGKILL)
    story.run()
    assert story.books == {"put": 240, "once": 240, "twice": 0, "never": 0, "dropped": 0}
    assert story.end.order == list(range(80, 240))
