"""Ranks under torchrun, with gloo: resumed by as many, by fewer, by more; each sample once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from tests.exactly_once.model import fill
from tests.exactly_once.stories import Story, assert_same_weights, every, merged

pytestmark = pytest.mark.slow

SAMPLES = 238  # 29 batches of 4 on 2 ranks, and 6 samples that are split
STOP = 12
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ddp": {"trainer": {"strategy": "ddp"}},
    "accumulate": {"trainer": {"strategy": "ddp", "accumulate_grad_batches": 4}},
    "bf16-mixed": {"trainer": {"strategy": "ddp", "precision": "bf16-mixed"}},
    "bf16-true": {"trainer": {"strategy": "ddp", "precision": "bf16-true"}},
    "manual": {"trainer": {"strategy": "ddp"}, "model": {"manual": True}},
    "fully-sharded": {"sharded": True},
}


def torchrun(ranks: int, orders: list[dict[str, Any]], *, fails: bool = False) -> str:
    """Run the orders on so many ranks; what they print."""
    folder = Path(orders[0]["folder"])
    (folder / "orders.json").write_text(json.dumps(orders))
    script = Path(__file__).with_name("ranks_process.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(script), str(folder / "orders.json")]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            out, _ = process.communicate(timeout=200)
        finally:
            process.kill()
    assert (process.returncode != 0) == fails, out
    return out


def order(story: Story, ranks: int, **own: Any) -> dict[str, Any]:
    common = {"folder": str(story.folder), "trainer": {"devices": ranks}}
    return merged(story.common, common, own)


class Jobs:
    """What the torchrun jobs have left behind, in stories by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stories: dict[str, Story] = {}

    def story(self, name: str, **common: Any) -> Story:
        path = self.folder / name
        path.mkdir()
        self.stories[name] = Story(path, **merged({"samples": SAMPLES}, common))
        return self.stories[name]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    found = Jobs(tmp_path_factory.mktemp("ranks"))
    first, again = [], []
    for name, common in CONFIGURATIONS.items():
        straight, stopped = found.story(f"{name}-straight", **common), found.story(name, **common)
        at = STOP // 4 if name == "accumulate" else STOP
        first.append(order(straight, 2))
        first.append(order(stopped, 2, keep=[every(at)], event=["stop", STOP + 3]))
        again.append(order(stopped, 2, resume=str(stopped.folder / f"step={at}.ckpt")))
    torchrun(2, first)
    shutil.copytree(found.folder / "ddp", found.folder / "fewer")
    found.stories["fewer"] = Story(found.folder / "fewer", filled=False, samples=SAMPLES)
    torchrun(2, again)
    return found


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_two_ranks_resumed_by_two_end_as_two_that_nothing_befell(
    jobs: Jobs, configuration: str
) -> None:
    story = jobs.stories[configuration]
    straight = jobs.stories[f"{configuration}-straight"]
    story.assert_each_sample_once()
    straight.assert_each_sample_once()
    assert story.end.steps == straight.end.steps
    assert_same_weights(story.end, straight.end)


@pytest.mark.parametrize("batch_size", [4, 8])
def test_two_ranks_resumed_by_one_go_on_with_the_next_sample(
    jobs: Jobs, tmp_path: Path, batch_size: int
) -> None:
    shutil.copytree(jobs.stories["fewer"].folder, tmp_path, dirs_exist_ok=True)
    story = Story(tmp_path, filled=False, samples=SAMPLES)
    story.run(resume=f"step={STOP}.ckpt", data={"batch_size": batch_size})
    story.assert_each_sample_once()
    assert story.end.order == list(range(SAMPLES))
    assert [len(step) for step in story.end.steps[STOP - 1 : STOP + 1]] == [8, batch_size]


def test_one_rank_resumed_by_three_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    story = Story(tmp_path, samples=240)
    story.run(keep=[every(20)], event=["stop", 22])
    resume = str(tmp_path / "step=20.ckpt")
    torchrun(3, [order(story, 3, resume=resume, trainer={"strategy": "ddp"})])
    story.assert_each_sample_once()
    assert story.end.order == list(range(240))
    assert [len(step) for step in story.end.steps[19:]] == [4, *[12] * 13, 4]


def test_lightnings_own_fsdp_strategy_runs_on_no_cpu() -> None:
    """Why "fully-sharded" goes through ModelParallelStrategy and fully_shard."""
    with pytest.raises(ValueError, match="`fsdp` requires a GPU accelerator"):
        Trainer(accelerator="cpu", devices=2, strategy="fsdp")


def test_a_killed_rank_ends_the_job_and_two_ranks_resume_it(tmp_path: Path) -> None:
    story = Story(tmp_path, samples=SAMPLES, trainer={"strategy": "ddp"})
    kill = order(story, 2, keep=[every(4)], event=["sigkill", 14])
    out = torchrun(2, [kill], fails=True)
    assert f"Signal {int(signal.SIGKILL)}" in out
    torchrun(2, [order(story, 2, resume=str(tmp_path / "step=12.ckpt"))])
    story.assert_each_sample_once()
    assert story.end.order == list(range(SAMPLES))


def test_ranks_that_get_sigterm_save_and_two_ranks_resume(tmp_path: Path) -> None:
    story = Story(tmp_path, samples=SAMPLES, trainer={"strategy": "ddp"})
    torchrun(2, [order(story, 2, on_exception=True, event=["sigterm", 14])])
    assert not (tmp_path / "end.ckpt").exists()
    torchrun(2, [order(story, 2, resume=str(tmp_path / "on_exception.ckpt"))])
    story.assert_each_sample_once()
    assert story.end.order == list(range(SAMPLES))


def test_a_wait_that_reaches_its_limit_is_told_on_all_ranks(tmp_path: Path) -> None:
    story = Story(
        tmp_path, filled=False, samples=20, data={"timeout": 3.0}, trainer={"strategy": "ddp"}
    )
    fill(tmp_path, 20, seal=False)
    out = torchrun(2, [order(story, 2)], fails=True)
    missing = "waited 3 s for 8 samples of q/default for task 'train'; 4 ready"
    for rank in range(2):
        assert f"[rank{rank}]: persisting_torch.errors.WaitTimeout: {missing}" in out
