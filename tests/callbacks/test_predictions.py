"""QueuePredictionWriter: predictions reach the queue whole, with their ids, and once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from tensordict import TensorDict

from persisting_torch import PersistingDataModule, Queue, SchemaError
from persisting_torch.callbacks import QueuePredictionWriter
from tests.datasets.counting import fill, trainer


class Predicts(LightningModule):
    """Returns what `make` makes of a batch."""

    def __init__(self, make: Any = None) -> None:
        super().__init__()
        self.make = make or (lambda batch: {"double": 2 * batch["uid"]})
        self.weight = torch.nn.Parameter(torch.ones(()))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.make(batch)


def predict(path: Path, writer: QueuePredictionWriter, make: Any = None, **options: Any) -> None:
    given = {"batch_size": 3, "fields": ["uid", "_index"]} | options
    data = PersistingDataModule("q", str(path), predict_partition_id="default", **given)
    run = trainer(path, writer, enable_checkpointing=False)
    run.predict(Predicts(make), data, return_predictions=False)


def writer(path: Path, *args: Any, **options: Any) -> QueuePredictionWriter:
    return QueuePredictionWriter("out", *args, storage_path=path, **options)


def records(path: Path, queue: str = "out") -> list[dict[str, Any]]:
    with Queue(queue, path) as found:
        return found.sync.get(limit=1000)


# What


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda batch: 2 * batch["uid"], "prediction"),
        (lambda batch: {"double": 2 * batch["uid"]}, "double"),
        (lambda batch: TensorDict({"double": 2 * batch["uid"]}, [len(batch)]), "double"),
    ],
    ids=["tensor", "dict", "tensordict"],
)
def test_what_predict_step_returns_is_in_the_queue_with_the_ids(
    tmp_path: Path, make: Any, field: str
) -> None:
    fill(tmp_path, 7)
    predict(tmp_path, writer(tmp_path), make)
    found = records(tmp_path)
    assert [record[field].item() for record in found] == [0, 2, 4, 6, 8, 10, 12]
    assert [record["source_index"].item() for record in found] == list(range(7))


def test_fields_choose_and_rename(tmp_path: Path) -> None:
    def make(batch: TensorDict) -> dict[str, Any]:
        return {"a": batch["uid"], "b": batch["uid"] + 1, "text": [f"t{u}" for u in batch["uid"]]}

    fill(tmp_path, 3)
    predict(tmp_path, writer(tmp_path, "some", ["a", "text"]), make)
    predict(tmp_path, writer(tmp_path, "other", {"b": "score"}), make)
    with Queue("out", tmp_path) as queue:
        some = queue.sync.get_batch(["a", "text"], 3, partition_id="some")
        other = queue.sync.get_batch(["score"], 3, partition_id="other")
        assert set(queue.sync.stats()["fields"]) == {"a", "text", "score", "source_index"}
    assert list(some["text"]) == ["t0", "t1", "t2"]
    assert other["score"].tolist() == [1, 2, 3]


def test_what_is_written_is_a_copy_without_gradients(tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []

    def make(batch: TensorDict) -> torch.Tensor:
        for tensor in kept:
            tensor.data.fill_(-1)
        with torch.inference_mode(False), torch.enable_grad():
            kept.append(batch["uid"].clone().float().requires_grad_() * 2)
        return kept[-1]

    fill(tmp_path, 6)
    predict(tmp_path, writer(tmp_path), make, fields=["uid"])
    assert [record["prediction"].item() for record in records(tmp_path)] == [0, 2, 4, 6, 8, 10]


def test_without_ids_predictions_are_put_and_flushed_at_the_end(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    with Queue("out", tmp_path) as queue:
        predict(tmp_path, QueuePredictionWriter(queue), fields=["uid"])
        with Queue("out", tmp_path) as another:
            found = another.sync.get()
    assert [set(record) for record in found] == [{"double"}] * 4


def test_a_step_that_returns_nothing_writes_nothing(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    predict(tmp_path, writer(tmp_path), lambda batch: None)
    assert records(tmp_path) == []


# Once


def test_predicting_again_updates_the_samples_of_the_same_ids(tmp_path: Path) -> None:
    fill(tmp_path, 7)
    predict(tmp_path, writer(tmp_path))
    predict(tmp_path, writer(tmp_path), lambda batch: {"double": 3 * batch["uid"]}, batch_size=2)
    found = records(tmp_path)
    assert [record["double"].item() for record in found] == [0, 3, 6, 9, 12, 15, 18]


def test_a_field_may_give_the_ids(tmp_path: Path) -> None:
    with Queue("q", tmp_path) as queue:
        queue.sync.put([{"uid": torch.tensor(n), "name": f"n{n % 3}"} for n in range(6)])
    predict(tmp_path, writer(tmp_path, id_field="name"), fields=["uid", "name"])
    found = records(tmp_path)
    assert [(record["name"], record["double"].item()) for record in found] == [
        ("n0", 6),
        ("n1", 8),
        ("n2", 10),
    ]


def test_a_batch_that_holds_a_sample_twice_writes_it_once(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    predict(tmp_path, writer(tmp_path), lambda batch: batch["uid"], batch_size=4)
    twice = TensorDict({"uid": torch.tensor([3, 3]), "_index": torch.tensor([3, 3])}, [2])
    w = writer(tmp_path)
    w.write_on_batch_end(None, None, twice["uid"], None, twice, 0, 0)  # type: ignore[arg-type]
    assert [record["prediction"].item() for record in records(tmp_path)] == [0, 1, 2, 3]


PROCESS = """
import sys
from pathlib import Path
from tests.callbacks.test_predictions import predict, writer

