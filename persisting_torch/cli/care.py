"""The commands that look after a queue: compact, reset, seal."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from persisting_torch.cli import show
from persisting_torch.cli.find import Mistake, engine_of


def compact(arguments: Namespace) -> int:
    """One round of upkeep: fewer fragments and versions, a shorter ledger."""
    from persisting_torch.queue import report

    with engine_of(arguments, writing=True) as engine:
        before = report.stats(engine)["storage"]
        done = engine.tending.tend()
        after = report.stats(engine)["storage"]
        name = engine.place.queue
    if arguments.json:
        show.print_json({"name": name, "done": done, "before": before, "after": after})
    elif done:
        print(
            f"{name}: {before['fragments']} -> {after['fragments']} fragments,"
            f" {before['versions']} -> {after['versions']} versions,"
            f" {show.size(before['bytes'])} -> {show.size(after['bytes'])},"
            f" {after['deleted']['samples'] - before['deleted']['samples']} samples deleted"
        )
    else:
        print(f"{name}: another process is at it")
    return 0


def reset(arguments: Namespace) -> int:
    """Let a task begin anew in one of its partitions, or in all of them."""
    from persisting_torch.queue import report

    with engine_of(arguments, writing=True) as engine:
        name = engine.place.queue
        tasks = report.stats(engine)["tasks"]
        if arguments.task not in tasks:
            raise Mistake(f"queue {name!r} has no task {arguments.task!r}. {_there(tasks)}")
        begun = tasks[arguments.task]
        if arguments.partition is not None and arguments.partition not in begun:
            raise Mistake(
                f"task {arguments.task!r} of queue {name!r} has taken nothing in partition"
                f" {arguments.partition!r}. {_there(begun)}"
            )
        partitions = list(begun) if arguments.partition is None else [arguments.partition]
        taken = {where: begun[where]["taken"] for where in partitions}
        if not arguments.yes and not _confirmed(name, arguments.task, taken):
            print("nothing was reset", file=sys.stderr)
            return 1
        for where in partitions:
            engine.reset(arguments.task, where)
    if arguments.json:
        show.print_json({"name": name, "task": arguments.task, "reset": taken})
    else:
        print(f"{name}: task {arguments.task!r} begins anew in {', '.join(map(repr, partitions))}")
    return 0


def _confirmed(queue: str, task: str, taken: dict[str, int]) -> bool:
    what = ", ".join(f"{count} samples of {where!r}" for where, count in taken.items())
    print(
        f"Task {task!r} of queue {queue!r} forgets that it has taken {what}, and every batch that"
        " was formed of them. Go on? [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def seal(arguments: Namespace) -> int:
    """Say that no more samples will come to a partition, or to the whole queue."""
    from persisting_torch.queue import report

    with engine_of(arguments, writing=True) as engine:
        name = engine.place.queue
        partitions: dict[str, Any] = report.stats(engine)["partitions"]
        if arguments.partition is not None and arguments.partition not in partitions:
            raise Mistake(
                f"queue {name!r} has no partition {arguments.partition!r}. {_there(partitions)}"
            )
        engine.seal(arguments.partition)
    if arguments.json:
        show.print_json({"name": name, "partition": arguments.partition})
    else:
        part = "the whole queue" if arguments.partition is None else repr(arguments.partition)
        print(f"{name}: sealed {part}")
    return 0


def _there(names: dict[str, Any]) -> str:
    return f"There is: {', '.join(names)}." if names else "There is none yet."
