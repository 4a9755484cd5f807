"""A ledger in an object store: snapshots of it, and every change since as an object of its own.

    ledger/snapshots/7-0.sqlite       the ledger after change 0 of the owner of epoch 7
    ledger/7/1, ledger/7/2, ...       what the owner of epoch 7 has committed since, in its order
    ledger/7/3                        ... until the next owner closed the epoch with an object

Each is made only if it is not there. So a change that an earlier owner still tries to commit once
its epoch was closed is refused by the store itself: it would have the number of the closing object,
which is never removed. Nobody has to trust a clock for that.
"""

from __future__ import annotations

import json
import os
import sqlite3
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from persisting_torch.errors import BucketUnavailable, FormatError, StaleOwner
from persisting_torch.queue.files import Files
from persisting_torch.queue.record import Statement, replay
from persisting_torch.queue.statements import decode, encode
from persisting_torch.queue.threads import at_once

LOGGED = "logged"  # key in `meta`: the number of the change that made the ledger what it is
AT_ONCE = 16
SNAPSHOT_CHANGES = 1000
SNAPSHOT_BYTES = 16 << 20


@dataclass(frozen=True, order=True)
class Position:
    """After a change of an owner."""

    epoch: int
    number: int


@dataclass
class Attempt:
    """A change that is on its way into the store and not committed here yet."""

    number: int
    content: bytes
    statements: list[Statement]
    landed: bool = False


