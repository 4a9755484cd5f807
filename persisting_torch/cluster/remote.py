"""A bucket's rows as those see them who do not own them: put by messages, read where they lie."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from persisting_torch.cluster.bucket import Bucket
from persisting_torch.cluster.head import Head
from persisting_torch.errors import BucketUnavailable, StaleOwner, WaitTimeout
from persisting_torch.queue.buffer import Composed
from persisting_torch.queue.commit import as_text, from_text
from persisting_torch.queue.late import LateBatch
from persisting_torch.queue.ownership import read_owner
from persisting_torch.queue.place import Place
from persisting_torch.queue.producers import Finishing
from persisting_torch.queue.record import Mark
from persisting_torch.queue.runs import Int64s
from persisting_torch.queue.sets import pack_set, unpack_set
from persisting_torch.queue.storage import RowStore
from persisting_torch.queue.threads import Background

ANSWER_SECONDS = 5.0
ALIVE_SECONDS = 2.0
NEAR_BYTES = 256 << 10
SLOWEST_BYTES_PER_SECOND = 20e6
READ_SECONDS = 10.0
LOCK_SECONDS = 120.0
BEAT_SECONDS = 0.5


@dataclass
class RemoteAppender:
    """Puts samples, and fields of samples, into a bucket by messages to its owner.

    Much at a time is written to files here, where this process sees the bucket's storage; the owner
    is only told of them then.
    """

    bucket: Bucket
    store: BucketStore
    writer: str = ""

    def append(self, composed: Composed) -> Mark:
        """Have them stored, once however often it takes."""
        table = composed.table
        header = {
            "runs": composed.runs,
            "arrivals": [
                (partition, names, *as_text(pack_set(members)))
                for (partition, names), members in composed.arrivals.items()
            ],
            "keys": composed.keys,
            "writer": self.writer,
        }
        answer = None if table.nbytes < NEAR_BYTES else self._append_near(header, table)
        if answer is None:
            seconds = _seconds_for(table)
            answer = self.bucket.put("append", header, table, seconds=seconds).header
        log, number = answer["mark"]
        return log, number

    def _append_near(self, header: dict[str, Any], table: pa.Table) -> dict[str, Any] | None:
        """The same without sending the rows; None if they have to be sent.

        Files that come to nothing are not removed, since an answer that was lost may have been that
        they are rows now. Lance removes them a week later.
        """
        near = self.store.near()
        if near is None:
            return None
        try:
            written = near.stage(table)
        except OSError:
            return None  # this process may only read there, or the owner says what is wrong
        if written is None:
            return None
        told = {**header, "fragments": [part.to_json() for part in written]}
        answer = self.bucket.ask("append_written", told).header
        return answer if answer["done"] else None

    def append_late(
        self,
        late: LateBatch,
        partition: str,
        keys: list[tuple[str, str, int, str | None]],
        finishing: Finishing,
    ) -> int:
        """Likewise; the first late row, bucket and row packed."""
        header = {
            "arrivals": [(names, len(indexes)) for names, indexes in late.arrivals],
            "partition": partition,
            "keys": keys,
            "finishing": [
                (work.producer.name, work.started, *as_text(pack_set(work.members)))
                for work in finishing.parts
            ],
            "writer": self.writer,
        }
        seconds = _seconds_for(late.table)
        answer = self.bucket.put("append_late", header, late.table, seconds=seconds).header
        for work in finishing.parts:
            if work.producer.name in answer.get("lost", ()):
                raise work.refused()
        return int(answer["first_row"])


def _seconds_for(table: pa.Table) -> float:
    """How long one try may take: an owner that is halted is not waited for much longer."""
    return ANSWER_SECONDS + float(table.nbytes) / SLOWEST_BYTES_PER_SECOND


def composed_of(header: dict[str, Any], table: pa.Table) -> Composed:
    """What an `append` or `append_written` says, as its sender had it."""
    return Composed(
        table=table,
        runs=[(first, count) for first, count in header["runs"]],
        arrivals={
            (partition, tuple(names)): unpack_set(*from_text(*packed))
            for partition, names, *packed in header["arrivals"]
        },
        keys=[(partition, key, index, tag) for partition, key, index, tag in header["keys"]],
    )


def late_of(header: dict[str, Any], table: pa.Table) -> LateBatch:
    """What an `append_late` says, likewise."""
    indexes = table["_index"].to_numpy()
    arrivals, at = [], 0
    for names, count in header["arrivals"]:
        arrivals.append((tuple(names), indexes[at : at + count]))
        at += count
    return LateBatch(table, arrivals)


def held_of(header: dict[str, Any]) -> list[tuple[str, float, BitMap64]]:
    """The producers whose work an `append_late` finishes: name, when it was entered, samples."""
    return [
        (name, started, unpack_set(*from_text(*packed)))
        for name, started, *packed in header["finishing"]
    ]


class BucketStore:
    """The rows of a bucket, read where this process sees its files, else sent by its owner.

    Whether it does is found out at the first read: the owner says who it is, and has written that
    into the bucket's folder.
    """

    def __init__(self, bucket: Bucket, place: Place, which: str) -> None:
        self.path = place.data if which == "data" else place.late
        self._bucket = bucket
        self._place = place
        self._which = which
        self._near: RowStore | None = None
        self._asked = False
        self._lock = threading.Lock()

    def near(self) -> RowStore | None:
        """The store itself, if its files are seen here."""
        if not self._asked:
            with self._lock:
                if not self._asked:
                    if not self._is_near():
                        # What was known of its owner may be old.
                        self._bucket.ask("alive", seconds=ALIVE_SECONDS)
                    if self._is_near():
                        self._near = RowStore(self.path, files=self._place.files)
                    self._asked = True
        return self._near

    def _is_near(self) -> bool:
        owner = self._bucket.owner()
        found = read_owner(self._place.bucket, self._place.files)
        return found is not None and found.incarnation == owner.incarnation

    def exists(self) -> bool:
        near = self.near()
        return True if near is None else near.exists()

    def refresh(self) -> int:
        """Move to the newest version; whoever asks the owner has that anyway."""
        near = self.near()
        return 0 if near is None else near.refresh()

    @property
    def version(self) -> int:
        return 0 if self._near is None else self._near.version

    @property
    def rows(self) -> int:
        return self._figure("rows")

    @property
    def fragments(self) -> int:
        return self._figure("fragments")

    @property
    def versions(self) -> int:
        return self._figure("versions")

    def _figure(self, name: str) -> int:
        return int(self._bucket.ask("figures", {"store": self._which}).header[name])

    def read(self, rows: Int64s, columns: Sequence[str]) -> pa.Table:
        """See RowStore.read."""
        near = self.near()
        if near is not None:
            return near.read(rows, columns)
        asked = np.ascontiguousarray(rows, dtype="<i8").tobytes()
        header = {"store": self._which, "columns": list(columns)}
        return self._bucket.get("rows", header, [asked], seconds=READ_SECONDS)[1]


class SharedLock:
    """One lock for all processes of a cluster, kept by the owner of the queue's ledger.

    The thread that holds it may take it again. It is lost by a holder that is silent for some
    seconds; what it does then is refused elsewhere.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._thread = threading.RLock()
        self._depth = 0
        self._token = ""

    def acquire(self, limit: float) -> bool:
        deadline = time.monotonic() + limit
        if not self._thread.acquire(timeout=max(0.0, limit)):
            return False
        held = self._depth > 0
        try:
            if not held:
                token, had = "", None
                while had is None:
                    token = uuid.uuid4().hex
                    had = self._head.hold(token, deadline - time.monotonic())
                held = had
                if held:
                    self._token = token
                    Background(lambda: self._keep(token))
        finally:
            if held:
                self._depth += 1
            else:
                self._thread.release()
        return held

    def _keep(self, token: str) -> None:
        while self._token == token:
            try:
                self._head.hold_on(token)
            except StaleOwner:
                return
            except BucketUnavailable:
                pass  # its owner is being replaced, and does not know of the lock then
            time.sleep(BEAT_SECONDS)

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            token, self._token = self._token, ""
            self._head.release(token)
        self._thread.release()

    def close(self) -> None:
        """Nothing: it lies with the head."""

    def __enter__(self) -> SharedLock:
        if not self.acquire(LOCK_SECONDS):
            raise WaitTimeout(
                f"waited {LOCK_SECONDS:g} s to have queue {self._head.bucket.target.queue!r} alone:"
                " another process does. See which ones there are with stats()."
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
