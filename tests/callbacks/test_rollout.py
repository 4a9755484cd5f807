"""RolloutCallback: rollouts of the module being trained, made in time, once for each version."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from tensordict import TensorDict

from persisting_torch import PersistingDataModule, Queue, WaitTimeout
from persisting_torch.callbacks import RolloutCallback
from tests.datasets.counting import fit, trainer

BATCH = 4


class Policy(LightningModule):
    """Each optimizer step adds 1 to its weight; it notes which samples it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.frozen = torch.nn.Dropout()
        self.seen: list[tuple[int, list[int], list[float]]] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def training_step(self, batch: TensorDict, batch_idx: int) -> torch.Tensor:
        self.seen.append(
            (self.global_step, batch["policy_version"].tolist(), batch["made_by"].tolist())
        )
        return -self.weight


def one_batch(policy: Policy, trainer: Trainer) -> list[dict[str, Any]]:
    return [{"made_by": policy.weight.clone()} for _ in range(BATCH)]


def data_of(path: Path, **options: Any) -> PersistingDataModule:
    Queue("q", path).close()
    return PersistingDataModule("q", str(path), **{"batch_size": BATCH, "timeout": 30.0} | options)


def rollouts(path: Path, generate: Any = one_batch, **options: Any) -> RolloutCallback:
    return RolloutCallback("q", generate, storage_path=path, **options)


def put(path: Path) -> list[int]:
    """The versions of all samples of the queue, in order."""
    with Queue("q", path) as queue:
        return [record["policy_version"] for record in queue.sync.get(limit=10_000)]


def every_step(path: Path, n: int = 1) -> ModelCheckpoint:
    return ModelCheckpoint(path / "steps", filename="{step}", every_n_train_steps=n, save_top_k=-1)


# In time


@pytest.mark.parametrize(
    "options",
    [{"max_steps": 5}, {"limit_train_batches": 5}, {"limit_train_batches": 2, "max_epochs": 3}],
    ids=["steps", "length", "epochs"],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_batch_is_made_by_the_weights_that_are_trained_on_it(
    tmp_path: Path, options: dict[str, Any], prefetch: int
) -> None:
    model = Policy()
    data = data_of(tmp_path, prefetch_batches=prefetch)
    fit(model, data, tmp_path, rollouts(tmp_path), **options)
    steps = options.get("max_steps") or options["limit_train_batches"] * options.get(
        "max_epochs", 1
    )
    assert model.seen == [(s, [s] * BATCH, [float(s)] * BATCH) for s in range(steps)]


def test_loaders_that_are_made_anew_every_epoch_ask_no_batch_ahead_either(tmp_path: Path) -> None:
    class TwoBatchesAnEpoch(Policy):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    model = TwoBatchesAnEpoch()
    more = rollouts(tmp_path, lambda policy, _: one_batch(policy, _) * 2)
    options = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3, "max_steps": 6}
    fit(model, data_of(tmp_path), tmp_path, more, **options)
    assert [step for step, _, _ in model.seen] == list(range(6))


def test_several_batches_of_each_version_and_accumulated_ones(tmp_path: Path) -> None:
    model = Policy()
    more = rollouts(tmp_path, lambda policy, _: one_batch(policy, _) * 4, every_n_steps=2)
    fit(model, data_of(tmp_path), tmp_path, more, max_steps=5, accumulate_grad_batches=2)
    assert [versions[0] for _, versions, _ in model.seen] == [0] * 4 + [2] * 4 + [4] * 2
    assert put(tmp_path) == [0] * 16 + [2] * 16 + [4] * 16


@pytest.mark.slow
def test_worker_processes_get_the_rollouts_too(tmp_path: Path) -> None:
    model = Policy()
    data = data_of(tmp_path, num_workers=1)
    fit(model, data, tmp_path, rollouts(tmp_path), max_steps=2)
    assert [step for step, _, _ in model.seen] == [0, 1]


def test_validation_before_and_between_leaves_the_rollouts_in_time(tmp_path: Path) -> None:
    class Validated(Policy):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    with Queue("q", tmp_path) as queue:
        queue.sync.put([{"made_by": torch.tensor(0.0), "policy_version": 0}] * 4, "val")
    model = Validated()
    data = data_of(tmp_path, val_partition_id="val")
    fit(model, data, tmp_path, rollouts(tmp_path), max_steps=4, val_check_interval=2)
    assert [versions[0] for _, versions, _ in model.seen] == [0, 1, 2, 3]


