"""A queue as a callback holds it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from persisting_torch.datasets.handle import QueueHandle

if TYPE_CHECKING:
    from persisting_torch.queue import Queue


class WritableQueue(QueueHandle):
    """The queue that a callback writes to: given open, or by a name under `storage_path`.

    One given by its name is opened at first use, and made if it is not there.
    """

    def __init__(self, queue: Queue | str, storage_path: str | os.PathLike[str] = "./data") -> None:
        super().__init__(queue, storage_path)

    def check(self) -> None:
        """A queue that is not there yet is no fault."""
