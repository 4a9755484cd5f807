"""A worker or a producer that is killed or stopped: an error that says so, within the limit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from persisting_torch import Queue
from tests.exactly_once.processes import Child, start
from tests.exactly_once.stories import Story, every

PRODUCE = "tests.exactly_once.training:produce"
LIMIT = 3.0


def number_after(word: str, text: str) -> int:
    return int(text.partition(word)[2].split()[0])


def failed_soon(trainer: Child, since: float) -> str:
    """The trainer ends with an error, some seconds after its limit at the latest."""
    status = trainer.wait(60)
    assert time.monotonic() - since < LIMIT + 25
    assert status == 1
    return trainer.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_producer_is_told_to_the_trainer_which_resumes_with_another(
    tmp_path: Path, number: signal.Signals
) -> None:
    story = Story(tmp_path, filled=False, data={"timeout": LIMIT})
    producer = start(PRODUCE, folder=str(tmp_path), first=0, count=80, pause=0.2, at_once=4)
    trainer = story.begin(keep=[every(1)])
    trainer.says("batch 5")
    producer.send(number)
    told = failed_soon(trainer, time.monotonic())
    if number == signal.SIGKILL:
        assert "ProducerFailed: no producer of queue 'q' is left: producer-0" in told
    else:
        assert "WaitTimeout: waited 3 s for 4 samples of q/default" in told
        assert "by producer producer-0" in told
        producer.send(signal.SIGCONT)
        assert producer.wait() == 0
    put = len_of(tmp_path)
    start(PRODUCE, folder=str(tmp_path), first=put, count=240 - put, seal=True)
    story.run(resume=story.newest(), data={"timeout": 30.0})
    story.assert_each_sample_once()


def len_of(folder: Path) -> int:
    with Queue("q", folder) as queue:
        return len(queue)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_told_to_the_trainer_which_resumes(
    tmp_path: Path, number: signal.Signals
) -> None:
    story = Story(tmp_path, model={"pace": 0.1}, data={"timeout": LIMIT})
    trainer = story.begin(keep=[every(1)], data={"num_workers": 2}, tell_worker=True)
    trainer.says("batch 5")
    worker = number_after("worker", trainer.out)
    began = time.monotonic()
    os.kill(worker, number)
    told = failed_soon(trainer, began)
    assert str(worker) in told
    assert not Path(f"/proc/{worker}").exists()
    story.run(resume=story.newest(), model={"pace": 0.0})
    story.assert_each_sample_once()
