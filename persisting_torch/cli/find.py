"""From what stands on the command line to a queue that is there."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from persisting_torch.errors import FormatError, SchemaError
from persisting_torch.queue.files import LOCAL, Files
from persisting_torch.queue.names import directory_name, queue_name
from persisting_torch.queue.objects import ObjectFiles, is_url
from persisting_torch.queue.place import MARK, Place, find_queues, found_at, open_place
from persisting_torch.queue.urls import root_of

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine

Options = Mapping[str, str]


class Mistake(Exception):
    """The command names something that is not there; the message says what is."""


@dataclass(frozen=True)
class Found:
    """A queue that is there. `open` raises FormatError if it cannot be read."""

    name: str
    root: str
    files: Files
    open: Callable[[], Place]


def queues(storage_path: str, options: Options) -> list[Found]:
    """The queues under a path or a URL, in the order of their names on disk."""
    if is_url(storage_path):
        return [_in_store(name, storage_path, options) for name in _named(storage_path, options)]
    path = Path(storage_path).expanduser()
    if not path.is_dir():
        raise Mistake(f"there is no folder {path}. Say where the queues are with --storage-path.")
    return [_in_folder(mark.parent) for mark in sorted(path.glob(f"*/{MARK}"))]


def _named(url: str, options: Options) -> list[str]:
    return sorted(find_queues(url, options), key=directory_name)


def _in_store(name: str, url: str, options: Options) -> Found:
    root = root_of(name, url)
    place = partial(open_place, name, url, None, options)
    return Found(name, root, ObjectFiles(root, options), place)


def _in_folder(folder: Path) -> Found:
    folder = folder.absolute()
    return Found(queue_name(folder.name), str(folder), LOCAL, partial(_place_of, folder))


def _place_of(folder: Path) -> Place:
    name = queue_name(folder.name)
    if not folder.name or directory_name(name) != folder.name:
        raise FormatError(
            f"the folder {folder} holds a queue, but its name is not one that a queue has."
            f" Rename it to {directory_name(name)!r}."
            if folder.name
            else f"a queue cannot be at the root {folder}."
        )
    return open_place(name, folder.parent)


def locate(queue: str, storage_path: str, options: Options) -> Place:
    """The queue of this name, or at this path or URL. Raises Mistake if there is none."""
    if is_url(queue):
        storage_path, _, name = queue.rstrip("/").rpartition("/")
        queue = queue_name(unquote(name))
    if is_url(storage_path):
        return _locate_in_store(queue, storage_path, options)
    for folder in _candidates(queue, storage_path):
        if (folder / MARK).exists():
            return _in_folder(folder).open()
    path = Path(storage_path).expanduser()
    if not path.is_dir():
        raise Mistake(
            f"there is no queue {queue!r}: {path} is no folder. Say where the queues are with"
            " --storage-path."
        )
    raise _missing(queue, str(path), [found.name for found in queues(storage_path, options)])


def _locate_in_store(queue: str, url: str, options: Options) -> Place:
    try:
        found = found_at(queue, url, options)
    except SchemaError as error:
        raise Mistake(str(error)) from error
    if found is None:
        raise _missing(queue, url, _named(url, options))
    return open_place(queue, url, None, options)


def _missing(queue: str, where: str, there: list[str]) -> Mistake:
    return Mistake(
        f"there is no queue {queue!r} under {where}. "
        + (f"Its queues are: {', '.join(there)}." if there else "It holds no queues.")
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
    place = locate(arguments.queue, arguments.storage_path, dict(arguments.storage_option))
    if not writing and place.files.exists(place.ledger):
        place = replace(place, writable=False)
    from persisting_torch.queue.engine import Engine

    engine = Engine(place)
    try:
        if writing:
            engine.check_open(writing=True)
        yield engine
    finally:
        engine.close()
