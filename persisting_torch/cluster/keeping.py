"""A bucket as a node keeps it: who answers for it, and how its owner is watched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import pyarrow as pa

from persisting_torch.cluster.trouble import Trouble
from persisting_torch.cluster.wire import Message
from persisting_torch.queue.files import LOCAL, Files
from persisting_torch.queue.ownership import Ownership, Watch
from persisting_torch.queue.threads import Background

REMOTE_SECONDS = 0.9  # from beat to beat where each is requests to an object store
WATCHED_SECONDS = 20.0

Answer = tuple[Message, "pa.Table | None"]


class Key(NamedTuple):
    """A bucket as requests name it."""

    queue: str
    storage_path: str
    bucket: int

    def __str__(self) -> str:
        return f"bucket {self.bucket} of queue {self.queue!r}"


class Service(Protocol):
    """What answers for one bucket that this process owns."""

    def answer(self, request: Message, table: pa.Table | None, /) -> Answer: ...

    def settle(self, limit: float, *, anyway: bool) -> bool:
        """Let what is under way end, since `close` follows.

        False, with all as it was, if that takes longer; unless it has to be `anyway`.
        """

    def close(self) -> None:
        """Write what there is to write, and end."""

    def abandon(self) -> None:
        """End without a trace: the bucket belongs to another owner by now."""


OpenService = Callable[[Key, Ownership], Service]


@dataclass
class Held:
    """A bucket that this process owns; without a service while it is opened or closed."""

    ownership: Ownership
    service: Service | None = None


@dataclass
class Keeping:
    """What a node knows of a bucket, whoever owns it."""

    folder: str
    files: Files
    watch: Watch = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)
    held: Held | None = None
    opening: Background | None = None
    trouble: Trouble = field(default_factory=Trouble)
    failing: bool = False
    look: Background | None = None
    looked: float = 0.0
    asked: float = 0.0

    def __post_init__(self) -> None:
        self.watch = Watch(self.folder, self.files)

    @property
    def is_remote(self) -> bool:
        return self.files is not LOCAL

    def is_due(self) -> bool:
        """Whether to look again at an object store, where that costs: for an owner, or somebody
        who has missed one of late."""
        now = time.monotonic()
        wanted = self.held is not None or now - self.asked < WATCHED_SECONDS
        busy = self.look is not None and self.look.is_alive()
        if busy or not wanted or now - self.looked < REMOTE_SECONDS:
            return False
        self.looked = now
        return True

    def reach(self, files: Files) -> None:
        """Reach an object store as the newest request says, while the bucket is not this node's."""
        with self.lock:
            if self.held is None and self.opening is None:
                # What was seen of the owner stays, for handles with different keys may take turns.
                self.files = self.watch.files = files
