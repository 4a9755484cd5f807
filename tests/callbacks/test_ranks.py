"""The callbacks on two ranks, as real processes."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from persisting_torch import Queue
from persisting_torch.callbacks import policy
from tests.callbacks.ranks_process import BATCH, STEPS
from tests.datasets.counting import fill

pytestmark = pytest.mark.slow


def run_ranks(path: Path, *what: str) -> None:
    script = Path(__file__).with_name("ranks_process.py")
    run = subprocess.run(
        [sys.executable, str(script), str(path), *what],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have trained and predicted."""
    path = tmp_path_factory.mktemp("ranks")
    fill(path, 7, queue="given")
    run_ranks(path)
    return path


def made(folder: Path, queue: str) -> list[tuple[int, int]]:
    """(version, rank) of the queue's rollouts, sorted."""
    with Queue(queue, folder) as found:
        return sorted((r["policy_version"], r["rank"]) for r in found.sync.get(limit=1000))


def test_rank_zero_makes_the_rollouts_of_all_ranks(folder: Path) -> None:
    assert made(folder, "zero") == [(v, 0) for v in range(STEPS) for _ in range(2 * BATCH)]


def test_or_every_rank_makes_its_share(folder: Path) -> None:
    shares = [(v, rank) for v in range(STEPS) for rank in (0, 1) for _ in range(BATCH)]
    assert made(folder, "all") == shares


def test_rank_zero_publishes_the_weights_under_the_modules_own_names(folder: Path) -> None:
    found = policy("zero", folder).latest()
    assert found is not None
    assert found.version == STEPS
    assert {name: value.item() for name, value in found.state_dict.items()} == {"weight": STEPS}


def test_rank_zero_logs_the_samples_of_all_ranks_once(folder: Path) -> None:
    with open(folder / "csv" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    assert all(float(row["queue/staleness_max_steps"]) == 0 for row in rows)
    for row in rows[:-1]:
        put, trained = (float(row[f"queue/{what}_samples_per_s"]) for what in ("put", "trained"))
        assert put == pytest.approx(trained)


def test_ranks_write_their_predictions_into_one_queue(folder: Path) -> None:
    with Queue("predicted", folder) as queue:
        found = sorted(
            (r["source_index"].item(), r["double"].item()) for r in queue.sync.get(limit=100)
        )
    assert found == [(n, 2 * n) for n in range(7)]


def test_weights_that_are_sharded_over_ranks_are_published_whole(tmp_path: Path) -> None:
    run_ranks(tmp_path, "sharded")
    for queue in ("whole", "shards"):
        actor = torch.nn.Linear(4, 4, bias=False)
        assert policy(queue, tmp_path).load_into(actor) == STEPS
        assert torch.equal(actor.weight, torch.full((4, 4), -float(STEPS)))
