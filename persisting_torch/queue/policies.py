"""Weights beside a queue: published by the trainer, read by rollout workers in other processes.

    <queue>/policy/newest.json              {"serial": 7, "version": 70, "published": 1754000000.0}
    <queue>/policy/<serial>-v<version>.pt   a state dict, as torch.save writes it

Files come whole and are never changed: whoever reads finds a whole policy or none, whenever the
publisher is killed. The pointer moves when the file that it names is there. Serials only rise;
versions go back when training goes back to a checkpoint. A queue has one publisher at a time. In an
object store it is the same with objects.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from persisting_torch.errors import WaitTimeout
from persisting_torch.queue.files import LOCAL, Files
from persisting_torch.queue.names import directory_name
from persisting_torch.queue.objects import ObjectFiles, is_url
from persisting_torch.queue.patience import FIRST_NOTICE_SECONDS, LONGEST_WAIT_SECONDS, Patience

if TYPE_CHECKING:
    from persisting_torch.queue.queue import Queue

log = logging.getLogger(__name__)

FOLDER = "policy"
POINTER = "newest.json"
POLL_SECONDS = 0.02
STORE_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Announcement:
    """What the pointer says: the newest policy's serial, version and time (seconds since 1970)."""

    serial: int
    version: int
    published: float

    @property
    def file(self) -> str:
        return f"{self.serial:010d}-v{self.version}.pt"


@dataclass(frozen=True)
class PolicyWeights:
    """One published policy: tensors on the CPU by name, and the trainer's step that made them."""

    version: int
    published: float
    state_dict: dict[str, Tensor]

    def load_into(self, module: nn.Module) -> None:
        """Copy the weights into a module, whatever its device. Raises RuntimeError on a misfit."""
        module.load_state_dict(self.state_dict)


class Policy:
    """The policy published for a queue. Looking at its version costs some microseconds."""

    def __init__(self, queue: str, folder: str | os.PathLike[str], files: Files = LOCAL) -> None:
        self.queue = queue
        self.folder = Path(folder) if files is LOCAL else folder
        self._files = files
        self._poll_seconds = POLL_SECONDS if files is LOCAL else STORE_POLL_SECONDS

    @property
    def version(self) -> int | None:
        """The newest version announced; None before the first."""
        newest = self._announced()
        return None if newest is None else newest.version

    def latest(
        self, wait: bool = False, timeout: float | None = None, newer_than: int | None = None
    ) -> PolicyWeights | None:
        """The newest policy, if its version is above `newer_than`; else None.

        With `wait`, waits for such a policy, and raises WaitTimeout after `timeout` seconds (None:
        1800; float("inf"): for ever). What is missing is said in the log meanwhile, and by the
        error at the end.
        """
        limit = LONGEST_WAIT_SECONDS if timeout is None else timeout
        deadline = time.monotonic() + limit
        patience = Patience(log, FIRST_NOTICE_SECONDS)
        while True:
            newest = self._announced()
            if newest is not None and (newer_than is None or newest.version > newer_than):
                found = self._load(newest)
                if found is not None:
                    return found
                continue
            if not wait:
                return None
            missing = partial(self._what_is_missing, newest, newer_than)
            if time.monotonic() >= deadline:
                raise WaitTimeout(missing(limit))
            patience.check(missing)
            time.sleep(self._poll_seconds)

    def load_into(self, module: nn.Module, timeout: float | None = None) -> int:
        """Copy the newest weights into a module, waiting for the first; their version.

        Raises WaitTimeout as `latest` does.
        """
        found = self.latest(wait=True, timeout=timeout)
        assert found is not None
        found.load_into(module)
        return found.version

    def _load(self, newest: Announcement) -> PolicyWeights | None:
        """None if newer policies have taken the place of this one meanwhile."""
        try:
            file = self._files.reading(os.path.join(self.folder, newest.file))
        except FileNotFoundError:
            if self._announced() == newest:
                raise
            return None
        with file:
            state = torch.load(file, map_location="cpu", weights_only=True)
        return PolicyWeights(newest.version, newest.published, state)

    def _announced(self) -> Announcement | None:
        return read_pointer(self.folder, self._files)

    def _what_is_missing(
        self, newest: Announcement | None, newer_than: int | None, waited: float
    ) -> str:
        wanted = "a policy" if newer_than is None else f"a policy newer than version {newer_than}"
        there = "none was published" if newest is None else f"the newest is {newest.version}"
        return (
            f"waited {waited:g} s for {wanted} of queue {self.queue!r} in {self.folder}; {there}."
            " Check that a trainer with PolicyPublisher runs, or raise timeout."
        )


def policy(
    queue: Queue | str,
    storage_path: str | os.PathLike[str] = "./data",
    storage_options: Mapping[str, str] | None = None,
) -> Policy:
    """The policy that a PolicyPublisher publishes for a queue, given open or by its name.

    Opens nothing: neither the queue nor the trainer needs to be there yet. In an object store each
    look at the version is a request, and who waits for a policy looks twice a second.

    >>> import tempfile
    >>> print(policy("rollouts", tempfile.mkdtemp()).version)
    None
    """
    if not isinstance(queue, str):
        place = queue.engine.place
        return Policy(queue.name, policy_folder(place.root), place.files)
    if is_url(storage_path):
        from persisting_torch.queue.urls import root_of

        url = root_of(queue, str(storage_path))
        return Policy(queue, policy_folder(url), ObjectFiles(url, storage_options))
    root = Path(storage_path).expanduser().absolute() / directory_name(queue)
    return Policy(queue, policy_folder(root))


def policy_folder(root: str | os.PathLike[str]) -> str:
    """Where the policy of the queue at this place is published."""
    return os.path.join(root, FOLDER)


def publish(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    version: int,
    *,
    keep: int = 2,
    files: Files = LOCAL,
) -> Announcement:
    """Write a state dict of tensors as the newest policy, and remove all but the newest `keep`."""
    before = read_pointer(folder, files)
    newest = Announcement(0 if before is None else before.serial + 1, version, time.time())
    with files.writing(os.path.join(folder, newest.file)) as file:
        torch.save(dict(state), file)
    content = json.dumps(vars(newest)) + "\n"
    files.replace(os.path.join(folder, POINTER), content.encode())
    old = [name for name in files.names(os.fspath(folder)) if is_older(name, newest.serial - keep)]
    files.remove([os.path.join(folder, name) for name in old])
    return newest


def is_older(name: str, serial: int) -> bool:
    """Whether a file holds a policy of this serial or an earlier one."""
    found = re.fullmatch(r"(\d+)-v.*\.pt", name)
    return found is not None and int(found[1]) <= serial


def read_pointer(folder: str | os.PathLike[str], files: Files = LOCAL) -> Announcement | None:
    """What is announced as the newest policy; None before the first."""
    try:
        return Announcement(**json.loads(files.read(os.path.join(folder, POINTER))))
    except FileNotFoundError:
        return None
