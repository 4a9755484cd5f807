"""Requests and tables between processes: carried whole, within limits, or refused with a reason."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from persisting_torch.cluster import peer as peers
from persisting_torch.cluster import plane
from persisting_torch.cluster.plane import Peer, Server, waiting
from persisting_torch.cluster.secret import credentials
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import (
    BucketUnavailable,
    PersistingError,
    QueueSealed,
    SchemaError,
    StaleOwner,
    WaitTimeout,
)
from tests.cluster.processes import running

TABLE = pa.table({"a": np.arange(300_000), "b": [b"x", None, b"yz"] * 100_000})

BIG = pa.table({"a": np.zeros(1 << 22)})


@pytest.fixture(params=["open", "secured"])
def secret(request):
    return None if request.param == "open" else credentials("a secret of tests")


@pytest.fixture
def serve():
    """Serve a handler in this process; the way to it."""
    servers = []

    def serving(handler, secret=None):
        server = Server("127.0.0.1", handler, secret)
        peer = Peer(server.address, secret)
        servers.append((server, peer))
        return peer

    yield serving
    for server, peer in servers:
        peer.close()
        server.close()


def echo(request, table):
    return Message({"said": request.header}, request.attached), table


SERVER = """
import time
import numpy as np, pyarrow as pa
from persisting_torch.cluster.plane import Server
from persisting_torch.cluster.secret import credentials
from persisting_torch.cluster.wire import Message

table = pa.table({"a": np.zeros(1 << 24)})  # 128 MB

def handler(request, put):
    time.sleep(request.header.get("sleep", 0))
    return Message({"pid": os.getpid(), "rows": put and put.num_rows}), table

