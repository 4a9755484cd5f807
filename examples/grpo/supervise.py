"""Runs the processes, kills each of them once, and counts what became of the rollouts."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plot import plot
from processes import (
    QUEUE,
    TRAIN,
    advantage_process,
    newest,
    reward_process,
    rollout_worker,
)
from task import Task

from persisting_torch import Queue
from persisting_torch.callbacks import policy as published_policy

ROLLOUT_WORKERS = 2
FIRST_KILL, LAST_KILL = 0.1, 0.7  # of the steps


def main(task: Task) -> int:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--steps", type=int, default=task.steps, help="optimizer steps")
    parser.add_argument("--wanted", type=float, default=task.wanted, help="score at the end")
    parser.add_argument("--no-kill", action="store_true", help="let every process live")
    parser.add_argument("--seed", type=int, help="of the times of the kills")
    parser.add_argument("--folder", type=Path, default=Path("grpo_data") / task.name)
    options = parser.parse_args()
    task.steps = options.steps

    began = time.monotonic()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    first_score = task.evaluate(task.policy())
    kills = run(task, options.folder, random.Random(options.seed), not options.no_kill)
    seconds = time.monotonic() - began

    books = count(options.folder)
    policy = task.policy()
    version = published_policy(QUEUE, options.folder).load_into(policy)
    score = task.evaluate(policy)
    plot(task, options.folder, kills)
    table = {
        **books,
        "score before": round(first_score, 3),
        f"score after {version} steps": round(score, 3),
        "seconds": round(seconds),
    }
    print()
    for title, value in table.items():
        print(f"  {title:44}{value:>12,}")
    broken = broken_promises(books)
    if score < options.wanted:
        broken.append(f"the score is {score:.3f}, below {options.wanted:g}")
    for promise in broken:
        print(f"  BROKEN: {promise}")
    return 1 if broken else 0


# Running


def run(task: Task, folder: Path, rng: random.Random, kill: bool) -> list[tuple[int, str]]:
    """Run all processes until the trainer has sealed the partition and every rollout is judged.

    With `kill`, each is killed once, at a random step of the training, and started again; but not
    the last producer that lives, since a trainer whose producers are all dead is told so, and ends.
    Returns the kills: the step, and the name of the process.
    """
    roles: dict[str, Callable[..., None]] = {"trainer": train, "reward": reward_process}
    roles |= {"advantage": advantage_process}
    roles |= {f"rollout-{n}": rollout_worker for n in range(ROLLOUT_WORKERS)}
    crew = {name: start(role, task, folder, name) for name, role in roles.items()}
    doomed = {name: int(rng.uniform(FIRST_KILL, LAST_KILL) * task.steps) for name in roles if kill}
    kills: list[tuple[int, str]] = []
    published = published_policy(QUEUE, folder)
    while any(process.exitcode != 0 for process in crew.values()):
        time.sleep(0.05)
        version = published.version or 0
        for name, process in crew.items():
            if process.exitcode not in (None, 0):
                stop(crew)
                sys.exit(f"{name} ended with {process.exitcode}; its message is above")
            if doomed.get(name, version) < version and others_live(folder, crew, name):
                del doomed[name]
                time.sleep(rng.random())  # not always just after a step
                process.kill()
                process.join()
                kills.append((version, name))
                say(f"{name} is killed at step {version}, and started again")
                crew[name] = start(roles[name], task, folder, name)
    return kills


def others_live(folder: Path, crew: dict[str, SpawnProcess], name: str) -> bool:
    """Whether a producer other than this process has registered and lives."""
    with Queue(QUEUE, str(folder)) as queue:
        producers = queue.sync.stats()["producers"]
    pids = {one["pid"] for one in producers.values() if one["state"] == "alive"}
    return any(process.pid in pids for each, process in crew.items() if each != name)


def start(role: Callable[..., None], *arguments: Any) -> SpawnProcess:
    process = multiprocessing.get_context("spawn").Process(target=play, args=(role, *arguments))
    process.start()
    return process


def play(role: Callable[..., None], *arguments: Any) -> None:
    """The body of each process: one thread for torch, and no life without its parent."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # of torch, about its own jagged tensors
    role(*arguments)


def train(task: Task, folder: Path, name: str) -> None:
    from trainer import trainer  # the other processes have no need of Lightning

    trainer(task, folder)


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def stop(crew: dict[str, SpawnProcess]) -> None:
    for process in crew.values():
        process.kill()


def say(line: str) -> None:
    print(f"  {line}", flush=True)


# Counting


def count(folder: Path) -> dict[str, int]:
    """What became of each rollout: by the queue's books, the weights' own list and the workers'."""
    with Queue(QUEUE, str(folder)) as queue:
        present = queue.engine.snapshot(TRAIN)
        judged = queue.engine.snapshot(TRAIN, ["advantage"])
        books = queue.engine.books_of("train", TRAIN)
    flushed = [
        int(index)
        for file in folder.glob("flushed-*.txt")
        for line in file.read_text().splitlines()
        for index in line.split()
    ]
    last = newest(folder / "checkpoints")
    assert last is not None
    used = torch.load(last, weights_only=True)["used"]
    times_used = np.unique(used.numpy(), return_counts=True)[1]
    return {
        "rollouts put": books["put"],
        "trained once": books["once"],
        "trained once, by the weights": int((times_used == 1).sum()),
        "trained twice": books["twice"],
        "trained twice, by the weights": int((times_used > 1).sum()),
        "dropped as too old": books["dropped"],
        "left untrained when training stopped": books["never"],
        "lost after their flush": len(np.setdiff1d(flushed, present)),
        "left without reward or advantage": len(np.setdiff1d(present, judged)),
    }


def broken_promises(books: dict[str, int]) -> list[str]:
    promises = {
        "every rollout is trained at most once": books["trained twice"] == 0
        and books["trained twice, by the weights"] == 0,
        "books and weights agree": books["trained once"] == books["trained once, by the weights"],
        "no flushed rollout is lost": books["lost after their flush"] == 0,
        "no claim is lost": books["left without reward or advantage"] == 0,
        "each is trained, dropped or left": books["rollouts put"]
        == books["trained once"]
        + books["dropped as too old"]
        + books["left untrained when training stopped"],
    }
    return [promise for promise, holds in promises.items() if not holds]
