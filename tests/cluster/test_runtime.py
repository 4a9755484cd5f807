"""Processes become one cluster, tell why if they do not, and end cleanly whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pyarrow.flight as flight
import pytest

from persisting_torch import Queue, cluster
from persisting_torch.cluster import peer
from persisting_torch.cluster.addresses import Address, own_address, parse
from persisting_torch.cluster.secret import credentials
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import PersistingError
from tests.cluster.processes import DIE_WITH_PARENT, ROOT, running

SECRET = "a secret of tests"

# Nodes that open no queue, and so come up without loading what queues need.
STUB = """
import asyncio, sys, time, types
from persisting_torch import Queue, cluster
from persisting_torch.cluster import runtime
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import PersistingError

class Stub:
    def __init__(self, key, ownership): pass
    def answer(self, request, table): return Message(request.header), table
    def settle(self, limit, anyway): return True
    def close(self): pass
    def abandon(self): pass

cluster.engine = engine = types.ModuleType("persisting_torch.cluster.engine")
sys.modules[engine.__name__] = engine
engine.BucketStorage = lambda key, ownership, finder, fsync: Stub(key, ownership)

def nodes():
    return sorted(node.name for node in runtime.current().discover() if not node.doubtful)

def await_nodes(count, seconds=30):
    deadline = time.monotonic() + seconds
    while len(nodes()) != count and time.monotonic() < deadline:
        time.sleep(0.02)
    return nodes()
"""

MEMBER = (
    STUB
    + """
options = json.loads(sys.argv[1])

async def join():
    began = time.monotonic()
    try:
        await cluster.init(**options)
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - began]
    return ["joined", str(runtime.current().address), time.monotonic() - began]

say(asyncio.run(join()))
while (order := hear()) is not None:
    if order[0] == "nodes":
        say(await_nodes(order[1]))
    elif order[0] == "node":
        node = runtime.current().node
        say(node and [node.name, node.server.address])
    elif order[0] == "serve much":
        import numpy, pyarrow
        much = pyarrow.table({"a": numpy.zeros(1 << 23)})
        runtime.current().node.server._handler = lambda request, table: (Message({}), much)
        say("served")
    elif order[0] == "at once":
        import socket
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(name))) as some:
                    port = some.getsockname()[1:2]
                    if some.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found += [port, some.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)]
            except OSError:
                continue
        say(found)
    elif order[0] == "shutdown":
        asyncio.run(cluster.shutdown())
        say(cluster.is_active())
    elif order[0] == "init":
        say(asyncio.run(join()))
    elif order[0] == "raise":
        raise RuntimeError("as ordered")
    elif order[0] == "exit":
        sys.exit(order[1])
