"""Policies beside the queue: published by the trainer, read elsewhere, never torn."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from persisting_torch import (
    MaxStaleness,
    PersistingDataModule,
    Queue,
    SequentialSampler,
    WaitTimeout,
)
from persisting_torch.callbacks import PolicyPublisher, policy
from persisting_torch.queue.objects import ObjectFiles
from persisting_torch.queue.policies import FOLDER, policy_folder, publish
from tests.datasets.counting import fill, fit, trainer
from tests.queue.children import start
from tests.queue.object_store import Gate, new_bucket, options_for, standing_in

PUBLISH = """
import sys, torch
from pathlib import Path
from persisting_torch.queue.policies import publish, read_pointer
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
newest = read_pointer(folder)
version = 0 if newest is None else newest.version + 1
while True:
    publish(folder, {f"layer{n}": torch.full((20_000,), float(version)) for n in range(4)}, version)
    print(version, flush=True)
    version += 1
"""


class Net(LightningModule):
    """Each optimizer step adds 1 to the weight of `actor`."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self.actor.weight)
        self.critic = torch.nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return -self.actor.weight.sum()


def data_of(path: Path) -> PersistingDataModule:
    return PersistingDataModule("q", str(path), batch_size=2, timeout=30.0)


def files_in(path: Path) -> list[str]:
    return sorted(file.name for file in (path / "q" / FOLDER).iterdir())


# Reading and writing


def test_what_is_published_is_what_is_read_bit_for_bit(tmp_path: Path) -> None:
    queue = Queue("q", tmp_path)
    state = {
        "half": torch.randn(3, 4).bfloat16(),
        "nan": torch.tensor([float("nan"), -0.0]),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 2),
    }
    reader = policy(queue)
    assert reader.version is None
    assert reader.latest() is None
    publish(reader.folder, state, 5)
    found = reader.latest()
    assert found is not None
    assert (reader.version, found.version) == (5, 5)
    for name, tensor in state.items():
        assert found.state_dict[name].dtype == tensor.dtype
        assert found.state_dict[name].shape == tensor.shape
        assert torch.equal(
            found.state_dict[name].reshape(-1).view(torch.uint8),
            tensor.reshape(-1).view(torch.uint8),
        )