secret = credentials(sys.argv[2]) if sys.argv[2:] else None
server = Server("127.0.0.1", handler, secret, int(sys.argv[1]))
say(server.address)
hear()
server.close()
"""


@pytest.fixture
def away():
    """A server in a process of its own, and the way to it."""
    with running(SERVER, 0) as process:
        peer = Peer(process.said(), None)
        yield process, peer
        peer.close()


CALLS = {
    "ask": lambda peer, header, timeout: peer.ask(Message(header), timeout),
    "get": lambda peer, header, timeout: peer.get(Message(header), timeout),
    "put": lambda peer, header, timeout: peer.put(Message(header), TABLE, timeout),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


# What is carried


def test_messages_and_tables_arrive_as_they_were_sent(serve, secret):
    received = []

    def handler(request, table):
        received.append((request.header, list(request.attached), table))
        return Message({"n": len(received)}, [b"more", b""]), table or TABLE

    peer = serve(handler, secret)
    request = Message({"op": "ä", "list": [1, None]}, [b"", b"\0bytes"])
    assert peer.ask(request, 5).header == {"n": 1}
    answer, table = peer.get(request, 5)
    assert answer == Message({"n": 2}, [b"more", b""])
    assert table.equals(TABLE)
    assert peer.put(request, TABLE, 5).attached == [b"more", b""]
    assert received[2][2].equals(TABLE)
    assert all(told[:2] == (request.header, [b"", b"\0bytes"]) for told in received)


def test_an_answer_without_a_table_and_tables_without_rows_are_carried(serve):
    def handler(request, table):
        return Message({"rows": None if table is None else table.num_rows}), None

    peer = serve(handler)
    assert peer.get(Message({}), 5)[1].num_columns == 0
    assert peer.put(Message({}), TABLE.slice(0, 0), 5).header == {"rows": 0}
    assert peer.put(Message({}), pa.table({}), 5).header == {"rows": 0}


def test_a_schema_keeps_its_metadata_and_nothing_is_added(serve):
    marked = TABLE.slice(0, 2).replace_schema_metadata({"own": "note"})
    peer = serve(lambda request, table: (Message({}), marked))
    assert peer.get(Message({}), 5)[1].schema.metadata == {b"own": b"note"}


def test_columns_are_aligned_when_they_arrive(serve):
    odd = TABLE.slice(1).select(["a"])
    _, table = serve(lambda request, put: (Message({}), odd)).get(Message({}), 5)
    addresses = [chunk.buffers()[1].address for chunk in table["a"].chunks]
    assert all(address % 64 == 0 for address in addresses)
    assert table.equals(odd)


def test_ask_carries_tens_of_megabytes_both_ways(serve):
    large = random.Random(0).randbytes(40 << 20)
    assert serve(echo).ask(Message({}, [large]), 60).attached == [large]


def test_an_answer_is_carried_whatever_its_length_is(serve):
    peer = serve(lambda request, table: (Message({}, [bytes(request.header["n"])]), None))
    empty = len(Message({}, [bytes(peers.CHUNK_BYTES)]).pack()) - peers.CHUNK_BYTES
    for length in (0, 1, *(k * peers.CHUNK_BYTES - empty + d for k in (1, 3) for d in (-1, 0, 1))):
        assert len(peer.ask(Message({"n": length}), 5).attached[0]) == length


def test_a_large_answer_beside_a_table_is_refused_with_a_reason(serve):
    def handler(request, table):
        return Message({}, [bytes(plane.LARGEST_ASIDE)]), TABLE

    with pytest.raises(ValueError, match="beside a table"):
        serve(handler).get(Message({}), 5)


# Errors


@each_call
@pytest.mark.parametrize(
    "error",
    [KeyError("k"), SchemaError("s"), StaleOwner("o"), BucketUnavailable("b"), WaitTimeout("w")],
    ids=lambda error: type(error).__name__,
)
def test_what_the_handler_raises_is_raised_here(serve, call, error):
    def handler(request, table):
        raise error

    with pytest.raises(type(error)) as caught:
        call(serve(handler), {}, 5)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)


@each_call
def test_a_long_error_arrives_cut_and_of_its_kind(serve, call):
    def handler(request, table):
        raise QueueSealed("ä€😀" * 100_000)

    with pytest.raises(QueueSealed, match=r"^ä€😀ä€"):
        call(serve(handler), {}, 5)


@each_call
def test_nothing_of_the_servers_code_is_told(serve, call):
    def handler(request, table):
        raise RuntimeError("broken")

    peer = serve(handler)
    with pytest.raises(PersistingError) as caught:
        call(peer, {}, 5)
    assert str(caught.value) == "RuntimeError: broken"
    client = flight.FlightClient(f"grpc://{peer.address}")
    with pytest.raises(flight.FlightServerError) as raw:
        list(client.do_action(flight.Action("ask", Message({}).pack())))
    assert "Traceback" not in str(raw.value)
    assert "handler" not in str(raw.value)


def test_a_request_that_cannot_be_told_is_an_error_of_the_caller(serve):
    peer = serve(echo)
    with pytest.raises(TypeError):
        peer.ask(Message({"a": object()}), 5)
    assert peer.ask(Message({"a": 1}), 5).header == {"said": {"a": 1}}


def test_damaged_messages_are_refused_and_the_server_lives_on(serve):
    peer = serve(echo)
    client = flight.FlightClient(f"grpc://{peer.address}")
    packed = Message({"op": "x"}, [b"abc"]).pack()
    chance = random.Random(1)
    refused = 0
    for _ in range(300):
        damaged = bytearray(packed[: chance.choice([len(packed), chance.randrange(len(packed))])])
        for _ in range(chance.randrange(3)):
            if damaged:
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            list(client.do_action(flight.Action("ask", bytes(damaged))))
            client.do_get(flight.Ticket(bytes(damaged))).read_all()
        except flight.FlightServerError as error:
            refused += b"ValueError" in error.extra_info
    assert refused > 100
    assert peer.ask(Message({"a": 1}), 5).header == {"said": {"a": 1}}


def test_an_answer_that_is_damaged_is_a_peer_that_is_not_available():
    class Odd(flight.FlightServerBase):
        def do_action(self, context, action):
            return iter([flight.Result(b"\x05\0\0\0{}")])

        def do_get(self, context, ticket):
            return flight.RecordBatchStream(pa.table({"a": [1]}))

    with Odd("grpc://127.0.0.1:0") as server:
        peer = Peer(f"127.0.0.1:{server.port}", None)
        with pytest.raises(BucketUnavailable, match="damaged"):
            peer.ask(Message({}), 5)
        with pytest.raises(BucketUnavailable, match="damaged"):
            peer.get(Message({}), 5)
        with pytest.raises(BucketUnavailable):
            peer.put(Message({}), TABLE, 5)
        peer.close()


# Puts


@pytest.mark.parametrize("marker", [None, b"", b"2", b"4", b"x"])
def test_a_put_without_its_right_last_marker_is_not_done(serve, marker):
    puts = []

    def handler(request, table):
        puts.append(table)
        return Message({}), None

    peer = serve(handler)
    client = flight.FlightClient(f"grpc://{peer.address}")
    command = flight.FlightDescriptor.for_command(Message({}).pack())
    batch = pa.record_batch({"a": [1, 2, 3]})

    def put():
        writer, _ = client.do_put(command, batch.schema)
        writer.write_batch(batch)
        if marker is not None:
            writer.write_metadata(marker)
        writer.close()

    if marker:
        with pytest.raises(flight.FlightServerError):
            put()
    else:
        put()
    assert puts == []
    peer.put(Message({}), TABLE, 5)
    assert len(puts) == 1


def test_a_put_whose_sender_dies_is_not_done(serve):
    puts = []

    def handler(request, table):
        puts.append(table)
        return Message({}), None

    peer = serve(handler)
    script = """
    import pyarrow as pa, pyarrow.flight as flight
    from persisting_torch.cluster.wire import Message
    client = flight.FlightClient("grpc://" + sys.argv[1])
    batch = pa.record_batch({"a": list(range(100_000))})
    writer, _ = client.do_put(flight.FlightDescriptor.for_command(Message({}).pack()), batch.schema)
    for _ in range(5):
        writer.write_batch(batch)
    say("sent")
    hear()
    """
    with running(script, peer.address) as sender:
        sender.said()
        sender.kill()
    time.sleep(0.2)
    assert puts == []
    peer.put(Message({}), TABLE, 5)
    assert len(puts) == 1


def test_a_table_that_is_too_large_is_refused_while_it_comes(serve, monkeypatch):
    monkeypatch.setattr(plane, "LARGEST_TABLE", 1 << 20)
    peer = serve(echo)
    with pytest.raises(ValueError, match="put it in parts"):
        peer.put(Message({}), pa.table({"a": np.zeros(1 << 23)}), 20)
    assert peer.put(Message({}), TABLE.slice(0, 9), 5).header == {"said": {}}


# How many at once


def test_at_most_32_are_worked_on_at_once_and_all_are_answered(serve):
    lock, now, most = threading.Lock(), 0, 0
    crowded = threading.Event()

    def handler(request, table):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            if now > 8:
                crowded.set()
        assert crowded.wait(20)
        time.sleep(0.02)
        with lock:
            now -= 1
        return Message(request.header), None

    peer = serve(handler)
    with ThreadPoolExecutor(100) as pool:
        told = pool.map(lambda n: peer.ask(Message({"n": n}), 30).header["n"], range(300))
        assert list(told) == list(range(300))
    assert most <= plane.MOST_AT_ONCE


def test_those_that_wait_for_others_do_not_keep_them_out(serve):
    news, lock, waiters = threading.Event(), threading.Lock(), 0

    def handler(request, table):
        nonlocal waiters
        if request.header["op"] == "wait":
            with lock:
                waiters += 1
            with waiting():
                assert news.wait(30)
        else:
            news.set()
        return Message(request.header), None

    peer = serve(handler)
    with ThreadPoolExecutor(60) as pool:
        asked = [pool.submit(peer.ask, Message({"op": "wait"}), 30) for _ in range(60)]
        while waiters < 60:
            time.sleep(0.005)
        peer.ask(Message({"op": "bring"}), 5)
        assert [future.result().header["op"] for future in asked] == ["wait"] * 60


def test_who_comes_when_the_house_is_full_is_told_so(serve, monkeypatch):
    monkeypatch.setattr(plane, "MOST_INSIDE", 4)
    free, lock, waiters = threading.Event(), threading.Lock(), 0

    def handler(request, table):
        nonlocal waiters
        with lock:
            waiters += 1
        with waiting():
            free.wait(30)
        return Message({}), None

    peer = serve(handler)
    with ThreadPoolExecutor(4) as pool:
        inside = [pool.submit(peer.ask, Message({}), 30) for _ in range(4)]
        while waiters < 4:
            time.sleep(0.005)
        with pytest.raises(BucketUnavailable, match="too much to do"):
            peer.ask(Message({}), 5)
        free.set()
        assert [future.result() for future in inside] == [Message({}, [])] * 4
    peer.ask(Message({}), 5)


def test_thirty_threads_share_one_peer(serve, secret):
    peer = serve(echo, secret)

    def work(number):
        for step in range(10):
            assert peer.ask(Message({"n": [number, step]}), 30).header["said"]["n"] == [
                number,
                step,
            ]
            answer, table = peer.get(Message({"n": number}), 30)
            assert answer.header["said"] == {"n": number}
            assert table.num_columns == 0
            put = TABLE.slice(number, 1000)
            assert peer.put(Message({"n": step}), put, 30).header["said"] == {"n": step}
        return number

    with ThreadPoolExecutor(30) as pool:
        assert list(pool.map(work, range(30))) == list(range(30))


def test_readers_that_do_not_read_cost_little_memory(away):
    process, peer = away
    peer.ask(Message({}), 5)
    memory = psutil.Process(process.popen.pid).memory_info
    before = memory().rss
    client = flight.FlightClient(f"grpc://{peer.address}")
    options = flight.FlightCallOptions(timeout=20)
    readers = [client.do_get(flight.Ticket(Message({}).pack()), options) for _ in range(4)]
    readers += [
        flight.FlightClient(f"grpc://{peer.address}").do_get(
            flight.Ticket(Message({}).pack()), options
        )
        for _ in range(4)
    ]
    time.sleep(1.0)
    grown = memory().rss - before
    assert grown < 8 * 40 << 20, f"{grown >> 20} MB for 8 readers of 128 MB each"
    for reader in readers:
        reader.cancel()
    assert peer.ask(Message({}), 5).header["pid"] == process.popen.pid


# Peers that do not answer


@each_call
def test_every_call_ends_at_its_deadline(serve, call):
    over = threading.Event()
    peer = serve(lambda request, table: (over.wait(30.0), (Message({}), None))[1])
    began = time.monotonic()
    with pytest.raises(BucketUnavailable, match="did not answer in time"):
        call(peer, {}, 0.3)
    assert 0.2 < time.monotonic() - began < 10
    over.set()


@each_call
def test_a_killed_peer_is_noticed_at_once(away, call):
    process, peer = away
    peer.ask(Message({}), 5)
    threading.Timer(0.3, process.kill).start()
    began = time.monotonic()
    with pytest.raises(BucketUnavailable):
        call(peer, {"sleep": 20}, 30)
    assert time.monotonic() - began < 10
    began = time.monotonic()
    with pytest.raises(BucketUnavailable):
        call(peer, {}, 30)
    assert time.monotonic() - began < 10


@each_call
def test_a_stopped_peer_costs_no_more_than_the_deadline(away, call):
    process, peer = away
    peer.ask(Message({}), 5)
    process.send(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(BucketUnavailable):
        call(peer, {}, 0.5)
    assert 0.4 < time.monotonic() - began < 10
    process.send(signal.SIGCONT)
    call(peer, {}, 20)


def test_nobody_there_is_noticed_at_once():
    peer = Peer("127.0.0.1:1", None)
    began = time.monotonic()
    with pytest.raises(BucketUnavailable, match=r"127\.0\.0\.1:1 does not answer"):
        peer.ask(Message({}), 30)
    assert time.monotonic() - began < 10


def test_a_server_that_starts_again_on_its_port_is_found_by_the_same_peer():
    with running(SERVER, 0) as first:
        address = first.said()
        peer = Peer(address, None)
        old = peer.ask(Message({}), 5).header["pid"]
        first.kill()
    with pytest.raises(BucketUnavailable):
        peer.ask(Message({}), 5)
    with running(SERVER, address.split(":")[1]) as second:
        assert second.said() == address
        deadline = time.monotonic() + 20
        while True:
            try:
                assert peer.ask(Message({}), 5).header["pid"] == second.popen.pid != old
                break
            except BucketUnavailable:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    peer.close()


def test_a_server_that_closes_says_so(serve):
    server = Server("127.0.0.1", echo, None)
    peer = Peer(server.address, None)
    peer.ask(Message({}), 5)
    server.closing = True
    with pytest.raises(BucketUnavailable, match="is closing"):
        peer.ask(Message({}), 5)
    server.close()
    assert server.ended
    with pytest.raises(BucketUnavailable):
        peer.ask(Message({}), 5)


def test_a_reader_that_does_not_read_holds_up_no_close():
    more = pa.concat_tables([BIG] * 20)  # than buffers on the way can hold
    server = Server("127.0.0.1", lambda request, table: (Message({}), more), None)
    client = flight.FlightClient(f"grpc://{server.address}")
    reader = client.do_get(flight.Ticket(Message({}).pack()), flight.FlightCallOptions(timeout=60))
    reader.read_chunk()
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 10
    assert not server.ended
    with pytest.raises(BucketUnavailable):
        Peer(server.address, None).ask(Message({}), 5)
    reader.cancel()


# Who may


def test_another_secret_is_told_apart_from_a_peer_that_is_gone(serve):
    ours, theirs = credentials("the first secret"), credentials("the second secret")
    peer = serve(echo, ours)
    for stranger in (theirs, None):
        began = time.monotonic()
        with pytest.raises(BucketUnavailable) as caught:
            Peer(peer.address, stranger).ask(Message({}), 20)
        assert time.monotonic() - began < 5
        if stranger is not None:
            assert "another passphrase" in str(caught.value)
    assert peer.ask(Message({"a": 1}), 5).header == {"said": {"a": 1}}
    open_peer = serve(echo)
    with pytest.raises(BucketUnavailable, match="another passphrase"):
        Peer(open_peer.address, ours).ask(Message({}), 20)


def test_who_has_no_certificate_is_refused(serve):
    ours = credentials("the first secret")
    asked = []
    peer = serve(lambda request, table: (asked.append(1), (Message({}), None))[1], ours)
    without = flight.FlightClient(
        f"grpc+tls://{peer.address}",
        tls_root_certs=ours.authority,
        override_hostname=peers.HOST_NAME,
    )
    unverified = flight.FlightClient(f"grpc+tls://{peer.address}", disable_server_verification=True)
    plain = flight.FlightClient(f"grpc://{peer.address}")
    for client in (without, unverified, plain):
        with pytest.raises((flight.FlightError, pa.ArrowException)):
            list(
                client.do_action(
                    flight.Action("ask", Message({}).pack()), flight.FlightCallOptions(timeout=3)
                )
            )
    assert asked == []
    peer.ask(Message({}), 5)
    assert asked == [1]


# Forks and signals


def test_a_fork_is_told_what_to_do_and_its_parent_goes_on(serve):
    peer = serve(echo)
    peer.ask(Message({}), 5)
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            peer.ask(Message({}), 5)
            os.write(tell, b"answered")
        except PersistingError as error:
            os.write(tell, str(error).encode())
        except BaseException as error:
            os.write(tell, repr(error).encode())
        finally:
            os._exit(0)
    os.close(tell)
    assert b"multiprocessing_context='forkserver'" in os.read(told, 1 << 16)
    os.close(told)
    os.waitpid(pid, 0)
    for _ in range(5):
        assert peer.ask(Message({"a": 1}), 5).header == {"said": {"a": 1}}


INTERRUPTED = """
import random, signal, threading, time
import pyarrow as pa
from persisting_torch.cluster.plane import Peer
from persisting_torch.cluster.wire import Message

