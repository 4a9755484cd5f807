"""The few things that a queue does to files beside SQLite and Lance, wherever they lie."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import BinaryIO, Protocol


class Files(Protocol):
    """Whole small files by path. What cannot be read or written raises OSError."""

    options: dict[str, str] | None
    """What Lance needs to reach the same files (its storage_options)."""

    def exists(self, path: str) -> bool:
        """Whether there is a file, or a folder that holds something."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names of what is in a folder; none where there is no such folder."""
        ...

    def read(self, path: str) -> bytes:
        """Raises FileNotFoundError."""
        ...

    def create(self, path: str, content: bytes) -> bool:
        """Make a file, with all of its content at once; False if it is there already."""
        ...

    def replace(self, path: str, content: bytes) -> None:
        """Put a file in place of the one there, if any; readers see the one or the other."""
        ...

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files; those that are not there are gone already."""
        ...

    def reading(self, path: str) -> BinaryIO:
        """A large file, to be read in parts and closed. Raises FileNotFoundError."""
        ...

    def writing(self, path: str) -> AbstractContextManager[BinaryIO]:
        """A large file, written in parts: there as a whole once the block has ended, else not.

        Not for two files of one folder at a time.
        """
        ...

    def size(self, path: str) -> int:
        """Bytes of a file or of all files below a folder, while others add and remove some."""
        ...


class LocalFiles:
    """Files of this machine, or of a network file system."""

    options: dict[str, str] | None = None

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def names(self, folder: str) -> list[str]:
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def create(self, path: str, content: bytes) -> bool:
        draft = _draft(path, content)
        try:
            # A link comes with its content, which a file that is opened exclusively does not.
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(draft)
        return True

    def replace(self, path: str, content: bytes) -> None:
        os.replace(_draft(path, content), path)

    def remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue

    def reading(self, path: str) -> BinaryIO:
        return open(path, "rb")

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        folder, name = os.path.split(path)
        os.makedirs(folder, exist_ok=True)
        # Always of the same name: what a process that was killed has left is written over.
        draft = os.path.join(folder, f"draft{os.path.splitext(name)[1]}")
        with open(draft, "wb") as file:
            yield file
        os.replace(draft, path)

    def size(self, path: str) -> int:
        files = [os.path.join(where, name) for where, _, names in os.walk(path) for name in names]
        return sum(map(_size_of_file, files or [path]))


def _draft(path: str, content: bytes) -> str:
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    draft = os.path.join(folder, f".{name}-{uuid.uuid4().hex}")
    with open(draft, "wb") as file:
        file.write(content)
    return draft


def sync(path: str) -> None:
    """Bring a file, or what is named in a folder, of this machine to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_of_file(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


LOCAL: Files = LocalFiles()
