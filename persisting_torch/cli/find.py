"""From what stands on the command line to a queue that is there."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from persisting_torch.errors import FormatError, SchemaError
from persisting_torch.queue.names import directory_name, queue_name
from persisting_torch.queue.place import MARK, Place, open_place

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine


class Mistake(Exception):
    """The command names something that is not there; the message says what is."""


def folders(storage_path: str) -> list[Path]:
    """The folders of the queues under a path, in the order of their names."""
    path = Path(storage_path).expanduser()
    if not path.is_dir():
        raise Mistake(f"there is no folder {path}. Say where the queues are with --storage-path.")
    return sorted(mark.parent for mark in path.glob(f"*/{MARK}"))


def place_of(folder: Path) -> Place:
    """The queue in a folder that holds one. Raises FormatError if it cannot be read."""
    folder = folder.absolute()
    name = queue_name(folder.name)
    if not folder.name or directory_name(name) != folder.name:
        raise FormatError(
            f"the folder {folder} holds a queue, but its name is not one that a queue has."
            f" Rename it to {directory_name(name)!r}."
            if folder.name
            else f"a queue cannot be at the root {folder}."
        )
    return open_place(name, folder.parent)


def locate(queue: str, storage_path: str) -> Place:
    """The queue of this name, or at this path. Raises Mistake if there is none."""
    for folder in _candidates(queue, storage_path):
        if (folder / MARK).exists():
            return place_of(folder)
    path = Path(storage_path).expanduser()
    if not path.is_dir():
        raise Mistake(
            f"there is no queue {queue!r}: {path} is no folder. Say where the queues are with"
            " --storage-path."
        )
    there = ", ".join(queue_name(folder.name) for folder in folders(storage_path))
    raise Mistake(
        f"there is no queue {queue!r} under {path}. "
        + (f"Its queues are: {there}." if there else "It holds no queues.")
    )


def _candidates(queue: str, storage_path: str) -> Iterator[Path]:
    try:
        yield Path(storage_path).expanduser() / directory_name(queue)
    except SchemaError as error:
        if os.sep not in queue:
            raise Mistake(str(error)) from error
    yield Path(os.path.abspath(os.path.expanduser(queue)))


@contextmanager
def engine_of(arguments: Namespace, *, writing: bool = False) -> Iterator[Engine]:
    """The queue that the arguments name, open while the block runs.

    Without `writing` it is opened as a queue that this process may not change, whoever runs it.
    """
    place = locate(arguments.queue, arguments.storage_path)
    if not writing and os.path.exists(place.ledger):
        place = replace(place, writable=False)
    from persisting_torch.queue.engine import Engine

    engine = Engine(place)
    try:
        if writing:
            engine.check_open(writing=True)
        yield engine
    finally:
        engine.close()
