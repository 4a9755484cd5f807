"""The owner of a queue's ledger, as a replica asks it."""

from __future__ import annotations

import time

from persisting_torch.cluster.bucket import Bucket
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import BucketUnavailable, PersistingError, StaleOwner, WaitTimeout
from persisting_torch.queue.again import Interrupted
from persisting_torch.queue.record import Change, Statement
from persisting_torch.queue.statements import decode_changes, encode

SOON_SECONDS = 5.0  # for answers that need no data; beyond the time that the owner itself waits
FOLLOW_SECONDS = 2.0
TURN_SECONDS = 60.0

News = tuple[str, "list[Change] | None"]
"""The log's name and its changes since; None if only a snapshot tells."""


class Head:
    """Requests to the owner of bucket 0. Each raises BucketUnavailable after a limit."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def snapshot(self) -> tuple[str, int, bytes]:
        """The log's name, the number of its last change, and the ledger as of that change."""
        answer, table = self.bucket.get("snapshot")
        content = b"".join(table["content"].to_pylist())
        return answer.header["log"], answer.header["number"], content

    def follow(self, log: str, number: int, wait: float) -> News:
        """What has changed since, waiting for it a while."""
        header = {"log": log, "number": number, "wait": wait}
        return _news(self.bucket.ask("follow", header, seconds=FOLLOW_SECONDS + wait))

    def begin(self, token: str, log: str, number: int) -> News | None:
        """Take the turn to write, and hear what has changed since. Raises WaitTimeout.

        None if the turn is over already: the answer that gave it was lost on its way, and whoever
        was given it was silent for too long.
        """
        header = {"token": token, "log": log, "number": number}
        deadline = time.monotonic() + TURN_SECONDS
        while time.monotonic() < deadline:
            answer = self.bucket.ask("begin", header, seconds=SOON_SECONDS)
            if "over" in answer.header:
                return None
            if "wait" not in answer.header:
                return _news(answer)
        raise WaitTimeout(
            f"waited {TURN_SECONDS:g} s for a turn to write the ledger of"
            f" {self.bucket.target.queue!r}: other processes take all of them. Start fewer, or put"
            " and take larger batches."
        )

    def beat(self, token: str) -> None:
        """Keep a turn that takes long."""
        self.bucket.ask("beat", {"token": token}, seconds=1.0, limit=0)

    def commit(
        self,
        token: str,
        statements: list[Statement],
        before: str,
        at: tuple[str, int] | None = None,
    ) -> int | None:
        """Write, and end the turn; the change's number, None if it was written but that is unknown.

        `before` is the token of an earlier commit that this process knows to be done. With `at`
        there was no turn: it is done only if the log has not moved since. Raises Interrupted or
        BucketUnavailable where nothing was written and never will be, or, saying so, where that
        could not be found out.
        """
        told, blobs = encode(statements)
        header = {"token": token, "statements": told, "before": before, "at": at}
        try:
            answer = self.bucket.ask("commit", header, blobs, seconds=SOON_SECONDS, limit=0)
            if "number" not in answer.header:
                raise Interrupted(f"others have written the ledger of {self.bucket.target} first.")
            return int(answer.header["number"])
        except Interrupted:
            raise
        except (BucketUnavailable, StaleOwner) as error:
            if self._settled(token, error):
                return None
            raise Interrupted(
                f"{self.bucket.target} lost its owner in the middle of a change: {error} Nothing"
                " was changed; try again."
            ) from error

    def _settled(self, token: str, cause: PersistingError) -> bool:
        try:
            return bool(self.bucket.ask("settled", {"token": token}).header["settled"])
        except BucketUnavailable as error:
            raise BucketUnavailable(
                f"{self.bucket.target} lost its owner in the middle of a change ({cause}), and"
                f" whether that was made is not known: {error}"
            ) from error

    def abort(self, token: str) -> None:
        """End the turn with nothing written. An owner that does not hear it ends it by itself."""
        try:
            self.bucket.ask("abort", {"token": token}, seconds=1.0, limit=0)
        except (BucketUnavailable, StaleOwner):
            return

    # A lock that all processes of the cluster share

    def hold(self, token: str, limit: float) -> bool | None:
        """Whether the lock could be had within `limit` seconds; None as `begin` answers it."""
        deadline = time.monotonic() + limit
        while told := self.bucket.ask("hold", {"token": token}, seconds=SOON_SECONDS).header:
            if "over" in told:
                return None
            if time.monotonic() >= deadline:
                self.release(token)
                return False
        return True

    def hold_on(self, token: str) -> None:
        """Keep the lock, which is lost after three silent seconds. Raises StaleOwner if it was."""
        self.bucket.ask("hold_on", {"token": token}, seconds=1.0, limit=0)

    def release(self, token: str) -> None:
        try:
            self.bucket.ask("release", {"token": token}, seconds=1.0, limit=0)
        except (BucketUnavailable, StaleOwner):
            return


def _news(answer: Message) -> News:
    header = answer.header
    return header["log"], decode_changes(header["changes"], list(answer.attached))
