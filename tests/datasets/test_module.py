from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from tensordict import TensorDict

from persisting_torch import ConsumptionCheckpoint, PersistingDataModule, PersistingError, Queue
from tests.datasets.counting import Counting, fill, fit, trainer


def data_of(path: Path | str, **options: Any) -> PersistingDataModule:
    return PersistingDataModule("q", str(path), **{"batch_size": 2, "timeout": 30.0} | options)


def test_it_trains_from_a_queue_that_is_given_open_and_leaves_it_open(tmp_path):
    fill(tmp_path, 8)
    with Queue("q", tmp_path) as queue:
        model = Counting(8)
        fit(model, PersistingDataModule(queue, batch_size=4), tmp_path)
        assert model.counts == [1.0] * 8
        assert len(queue) == 8


def test_it_installs_one_consumption_checkpoint_before_all_other_callbacks(tmp_path):
    fill(tmp_path, 8)
    run = fit(Counting(8), data_of(tmp_path), tmp_path, enable_checkpointing=True)
    assert isinstance(run.callbacks[0], ConsumptionCheckpoint)
    assert sum(isinstance(c, ConsumptionCheckpoint) for c in run.callbacks) == 1
    own = ConsumptionCheckpoint()
    run = fit(Counting(8), data_of(tmp_path, task_name="other"), tmp_path, own)
    assert [c for c in run.callbacks if isinstance(c, ConsumptionCheckpoint)] == [own]


def test_its_loaders_work_without_a_trainer(tmp_path):
    fill(tmp_path, 8)
    data = data_of(tmp_path, predict_partition_id="default")
    data.prepare_data()
    data.setup("fit")
    assert [b["uid"].tolist() for b in data.train_dataloader()] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(list(data.predict_dataloader())) == 4
    data.teardown("fit")
    data.teardown("fit")
    data.setup("fit")
    assert list(data.train_dataloader()) == []


def test_a_setup_that_is_overridden_without_super_is_refused(tmp_path):
    class Own(PersistingDataModule):
        def setup(self, stage: str) -> None:
            pass

    fill(tmp_path, 8)
    with pytest.raises(RuntimeError, match=r"Own\.setup was not called"):
        fit(Counting(8), Own("q", str(tmp_path), batch_size=2), tmp_path)


def test_an_exception_in_validation_leaves_no_thread_and_no_open_queue(tmp_path):
    class Failing(Counting):
        def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
            raise RuntimeError("the validation step failed")

    fill(tmp_path, 200)
    data = data_of(tmp_path, val_partition_id="default")
    with pytest.raises(RuntimeError, match="the validation step failed"):
        fit(Failing(200), data, tmp_path)
    assert [t for t in threading.enumerate() if "prefetch" in t.name] == []
    assert data._handle._opened is None


def test_a_missing_queue_is_said_before_training_starts(tmp_path):
    with pytest.raises(PersistingError, match="there is no queue 'q'"):
        fit(Counting(1), data_of(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"last": "keep"}, "last must be one of"),
        ({"fields": []}, "fields is empty"),
    ],
)
def test_bad_arguments_are_refused_at_once(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        data_of(tmp_path, **options)


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_a_stage_without_a_partition_is_refused(tmp_path, stage):
    fill(tmp_path, 8)
    run = trainer(tmp_path)
    with pytest.raises(ValueError, match=f"PersistingDataModule has no {stage}_partition_id"):
        getattr(run, stage)(Counting(8), data_of(tmp_path))


def test_without_a_validation_partition_validation_is_skipped(tmp_path):
    fill(tmp_path, 8)
    model = Counting(8)
    fit(model, data_of(tmp_path), tmp_path)
    assert model.validated == 0
    assert model.counts == [1.0] * 8


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true", "bf16-mixed"])
def test_every_precision_leaves_batches_their_batch_size(tmp_path, precision):
    class Look(Counting):
        texts = "abcdefgh"
        wanted = {"b": torch.bfloat16, "6": torch.float64}.get(precision[0], torch.float32)
        wanted = torch.float32 if "mixed" in precision else wanted

        def training_step(self, batch: TensorDict, batch_idx: int) -> torch.Tensor:
            assert batch.batch_size == (2,)
            assert batch["more"].batch_size[:1] == (2,)
            assert list(batch["text"]) == [self.texts[uid] for uid in batch["uid"]]
            assert batch["long"].layout == torch.jagged
            assert batch["more", "x"].dtype == batch["long"].dtype == self.wanted
            return super().training_step(batch, batch_idx)

    with Queue("q", tmp_path) as queue:
        numbers = TensorDict({"uid": torch.arange(8), "more": {"x": torch.rand(8, 3)}}, [8])
        numbers["text"] = list(Look.texts)
        ragged = [torch.rand(n + 1) for n in range(8)]
        numbers["long"] = torch.nested.nested_tensor(ragged, layout=torch.jagged)
        queue.sync.put(numbers)
        queue.sync.seal()
    model = Look(8)
    fit(model, data_of(tmp_path), tmp_path, precision=precision)
    assert model.counts == [1.0] * 8


def test_the_models_own_hook_still_runs(tmp_path):
    class Hooked(Counting):
        def on_before_batch_transfer(self, batch: TensorDict, dataloader_idx: int) -> TensorDict:
            batch["uid"] = batch["uid"].flip(0)
            return batch

    fill(tmp_path, 8)
    model = Hooked(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(model, data_of(tmp_path), tmp_path)
    assert model.seen[0] == [1, 0]


def test_predict_keeps_what_the_loader_was_made_with(tmp_path):
    fill(tmp_path, 9)
    data = data_of(tmp_path, predict_partition_id="default", prefetch_batches=3)
    run = trainer(tmp_path)
    predicted = run.predict(Counting(9), data)
    assert torch.cat(predicted).tolist() == list(range(9))
    assert run.predict_dataloaders.prefetch_batches == 3


def test_its_arguments_have_types_that_a_command_line_can_resolve():
    hints = get_type_hints(PersistingDataModule.__init__)
    assert {"queue", "batch_size", "fields", "sampler", "pin_memory"} <= set(hints)
