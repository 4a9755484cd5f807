"""The client's side of the data plane: a way to the Flight server of another process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.flight as flight

from persisting_torch.cluster.secret import HOST_NAME, Credentials
from persisting_torch.cluster.wire import LARGEST_MESSAGE, Message, from_wire
from persisting_torch.errors import PersistingError
from persisting_torch.queue.pieces import in_pieces

ANSWER = b"persisting_torch answer"
HERE = "here"  # the action that is answered at once, by nothing
HERE_SECONDS = 0.5
CHUNK_BYTES = 1 << 20  # messages of 256 KB to 4 MB stream fastest
ALIGNMENT = 64  # bytes, as torch likes it
CONNECT_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 500),  # that one try to connect may take, to a busy peer, too
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),  # else a new client may use the connection of an old one
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]


class Peer:
    """A way to the Flight server of another process; thread-safe, connected when first used.

    Each call raises what the peer's handler raised, and BucketUnavailable if there was no answer
    within `timeout` seconds: the peer is gone, out of reach or stopped, or has another passphrase.
    It may have done what it was asked to, then. A Ctrl-C takes effect when the call ends.

    A connection on which nothing comes at all is left, and the next call makes a new one: TCP tries
    again after ever longer pauses, so that an old one is of no use for as long again as the network
    was away.
    """

    def __init__(self, address: str, credentials: Credentials | None) -> None:
        self.address = address
        self._credentials = credentials
        self._lock = threading.Lock()
        self._client: flight.FlightClient | None = None
        self.left = 0  # how many connections were given up

    def ask(self, request: Message, timeout: float) -> Message:
        """An answer without data."""
        action = flight.Action("ask", request.pack())
        with self._telling() as client:
            parts, size = [], 0
            for result in client.do_action(action, options=_limit(timeout)):
                parts.append(result.body)
                size += result.body.size
                if size > LARGEST_MESSAGE:
                    raise pa.ArrowInvalid("its answer is too large")
            return _unpacked(parts[0] if len(parts) == 1 else b"".join(parts))

    def get(self, request: Message, timeout: float) -> tuple[Message, pa.Table]:
        """An answer with a table, its columns aligned as torch likes them."""
        ticket = flight.Ticket(request.pack())
        with self._telling() as client:
            reader = client.do_get(ticket, _limit(timeout))
            batches = []
            while True:
                try:
                    batches.append(reader.read_chunk().data)
                except StopIteration:
                    break
                batches[-1].validate(full=True)
            metadata = dict(reader.schema.metadata or {})
            answer = _unpacked(metadata.pop(ANSWER, b""))
            table = aligned(pa.Table.from_batches(batches, schema=reader.schema))
            return answer, table.replace_schema_metadata(metadata or None)

    def put(self, request: Message, table: pa.Table, timeout: float) -> Message:
        """Send a table; the answer comes when the peer has committed it."""
        descriptor = flight.FlightDescriptor.for_command(request.pack())
        with self._telling() as client:
            writer, reader = client.do_put(descriptor, table.schema, _limit(timeout))
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
    def _telling(self) -> Iterator[flight.FlightClient]:
        client = self._connected()
        try:
            yield client
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            if isinstance(error, flight.FlightTimedOutError):
                self._look_after(client)
            raise from_wire(error, f"the process at {self.address}") from None

    def _look_after(self, client: flight.FlightClient) -> None:
        """Leave a connection if it is dead, to the calls that are under way on it."""
        is_used = self._client is client
        if not is_used:
            return
        try:
            list(client.do_action(HERE, _limit(HERE_SECONDS)))
        except (flight.FlightError, pa.ArrowException, OSError):
            with self._lock:
                if self._client is client:
                    self._client = None
                    self.left += 1


def _unpacked(data: bytes | pa.Buffer) -> Message:
    try:
        return Message.unpack(data)
    except ValueError as error:
        raise pa.ArrowInvalid(f"its answer is damaged: {error}") from None


def in_chunks(table: pa.Table) -> pa.Table:
    """The table in batches of about a megabyte, which stream faster than one large one."""
    return in_pieces(table, CHUNK_BYTES)


def aligned(table: pa.Table, to: int = ALIGNMENT) -> pa.Table:
    """The table with each buffer at an address that is a multiple of so many bytes.

    What has to move for that becomes one piece: it would be copied again where that is needed, as
    Flight's own alignment of each message is.
    """
    columns = [
        column if _is_aligned(column, to) else pa.concat_arrays(column.chunks)
        for column in table.columns
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _is_aligned(column: pa.ChunkedArray, to: int) -> bool:
    return all(
        buffer is None or buffer.address % to == 0
        for chunk in column.chunks
        for buffer in chunk.buffers()
    )


def _limit(seconds: float) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(timeout=max(0.001, seconds))


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
