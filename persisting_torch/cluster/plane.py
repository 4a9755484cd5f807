"""The data plane: one Arrow Flight server in each process that owns something, for its peers.

One round trip for each request. `get` sends a message in the ticket and receives a table whose
schema carries the answer; `put` sends a table and receives a message once it is committed; `ask`
sends and receives messages only.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from persisting_torch.cluster.peer import ANSWER, CHUNK_BYTES, HERE, Peer, in_chunks, note_use
from persisting_torch.cluster.secret import Credentials
from persisting_torch.cluster.wire import Message, to_wire
from persisting_torch.errors import BucketUnavailable
from persisting_torch.queue.threads import Background

__all__ = ["Handler", "Peer", "Server", "waiting"]

LARGEST_ASIDE = 16 << 20  # of an answer beside a table; larger ones are for `ask`
LARGEST_TABLE = 2 << 30
MOST_AT_ONCE = 32
MOST_INSIDE = 1024
QUEUED_SECONDS = 30.0
CLOSE_SECONDS = 1.0

Handler = Callable[[Message, "pa.Table | None"], "tuple[Message, pa.Table | None]"]

_at_work = threading.local()


@contextmanager
def waiting() -> Iterator[None]:
    """Within a handler: let others work while it waits for what only they can bring about."""
    turns: threading.Semaphore | None = getattr(_at_work, "turns", None)
    if turns is None:
        yield
        return
    turns.release()
    try:
        yield
    finally:
        turns.acquire()


class Server(flight.FlightServerBase):  # type: ignore[misc]
    """Answers requests by one handler, in threads of Flight's own.

    32 requests with tables and 32 without are worked on at once; those that wait, in `waiting`, do
    not count. Whatever the handler raises reaches the peer as its kind and text, and nothing else.
    """

    def __init__(
        self, host: str, handler: Handler, credentials: Credentials | None, port: int = 0
    ) -> None:
        scheme = "grpc" if credentials is None else "grpc+tls"
        secured: dict[str, Any] = {}
        if credentials is not None:
            secured = {
                "tls_certificates": [(credentials.certificate, credentials.key)],
                "verify_client": True,
                "root_certificates": credentials.authority,
            }
        note_use()
        super().__init__(f"{scheme}://{host}:{port}", **secured)
        _end_it_ourselves(self)
        self.address = f"{host}:{self.port}"
        self.closing = False
        self.ended = False
        self._handler = handler
        self._for_tables = threading.Semaphore(MOST_AT_ONCE)
        self._for_asks = threading.Semaphore(MOST_AT_ONCE)
        self._lock = threading.Lock()
        self._inside = 0

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> Iterator[flight.Result]:
        if action.type == HERE:  # whatever others are at
            return iter([])
        with self._telling(), self._turn(self._for_asks):
            answer, _ = self._handler(Message.unpack(action.body), None)
            packed = pa.py_buffer(answer.pack())
        whole, rest = divmod(packed.size, CHUNK_BYTES)
        parts = [packed.slice(number * CHUNK_BYTES, CHUNK_BYTES) for number in range(whole)]
        parts.append(packed.slice(whole * CHUNK_BYTES, rest))
        return iter([flight.Result(part) for part in parts])

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.RecordBatchStream:
        with self._telling(), self._turn(self._for_tables):
            answer, table = self._handler(Message.unpack(ticket.ticket), None)
            aside = answer.pack()
            if len(aside) > LARGEST_ASIDE:
                raise ValueError(f"an answer of {len(aside)} bytes beside a table")
            table = pa.table({}) if table is None else table
            metadata = {**(table.schema.metadata or {}), ANSWER: aside}
            return flight.RecordBatchStream(in_chunks(table.replace_schema_metadata(metadata)))

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        with self._telling(), self._turn(self._for_tables):
            table = _received(reader)
            if table is None:
                return
            answer, _ = self._handler(Message.unpack(descriptor.command), table)
            writer.write(pa.py_buffer(answer.pack()))

    @contextmanager
    def _turn(self, turns: threading.Semaphore) -> Iterator[None]:
        with self._lock:
            full = self._inside >= MOST_INSIDE
            self._inside += not full
        if full:
            raise BucketUnavailable(f"the process at {self.address} has too much to do.")
        try:
            if not turns.acquire(timeout=QUEUED_SECONDS):
                raise BucketUnavailable(f"the process at {self.address} has too much to do.")
            _at_work.turns = turns
            try:
                if self.closing:
                    raise BucketUnavailable(f"the process at {self.address} is closing.")
                yield
            finally:
                _at_work.turns = None
                turns.release()
        finally:
            with self._lock:
                self._inside -= 1

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise to_wire(error) from None

    def close(self) -> None:
        """Refuse what comes, and end; not `ended` where a peer does not read what it asked for."""
        self.closing = True
        ending = Background(self.shutdown)
        ending.join(CLOSE_SECONDS)
        self.ended = not ending.is_alive()


def _end_it_ourselves(server: Server) -> None:
    """Keep pyarrow from shutting a server down at exit: that waits for every peer, without limit.

    The list of finalizers is private; without it, such an exit is late, and nothing else.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        found = finalizer.peek()
        if found is not None and found[0] is server:
            finalizer.atexit = False


def _received(reader: flight.MetadataRecordBatchReader) -> pa.Table | None:
    """The table that was put; None if its sender died or gave up before the last marker."""
    batches, rows, size, declared = [], 0, 0, None
    while declared is None:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return None
        if chunk.data is not None:
            chunk.data.validate(full=True)
            batches.append(chunk.data)
            rows += chunk.data.num_rows
            size += chunk.data.nbytes
        if size > LARGEST_TABLE:
            raise ValueError(f"a table of more than {LARGEST_TABLE} bytes; put it in parts")
        if chunk.app_metadata is not None:
            declared = int(chunk.app_metadata.to_pybytes())
    if rows != declared:
        raise ValueError(f"{rows} rows arrived of the {declared} that were sent")
    return pa.Table.from_batches(batches, schema=reader.schema)
