"""What keeps a node from opening a bucket: tried again, and told, no more often than is of use."""

from __future__ import annotations

import time
from dataclasses import dataclass

from persisting_torch.errors import BucketUnavailable

AGAIN_SECONDS = 1.0
LONGEST_SECONDS = 10.0
TOLD_SECONDS = 60.0


class Elsewhere(BucketUnavailable):
    """The bucket lies on storage that this node does not see, which may stay so for long."""


@dataclass
class Trouble:
    """The last one with a bucket; `text` is empty once it is over."""

    text: str = ""
    not_before: float = 0.0
    """When it may be tried again, by time.monotonic()."""

    _pause: float = 0.0
    _told: str = ""
    _told_at: float = 0.0

    def note(self, text: str, *, lasting: bool) -> bool:
        """Wait before the next try, ever longer with what lasts; whether to tell of it now."""
        now = time.monotonic()
        longer = min(2 * self._pause, LONGEST_SECONDS) if lasting else 0.0
        self._pause = max(AGAIN_SECONDS, longer)
        self.text, self.not_before = text, now + self._pause
        tells = text != self._told or now - self._told_at >= TOLD_SECONDS
        if tells:
            self._told, self._told_at = text, now
        return tells

    def end(self) -> None:
        """It works again."""
        self.text, self._pause, self._told = "", 0.0, ""
