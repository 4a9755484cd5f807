"""ConsumptionCheckpoint: every sample reaches the weights exactly once, whatever interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    Callback,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from persisting_torch import (
    ConsumptionCheckpoint,
    PersistingDataLoader,
    PersistingDataModule,
    PersistingDataset,
    Queue,
    WaitTimeout,
)
from tests.datasets.counting import Counting, committed, fill, fit, trainer

SAMPLES = 42


def data_of(path: Path, **options: Any) -> PersistingDataModule:
    return PersistingDataModule(
        "q", str(path), **{"batch_size": 2, "last": "split", "timeout": 30.0} | options
    )


def every_step(path: Path, n: int = 1) -> ModelCheckpoint:
    return ModelCheckpoint(path / "steps", filename="{step}", every_n_train_steps=n, save_top_k=-1)


def state_in(checkpoint: Path | str) -> list[dict[str, Any]]:
    saved = torch.load(checkpoint, weights_only=True)
    return saved["callbacks"]["ConsumptionCheckpoint"]["cursors"]


# Killed


def run_process(path: Path, *options: str, kill_at: int | None = None) -> list[int]:
    """Run trainer_process.py, to its end or until it says the step to be killed at."""
    script = Path(__file__).with_name("trainer_process.py")
    command = [sys.executable, str(script), str(path), "--samples", str(SAMPLES), *options]
    steps = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("step"):
                continue
            steps.append(int(line.split()[1]))
            if steps[-1] == kill_at:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == (0 if kill_at is None else -signal.SIGKILL)
    return steps


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--workers", "2"), marks=pytest.mark.slow)],
    ids=["thread", "workers"],
)
def test_after_a_sigkill_and_a_resume_the_weights_have_had_each_sample_once(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    fill(tmp_path, SAMPLES)
    run_process(tmp_path, *options, kill_at=8)
    (last,) = (tmp_path / "steps").glob("*step=6.ckpt")
    steps = run_process(tmp_path, *options, "--resume", str(last))
    assert steps == [7, 8, 9, 10, 11]
    weights = torch.load(tmp_path / "end" / "end.ckpt", weights_only=True)["state_dict"]["count"]
    assert weights.tolist() == [1.0] * SAMPLES
    assert committed(tmp_path) == 11


@pytest.mark.slow
def test_two_kills_while_accumulating_and_each_sample_still_counts_once(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    options = ("--accumulate", "2")
    run_process(tmp_path, *options, kill_at=4)
    (last,) = (tmp_path / "steps").glob("*step=3.ckpt")
    run_process(tmp_path, *options, "--resume", str(last), kill_at=5)
    run_process(tmp_path, *options, "--resume", str(last))
    weights = torch.load(tmp_path / "end" / "end.ckpt", weights_only=True)["state_dict"]["count"]
    assert weights.tolist() == [1.0] * SAMPLES


@pytest.mark.slow
def test_two_ranks_resume_exactly_and_end_together(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    run_process(tmp_path, "--devices", "2", "--max-steps", "4")
    (last,) = (tmp_path / "steps").glob("*step=3.ckpt")
    steps = run_process(tmp_path, "--devices", "2", "--resume", str(last))
    assert sorted(steps) == [4, 4, 5, 5, 6, 6]
    weights = torch.load(tmp_path / "end" / "end-v1.ckpt", weights_only=True)["state_dict"]["count"]
    assert weights.tolist() == [1.0] * SAMPLES
    assert committed(tmp_path) == 6


# Resumed from every kind of checkpoint


def test_a_checkpoint_taken_in_mid_epoch_resumes_with_the_next_batch(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    first = Counting(SAMPLES)
    fit(first, data_of(tmp_path), tmp_path, every_step(tmp_path), max_steps=5)
    assert first.seen[-1] == [8, 9]
    model = Counting(SAMPLES)
    fit(
        model,
        data_of(tmp_path),
        tmp_path,
        every_step(tmp_path),
        ckpt_path=tmp_path / "steps" / "step=3.ckpt",
    )
    assert model.seen[0] == [6, 7]
    assert model.counts == [1.0] * SAMPLES


def test_a_checkpoint_taken_at_an_epochs_end_resumes_with_the_next_batch(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    keep = ModelCheckpoint(tmp_path / "epochs", filename="{epoch}", save_top_k=-1)
    fit(Counting(SAMPLES), data_of(tmp_path), tmp_path, keep, max_epochs=2, limit_train_batches=4)
    model = Counting(SAMPLES)
    last = tmp_path / "epochs" / "epoch=1.ckpt"
    fit(model, data_of(tmp_path), tmp_path, keep, ckpt_path=last, max_epochs=3)
    assert model.seen[0] == [16, 17]
    assert model.counts == [1.0] * SAMPLES


def test_a_checkpoint_taken_in_mid_accumulation_repeats_what_no_step_had_covered(
    tmp_path: Path,
) -> None:
    class SaveAfterSixBatches(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if args[-1] == 5:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")
                trainer.should_stop = True

    fill(tmp_path, 32)
    options = {"accumulate_grad_batches": 4}
    fit(Counting(32, accumulate=4), data_of(tmp_path), tmp_path, SaveAfterSixBatches(), **options)
    assert state_in(tmp_path / "middle.ckpt")[0]["k"] == 4
    model = Counting(32, accumulate=4)
    fit(model, data_of(tmp_path), tmp_path, ckpt_path=tmp_path / "middle.ckpt", **options)
    assert model.seen[0] == [8, 9]
    assert model.counts == [1.0] * 32


def test_estimated_stepping_batches_leaves_a_resume_exact(tmp_path: Path) -> None:
    class Scheduled(Counting):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches > 0
            return super().configure_optimizers()

    fill(tmp_path, SAMPLES)
    options = {"limit_train_batches": 4, "max_epochs": 2}
    fit(Scheduled(SAMPLES), data_of(tmp_path), tmp_path, every_step(tmp_path), **options)
    for step, follows in ((3, [6, 7]), (4, [8, 9])):
        model = Scheduled(SAMPLES)
        checkpoint = tmp_path / "steps" / f"step={step}.ckpt"
        fit(model, data_of(tmp_path), tmp_path, ckpt_path=checkpoint, **options)
        assert model.seen[0] == follows
        assert model.counts == [1.0] * 16 + [0.0] * 26


def test_a_strategy_that_restores_after_setup_drops_the_batch_fetched_too_early(
    tmp_path: Path,
) -> None:
    class Late(SingleDeviceStrategy):
        restore_checkpoint_after_setup = True

    class Scheduled(Counting):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches is not None
            return super().configure_optimizers()

    fill(tmp_path, SAMPLES)
    fit(Counting(SAMPLES), data_of(tmp_path), tmp_path, every_step(tmp_path), max_steps=5)
    model = Scheduled(SAMPLES)
    fit(
        model,
        data_of(tmp_path),
        tmp_path,
        ckpt_path=tmp_path / "steps" / "step=3.ckpt",
        strategy=Late(),
    )
    assert model.seen[0] == [6, 7]
    assert model.counts == [1.0] * SAMPLES


@pytest.mark.parametrize("saver", ["ModelCheckpoint", "OnExceptionCheckpoint"])
def test_an_exceptions_checkpoint_does_not_count_the_batch_that_failed(
    tmp_path: Path, saver: str
) -> None:
    fill(tmp_path, SAMPLES)
    if saver == "ModelCheckpoint":
        saves: Callback = ModelCheckpoint(
            tmp_path, filename="on_exception", save_on_exception=True, save_top_k=1
        )
    else:
        saves = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(RuntimeError, match="the training step failed"):
        fit(Counting(SAMPLES, fail_at=5), data_of(tmp_path), tmp_path, saves)
    assert committed(tmp_path) == 5
    model = Counting(SAMPLES)
    fit(model, data_of(tmp_path), tmp_path, ckpt_path=tmp_path / "on_exception.ckpt")
    assert model.seen[0] == [10, 11]
    assert model.counts == [1.0] * SAMPLES


def test_manual_optimization_counts_its_own_steps(tmp_path: Path) -> None:
    class Manual(Counting):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__(SAMPLES)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx))
            if batch_idx % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    fill(tmp_path, SAMPLES)
    model = Manual()
    fit(model, data_of(tmp_path), tmp_path, limit_train_batches=8)
    assert model.counts == [1.0] * 12 + [0.0] * (SAMPLES - 12)
    assert committed(tmp_path) == 6


def test_a_loader_given_to_the_trainer_resumes_exactly_with_the_callback(tmp_path: Path) -> None:
    def loader() -> PersistingDataLoader:
        return PersistingDataLoader(
            PersistingDataset("q", storage_path=tmp_path, batch_size=2, last="split")
        )

    fill(tmp_path, SAMPLES)
    first = trainer(tmp_path, ConsumptionCheckpoint(), every_step(tmp_path), max_steps=5)
    first.fit(Counting(SAMPLES), loader())
    assert committed(tmp_path) == 5
    for step, follows in ((3, [6, 7]), (5, [10, 11])):
        model = Counting(SAMPLES)
        again = trainer(tmp_path, ConsumptionCheckpoint(), every_step(tmp_path))
        again.fit(model, loader(), ckpt_path=tmp_path / "steps" / f"step={step}.ckpt")
        assert model.seen[0] == follows
        assert model.counts == [1.0] * SAMPLES


@pytest.mark.parametrize("step", [3, 10, 14])
def test_a_loader_that_does_not_consume_resumes_in_its_epoch(tmp_path: Path, step: int) -> None:
    def run(model: Counting, checkpoint: Path | None = None) -> None:
        loader = PersistingDataLoader(
            PersistingDataset(
                "q", storage_path=tmp_path, batch_size=2, consume=False, shuffle_seed=1
            )
        )
        own = [ConsumptionCheckpoint(), every_step(tmp_path)]
        trainer(tmp_path, *own, max_epochs=2).fit(model, loader, ckpt_path=checkpoint)

    fill(tmp_path, 20)
    straight, model = Counting(20), Counting(20)
    run(straight)
    assert straight.seen[:10] != straight.seen[10:]
    run(model, tmp_path / "steps" / f"step={step}.ckpt")
    assert model.seen == straight.seen[step:]
    assert model.counts == [2.0] * 20
    assert committed(tmp_path) == 0


def test_loaders_that_are_reloaded_every_epoch_go_on_where_the_last_one_was(
    tmp_path: Path,
) -> None:
    fill(tmp_path, SAMPLES)
    model = Counting(SAMPLES)
    options = {"reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 3, "max_epochs": 7}
    fit(model, data_of(tmp_path), tmp_path, **options)
    assert model.counts == [1.0] * SAMPLES


def test_a_second_fit_of_the_same_trainer_goes_on(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    model, data = Counting(SAMPLES), data_of(tmp_path)
    run = fit(model, data, tmp_path, max_epochs=1, limit_train_batches=3)
    run.fit_loop.max_epochs = 7
    run.fit(model, data)
    assert model.counts == [1.0] * SAMPLES


# What counts as consumed


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_prefetched_at_an_epochs_end_are_not_lost(tmp_path: Path, workers: int) -> None:
    fill(tmp_path, 24)
    model = Counting(24)
    options = {"limit_train_batches": 3, "max_epochs": 4}
    fit(model, data_of(tmp_path, num_workers=workers), tmp_path, **options)
    assert model.seen == [[2 * i, 2 * i + 1] for i in range(12)]
    assert committed(tmp_path) == 12


def test_a_batch_whose_epoch_the_model_cuts_short_comes_again(tmp_path: Path) -> None:
    class Cutting(Counting):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 and self.current_epoch == 0 else None

    fill(tmp_path, SAMPLES)
    model = Cutting(SAMPLES)
    fit(model, data_of(tmp_path), tmp_path, max_epochs=2)
    assert model.counts == [1.0] * SAMPLES


def test_without_checkpoints_each_optimizer_step_is_committed(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    cursors = []

    class Look(Counting):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            cursors.append(committed(tmp_path))

    fit(Look(SAMPLES), data_of(tmp_path), tmp_path, max_steps=4)
    assert cursors == [0, 1, 2, 3]
    assert committed(tmp_path) == 4


def test_with_checkpoints_only_what_one_on_disk_counts_is_committed(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    cursors = []

    class Look(Counting):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            cursors.append(committed(tmp_path))

    fit(Look(SAMPLES), data_of(tmp_path), tmp_path, every_step(tmp_path, 2), max_steps=5)
    assert cursors == [0, 0, 2, 2, 4]
    assert committed(tmp_path) == 4


def test_weights_without_state_do_not_count_as_checkpoints(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    weights = ModelCheckpoint(tmp_path, save_weights_only=True)
    fit(Counting(SAMPLES), data_of(tmp_path), tmp_path, weights, max_steps=4)
    assert committed(tmp_path) == 4


def test_a_checkpoint_that_could_not_be_written_commits_nothing(tmp_path: Path) -> None:
    class FullDisk(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("No space left on device")

    fill(tmp_path, SAMPLES)
    with pytest.raises(OSError, match="No space left"):
        fit(
            Counting(SAMPLES),
            data_of(tmp_path),
            tmp_path,
            every_step(tmp_path, 2),
            plugins=[FullDisk()],
        )
    assert committed(tmp_path) == 0


def test_checkpoints_written_behind_the_training_are_committed_when_fit_ends(
    tmp_path: Path,
) -> None:
    fill(tmp_path, SAMPLES)
    cursors = []

    class Look(Counting):
        def on_train_end(self) -> None:
            cursors.append(committed(tmp_path))

    keep = every_step(tmp_path, 2)
    fit(
        Look(SAMPLES), data_of(tmp_path), tmp_path, keep, max_steps=5, plugins=[AsyncCheckpointIO()]
    )
    assert cursors == [0]
    assert committed(tmp_path) == 4


def test_a_resume_commits_what_its_checkpoint_counts(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    run = fit(Counting(SAMPLES), data_of(tmp_path), tmp_path, every_step(tmp_path, 3), max_steps=5)
    run.save_checkpoint(tmp_path / "final.ckpt")
    assert committed(tmp_path) == 3
    model = Counting(SAMPLES)
    fit(
        model,
        data_of(tmp_path),
        tmp_path,
        every_step(tmp_path, 100),
        max_steps=6,
        ckpt_path=tmp_path / "final.ckpt",
    )
    assert committed(tmp_path) == 5


def test_a_fresh_run_begins_after_what_is_committed(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    fit(Counting(SAMPLES), data_of(tmp_path), tmp_path, every_step(tmp_path, 2), max_steps=5)
    model = Counting(SAMPLES)
    fit(model, data_of(tmp_path), tmp_path)
    assert model.seen[0] == [8, 9]


def test_fast_dev_run_consumes_nothing(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    model = Counting(SAMPLES)
    fit(model, data_of(tmp_path), tmp_path, fast_dev_run=3)
    assert len(model.seen) == 3
    assert committed(tmp_path) == 0


def test_the_learning_rate_finder_takes_nothing_from_the_training(tmp_path: Path) -> None:
    class Finding(Counting):
        def __init__(self) -> None:
            super().__init__(SAMPLES)
            self.lr = 1.0

    fill(tmp_path, SAMPLES)
    model = Finding()
    finder = LearningRateFinder(num_training_steps=4, update_attr=False)
    fit(model, data_of(tmp_path), tmp_path, finder)
    assert model.seen[-1] == [40, 41]
    assert model.counts == [1.0] * SAMPLES


def test_validation_its_sanity_check_test_and_predict_consume_nothing(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    fill(tmp_path, 7, first=SAMPLES, partition="val")
    data = data_of(
        tmp_path, val_partition_id="val", test_partition_id="val", predict_partition_id="val"
    )
    model = Counting(SAMPLES)
    run = fit(model, data, tmp_path, limit_train_batches=3, max_epochs=2)
    assert model.validated == 4 + 7 + 7
    assert committed(tmp_path) == 6
    run.validate(model, data, verbose=False)
    run.test(model, data, verbose=False)
    predicted = run.predict(model, data)
    assert predicted is not None
    assert torch.cat(predicted).tolist() == list(range(SAMPLES, SAMPLES + 7))  # type: ignore[arg-type]
    with Queue("q", tmp_path) as queue:
        assert queue.engine.cursor("train", "val") == 0
        assert len(queue.sync.get_meta(["uid"], 100, "train", "val").global_indexes) == 7


def test_validating_a_checkpoint_moves_no_cursor_and_misses_no_callback(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    fill(tmp_path, 7, first=SAMPLES, partition="val")
    data = data_of(tmp_path, val_partition_id="val")
    fit(Counting(SAMPLES), data, tmp_path, every_step(tmp_path), max_steps=4)
    run = trainer(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*add the following.*ConsumptionCheckpoint.*")
        run.validate(
            Counting(SAMPLES), data, ckpt_path=tmp_path / "steps" / "step=2.ckpt", verbose=False
        )
    (callback,) = (c for c in run.callbacks if isinstance(c, ConsumptionCheckpoint))
    assert callback.state_dict() == {}
    assert committed(tmp_path) == 4


# State and threads


def test_the_state_in_a_checkpoint_is_primitives(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    fit(Counting(SAMPLES), data_of(tmp_path), tmp_path, every_step(tmp_path), max_steps=2)
    assert state_in(tmp_path / "steps" / "step=2.ckpt") == [
        {"k": 2, "queue": "q", "partition": "default", "task": "train"}
    ]


def test_a_callback_that_saves_in_its_batch_end_finds_the_cursor_moved(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / "own.ckpt")

    fill(tmp_path, SAMPLES)
    fit(Counting(SAMPLES), data_of(tmp_path), tmp_path, Saves(), max_steps=3)
    assert state_in(tmp_path / "own.ckpt")[0]["k"] == 3


def test_a_wait_that_times_out_ends_fit_with_its_message_and_no_thread(tmp_path: Path) -> None:
    fill(tmp_path, 6, seal=False)
    before = set(threading.enumerate())
    with pytest.raises(WaitTimeout, match=r"waited 0\.3 s for 2 samples of q/default"):
        fit(Counting(SAMPLES), data_of(tmp_path, timeout=0.3), tmp_path)
    left = [t.name for t in set(threading.enumerate()) - before if "prefetch" in t.name]
    assert left == []


def test_a_failing_step_leaves_no_thread_and_no_open_queue(tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES)
    with pytest.raises(RuntimeError, match="the training step failed"):
        fit(Counting(SAMPLES, fail_at=2), data_of(tmp_path), tmp_path)
    assert [t.name for t in threading.enumerate() if "prefetch" in t.name] == []
    assert committed(tmp_path) == 2
    assert os.path.exists(tmp_path)
