"""Hugging Face's Trainer, fed from a queue, trains each sample exactly once."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from persisting_torch import PersistingDataLoader, PersistingDataset
from persisting_torch.datasets import feed_trainer, last_checkpoint
from tests.datasets.counting import committed, fill
from tests.datasets.runs import Runs, Weights, die_if

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SAMPLES = 46
BATCHES = 12  # of 4, the last of 2


@pytest.fixture(scope="module")
def run() -> Iterator[Runs]:
    with Runs(__name__) as runs:
        yield runs


def loader_of(path: str | Path, batch_size: int = 4, **options: Any) -> PersistingDataLoader:
    dataset = PersistingDataset(
        "q",
        storage_path=path,
        batch_size=batch_size,
        fields=["uid"],
        last="split",
        timeout=60,
        **options,
    )
    return PersistingDataLoader(dataset)


class Counted(Weights):
    """Dies in a forward pass or a save, if it is to."""

    def __init__(self, dies: str) -> None:
        super().__init__(SAMPLES)
        self.dies = dies
        self.seen: list[list[int]] = []

    def forward(self, uid: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(uid.tolist())
        die_if(self.dies == f"got {len(self.seen)}")
        return super().forward(uid)


class Deaths(transformers.TrainerCallback):
    def __init__(self, dies: str) -> None:
        self.dies = dies

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        die_if(self.dies == f"stepped {state.global_step}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        die_if(self.dies == f"saved {state.global_step}")


def trainer_of(
    path: str | Path, loader: PersistingDataLoader, dies: str = "", **options: Any
) -> Any:
    defaults: dict[str, Any] = {
        "output_dir": f"{path}/out",
        "max_steps": 1000,
        "save_strategy": "steps",
        "save_steps": 3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "logging_strategy": "no",
    }
    args = transformers.TrainingArguments(**defaults | options)
    model = Counted(dies)
    optimizer = model.optimizer(args.gradient_accumulation_steps)
    # The optimizer's state is written after the weights and before the Trainer's state.
    optimizer.register_state_dict_pre_hook(
        lambda *_: die_if(dies == f"writing {trainer.state.global_step}")
    )
    trainer = transformers.Trainer(
        model, args, optimizers=(optimizer, None), callbacks=[Deaths(dies)]
    )
    feed_trainer(trainer, loader)
    return trainer


def train(path: str, *, dies: str = "", **options: Any) -> None:
    """Resume from the last checkpoint, or begin, and train to the queue's end."""
    trainer = trainer_of(path, loader_of(path), dies, **options)
    trainer.train(resume_from_checkpoint=last_checkpoint(trainer.args.output_dir))
    trainer.save_model(f"{path}/end")


def end_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "end" / "model.safetensors")


def test_after_sigkills_the_weights_are_those_of_an_uninterrupted_run(
    run: Runs, tmp_path: Path
) -> None:
    moments = ("got 2", "stepped 2", "saved 3", "stepped 5", "writing 6", "got 8", "writing 12")
    for name, kills in (("once", ()), ("killed", moments)):
        path = tmp_path / name
        fill(path, SAMPLES)
        for moment in kills:
            run("train", path=str(path), dies=moment)
        run("train", path=str(path))
        assert end_of(path)["count"].tolist() == [1.0] * SAMPLES
        assert committed(path) == BATCHES
    assert torch.equal(*(end_of(tmp_path / name)["trail"] for name in ("once", "killed")))


def test_a_sigkill_in_mid_accumulation_repeats_what_no_step_had_covered(
    run: Runs, tmp_path: Path
) -> None:
    fill(tmp_path, SAMPLES)
    options = {"gradient_accumulation_steps": 3, "save_steps": 1}
    run("train", path=str(tmp_path), dies="got 8", **options)
    assert committed(tmp_path) == 6
    run("train", path=str(tmp_path), **options)
    assert end_of(tmp_path)["count"].tolist() == [1.0] * SAMPLES