def test_a_queue_that_is_sealed_ends_the_training(tmp_path: Path) -> None:
    with Queue("q", tmp_path) as queue:
        seal = rollouts(tmp_path, lambda p, t: one_batch(p, t) if t.global_step < 3 else None)

        class Seal(Callback):
            def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
                if trainer.global_step == 3:
                    queue.sync.seal()

        model = Policy()
        run = fit(model, data_of(tmp_path), tmp_path, seal, Seal())
        assert run.global_step == 3
        assert queue.engine.books_of("train", "default") == {
            "put": 12,
            "once": 12,
            "twice": 0,
            "never": 0,
            "dropped": 0,
        }


def test_too_few_rollouts_are_an_error_that_says_what_is_missing(tmp_path: Path) -> None:
    few = rollouts(tmp_path, lambda policy, _: one_batch(policy, _)[:3])
    with pytest.raises(WaitTimeout, match=r"waited 0\.3 s for 4 samples of q/default.*3 ready"):
        fit(Policy(), data_of(tmp_path, timeout=0.3), tmp_path, few)


# How


def test_generate_runs_in_eval_mode_without_gradients_and_each_mode_is_restored(
    tmp_path: Path,
) -> None:
    found = []

    def generate(policy: Policy, trainer: Trainer) -> list[dict[str, Any]]:
        found.append((policy.training, policy.frozen.training, torch.is_grad_enabled()))
        return one_batch(policy, trainer)

    class Look(Policy):
        def training_step(self, batch: TensorDict, batch_idx: int) -> torch.Tensor:
            assert (self.training, self.frozen.training) == (True, False)
            return super().training_step(batch, batch_idx)

    model = Look()
    model.frozen.eval()
    fit(model, data_of(tmp_path), tmp_path, rollouts(tmp_path, generate), max_steps=2)
    assert found == [(False, False, False)] * 2


@pytest.mark.parametrize(
    "given",
    [
        TensorDict({"made_by": torch.zeros(4)}, batch_size=[4]),
        TensorDict({"made_by": torch.zeros(())}, batch_size=[]),
        {"made_by": torch.zeros(())},
        [{"made_by": torch.zeros(()), "policy_version": 0}],
    ],
    ids=["batch", "one", "record", "versioned"],
)
def test_generate_may_give_whatever_put_takes(tmp_path: Path, given: Any) -> None:
    model = Policy()
    data = data_of(tmp_path, batch_size=1)
    fit(model, data, tmp_path, rollouts(tmp_path, lambda *_: given), max_steps=1)
    assert model.seen == [(0, [0], [0.0])]


def test_the_version_that_generate_gives_itself_stays(tmp_path: Path) -> None:
    def older(policy: Policy, trainer: Trainer) -> list[dict[str, Any]]:
        return [{**record, "policy_version": -1} for record in one_batch(policy, trainer)]

    model = Policy()
    fit(model, data_of(tmp_path), tmp_path, rollouts(tmp_path, older), max_steps=1)
    assert put(tmp_path) == [-1] * 4


# Once


def test_a_resume_makes_no_rollouts_twice_and_trains_the_same_ones(tmp_path: Path) -> None:
    whole = Policy()
    keep = every_step(tmp_path, 3)
    fit(whole, data_of(tmp_path), tmp_path, keep, rollouts(tmp_path), max_steps=5)
    assert put(tmp_path) == [v for v in range(5) for _ in range(BATCH)]
    again = Policy()
    run = trainer(tmp_path, rollouts(tmp_path), max_steps=7)
    run.fit(again, data_of(tmp_path), ckpt_path=tmp_path / "steps" / "step=3.ckpt")
    assert again.seen[:2] == whole.seen[3:]
    assert [step for step, _, _ in again.seen] == [3, 4, 5, 6]
    assert put(tmp_path) == [v for v in range(7) for _ in range(BATCH)]


def test_a_checkpoint_saved_before_its_steps_rollouts_were_made_gets_them_on_resume(
    tmp_path: Path,
) -> None:
    class SaveAndDie(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "early.ckpt")
                raise KeyError("died before the rollouts of version 2")

    with pytest.raises(KeyError):
        fit(Policy(), data_of(tmp_path), tmp_path, SaveAndDie(), rollouts(tmp_path))
    model = Policy()
    run = trainer(tmp_path, rollouts(tmp_path), max_steps=4)
    run.fit(model, data_of(tmp_path), ckpt_path=tmp_path / "early.ckpt")
    assert model.seen == [(s, [s] * BATCH, [float(s)] * BATCH) for s in (2, 3)]


