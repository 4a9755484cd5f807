"""How rollouts and ranks become part of the cluster, and open its queue."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from settings import BATCH, BUCKETS, QUEUE, STEPS_AHEAD

from persisting_torch import Queue, cluster


@contextmanager
def light_member(options: Namespace) -> Iterator[None]:
    """Be part of the cluster while the block runs, without owning anything."""
    seeds = options.seeds.split(",")
    asyncio.run(cluster.init(options.addr, seeds, owns_buckets=False))
    try:
        yield
    finally:
        asyncio.run(cluster.shutdown())


def open_queue(options: Namespace, ranks: int) -> Queue:
    """The queue; whoever is the first to open it makes it, with its buckets."""
    return Queue(
        QUEUE,
        options.storage,
        num_buckets=BUCKETS,
        bucket_column="prompt_id",
        capacity=STEPS_AHEAD * ranks * BATCH,
    )