"""
)


def member(**options):
    return running(MEMBER, json.dumps(options))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Importing


def test_neither_pulsing_nor_flight_is_imported_before_it_is_used():
    code = (
        "import sys, persisting_torch, persisting_torch.cluster as c; assert not c.is_active();"
        "sys.exit(any(m in sys.modules for m in ('pulsing', 'pyarrow.flight', 'cryptography')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


# Addresses


@pytest.mark.parametrize(
    "text", ["", "7000", ":7000", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "1.2.3.4:70000"]
)
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="must be host:port"):
        parse(text, "addr")


def test_a_host_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="not known here"):
        parse("no-such-host.invalid:7000", "seeds")


def test_addresses_are_written_as_they_are_read():
    for text in ("127.0.0.1:7000", "[::1]:0"):
        assert str(parse(text, "addr")) == text
    assert isinstance(parse("localhost:80", "addr"), Address)


def test_without_a_passphrase_only_this_machine_is_listened_to():
    for open_to_all in ("10.0.0.7:7000", "192.168.1.1:0", "[2001:db8::1]:1"):
        with pytest.raises(ValueError, match="run code here"):
            own_address(open_to_all, None, insecure=False)
        assert own_address(open_to_all, None, insecure=True).host
        assert own_address(open_to_all, "secret", insecure=False).host
    for own in ("127.0.0.1:0", "127.1.2.3:7000", "[::1]:5"):
        assert own_address(own, None, insecure=False).ip.is_loopback
    for everywhere in ("0.0.0.0:7000", "[::]:1"):
        with pytest.raises(ValueError, match="not one that others can reach"):
            own_address(everywhere, "secret", insecure=True)


# Joining


def test_nodes_and_light_members_find_each_other():
    with ExitStack() as stack:
        first = stack.enter_context(member(passphrase=SECRET, name="first"))
        _, seed, _ = first.said()
        second = stack.enter_context(member(seeds=[seed], passphrase=SECRET, name="second"))
        light = stack.enter_context(member(seeds=[seed], passphrase=SECRET, owns_buckets=False))
        assert [process.said()[0] for process in (second, light)] == ["joined", "joined"]
        for process in (first, second, light):
            process.tell(["nodes", 2])
            assert process.said() == ["first", "second"]
        light.tell(["node"])
        assert light.said() is None
        second.tell(["node"])
        name, address = second.said()
        assert name == "second"
        assert address.startswith("127.0.0.1:")
        for process in (light, second, first):
            process.tell(None)
            assert process.status(20) == 0


def test_a_seed_that_comes_late_is_waited_for():
    seed = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        early = [stack.enter_context(member(seeds=[seed], passphrase=SECRET)) for _ in range(2)]
        time.sleep(1.5)
        late = stack.enter_context(member(addr=seed, passphrase=SECRET))
        assert late.said()[0] == "joined"
        for process in early:
            kind, _, seconds = process.said()
            assert kind == "joined"
            assert seconds < 15
        late.tell(["nodes", 3])
        assert len(late.said()) == 3


def test_with_the_same_seeds_everywhere_any_node_may_be_the_first():
    seeds = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with ExitStack() as stack:
        first = stack.enter_context(member(addr=seeds[1], seeds=seeds, passphrase=SECRET))
        assert first.said()[0] == "joined"
        second = stack.enter_context(member(addr=seeds[0], seeds=seeds, passphrase=SECRET))
        assert second.said()[0] == "joined"
        third = stack.enter_context(member(seeds=seeds, passphrase=SECRET))
        assert third.said()[0] == "joined"
        for process in (first, second, third):
            process.tell(["nodes", 3])
            assert len(process.said()) == 3


def test_a_node_that_starts_again_on_its_port_takes_its_old_place():
    port = free_port()
    with ExitStack() as stack:
        first = stack.enter_context(member(passphrase=SECRET, name="first"))
        _, seed, _ = first.said()
        options = {"addr": f"127.0.0.1:{port}", "seeds": [seed], "passphrase": SECRET}
        addresses = []
        for _ in range(2):
            again = stack.enter_context(member(**options))
            assert again.said()[0] == "joined"
            again.tell(["node"])
            name, address = again.said()
            assert name == f"{socket.gethostname()}:{port}"
            addresses.append(address)
            first.tell(["nodes", 2])
            assert first.said() == sorted(["first", name])
            again.kill()
        assert addresses[0] != addresses[1]


@pytest.mark.parametrize("given", ["another secret", None])
def test_another_passphrase_or_none_is_an_error_and_never_an_island(given):
    with member(passphrase=SECRET) as first:
        _, seed, _ = first.said()
        with member(seeds=[seed], passphrase=given, timeout=3) as stranger:
            kind, text, seconds = stranger.said()
            assert kind == "WaitTimeout"
            assert "another passphrase" in text
            assert seed in text
            assert seconds < 15
            stranger.tell(None)
            assert stranger.status(20) == 0
        first.tell(["nodes", 1])
        assert len(first.said()) == 1


def test_a_seed_that_is_not_there_is_an_error_that_says_so():
    seed = f"127.0.0.1:{free_port()}"
    with member(seeds=[seed], timeout=1) as alone:
        kind, text, seconds = alone.said()
        assert kind == "WaitTimeout"
        assert f"nobody listens at {seed}" in text
        assert "passphrase" in text
        assert 0.9 < seconds < 10


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secured", "open"])
def test_a_halted_seed_is_an_error_that_says_so(secret):
    with member(passphrase=secret) as halted:
        _, seed, _ = halted.said()
        halted.send(signal.SIGSTOP)
        with member(seeds=[seed], passphrase=secret, timeout=2) as stranger:
            kind, text, _ = stranger.said()
            assert kind == "WaitTimeout"
            assert f"what listens at {seed} does not answer. It may be halted" in text
        halted.send(signal.SIGCONT)


def test_a_port_that_is_taken_is_an_error_and_another_try_may_follow():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with member(addr=f"127.0.0.1:{taken.getsockname()[1]}") as process:
            kind, text, _ = process.said()
            assert kind == "PersistingError"
            assert "in use" in text
            taken.close()
            process.tell(["init"])
            assert process.said()[0] == "joined"


def test_joining_twice_is_an_error_and_after_shutdown_it_is_none():
    with member() as process:
        assert process.said()[0] == "joined"
        process.tell(["init"])
        kind, text, _ = process.said()
        assert kind == "PersistingError"
        assert "shutdown()" in text
        for _ in range(2):
            process.tell(["shutdown"])
            assert process.said() is False
            process.tell(["init"])
            assert process.said()[0] == "joined"


def test_without_a_cluster_there_is_no_runtime():
    from persisting_torch.cluster import runtime

    assert not cluster.is_active()
    with pytest.raises(PersistingError, match="not part of a cluster"):
        runtime.current()
    asyncio.run(cluster.shutdown())


# Other ways in


ADOPTED = (
    STUB
    + """