def make(batch):
    print(batch["uid"][0].item(), flush=True)
    return {"double": 2 * batch["uid"]}

predict(Path(sys.argv[1]), writer(Path(sys.argv[1])), make, batch_size=2)
"""


def test_a_run_that_was_killed_and_runs_again_leaves_each_sample_once(tmp_path: Path) -> None:
    fill(tmp_path, 400)
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 20:
                process.send_signal(signal.SIGKILL)
                break
    before = len(records(tmp_path))
    assert 20 <= before < 400
    predict(tmp_path, writer(tmp_path), batch_size=50)
    found = [record["source_index"].item() for record in records(tmp_path)]
    assert sorted(found) == list(range(400))


# Into the samples themselves


def test_late_predictions_become_fields_of_the_samples_that_training_waits_for(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 6, seal=False)
    late = QueuePredictionWriter("q", storage_path=tmp_path, late=True)
    predict(tmp_path, late, lambda batch: {"log_prob": -batch["uid"].float()})
    with Queue("q", tmp_path) as queue:
        batch = queue.sync.get_batch(["uid", "log_prob"], 6, "train")
        assert len(queue) == 6
    assert batch["uid"].tolist() == list(range(6))
    assert batch["log_prob"].tolist() == [-float(n) for n in range(6)]


# Refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda batch: torch.tensor(1.0), "without tensors of one row for each sample"),
        (lambda batch: {}, "without tensors of one row"),
        (lambda batch: "text", "it returned str"),
        (lambda batch: batch["uid"][:1], "returned 1 rows for 3 samples"),
    ],
)
def test_predictions_that_do_not_fit_the_batch_are_refused(
    tmp_path: Path, make: Any, message: str
) -> None:
    fill(tmp_path, 3)
    with pytest.raises(SchemaError, match=message):
        predict(tmp_path, writer(tmp_path), make)


def test_names_that_are_not_there_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    with pytest.raises(SchemaError, match=r"no 'tripel', which .* returned 'double'"):
        predict(tmp_path, writer(tmp_path, fields=["tripel"]))
    with pytest.raises(SchemaError, match="the batch has no field '_index'"):
        predict(tmp_path, writer(tmp_path, late=True), fields=["uid"])
    with pytest.raises(ValueError, match="has no meaning"):
        writer(tmp_path, late=True, id_field="uid")
    with pytest.raises(TypeError, match=r"\['double'\]"):
        writer(tmp_path, fields="double")
