"""Queues that grow, end unevenly, are read in other sizes, or are read again in every epoch."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.exactly_once.model import fill
from tests.exactly_once.processes import start
from tests.exactly_once.stories import (
    SAMPLES,
    Story,
    assert_same_weights,
    every,
    uninterrupted_like,
)

PRODUCE = "tests.exactly_once.training:produce"


def test_a_queue_that_grows_meanwhile_is_trained_as_one_that_was_full(tmp_path: Path) -> None:
    story = Story(tmp_path, filled=False)
    producer = start(PRODUCE, folder=str(tmp_path), first=0, count=SAMPLES, seal=True)
    producer.says("put")
    story.run(keep=[every(4)], event=["sigkill", 26], status=-signal.SIGKILL)
    story.run(resume=story.newest())
    assert producer.wait() == 0
    story.assert_as_uninterrupted()


def test_two_producers_put_while_a_killed_trainer_resumes(tmp_path: Path) -> None:
    story = Story(tmp_path, filled=False)
    half = SAMPLES // 2
    producers = [
        start(PRODUCE, folder=str(tmp_path), first=first, count=half) for first in (0, half)
    ]
    for producer in producers:
        producer.says("put")
    story.run(keep=[every(4)], event=["sigkill", 26], status=-signal.SIGKILL)
    trainer = story.begin(resume=story.newest())
    for producer in producers:
        assert producer.wait() == 0
    fill(tmp_path, 0)
    assert trainer.wait() == 0, trainer.err
    story.assert_each_sample_once()


@pytest.mark.parametrize("last", ["drop", "split", "pad"])
def test_a_sealed_queue_that_fills_no_last_batch_ends_as_it_was_told(
    tmp_path: Path, last: str
) -> None:
    story = Story(tmp_path, samples=238, data={"last": last})
    story.run(keep=[every(5)], event=["sigkill", 28], status=-signal.SIGKILL)
    story.run(resume=story.newest())
    straight = uninterrupted_like(story)
    assert story.end.steps == straight.steps
    assert_same_weights(story.end, straight)
    dropped = 2 if last == "drop" else 0
    once = 238 - dropped
    assert story.books == {"put": 238, "once": once, "twice": 0, "never": dropped, "dropped": 0}
    repeated = [2, 2] if last == "pad" else [1 - dropped // 2] * 2
    assert story.end.trained == [1] * 236 + repeated


def test_an_older_file_is_gone_on_from_with_another_batch_size(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.run(keep=[every(10)])
    story.run(resume="step=30.ckpt", data={"batch_size": 3})
    story.assert_as_uninterrupted(same_steps=False)
    story.run(resume="step=20.ckpt")
    story.assert_as_uninterrupted()


@pytest.mark.parametrize("batch_size", [3, 16])
def test_a_run_that_resumes_with_another_batch_size_goes_on_with_the_next_sample(
    tmp_path: Path, batch_size: int
) -> None:
    story = Story(tmp_path)
    story.run(keep=[every(5)], event=["stop", 33])
    story.run(resume="step=30.ckpt", data={"batch_size": batch_size})
    story.assert_as_uninterrupted(same_steps=False)
    assert [len(step) for step in story.end.steps[29:32]] == [4, batch_size, batch_size]


@pytest.mark.slow
def test_workers_come_and_go_from_resume_to_resume(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.run(keep=[every(5)], event=["sigkill", 18], status=-signal.SIGKILL)
    story.run(
        keep=[every(5)],
        event=["sigkill", 18],
        status=-signal.SIGKILL,
        resume=story.newest(),
        data={"num_workers": 2},
    )
    assert story.newest() == "step=30.ckpt"
    story.run(resume=story.newest())
    story.assert_as_uninterrupted()


def test_epochs_over_the_same_samples_resume_in_the_middle_of_one(tmp_path: Path) -> None:
    story = Story(
        tmp_path,
        consume=False,
        model={"epochs": 3},
        data={"shuffle_seed": 1},
        trainer={"max_epochs": 3},
    )
    story.run(keep=[every(7)], event=["sigkill", 100], status=-signal.SIGKILL)
    story.run(keep=[every(7)], event=["sigkill", 40], status=-signal.SIGKILL, resume=story.newest())
    story.run(resume=story.newest())
    straight = uninterrupted_like(story)
    assert story.end.trained == [3] * SAMPLES
    assert story.end.steps == straight.steps
    assert_same_weights(story.end, straight)
    assert straight.order[:SAMPLES] != straight.order[SAMPLES : 2 * SAMPLES]
    assert story.books["once"] == 0


def test_an_epoch_over_the_same_samples_goes_on_with_batches_of_another_size(
    tmp_path: Path,
) -> None:
    story = Story(
        tmp_path,
        consume=False,
        model={"epochs": 2},
        data={"shuffle_seed": 1},
        trainer={"max_epochs": 2},
    )
    story.run(keep=[every(5)], event=["stop", 27])
    story.run(keep=[every(5)], event=["stop", 8], resume="step=25.ckpt", data={"batch_size": 8})
    story.run(resume="step=30.ckpt", data={"batch_size": 3})
    assert [len(step) for step in story.end.steps[24:31]] == [4, 8, 8, 8, 8, 8, 3]
    assert story.end.order == uninterrupted_like(story).order
    assert story.end.trained == [2] * SAMPLES


def test_weights_saved_alone_are_trained_on_with_what_they_have_not_seen(tmp_path: Path) -> None:
    story = Story(tmp_path, model={"momentum": 0.0})
    story.run(trainer={"max_steps": 23}, end="weights.ckpt", weights_only=True)
    story.run(weights="weights.ckpt")
    story.assert_as_uninterrupted()


def test_weights_saved_alone_in_between_move_no_cursor(tmp_path: Path) -> None:
    story = Story(tmp_path)
    lean = every(3, save_weights_only=True, filename="lean-{step}")
    story.run(keep=[lean, every(5)], event=["sigkill", 24], status=-signal.SIGKILL)
    assert (tmp_path / "lean-step=21.ckpt").exists()
    story.run(resume="step=20.ckpt")
    story.assert_as_uninterrupted()
