"""A queue's folder on disk: found, made, or refused with the reason. For URLs see urls.py."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from persisting_torch.errors import FormatError, PersistingError
from persisting_torch.queue.files import LOCAL, Files
from persisting_torch.queue.locks import FileLock
from persisting_torch.queue.names import directory_name
from persisting_torch.queue.objects import is_url

FORMAT = 2
MARK = "queue.json"
MAKE_LOCK = ".make.lock"
DEFAULT_BUCKETS = 4

NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|9p|afs|ceph|lustre|gpfs|beegfs\w*|glusterfs|ocfs2|gfs2|pvfs2|orangefs"
    r"|wekafs|virtiofs|vboxsf|fuse\.(?!ext|ntfs|zfs|btrfs|xfs|fuse-overlayfs).*"
)


@dataclass(frozen=True)
class Place:
    """Where one bucket of a queue lives, and what may be done there.

    `storage` is the same for all who see the same files; "" of a queue that no cluster made.
    """

    queue: str
    root: str
    bucket: str
    writable: bool
    network: bool
    format: int = FORMAT
    num_buckets: int = 1
    bucket_column: str | None = None
    storage: str = ""
    files: Files = field(default=LOCAL, compare=False)

    def of_bucket(self, number: int) -> Place:
        """The place of another bucket of the queue."""
        return replace(self, bucket=os.path.join(self.root, f"bucket-{number}"))

    @property
    def data(self) -> str:
        return os.path.join(self.bucket, "data.lance")

    @property
    def late(self) -> str:
        return os.path.join(self.bucket, "late.lance")

    @property
    def ledger(self) -> str:
        return os.path.join(self.bucket, "ledger.sqlite" if self.files is LOCAL else "ledger")

    @property
    def commit_lock(self) -> str:
        return os.path.join(self.bucket, "commit.lock")

    @property
    def upkeep_lock(self) -> str:
        return os.path.join(self.bucket, "upkeep.lock")

    @property
    def takeover_lock(self) -> str:
        return os.path.join(self.bucket, "takeover.lock")


@dataclass(frozen=True)
class Split:
    """Into how many buckets a queue is to be split, and by which field; None where nobody said.

    A queue that is made on one machine has one bucket, whatever was said. `part`: whether only some
    of a distributed queue's buckets are here, and not the first one.
    """

    num_buckets: int | None = None
    bucket_column: str | None = None
    distributed: bool = False
    part: bool = False


def open_place(
    queue: str,
    storage_path: str | os.PathLike[str],
    asked: Split | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Place:
    """The place of a queue's first bucket, made if it is not there yet.

    A new queue is split as asked, else it has one bucket; an old one stays as it is. Raises
    PersistingError where something else was asked for, or the place can neither be read nor made;
    FormatError where something else stands there or a later version wrote it.
    """
    if is_url(storage_path):
        from persisting_torch.queue.urls import open_remote_place

        return open_remote_place(queue, str(storage_path), asked, storage_options)
    root = Path(storage_path).expanduser().absolute() / directory_name(queue)
    try:
        if not root.exists():
            _make(root, queue, asked)
        described = _check(root, queue, asked)
        folder = root / "bucket-0"
        if os.access(root, os.W_OK | os.X_OK):
            folder.mkdir(exist_ok=True)
    except NotADirectoryError as error:
        raise FormatError(
            f"queue {queue!r} cannot be at {root}: {error.filename!r} on the way is a file,"
            " not a folder. Choose another storage_path or move that file away."
        ) from error
    except OSError as error:
        raise PersistingError(
            f"queue {queue!r} cannot be opened at {root}: {error.strerror or error}."
            " Check that the storage_path exists or can be made, and who may read and write it."
        ) from error
    if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
        raise PersistingError(
            f"queue {queue!r} cannot be opened: {folder} may not be read by this process."
            " Open it as a user who may."
        )
    if not folder.exists():
        raise PersistingError(
            f"queue {queue!r} at {root} is read-only for this process and holds no data yet."
            " Open it once where it can be written."
        )
    return Place(
        queue=queue,
        root=str(root),
        bucket=str(folder),
        writable=os.access(folder, os.W_OK | os.X_OK) and _ledger_writable(folder),
        network=bool(NETWORK_FILE_SYSTEMS.fullmatch(file_system(str(folder)))),
        format=described["format"],
        num_buckets=described.get("num_buckets", 1),
        bucket_column=described.get("bucket_column"),
        storage=described.get("storage", ""),
    )


def found_at(
    queue: str,
    storage_path: str | os.PathLike[str],
    storage_options: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """What the queue at this place says of itself; None if there is none here."""
    if is_url(storage_path):
        from persisting_torch.queue.urls import found_remotely

        return found_remotely(queue, str(storage_path), storage_options)
    root = Path(storage_path).expanduser().absolute() / directory_name(queue)
    return _check(root, queue, None) if (root / MARK).exists() else None


def whole_path(storage_path: str | os.PathLike[str]) -> str:
    """A storage path as all processes understand it."""
    if is_url(storage_path):
        return str(storage_path).rstrip("/")
    return str(Path(storage_path).expanduser().absolute())


def raise_format(place: Place) -> None:
    """Say in a queue's mark that its folder has this release's format by now."""
    mark = Path(place.root) / MARK
    described = json.loads(mark.read_text())
    if described["format"] < FORMAT:
        _write_mark(mark, {**described, "format": FORMAT})


def find_queues(
    storage_path: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None
) -> list[str]:
    """Names of the queues under a storage path, sorted."""
    if is_url(storage_path):
        from persisting_torch.queue.urls import find_remote_queues

        return find_remote_queues(str(storage_path), storage_options)
    marks = Path(storage_path).expanduser().glob(f"*/{MARK}")
    return sorted(str(json.loads(mark.read_text())["name"]) for mark in marks)


def file_system(path: str) -> str:
    """The type of the file system that holds `path`, as Linux names it; "" if unknown."""
    mounts = Path("/proc/self/mountinfo")
    if not mounts.exists():
        return ""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    return ""


def _make(root: Path, queue: str, asked: Split | None) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with closing(FileLock(str(root / MAKE_LOCK))) as lock, lock:
        mark = root / MARK
        if not mark.exists():
            _write_mark(mark, new_mark(queue, asked))


def new_mark(queue: str, asked: Split | None) -> dict[str, Any]:
    """What a queue that is made now says of itself."""
    described: dict[str, Any] = {"format": FORMAT, "name": queue, "created": time.time()}
    if asked is not None and asked.distributed:
        described["num_buckets"] = asked.num_buckets or DEFAULT_BUCKETS
        described["storage"] = uuid.uuid4().hex
        if asked.part:
            described["part"] = True
        if asked.bucket_column is not None:
            described["bucket_column"] = asked.bucket_column
    return described


def mark_text(described: dict[str, Any]) -> str:
    return json.dumps(described) + "\n"


def _write_mark(mark: Path, described: dict[str, Any]) -> None:
    draft = mark.with_name(f".{MARK}")
    draft.write_text(mark_text(described))
    draft.replace(mark)


def _check(root: Path, queue: str, asked: Split | None) -> dict[str, Any]:
    """What the queue in this folder says of itself."""
    if not root.is_dir():
        raise FormatError(
            f"queue {queue!r} cannot be opened: {root} is a file, not a folder."
            " Choose another name or storage_path, or move that file away."
        )
    mark = root / MARK
    # One look, since others may be making the queue at this moment.
    names = set(os.listdir(root))
    if MARK not in names:
        if MAKE_LOCK in names or names <= {f"{MAKE_LOCK}.turn"}:
            _make(root, queue, asked)
            return _check(root, queue, asked)
        raise FormatError(
            f"queue {queue!r} cannot be opened: {root} is a folder that holds other things and"
            f" no {MARK}, so it is no queue. Choose another name or storage_path."
        )
    return read_mark(mark.read_bytes(), str(root), queue, asked)


def read_mark(content: bytes, root: str, queue: str, asked: Split | None) -> dict[str, Any]:
    """What a queue's mark says; FormatError where that is not what is to be opened."""
    try:
        described: dict[str, Any] = json.loads(content)
        version, name = int(described["format"]), described["name"]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"queue {queue!r} cannot be opened: {root}/{MARK} is damaged ({error}). It should read"
            f' {{"format": {FORMAT}, "name": {json.dumps(queue)}}}.'
        ) from error
    if version > FORMAT:
        raise FormatError(
            f"queue {queue!r} at {root} has format {version}; this version of persisting_torch"
            f" reads up to format {FORMAT}. Upgrade persisting_torch."
        )
    if name != queue:
        raise FormatError(f"the folder {root} of queue {queue!r} says it is queue {name!r}.")
    if asked is not None:
        _check_split(queue, described, asked)
    return described


def _check_split(queue: str, described: dict[str, Any], asked: Split) -> None:
    """Raise PersistingError where the queue is split otherwise than asked for."""
    count = described.get("num_buckets", 1)
    options: list[tuple[str, object, object]] = []
    if asked.distributed or count > 1:
        options.append(("num_buckets", count, asked.num_buckets))
    if count > 1:
        options.append(("bucket_column", described.get("bucket_column"), asked.bucket_column))
    for option, stored, wanted in options:
        if wanted is not None and wanted != stored:
            raise PersistingError(
                f"queue {queue!r} was made with {option}={stored!r}, which stays as it is, and is"
                f" now opened with {option}={wanted!r}. Leave the argument out."
            )


def _ledger_writable(folder: Path) -> bool:
    ledger = folder / "ledger.sqlite"
    return not ledger.exists() or os.access(ledger, os.W_OK)
