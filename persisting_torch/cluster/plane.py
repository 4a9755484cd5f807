"""The data plane: one Arrow Flight server in each process that owns something, and its clients.

One round trip for each request. `get` sends a message in the ticket and receives a table whose
schema carries the answer; `put` sends a table and receives a message once it is committed; `ask`
sends and receives messages only.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
from pyarrow.ipc import IpcReadOptions

from persisting_torch.cluster.secret import HOST_NAME, Credentials
from persisting_torch.cluster.wire import LARGEST_MESSAGE, Message, from_wire, to_wire
from persisting_torch.errors import BucketUnavailable, PersistingError
from persisting_torch.queue.threads import Background

ANSWER = b"persisting_torch answer"
CHUNK_BYTES = 1 << 20  # messages of 256 KB to 4 MB stream fastest
LARGEST_ASIDE = 16 << 20  # of an answer beside a table; larger ones are for `ask`
LARGEST_TABLE = 2 << 30
MOST_AT_ONCE = 32
MOST_INSIDE = 1024
QUEUED_SECONDS = 30.0
CLOSE_SECONDS = 1.0
CONNECT_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]

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


class Peer:
    """A way to the Flight server of another process; thread-safe, connected when first used.

    Each call raises what the peer's handler raised, and BucketUnavailable if there was no answer
    within `timeout` seconds: the peer is gone, out of reach or stopped, or has another passphrase.
    It may have done what it was asked to, then. A Ctrl-C takes effect when the call ends.
    """

    def __init__(self, address: str, credentials: Credentials | None) -> None:
        self.address = address
        self._credentials = credentials
        self._lock = threading.Lock()
        self._client: flight.FlightClient | None = None

    def ask(self, request: Message, timeout: float) -> Message:
        """An answer without data."""
        action = flight.Action("ask", request.pack())
        with self._telling():
            parts, size = [], 0
            for result in self._connected().do_action(action, options=_limit(timeout)):
                parts.append(result.body)
                size += result.body.size
                if size > LARGEST_MESSAGE:
                    raise pa.ArrowInvalid("its answer is too large")
            return _unpacked(parts[0] if len(parts) == 1 else b"".join(parts))

    def get(self, request: Message, timeout: float) -> tuple[Message, pa.Table]:
        """An answer with a table, its columns aligned as torch likes them."""
        ticket = flight.Ticket(request.pack())
        with self._telling():
            reader = self._connected().do_get(ticket, _limit(timeout))
            batches = []
            while True:
                try:
                    batches.append(reader.read_chunk().data)
                except StopIteration:
                    break
                batches[-1].validate(full=True)
            metadata = dict(reader.schema.metadata or {})
            answer = _unpacked(metadata.pop(ANSWER, b""))
            table = pa.Table.from_batches(batches, schema=reader.schema)
            return answer, table.replace_schema_metadata(metadata or None)

    def put(self, request: Message, table: pa.Table, timeout: float) -> Message:
        """Send a table; the answer comes when the peer has committed it."""
        descriptor = flight.FlightDescriptor.for_command(request.pack())
        with self._telling():
            writer, reader = self._connected().do_put(descriptor, table.schema, _limit(timeout))
            try:
                for batch in in_chunks(table).to_batches():
                    writer.write_batch(batch)
                writer.write_metadata(str(table.num_rows).encode())
                writer.done_writing()
                answer = reader.read()
            except pa.ArrowException:
                writer.close()  # raises what the peer said, if it refused amid the table
                raise
            writer.close()
            return _unpacked(b"" if answer is None else answer)

    def close(self) -> None:
        """End the connection; the next call makes a new one."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None and not _inherited:
            client.close()

    def _connected(self) -> flight.FlightClient:
        refuse_after_fork()
        with self._lock:
            if self._client is None:
                note_use()
                self._client = _connect(self.address, self._credentials)
            return self._client

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise from_wire(error, f"the process at {self.address}") from None


def _unpacked(data: bytes | pa.Buffer) -> Message:
    try:
        return Message.unpack(data)
    except ValueError as error:
        raise pa.ArrowInvalid(f"its answer is damaged: {error}") from None


def in_chunks(table: pa.Table) -> pa.Table:
    """The table in batches of about a megabyte, which stream faster than one large one."""
    rows = max(1, table.num_rows * CHUNK_BYTES // max(1, table.nbytes))
    return pa.Table.from_batches(table.to_batches(max_chunksize=rows), schema=table.schema)


def _limit(seconds: float) -> flight.FlightCallOptions:
    aligned = IpcReadOptions(ensure_alignment=pa.ipc.Alignment.At64Byte)
    return flight.FlightCallOptions(timeout=max(0.001, seconds), read_options=aligned)


def _connect(address: str, credentials: Credentials | None) -> flight.FlightClient:
    if credentials is None:
        return flight.FlightClient(f"grpc://{address}", generic_options=CONNECT_OPTIONS)
    return flight.FlightClient(
        f"grpc+tls://{address}",
        tls_root_certs=credentials.authority,
        cert_chain=credentials.certificate,
        private_key=credentials.key,
        override_hostname=HOST_NAME,
        generic_options=CONNECT_OPTIONS,
    )


# Forks. Flight's connections hang in the child of a process that used any, for ever.

_used = False
_inherited = False


def note_use() -> None:
    """Remember that this process has connections which a fork would break."""
    global _used
    _used = True


def refuse_after_fork() -> None:
    """Raise PersistingError in a fork of a process that is part of a cluster."""
    if _inherited:
        raise PersistingError(
            f"process {os.getpid()} was forked from one that is connected to a cluster, and cannot"
            " use its connections. Start processes by 'forkserver' or 'spawn', as in"
            " DataLoader(..., multiprocessing_context='forkserver')."
        )


def _after_fork_in_child() -> None:
    global _inherited
    _inherited = _used


os.register_at_fork(after_in_child=_after_fork_in_child)
