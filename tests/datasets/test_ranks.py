from __future__ import annotations

import json
import subprocess
import sys

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


FOUR_PROCESSES = """
import json, os, sys
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from persisting_torch.datasets.ranks import discover

store, shape, names = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
children = []
for rank in range(4):
    pid = os.fork()
    if not pid:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=4
        )
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names and tuple(names))
        try:
            found = discover(device_mesh=mesh)
            text = f"{rank} {found.rank} {found.size}"
        except ValueError as error:
            text = f"{rank} {error}"
        os.write(1, f"{text}\\n".encode())
        torch.distributed.barrier()
        os._exit(0)
    children.append(pid)
for pid in children:
    os.waitpid(pid, 0)
"""


@pytest.mark.parametrize(
    ("shape", "names", "answers"),
    [
        ([2, 2], ["dp", "tp"], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ([2, 2], ["pp", "data_parallel"], [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ([2, 2], ["dp_replicate", "dp_shard"], [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ([4], None, [(0, 4), (1, 4), (2, 4), (3, 4)]),
    ],
)
def test_tensor_parallel_peers_of_a_device_mesh_share_a_data_parallel_rank(
    tmp_path, shape, names, answers
):
    lines = _ranks_on(tmp_path, shape, names)
    assert [tuple(map(int, line.split())) for line in lines] == [
        (number, *answer) for number, answer in enumerate(answers)
    ]


def test_a_mesh_without_a_data_parallel_dimension_is_refused(tmp_path):
    lines = _ranks_on(tmp_path, [2, 2], ["tp", "pp"])
    assert all("none of the device mesh's dimensions ('tp', 'pp')" in line for line in lines)


def _ranks_on(tmp_path, shape, names) -> list[str]:
    command = [sys.executable, "-c", FOUR_PROCESSES, str(tmp_path / "store")]
    done = subprocess.run(
        [*command, json.dumps(shape), json.dumps(names)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return sorted(done.stdout.splitlines())