def test_only_the_newest_policies_are_kept_also_when_versions_go_back(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    for version in (1, 2, 9, 3, 4):
        publish(folder, {"w": torch.tensor(version)}, version, keep=2)
    assert sorted(file.name for file in folder.iterdir()) == [
        "0000000003-v3.pt",
        "0000000004-v4.pt",
        "newest.json",
    ]


def test_a_policy_in_hand_outlives_its_file(tmp_path: Path) -> None:
    queue = Queue("q", tmp_path)
    reader = policy(queue)
    publish(reader.folder, {"w": torch.full((100_000,), 1.0)}, 1)
    held = reader.latest()
    for version in (2, 3, 4):
        publish(reader.folder, {"w": torch.full((100_000,), float(version))}, version)
    assert held is not None
    assert held.state_dict["w"].unique().tolist() == [1.0]


def test_newer_than_gives_only_what_is_newer(tmp_path: Path) -> None:
    reader = policy("q", tmp_path)
    (tmp_path / "q").mkdir()
    publish(reader.folder, {"w": torch.tensor(3)}, 3)
    assert reader.latest(newer_than=3) is None
    found = reader.latest(newer_than=2)
    assert found is not None
    assert found.version == 3


def test_a_wait_ends_with_the_policy_that_it_waited_for(tmp_path: Path) -> None:
    reader = policy("q", tmp_path)
    (tmp_path / "q").mkdir()
    publish(reader.folder, {"w": torch.tensor(1)}, 1)
    later = threading.Timer(0.2, publish, (reader.folder, {"w": torch.tensor(2)}, 2))
    later.start()
    found = reader.latest(wait=True, timeout=30, newer_than=1)
    later.join()
    assert found is not None
    assert found.version == 2


def test_a_wait_without_a_policy_times_out_and_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(WaitTimeout, match=r"waited 0\.1 s for a policy of queue 'q'.*none was"):
        policy("q", tmp_path).latest(wait=True, timeout=0.1)
    (tmp_path / "q").mkdir()
    publish(policy("q", tmp_path).folder, {}, 4)
    with pytest.raises(WaitTimeout, match=r"newer than version 4 .*the newest is 4"):
        policy("q", tmp_path).latest(wait=True, timeout=0.1, newer_than=4)


def test_a_wait_for_a_policy_has_a_limit_and_says_in_the_log_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("persisting_torch.queue.policies.FIRST_NOTICE_SECONDS", 0.1)
    monkeypatch.setattr("persisting_torch.queue.policies.LONGEST_WAIT_SECONDS", 0.3)
    for wait in (
        lambda: policy("q", tmp_path).latest(wait=True),
        lambda: policy("q", tmp_path).load_into(torch.nn.Linear(1, 1)),
    ):
        caplog.clear()
        with pytest.raises(WaitTimeout, match=r"waited 0\.3 s for a policy of queue 'q'"):
            wait()
        assert "still waiting: waited 0.1 s for a policy of queue 'q'" in caplog.text


def test_a_wait_for_a_policy_lasts_for_ever_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persisting_torch.queue.policies.LONGEST_WAIT_SECONDS", 0.0)
    reader = policy("q", tmp_path)
    (tmp_path / "q").mkdir()
    later = threading.Timer(0.2, publish, (reader.folder, {}, 1))
    later.start()
    found = reader.latest(wait=True, timeout=float("inf"))
    later.join()
    assert found is not None
    assert found.version == 1


def test_a_pointer_without_its_file_is_an_error_and_no_endless_search(tmp_path: Path) -> None:
    reader = policy("q", tmp_path)
    (tmp_path / "q").mkdir()
    newest = publish(reader.folder, {"w": torch.tensor(3)}, 3)
    (reader.folder / newest.file).unlink()
    with pytest.raises(FileNotFoundError, match=r"v3\.pt"):
        reader.latest()


def test_looking_at_the_version_costs_next_to_nothing(tmp_path: Path) -> None:
    reader = policy("q", tmp_path)
    (tmp_path / "q").mkdir()
    publish(reader.folder, {"w": torch.zeros(10_000_000)}, 3)
    looks, loads = [], []
    for _ in range(9):
        began = time.perf_counter()
        assert reader.version == 3
        looks.append(time.perf_counter() - began)
        began = time.perf_counter()
        assert policy("q", tmp_path).latest() is not None
        loads.append(time.perf_counter() - began)
    assert statistics.median(looks) < statistics.median(loads) / 10


def test_a_rollout_worker_reads_policies_without_loading_lightning_or_lance(
    tmp_path: Path,
) -> None:
    (tmp_path / "q").mkdir()
    publish(policy("q", tmp_path).folder, {"weight": torch.ones(1, 1), "bias": torch.ones(1)}, 3)
    code = """
import sys, torch
from persisting_torch.callbacks import policy
net = torch.nn.Linear(1, 1)
print(policy("q", sys.argv[1]).load_into(net), net.weight.item())
print(*({"lightning", "pytorch_lightning", "lance", "pyarrow"} & set(sys.modules)))
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.stdout == "3 1.0\n\n", run.stderr


def test_no_kill_while_publishing_leaves_a_torn_policy(tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    reader = policy("q", tmp_path)
    chance = random.Random(0)
    for _ in range(15):
        child = start(PUBLISH, reader.folder)
        child.await_line()
        time.sleep(chance.uniform(0, 0.03))
        child.send(9)
        child.wait()
        found = reader.latest()
        assert found is not None
        assert found.version >= child.lines[-1]
        for tensor in found.state_dict.values():
            assert tensor.unique().tolist() == [float(found.version)]
    assert len(list(reader.folder.glob("*-v*.pt"))) <= 3


def test_a_reader_beside_a_publisher_never_meets_half_a_policy(tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    reader = policy("q", tmp_path)
    child = start(PUBLISH, reader.folder)
    child.await_line()
    seen = []
    for _ in range(100):
        found = reader.latest()
        assert found is not None
        seen.append(found.version)
        for tensor in found.state_dict.values():
            assert tensor.unique().tolist() == [float(found.version)]
    child.send(9)
    child.wait()
    assert seen == sorted(seen)
    assert len(set(seen)) > 1


# The callback


def test_weights_are_published_before_the_first_batch_and_every_n_steps(tmp_path: Path) -> None:
    fill(tmp_path, 14)
    reader, found = policy("q", tmp_path), []

    class Look(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            newest = reader.latest()
            assert newest is not None
            found.append((newest.version, newest.state_dict["actor.weight"].item()))

    fit(Net(), data_of(tmp_path), tmp_path, Look(), PolicyPublisher("q", 3, storage_path=tmp_path))
    assert found == [(0, 0), (0, 0), (0, 0), (3, 3), (3, 3), (3, 3), (6, 6)]
    assert files_in(tmp_path) == ["0000000001-v3.pt", "0000000002-v6.pt", "newest.json"]


def test_workers_that_need_the_policy_to_make_the_first_sample_get_it(tmp_path: Path) -> None:
    def work() -> None:
        net = torch.nn.Linear(1, 1)
        with Queue("q", tmp_path) as queue:
            for version in range(3):
                weights = policy(queue).latest(wait=True, timeout=30, newer_than=version - 1)
                assert weights is not None
                weights.load_into(net)
                queue.sync.put([{"uid": torch.tensor(int(net.weight.item()))}] * 2)
                queue.sync.flush()

    Queue("q", tmp_path).close()
    worker = threading.Thread(target=work)
    worker.start()
    publisher = PolicyPublisher("q", storage_path=tmp_path, module="actor")
    run = fit(Net(), data_of(tmp_path), tmp_path, publisher, max_steps=2)
    worker.join()
    assert run.global_step == 2


def test_one_submodule_is_published_under_its_own_names(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    publisher = PolicyPublisher("q", storage_path=tmp_path, module="actor")
    fit(Net(), data_of(tmp_path), tmp_path, publisher)
    actor = torch.nn.Linear(1, 1)
    assert policy("q", tmp_path).load_into(actor) == 2
    assert actor.weight.item() == 2.0
    with pytest.raises(ValueError, match=r"no such submodule. It has actor, critic"):
        fit(Net(), data_of(tmp_path), tmp_path, PolicyPublisher("q", module="actr"))


def test_a_resumed_training_announces_the_version_that_it_resumes_from(tmp_path: Path) -> None:
    fill(tmp_path, 14)
    keep = ModelCheckpoint(tmp_path / "steps", filename="{step}", every_n_train_steps=2)
    publisher = PolicyPublisher("q", storage_path=tmp_path)
    fit(Net(), data_of(tmp_path), tmp_path, keep, publisher, max_steps=5)
    assert policy("q", tmp_path).version == 5
    found = []

    class Look(Callback):
        def on_train_start(self, *_: Any) -> None:
            found.append(policy("q", tmp_path).latest())

    again = trainer(tmp_path, Look(), PolicyPublisher("q", storage_path=tmp_path), max_steps=6)
    again.fit(Net(), data_of(tmp_path), ckpt_path=tmp_path / "steps" / "step=4.ckpt")
    (newest,) = found
    assert newest is not None
    assert (newest.version, newest.state_dict["actor.weight"].item()) == (4, 4.0)
    assert policy("q", tmp_path).version == 6


def test_publishing_makes_a_queue_that_is_not_there(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    publisher = PolicyPublisher("policies", storage_path=tmp_path)
    fit(Net(), data_of(tmp_path), tmp_path, publisher)
    assert policy("policies", tmp_path).version == 2
    with Queue("policies", tmp_path) as queue:
        assert len(queue) == 0
        assert policy(queue).version == 2


@pytest.mark.parametrize("wrong", [{"every_n_steps": 0}, {"keep": 0}])
def test_numbers_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        PolicyPublisher("q", **wrong)


# In an object store


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with standing_in() as endpoint:
        yield endpoint


def test_policies_of_a_queue_in_an_object_store_are_objects_beside_it(store: str) -> None:
    path, options = new_bucket(store), options_for(store)
    reader = policy("q", path, options)
    assert reader.version is None
    state = {"w": torch.randn(700, 3000), "n": torch.tensor(3)}  # more than a part of an upload
    with Queue("q", path, storage_options=options) as queue:
        place = queue.engine.place
        folder = policy_folder(place.root)
        for version in range(4):
            publish(folder, {**state, "n": torch.tensor(version)}, version, files=place.files)
        assert policy(queue).version == 3
        assert sorted(place.files.names(folder)) == [
            "0000000002-v2.pt",
            "0000000003-v3.pt",
            "newest.json",
        ]
    found = reader.latest(newer_than=2)
    assert found is not None
    assert (found.version, found.state_dict["n"]) == (3, 3)
    assert torch.equal(found.state_dict["w"], state["w"])
    assert reader.latest(newer_than=3) is None


def test_a_policy_whose_upload_breaks_off_is_never_there(store: str) -> None:
    gate = Gate(store)
    path, options = new_bucket(store), options_for(gate.endpoint)
    files = ObjectFiles(f"{path}/q", {**options, "timeout": "1s"})
    folder = policy_folder(f"{path}/q")
    publish(folder, {"n": torch.tensor(1)}, 1, files=files)
    gate.shut = "before"
    with pytest.raises(OSError, match="q/policy"):
        publish(folder, {"w": torch.zeros(3_000_000)}, 2, files=files)
    gate.shut = ""
    assert policy("q", path, options_for(store)).version == 1
    assert not [name for name in files.names(folder) if "v2" in name]


def test_a_training_on_files_publishes_to_an_object_store(store: str, tmp_path: Path) -> None:
    fill(tmp_path, 4)
    path, options = new_bucket(store), options_for(store)
    publisher = PolicyPublisher("q", storage_path=path, storage_options=options, module="actor")
    fit(Net(), data_of(tmp_path), tmp_path, publisher)
    actor = torch.nn.Linear(1, 1)
    assert policy("q", path, options).load_into(actor, timeout=10) == 2
    assert actor.weight.item() == 2.0


def test_staleness_is_counted_from_a_policy_in_an_object_store(store: str) -> None:
    path, options = new_bucket(store), options_for(store)
    with Queue("q", path, storage_options=options) as queue:
        queue.sync.put([{"policy_version": version} for version in range(4)])
        place = queue.engine.place
        publish(policy_folder(place.root), {}, 3, files=place.files)
        sampler = MaxStaleness(SequentialSampler(), max_staleness=1)
        found = queue.sync.get_batch(["policy_version"], 2, sampler=sampler)
    assert found["policy_version"].tolist() == [2, 3]