@pytest.mark.parametrize("begun", [0, 3])
def test_a_strategy_that_restores_after_setup_makes_them_with_the_restored_weights(
    tmp_path: Path, begun: int
) -> None:
    class Late(SingleDeviceStrategy):
        restore_checkpoint_after_setup = True

    keep = every_step(tmp_path)
    fit(Policy(), data_of(tmp_path), tmp_path, keep, rollouts(tmp_path), max_steps=3)
    assert put(tmp_path)[-1] == 2
    model = Policy()
    run = trainer(tmp_path, rollouts(tmp_path), max_steps=5, strategy=Late())
    checkpoint = tmp_path / "steps" / "step=3.ckpt" if begun else None
    if not begun:
        with Queue("q", tmp_path) as queue:
            queue.sync.clear(range(12))
    run.fit(model, data_of(tmp_path), ckpt_path=checkpoint)
    assert model.seen == [(s, [s] * BATCH, [float(s)] * BATCH) for s in range(begun, 5)]


def test_an_optimizer_that_asks_how_many_steps_there_will_be_finds_the_first_rollouts(
    tmp_path: Path,
) -> None:
    class Scheduled(Policy):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches is not None
            return super().configure_optimizers()

    keep = every_step(tmp_path)
    options = {"max_epochs": 1, "max_steps": 3}
    model = Scheduled()
    fit(model, data_of(tmp_path), tmp_path, keep, rollouts(tmp_path), **options)
    assert model.seen == [(s, [s] * BATCH, [float(s)] * BATCH) for s in range(3)]
    again = Scheduled()
    run = trainer(tmp_path, rollouts(tmp_path), **options | {"max_steps": 4})
    run.fit(again, data_of(tmp_path), ckpt_path=tmp_path / "steps" / "step=2.ckpt")
    assert again.seen == [(s, [s] * BATCH, [float(s)] * BATCH) for s in (2, 3)]


def test_a_fresh_run_makes_its_own_rollouts(tmp_path: Path) -> None:
    fit(Policy(), data_of(tmp_path), tmp_path, rollouts(tmp_path), max_steps=2)
    model = Policy()
    same = rollouts(tmp_path)
    fit(model, data_of(tmp_path), tmp_path, same, max_steps=2)
    fit(model, data_of(tmp_path), tmp_path, same, max_steps=1)
    assert put(tmp_path) == [v for v in (0, 1, 0, 1, 0) for _ in range(BATCH)]


def test_a_second_fit_of_the_same_trainer_goes_on(tmp_path: Path) -> None:
    model, data, callback = Policy(), data_of(tmp_path), rollouts(tmp_path)
    run = fit(model, data, tmp_path, callback, max_epochs=1, limit_train_batches=3)
    run.fit_loop.max_epochs = 2
    run.fit(model, data)
    assert [versions[0] for _, versions, _ in model.seen] == list(range(6))


PROCESS = """
import sys
from pathlib import Path
from lightning.pytorch.callbacks import Callback
from tests.callbacks.test_rollout import Policy, data_of, every_step, rollouts
from tests.datasets.counting import trainer

class Say(Callback):
    def on_train_batch_end(self, trainer, *_):
        print(trainer.global_step, flush=True)

path = Path(sys.argv[1])
run = trainer(path, rollouts(path), Say(), every_step(path, 2), max_steps=400)
run.fit(Policy(), data_of(path), ckpt_path=sys.argv[2] if len(sys.argv) > 2 else None)
"""


def test_after_a_sigkill_the_rollouts_of_each_version_are_there_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "8":
                process.send_signal(signal.SIGKILL)
                break
    newest = max((tmp_path / "steps").glob("*.ckpt"), key=lambda path: int(path.stem[5:]))
    begun = int(newest.stem[5:])
    model = Policy()
    run = trainer(tmp_path, rollouts(tmp_path), max_steps=begun + 5)
    run.fit(model, data_of(tmp_path), ckpt_path=newest)
    assert [versions for _, versions, _ in model.seen] == [[begun + i] * BATCH for i in range(5)]
    assert put(tmp_path) == [v for v in range(begun + 5) for _ in range(BATCH)]


def test_unknown_ranks_and_numbers_below_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'zero' or 'all', got 'one'"):
        rollouts(tmp_path, ranks="one")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        rollouts(tmp_path, every_n_steps=0)