import pulsing

async def main():
    system = await pulsing.init("127.0.0.1:0")
    assert cluster.is_active()
    # As a Queue made in a coroutine would: the loop stands still meanwhile.
    found = runtime.current()
    say(system.addr)
    return found

loop = asyncio.new_event_loop()
found = loop.run_until_complete(main())
loop.close()  # Pulsing goes on without its loop
assert runtime.current() is found
say(await_nodes(2))
hear()
"""
)


def test_a_pulsing_that_the_user_has_started_is_used_even_when_its_loop_stands_still():
    with running(ADOPTED) as adopted:
        seed = adopted.said()
        with member(seeds=[seed], name="other") as other:
            assert other.said()[0] == "joined"
            other.tell(["nodes", 2])
            names = other.said()
            assert len(names) == 2
            assert adopted.said() == names
        adopted.tell(None)
        assert adopted.status(20) == 0


TORCHRUN = (
    STUB
    + """
cluster.init_from_torchrun()
node = runtime.current().node
names = await_nodes(1)
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
    json.dump([node is not None, names, runtime.current().others()], file)
deadline = time.monotonic() + 20
while len(os.listdir(sys.argv[1])) < 3 and time.monotonic() < deadline:
    time.sleep(0.02)
"""
)


def test_the_ranks_of_torchrun_become_one_cluster(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(DIE_WITH_PARENT + TORCHRUN)
    out = tmp_path / "out"
    out.mkdir()
    (out / "x").touch()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *command, str(out)], check=True, cwd=ROOT, timeout=90, env=environment
    )
    names = [f"{socket.gethostname()}:0"]
    assert json.loads((out / "0").read_text())[:2] == [True, names]
    assert json.loads((out / "1").read_text()) == [False, names, 1]


def test_outside_of_torchrun_its_way_in_says_what_is_missing(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(PersistingError, match="RANK"):
        cluster.init_from_torchrun()


HANDED = (
    STUB
    + """
import multiprocessing, pickle

def work(handle, answers):
    from persisting_torch.cluster.finder import Target
    finder = handle.finder()
    assert finder is handle.finder()
    answers.put([sorted(node.name for node in finder.nodes()), "pulsing" in sys.modules])

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    asyncio.run(cluster.init(**options))
    await_nodes(2)
    handle = runtime.current().handle()
    assert len(pickle.dumps(handle)) < 10_000
    assert options["passphrase"] not in repr(handle)
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        answers = context.Queue()
        child = context.Process(target=work, args=(handle, answers))
        child.start()
        say(answers.get(timeout=30))
        child.join(20)
        assert child.exitcode == 0
    try:
        pid = os.fork()
        if pid == 0:
            try:
                handle.finder()
            except PersistingError as error:
                os._exit(7)
            os._exit(0)
        say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    finally:
        hear()
