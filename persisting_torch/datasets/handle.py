"""A queue as a dataset holds it: usable in this process, and openable anew in another."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persisting_torch.errors import PersistingError
from persisting_torch.queue.names import check_name, directory_name
from persisting_torch.queue.objects import is_url
from persisting_torch.queue.place import MARK, find_queues, found_at
from persisting_torch.queue.seam import is_distributed, take_way, way_there

if TYPE_CHECKING:
    from persisting_torch.queue import Queue
    from persisting_torch.queue.engine import Engine


class QueueHandle:
    """Where a queue is, and this process's handle of it, opened at first use.

    Pickled, it carries the place alone, and the way to the cluster where there is one. In the child
    of a fork it raises PersistingError, since neither the parent's handle nor Lance's threads work
    there.
    """

    def __init__(self, queue: Queue | str, storage_path: str | os.PathLike[str]) -> None:
        self._given: Queue | None = None
        self._opened: Queue | None = None
        self._pid = os.getpid()
        self._since = time.time()
        self._options: dict[str, Any] = {}
        if isinstance(queue, str):
            self.name = check_name(queue, "queue name")
            self.storage_path = os.fspath(storage_path)
        elif hasattr(queue, "engine"):
            self.name = queue.name
            self.storage_path = queue.storage_path
            self._given = queue
            self._options = {
                "allow_pickle": queue.allow_pickle,
                "zerocopy_mode": queue.zerocopy_mode,
                "storage_options": queue.storage_options,
            }
        else:
            raise TypeError(
                f"queue must be a Queue or the name of one, got {type(queue).__name__}: {queue!r}."
            )

    def check(self) -> None:
        """Raise PersistingError where there is no such queue yet; a cluster makes it."""
        if is_distributed() or self._given is not None:
            return
        if is_url(self.storage_path):
            options = self._options.get("storage_options")
            if found_at(self.name, self.storage_path, options) is None:
                raise self._missing(self.storage_path, find_queues(self.storage_path, options))
            return
        root = Path(self.storage_path).expanduser().absolute()
        if (root / directory_name(self.name) / MARK).exists():
            return
        raise self._missing(str(root), find_queues(root) if root.is_dir() else [])

    def _missing(self, root: str, others: list[str]) -> PersistingError:
        there = f"It holds {', '.join(map(repr, others[:10]))}" if others else "It holds no queue"
        return PersistingError(
            f"there is no queue {self.name!r} under storage_path {root!r}. {there}."
            " Check both; where the trainer starts before the producers, make the queue first"
            " with Queue(name, storage_path), or give that Queue instead of its name."
        )

    @property
    def engine(self) -> Engine:
        """The synchronous engine of the queue in this process."""
        return self.queue.engine

    @property
    def queue(self) -> Queue:
        """The queue in this process: the one given, or one opened for this handle."""
        if os.getpid() != self._pid:
            raise PersistingError(
                f"the dataset of queue {self.name!r} was made in process {self._pid} and is used in"
                f" its fork {os.getpid()}, which its files' threads do not survive. Use"
                " PersistingDataLoader, or give the DataLoader"
                " multiprocessing_context='forkserver' (or 'spawn')."
            )
        if self._given is not None:
            return self._given
        if self._opened is None:
            from persisting_torch.queue import Queue

            self.check()
            self._opened = Queue(self.name, self.storage_path, **self._options)
            self._opened.engine.producers.since = self._since
        return self._opened

    def close(self) -> None:
        """Close what this handle has opened; a queue that was given stays as it is."""
        if self._opened is not None and os.getpid() == self._pid:
            self._opened.close()
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        own = {"_given": None, "_opened": None, "_pid": None}
        return self.__dict__ | own | {"_way": way_there()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        take_way(state.pop("_way"))
        self.__dict__.update(state)
        self._pid = os.getpid()