def test_batches_at_the_end_that_fill_no_accumulation_stay_unconsumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, SAMPLES)
    trainer = trainer_of(tmp_path, loader_of(tmp_path), gradient_accumulation_steps=5, save_steps=1)
    with caplog.at_level(logging.WARNING, "persisting_torch"):
        trainer.train()
    assert "do not fill gradient_accumulation_steps=5" in caplog.text
    assert trainer.state.global_step == 2
    assert trainer.model.counts == [1.0] * 40 + [0.0] * 6
    assert committed(tmp_path) == 10
    trainer.args.gradient_accumulation_steps = 1
    trainer.model.seen.clear()
    trainer.train(resume_from_checkpoint=True)
    assert trainer.model.seen == [[40, 41, 42, 43], [44, 45]]


def test_an_epoch_cut_short_in_mid_accumulation_begins_again_with_what_no_step_had_covered(
    tmp_path: Path,
) -> None:
    class CutsShort(transformers.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = len(trainer.model.seen) == 5

    fill(tmp_path, 48)
    trainer = trainer_of(tmp_path, loader_of(tmp_path), gradient_accumulation_steps=3, max_steps=3)
    trainer.add_callback(CutsShort())
    trainer.train()
    assert trainer.model.counts == [1.0] * 36 + [0.0] * 10
    assert [uids[0] for uids in trainer.model.seen] == [0, 4, 8, 12, 16, 12, 16, 20, 24, 28, 32]


def test_without_checkpoints_each_optimizer_step_is_committed(tmp_path: Path) -> None:
    class Looks(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            cursors.append(committed(tmp_path))

    fill(tmp_path, SAMPLES)
    cursors: list[int] = []
    trainer = trainer_of(tmp_path, loader_of(tmp_path), save_strategy="no", max_steps=3)
    trainer.add_callback(Looks())
    trainer.train()
    assert cursors == [0, 1, 2]
    trainer.train()
    assert trainer.model.counts == [1.0] * 24 + [0.0] * 22


def test_where_the_data_end_a_checkpoint_counts_them(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    trainer_of(tmp_path, loader_of(tmp_path), save_steps=5).train()
    saved = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert saved == ["checkpoint-10", "checkpoint-12", "checkpoint-5"]
    assert committed(tmp_path) == BATCHES


def test_a_checkpoint_older_than_the_newest_resumes_as_exactly(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    trainer_of(tmp_path, loader_of(tmp_path), max_steps=7).train()
    trainer = trainer_of(tmp_path, loader_of(tmp_path))
    trainer.train(resume_from_checkpoint=f"{tmp_path}/out/checkpoint-3")
    assert trainer.model.seen[0] == [12, 13, 14, 15]
    assert trainer.model.counts == [1.0] * SAMPLES


# Ranks


def train_on_two_ranks(path: str, port: int, *, dies: str = "") -> None:
    """As torchrun starts two ranks on one machine; this process becomes rank 0."""
    rank = 0 if os.fork() else 1
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}", "OMP_NUM_THREADS": "1"}
    trainer = trainer_of(path, loader_of(path, batch_size=2), dies if rank == 0 else "")
    # DDP averages the gradients of the ranks, and each rank has its own samples.
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 2
    trainer.train(resume_from_checkpoint=last_checkpoint(trainer.args.output_dir))
    trainer.save_model(f"{path}/end")
    torch.distributed.destroy_process_group()
    os._exit(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def test_accelerate_leaves_each_rank_its_own_slice_of_every_batch(
    run: Runs, tmp_path: Path
) -> None:
    fill(tmp_path, 44)
    run("train_on_two_ranks", path=str(tmp_path), port=free_port(), dies="stepped 5")
    run("train_on_two_ranks", path=str(tmp_path), port=free_port())
    assert end_of(tmp_path)["count"].tolist() == [1.0] * 44 + [0.0] * 2
    assert committed(tmp_path) == 11


# What is given


def test_last_checkpoint_passes_over_one_that_is_not_complete(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "none") is None
    for step, text in ((9, "{}"), (30, "{}"), (31, '{"global'), (32, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if text is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
    (tmp_path / "checkpoint-best").mkdir()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-30")


@pytest.mark.parametrize(
    ("give", "error", "message"),
    [
        (lambda path: [1, 2], TypeError, "loader must be a PersistingDataLoader, got list"),
        (lambda path: loader_of(path, consume=False), ValueError, "consume=False"),
    ],
)
def test_what_cannot_be_trained_exactly_once_is_refused(
    tmp_path: Path, give: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trainer_of(tmp_path, give(tmp_path))