peer = Peer(sys.argv[1], None)
table = pa.table({"a": list(range(1000))})
calls = {
    "ask": lambda: peer.ask(Message({"n": 1}), 10),
    "get": lambda: peer.get(Message({"n": 1}), 10),
    "put": lambda: peer.put(Message({"n": 1}), table, 10),
}
call = calls[sys.argv[2]]
call()
answered, interrupted, begun, ended = 0, 0, False, False

def storm():
    while not ended:
        time.sleep(random.random() * 0.004)
        if begun:
            os.kill(os.getpid(), signal.SIGINT)

thread = threading.Thread(target=storm)
thread.start()
deadline = time.monotonic() + 2
while True:
    try:
        begun = True
        while time.monotonic() < deadline:
            try:
                call()
                answered += 1
            except KeyboardInterrupt:
                interrupted += 1
        ended = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        break
    except KeyboardInterrupt:
        interrupted += 1
thread.join()
call()
say([answered, interrupted])
"""


@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_in_the_middle_of_calls_leaves_the_peer_usable(serve, call):
    peer = serve(echo)
    with running(INTERRUPTED, peer.address, call) as process:
        answered, interrupted = process.said(30)
        assert process.status() == 0
    assert answered > 20
    assert interrupted > 20
    assert peer.ask(Message({"a": 1}), 5).header == {"said": {"a": 1}}
