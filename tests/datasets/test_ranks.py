from __future__ import annotations

import pytest
import torch.distributed

from persisting_torch.datasets.ranks import Ranks, discover


@pytest.fixture
def process_group(tmp_path, monkeypatch):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def torchrun(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")


def test_alone_it_is_rank_0_of_1(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert discover() == Ranks(0, 1)


def test_torchruns_environment_is_asked_last(torchrun):
    assert discover() == Ranks(3, 4)


def test_torch_distributed_comes_before_torchruns_environment(torchrun, process_group):
    assert discover() == Ranks(0, 1)


def test_a_trainers_word_comes_before_torch_distributed(torchrun, process_group):
    assert discover(sampler_kwargs={"rank": 5, "num_replicas": 8}) == Ranks(5, 8)


def test_arguments_come_before_all(torchrun, process_group):
    assert discover(1, 2, sampler_kwargs={"rank": 5, "num_replicas": 8}) == Ranks(1, 2)


@pytest.mark.parametrize(("rank", "size"), [(0, None), (None, 2)])
def test_half_an_answer_is_refused(rank, size):
    with pytest.raises(ValueError, match="dp_rank and dp_size belong together"):
        discover(rank, size)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_size_is_refused(rank, size):
    with pytest.raises(ValueError, match="from 0 to dp_size - 1"):
        discover(rank, size)