class Journal:
    """The log of one epoch, written by its owner. Not thread-safe: under the ledger's lock."""

    def __init__(self, files: Files, folder: str, epoch: int) -> None:
        self.files = files
        self.folder = folder
        self.epoch = epoch
        self.number = 0
        self.attempt: Attempt | None = None
        self._snapshot = Position(epoch, 0)
        self._bytes = 0

    # Opening

    def load(self, path: str) -> bool:
        """Make the SQLite file at `path` what all earlier owners have committed; False if nothing.

        From then on none of them commits anything more.
        """
        while True:
            newest = self._newest()
            try:
                found = self._load(path, newest)
            except FileNotFoundError:
                if newest == self._newest():
                    raise
                continue  # an owner that still lived made a new one and removed this one
            # Or it removed changes, before there seemed to be an end.
            if newest == self._newest():
                return found

    def _newest(self) -> Position | None:
        return max(self._snapshots(), default=None)

    def _snapshots(self) -> list[Position]:
        names = self.files.names(os.path.join(self.folder, "snapshots"))
        return [Position(*map(int, name.partition(".")[0].split("-"))) for name in names]

    def _load(self, path: str, newest: Position | None) -> bool:
        with open(path, "wb") as file:
            if newest is not None:
                file.write(self.files.read(self._snapshot_path(newest)))
        start = newest or Position(1, 0)
        ledger = sqlite3.connect(path, isolation_level=None)
        try:
            ledger.execute("BEGIN")
            for epoch in range(start.epoch, self.epoch):
                first = start.number + 1 if epoch == start.epoch else 1
                changes = self._close(epoch, first)
                if changes and newest is None:
                    raise FormatError(
                        f"{self.folder} has changes of the ledger, but no snapshot to begin with."
                        " Restore the objects under it from a copy."
                    )
                for statements in changes:
                    replay(ledger, statements)
            ledger.execute("COMMIT")
        finally:
            ledger.close()
        return newest is not None

    def _close(self, epoch: int, first: int) -> list[list[Statement]]:
        """All changes of an epoch from this number on, to which none will come any more."""
        known = [number for number in self._numbers(epoch) if number >= first]
        contents: dict[int, bytes] = {}

        def read(number: int) -> None:
            contents[number] = self.files.read(self._change_path(epoch, number))

        for at in range(0, len(known), AT_ONCE):
            at_once([partial(read, number) for number in known[at : at + AT_ONCE]])
        closing = _packed({"closed_by": self.epoch}, [])
        changes: list[list[Statement]] = []
        for number in count(first):
            if number not in contents:
                if self.files.create(self._change_path(epoch, number), closing):
                    return changes
                read(number)
            statements = statements_of(contents[number])
            if statements is None:
                return changes
            changes.append(statements)
        raise AssertionError

    # Committing

    def put(self, statements: list[Statement]) -> None:
        """Bring the next change into the store; `done` is to be called once it is committed here.

        Raises StaleOwner where there is a later owner, BucketUnavailable where the store does not
        answer: whether the change is in it then, `settle` finds out.
        """
        assert self.attempt is None
        told, blobs = encode(statements)
        content = _packed({"id": uuid.uuid4().hex, "statements": told}, blobs)
        self.attempt = Attempt(self.number + 1, content, statements)
        if not self._create(self.attempt.number, content):
            self.attempt = None
            raise self._stale()
        self.attempt.landed = True

    def done(self) -> None:
        """The change is committed here, too."""
        assert self.attempt is not None
        self.number = self.attempt.number
        self._bytes += len(self.attempt.content)
        self.attempt = None

    def settle(self) -> list[Statement]:
        """What the change that was broken off has done, if it is in the store; else it never will.

        `done` is to be called after that likewise.
        """
        attempt = self.attempt
        assert attempt is not None
        if not attempt.landed:
            # An empty change in its place, if it is not there, so that it cannot come later.
            nothing = _packed({"id": uuid.uuid4().hex, "statements": []}, [])
            if self._create(attempt.number, nothing):
                attempt.statements = []
            elif self.files.read(self._change_path(self.epoch, attempt.number)) != attempt.content:
                raise self._stale()
            attempt.landed = True
        return attempt.statements

    def _create(self, number: int, content: bytes) -> bool:
        try:
            return self.files.create(self._change_path(self.epoch, number), content)
        except OSError as error:
            raise BucketUnavailable(
                f"{self.folder} cannot be written: {error}. Nothing is lost that was acknowledged;"
                " try again once the store can be reached."
            ) from error

    def _stale(self) -> StaleOwner:
        return StaleOwner(
            f"{self.folder} was taken over from this process (epoch {self.epoch}) by another, since"
            " it was silent for too long. Nothing more is written here; open the queue anew."
        )

    # Snapshots

    def snapshot_due(self) -> bool:
        """Whether so much has changed since the last one that opening would take a while."""
        changes = self.number - self._snapshot.number
        return changes >= SNAPSHOT_CHANGES or self._bytes >= SNAPSHOT_BYTES

    def snapshot(self, content: bytes, number: int) -> None:
        """Keep the ledger as it was after this change, and remove what that makes superfluous."""
        position = Position(self.epoch, number)
        self._bytes = 0
        self.files.create(self._snapshot_path(position), content)
        self._snapshot = position
        older = [one for one in self._snapshots() if one < position]
        changes = [(self.epoch, one) for one in self._numbers(self.epoch) if one <= number]
        for epoch in range(min(older, default=position).epoch, self.epoch):
            # The last object of an earlier epoch has closed it.
            changes += [(epoch, one) for one in sorted(self._numbers(epoch))[:-1]]
        self.files.remove([self._change_path(*change) for change in changes])
        self.files.remove([self._snapshot_path(one) for one in older])

    def _numbers(self, epoch: int) -> list[int]:
        return [int(name) for name in self.files.names(os.path.join(self.folder, str(epoch)))]

    def _change_path(self, epoch: int, number: int) -> str:
        return os.path.join(self.folder, str(epoch), str(number))

    def _snapshot_path(self, position: Position) -> str:
        name = f"{position.epoch}-{position.number}.sqlite"
        return os.path.join(self.folder, "snapshots", name)


def _packed(header: dict[str, object], blobs: Sequence[bytes]) -> bytes:
    """A line of JSON, and the blobs that it numbers after it, one behind the other."""
    header["blobs"] = [len(blob) for blob in blobs]
    return b"".join([json.dumps(header).encode(), b"\n", *blobs])


def statements_of(content: bytes) -> list[Statement] | None:
    """What a change has done; None for the object that closes an epoch."""
    line, _, rest = content.partition(b"\n")
    header = json.loads(line)
    if "closed_by" in header:
        return None
    blobs: list[bytes] = []
    for length in header["blobs"]:
        blobs.append(rest[:length])
        rest = rest[length:]
    return decode(header["statements"], blobs)
