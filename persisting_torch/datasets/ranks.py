"""Which data-parallel rank this process is: decided here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Ranks:
    """Data-parallel rank `rank` of `size`; peers that share a rank get identical batches."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"dp_rank must be from 0 to dp_size - 1, got dp_rank={self.rank} and"
                f" dp_size={self.size}."
            )


def discover(
    dp_rank: int | None = None,
    dp_size: int | None = None,
    *,
    sampler_kwargs: Mapping[str, Any] | None = None,
    device_mesh: DeviceMesh | None = None,
) -> Ranks:
    """The data-parallel rank of this process, from the first source that knows it.

    In order: `dp_rank` and `dp_size`; `sampler_kwargs`, a Trainer's `distributed_sampler_kwargs`;
    the data-parallel dimensions of `device_mesh`; torch.distributed, if it is initialised;
    torchrun's environment variables RANK and WORLD_SIZE; else 0 of 1.

    A DataLoader's worker must not ask (torch.distributed is there or not as the start method has
    it): the dataset asks in the main process and carries the answer into its workers.

    Data-parallel are the dimensions of a mesh that are called "data", "ddp", "fsdp", or something
    that begins with "dp" or "data_parallel" ("dp_replicate" and "dp_shard" together), and the only
    dimension of a mesh without names.

    Raises ValueError where a mesh has no such dimension, or where one of `dp_rank` and `dp_size`
    comes without the other or does not fit.
    """
    if (dp_rank is None) != (dp_size is None):
        raise ValueError(
            f"dp_rank and dp_size belong together, got dp_rank={dp_rank} and dp_size={dp_size}."
            " Give both, or neither to have them found."
        )
    if dp_rank is not None and dp_size is not None:
        return Ranks(dp_rank, dp_size)
    if sampler_kwargs is not None:
        return Ranks(int(sampler_kwargs["rank"]), int(sampler_kwargs["num_replicas"]))
    if device_mesh is not None:
        return _of_mesh(device_mesh)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return Ranks()


def _of_mesh(mesh: DeviceMesh) -> Ranks:
    names = mesh.mesh_dim_names
    if names is None and mesh.ndim == 1:
        return Ranks(mesh.get_local_rank(), mesh.size())
    rank, size, found = 0, 1, False
    for dimension, name in enumerate(names or ()):
        if name in ("data", "ddp", "fsdp") or name.startswith(("dp", "data_parallel")):
            found = True
            size *= mesh.size(dimension)
            rank = rank * mesh.size(dimension) + mesh.get_local_rank(dimension)
    if not found:
        raise ValueError(
            f"none of the device mesh's dimensions {names} is called as a data-parallel one ('dp',"
            " 'data_parallel', 'fsdp', ...). Name one so, or give dp_rank and dp_size."
        )
    return Ranks(rank, size)
