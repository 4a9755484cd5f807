"""Putting samples under keys from a callback, which has no event loop of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from persisting_torch.queue.kv import KVInterface

if TYPE_CHECKING:
    from persisting_torch.queue import Queue


def known_keys(queue: Queue, keys: list[str], partition: str) -> set[str]:
    """Those of the keys that the partition has."""
    return set(KVInterface(queue).sync.find(keys, partition))


def put_under_keys(
    queue: Queue, keys: list[str], data: TensorDictBase | Sequence[dict[str, Any]], partition: str
) -> None:
    """`KVInterface.kv_batch_put`, on disk when this returns: new keys put, known ones updated."""
    if keys:
        KVInterface(queue).sync.kv_batch_put(keys, data, partition)