"""
)


def test_a_handle_leads_other_processes_to_the_nodes_without_pulsing(tmp_path):
    script = tmp_path / "handed.py"
    script.write_text(DIE_WITH_PARENT + HANDED)
    with ExitStack() as stack:
        first = stack.enter_context(member(passphrase=SECRET, name="first"))
        _, seed, _ = first.said()
        second = stack.enter_context(member(seeds=[seed], passphrase=SECRET, name="second"))
        second.said()
        options = {"seeds": [seed], "passphrase": SECRET, "owns_buckets": False}
        light = stack.enter_context(running(script, json.dumps(options)))
        assert light.said() == [["first", "second"], False]
        assert light.said() == [["first", "second"], False]
        assert light.said() == 7
        light.tell(None)
        assert light.status(20) == 0


def test_replies_of_pulsing_leave_at_once():
    with member(owns_buckets=False) as process:
        _, address, _ = process.said()
        process.tell(["at once"])
        found = process.said()
        assert [int(address.split(":")[1])] in found
        assert found[found.index([int(address.split(":")[1])]) + 1] == 1


# Endings


ENDINGS = {
    "its end": (None, [0]),
    "sys.exit(3)": (["exit", 3], [3]),
    "an exception": (["raise"], [1]),
    "SIGTERM": (signal.SIGTERM, [143]),
    "Ctrl-C": (signal.SIGINT, [1, 130, -signal.SIGINT]),
    "shutdown": (["shutdown"], [0]),
}


@pytest.mark.parametrize("owns", [True, False], ids=["node", "light"])
def test_members_end_soon_and_with_their_own_exit_status(owns):
    with ExitStack() as stack:
        first = stack.enter_context(member(passphrase=SECRET))
        _, seed, _ = first.said()
        options = {"seeds": [seed], "passphrase": SECRET, "owns_buckets": owns}
        processes = {name: stack.enter_context(member(**options)) for name in ENDINGS}
        for process in processes.values():
            assert process.said()[0] == "joined"
        for name, (order, _) in ENDINGS.items():
            if isinstance(order, signal.Signals):
                processes[name].send(order)
            else:
                processes[name].tell(order)
        assert processes["shutdown"].said() is False
        processes["shutdown"].tell(None)
        for name, (_, statuses) in ENDINGS.items():
            assert processes[name].status(15) in statuses, (name, processes[name].errors())
        first.tell(None)
        assert first.status(8) == 0


def test_a_peer_that_does_not_read_what_it_asked_for_holds_up_no_end():
    with member(passphrase=SECRET) as process:
        process.said()
        process.tell(["serve much"])
        process.said()
        process.tell(["node"])
        _, address = process.said()
        client = peer._connect(address, credentials(SECRET))
        options = flight.FlightCallOptions(timeout=60)
        reader = client.do_get(flight.Ticket(Message({}).pack()), options)
        reader.read_chunk()
        process.tell(["exit", 3])
        assert process.status(8) == 3
        reader.cancel()


LATE = """
import _thread, asyncio, atexit, sys
from persisting_torch.queue import threads

threads.STARTS_NONE_AT_END = True

from persisting_torch import Queue, cluster

def none(*arguments):
    raise RuntimeError("can't create new thread at interpreter shutdown")

asyncio.run(cluster.init())
queue = Queue("q", sys.argv[1], num_buckets=4)
queue.sync.put([{"id": str(number)} for number in range(40)])
atexit.register(setattr, _thread, "start_new_thread", none)  # called before all others
"""


def test_what_waits_is_flushed_by_an_interpreter_that_starts_no_threads_at_its_end(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", LATE, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    with Queue("q", tmp_path) as queue:
        assert sorted(int(record["id"]) for record in queue.sync.get()) == list(range(40))
