"""The processes of the loop, each a function that fits a screen, connected only by one queue.

    rollout-0 ─┐ put: what `play` gives, group, policy_version         newest weights
    rollout-1 ─┴──────────────▶ ┌─────────────────────┐    ◀── policy("rollouts") ── PolicyPublisher
    reward    ◀── claims, puts: │  queue "rollouts",  │                                    ▲
                  reward        │  partition "train"  │ ── batches with an advantage ──▶ trainer
    advantage ◀── claims groups,└─────────────────────┘    (trainer.py)
                  puts: advantage

Any of them may be killed at any time and started again under its name: what was flushed stays, what
a dead process had claimed and not finished goes to the next one, and the trainer resumes from its
last checkpoint.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from task import Task
from tensordict import TensorDict

from persisting_torch import BaseSampler, BatchMeta, GRPOGroupNSampler, Queue, QueueSealed
from persisting_torch.callbacks import policy as published_policy

QUEUE, TRAIN = "rollouts", "train"
BATCHES_AHEAD = 2  # of the trainer's, that the rollout workers may be ahead of it
POLL_SECONDS = 0.02
LOOK_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 300


def rollout_worker(task: Task, folder: Path, name: str) -> None:
    """Play with the newest policy, and put what came of it, until the partition is sealed."""
    torch.seed()  # else each start would make what the one before it made
    rng = random.Random()
    policy, version = task.policy(), None
    published = published_policy(QUEUE, folder)
    capacity = BATCHES_AHEAD * task.batch_size
    with (
        Queue(QUEUE, str(folder), capacity=capacity) as queue,
        queue.producer(name),
        open(folder / f"flushed-{name}.txt", "a") as flushed,
    ):
        while True:
            if published.version != version or version is None:
                version = published.load_into(policy, timeout=LONGEST_WAIT_SECONDS)
            rollouts = task.play(policy, task.groups_per_put, rng)
            groups = [rng.getrandbits(62) for _ in range(task.groups_per_put)]
            rollouts["group"] = torch.tensor(groups).repeat_interleave(task.group_size)
            rollouts["policy_version"] = torch.full(rollouts.batch_size, version)
            try:
                put = queue.sync.put(rollouts, TRAIN)
                queue.sync.flush()
            except QueueSealed:
                return
            # For the count at the end alone: none of these may be lost from here on.
            print(*put.global_indexes, file=flushed, flush=True)


def reward_process(task: Task, folder: Path, name: str) -> None:
    """Judge each rollout by itself."""
    with Queue(QUEUE, str(folder)) as queue, queue.producer(name):
        for claim in claims(queue, name, task.judged, task.batch_size):
            reward = task.reward(queue.sync.get_data(claim))
            queue.sync.put(fields(reward=reward), TRAIN, metadata=claim)


def advantage_process(task: Task, folder: Path, name: str) -> None:
    """Compare each rollout with the others of its group, once all of them have a reward."""
    n = task.group_size
    whole_groups = GRPOGroupNSampler(n, group_by="group")
    with Queue(QUEUE, str(folder)) as queue, queue.producer(name):
        some, one = task.groups_per_put * n, n
        for claim in claims(queue, name, ["reward"], some, one, sampler=whole_groups):
            reward = queue.sync.get_data(claim)["reward"].unflatten(0, (-1, n))
            better = reward - reward.mean(1, keepdim=True)
            advantage = better / (reward.std(1, keepdim=True) + 1e-4)
            queue.sync.put(fields(advantage=advantage.flatten()), TRAIN, metadata=claim)


def claims(
    queue: Queue,
    name: str,
    needed: Sequence[str],
    *sizes: int,
    sampler: BaseSampler | None = None,
) -> Iterator[BatchMeta]:
    """Samples that lack the field `name`, until the partition is sealed and none does.

    Each claim is of the first of the sizes that there is. Raises TimeoutError after five minutes
    without one.
    """
    last = looked = time.monotonic()
    while True:
        for size in sizes:
            claim = queue.sync.get_meta(needed, size, name, TRAIN, sampler=sampler)
            if claim.size:
                yield claim
                last = time.monotonic()
                break
        else:
            now = time.monotonic()
            if now - looked >= LOOK_SECONDS:  # stats() looks at the whole queue
                looked = now
                if is_complete(queue, name):
                    return
            if now - last >= LONGEST_WAIT_SECONDS:
                raise TimeoutError(
                    f"waited {LONGEST_WAIT_SECONDS} s for samples of {QUEUE}/{TRAIN} with"
                    f" {', '.join(needed)} and without {name}. Check who makes those."
                )
            time.sleep(POLL_SECONDS)


def is_complete(queue: Queue, field: str) -> bool:
    """Whether no more samples will come, and all that are there have the field."""
    partition = queue.sync.stats()["partitions"].get(TRAIN)
    if partition is None or not partition["sealed"]:
        return False
    return len(queue.engine.snapshot(TRAIN, [field])) == int(partition["samples"])


def fields(**values: torch.Tensor) -> TensorDict:
    return TensorDict(values, batch_size=[len(next(iter(values.values())))])


def newest(checkpoints: Path) -> Path | None:
    """The checkpoint of the latest step; None before the first."""
    return max(
        checkpoints.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]), default=None
    )
