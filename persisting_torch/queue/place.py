"""A queue's folder on disk: found, made, or refused with the reason."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persisting_torch.errors import FormatError, PersistingError
from persisting_torch.queue.locks import FileLock
from persisting_torch.queue.names import directory_name

FORMAT = 2
MARK = "queue.json"
MAKE_LOCK = ".make.lock"

NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|9p|afs|ceph|lustre|gpfs|beegfs\w*|glusterfs|ocfs2|gfs2|pvfs2|orangefs"
    r"|wekafs|virtiofs|vboxsf|fuse\.(?!ext|ntfs|zfs|btrfs|xfs|fuse-overlayfs).*"
)


@dataclass(frozen=True)
class Place:
    """Where one bucket of a queue lives, and what may be done there."""

    queue: str
    root: str
    bucket: str
    writable: bool
    network: bool
    format: int = FORMAT

    @property
    def data(self) -> str:
        return os.path.join(self.bucket, "data.lance")

    @property
    def late(self) -> str:
        return os.path.join(self.bucket, "late.lance")

    @property
    def ledger(self) -> str:
        return os.path.join(self.bucket, "ledger.sqlite")

    @property
    def commit_lock(self) -> str:
        return os.path.join(self.bucket, "commit.lock")

    @property
    def upkeep_lock(self) -> str:
        return os.path.join(self.bucket, "upkeep.lock")


def open_place(queue: str, storage_path: str | os.PathLike[str], *, bucket: int = 0) -> Place:
    """The place of a queue, made if it is not there yet.

    Raises FormatError where something else stands at its path or a later version wrote it, and
    PersistingError where it can neither be read nor made.
    """
    if re.match(r"\w[\w+.-]*:/", str(storage_path)):
        raise PersistingError(
            f"storage_path {str(storage_path)!r} of queue {queue!r} is a URL. A queue of this"
            " version lives on a file system; give a local path."
        )
    root = Path(storage_path).expanduser().absolute() / directory_name(queue)
    try:
        if not root.exists():
            _make(root, queue)
        version = _check(root, queue)
        folder = root / f"bucket-{bucket}"
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
        format=version,
    )


def raise_format(place: Place) -> None:
    """Say in a queue's mark that its folder has this release's format by now."""
    mark = Path(place.root) / MARK
    described = json.loads(mark.read_text())
    if described["format"] < FORMAT:
        _write_mark(mark, {**described, "format": FORMAT})


def find_queues(storage_path: str | os.PathLike[str]) -> list[str]:
    """Names of the queues under a storage path, sorted."""
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


def size_on_disk(path: str) -> int:
    """Bytes of a file or of all files below a folder, while others may add and remove some."""
    files = [os.path.join(where, name) for where, _, names in os.walk(path) for name in names]
    return sum(map(_size_of_file, files or [path]))


def _size_of_file(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _make(root: Path, queue: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with closing(FileLock(str(root / MAKE_LOCK))) as lock, lock:
        mark = root / MARK
        if not mark.exists():
            _write_mark(mark, {"format": FORMAT, "name": queue, "created": time.time()})


def _write_mark(mark: Path, described: dict[str, Any]) -> None:
    draft = mark.with_name(f".{MARK}")
    draft.write_text(json.dumps(described) + "\n")
    draft.replace(mark)


def _check(root: Path, queue: str) -> int:
    """The format of the queue in this folder."""
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
            _make(root, queue)
            return FORMAT
        raise FormatError(
            f"queue {queue!r} cannot be opened: {root} is a folder that holds other things and"
            f" no {MARK}, so it is no queue. Choose another name or storage_path."
        )
    try:
        described = json.loads(mark.read_text())
        version, name = int(described["format"]), described["name"]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"queue {queue!r} cannot be opened: {mark} is damaged ({error}). It should read"
            f' {{"format": {FORMAT}, "name": {json.dumps(queue)}}}.'
        ) from error
    if version > FORMAT:
        raise FormatError(
            f"queue {queue!r} at {root} has format {version}; this version of persisting_torch"
            f" reads up to format {FORMAT}. Upgrade persisting_torch."
        )
    if name != queue:
        raise FormatError(f"the folder {root} of queue {queue!r} says it is queue {name!r}.")
    return version


def _ledger_writable(folder: Path) -> bool:
    ledger = folder / "ledger.sqlite"
    return not ledger.exists() or os.access(ledger, os.W_OK)
