"""A queue's place in an object store: found, made, or refused with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import quote

from persisting_torch.errors import PersistingError
from persisting_torch.queue.files import Files
from persisting_torch.queue.names import directory_name, queue_name
from persisting_torch.queue.objects import SCHEMES, ObjectFiles
from persisting_torch.queue.place import MARK, Place, Split, mark_text, new_mark, read_mark
from persisting_torch.queue.threads import at_once

AT_ONCE = 16
_CHECK = (
    "Check the bucket's name, the network, and in storage_options the endpoint, the region and the"
    " credentials."
)


def open_remote_place(
    queue: str,
    storage_path: str,
    asked: Split | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Place:
    """The place of a queue under a URL, made if it is not there yet; see open_place."""
    root = root_of(queue, storage_path)
    files = ObjectFiles(root, storage_options)
    mark = os.path.join(root, MARK)
    with _explained(queue, root):
        try:
            content = files.read(mark)
        except FileNotFoundError:
            files.create(mark, mark_text(new_mark(queue, asked)).encode())
            content = files.read(mark)
    described = read_mark(content, root, queue, asked)
    return Place(
        queue=queue,
        root=root,
        bucket=os.path.join(root, "bucket-0"),
        writable=True,
        network=False,
        format=described["format"],
        num_buckets=described.get("num_buckets", 1),
        bucket_column=described.get("bucket_column"),
        storage=described.get("storage", ""),
        files=files,
    )


def reached(
    queue: str, storage_path: str, storage_options: Mapping[str, str] | None = None
) -> Files:
    """The objects of a queue, which this process may read, whether the queue is there or not."""
    found_remotely(queue, storage_path, storage_options)
    return ObjectFiles(root_of(queue, storage_path), storage_options)


def found_remotely(
    queue: str, storage_path: str, storage_options: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """What the queue under a URL says of itself; None if there is none."""
    root = root_of(queue, storage_path)
    with _explained(queue, root):
        try:
            content = ObjectFiles(root, storage_options).read(os.path.join(root, MARK))
        except FileNotFoundError:
            return None
    return read_mark(content, root, queue, None)


def find_remote_queues(
    storage_path: str, storage_options: Mapping[str, str] | None = None
) -> list[str]:
    """Names of the queues under a URL, sorted."""
    _check(storage_path)
    folder = storage_path.rstrip("/")
    files = ObjectFiles(folder, storage_options)
    found: list[str] = []

    def look(name: str) -> None:
        if files.exists(os.path.join(folder, name, MARK)):
            found.append(queue_name(name))

    try:
        names = files.names(folder)
        for at in range(0, len(names), AT_ONCE):
            at_once([partial(look, name) for name in names[at : at + AT_ONCE]])
    except OSError as error:
        raise PersistingError(f"{folder} cannot be listed: {error}. {_CHECK}") from error
    return sorted(found)


def _check(storage_path: str, whose: str = "") -> None:
    """Raise PersistingError for a URL that is of no use."""
    scheme, _, rest = storage_path.partition("://")
    bucket = rest.partition("/")[0]
    if scheme not in SCHEMES or not bucket or set("?#") & set(rest):
        raise PersistingError(
            f"storage_path {storage_path!r}{whose} is a URL of a kind that this version does not"
            " know. Give a local path, or s3://bucket/folder."
        )


def root_of(queue: str, storage_path: str) -> str:
    """The URL of a queue. Raises PersistingError for one that is of no use."""
    _check(storage_path, f" of queue {queue!r}")
    # What reads the URL decodes it; the object's key is then the escaped name, as on a disk.
    return f"{storage_path.rstrip('/')}/{quote(directory_name(queue), safe='')}"


@contextmanager
def _explained(queue: str, root: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PersistingError(
            f"queue {queue!r} cannot be opened at {root}: {error}. {_CHECK}"
        ) from error
