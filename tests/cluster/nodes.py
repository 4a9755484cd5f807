"""A cluster of real processes on loopback, for tests that ask what its queues do.

    def fill(path: str) -> list[int]:               # a function of the test's module
        with Queue("q", path) as queue:
            return queue.sync.put([{"x": 1}, {"x": 2}]).global_indexes

    @pytest.fixture
    def nodes() -> Iterator[Cluster]:
        with Cluster() as cluster:
            yield cluster

    def test_...(nodes: Cluster, tmp_path: Path) -> None:
        nodes.grow(3)                               # three processes that own buckets
        client = nodes.client()                     # a light member: puts and reads, owns nothing
        assert client.call(fill, str(tmp_path)) == [0, 1]
        pending = client.begin(fill, str(tmp_path)) # goes on while the test does something else
        nodes[1].kill()                             # SIGKILL; stop() and go_on(): SIGSTOP, SIGCONT
        nodes.start(nodes[1])                       # anew, under its name and at its port
        assert pending.result() == [2, 3]
        with nodes.alone() as process: ...          # a process that is in no cluster

A Member runs one call after the other in its main thread, with nothing between the calls. What it
is to do is a function at the top level of a module, and its arguments; result and exception come
back pickled, the exception with its traceback as a note. What the function leaves in `HELD` is
there for the next call. `leave()` is cluster.shutdown() and a clean end of the process;
`end()` ends it without shutdown, by the normal end of an interpreter.

Processes are forks, which start in some 20 ms (see tests/children.py). Not for use after a test's
process has itself joined a cluster, and none of these processes shares its current directory.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from persisting_torch.cluster.finder import Member as Named
from persisting_torch.cluster.finder import Target, rank_nodes
from tests.children import Child, Nursery

LONGEST = 60.0

Answer = TypeVar("Answer")

HELD: dict[str, Any] = {}
"""What a Member keeps from one call to the next, such as an open queue."""

NURSERY = Nursery(
    "torch",
    "lance",
    "pytest",
    "pulsing",
    "pyarrow.flight",
    "persisting_torch.cluster.engine",
    "persisting_torch.cluster.joining",
    "persisting_torch.datasets",
    "persisting_torch.queue.kv",
    "persisting_torch.queue.queue",
    "persisting_torch.queue.report",
    "persisting_torch.samplers",
    __name__,
)
SOCKET = "socket"


def note(error: BaseException, text: str) -> None:
    """`error.add_note`, which Python has from 3.11 on."""
    error.__notes__ = [*getattr(error, "__notes__", ()), text]


def serve() -> None:
    """The life of a Member: do what comes, until the test hangs up."""
    test = Client(SOCKET, "AF_UNIX")
    while True:
        try:
            task = test.recv_bytes()
        except EOFError:
            os._exit(0)
        if not task:
            return
        try:
            function, arguments, options = pickle.loads(task)
            answer = (True, function(*arguments, **options))
        except BaseException as error:
            note(error, "".join(traceback.format_exception(error)))
            answer = (False, error)
        try:
            sent = pickle.dumps(answer)
            pickle.loads(sent)
        except Exception as error:  # what cannot be pickled, there or back
            told = "".join(getattr(answer[1], "__notes__", ()))
            sent = pickle.dumps((False, TypeError(f"{answer!r}: {error}; {told}")))
        test.send_bytes(sent)


class Pending:
    """An answer that is awaited; it has to be fetched before the next call."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def is_there(self, seconds: float = 0.0) -> bool:
        return self._member.connection.poll(seconds)

    def result(self, seconds: float = LONGEST) -> Any:
        """What the function returned; raises what it raised."""
        if not self.is_there(seconds):
            self._member.kill()
            raise AssertionError(f"no answer within {seconds} s; {self._member.err}")
        try:
            fine, answer = pickle.loads(self._member.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"the process died; {self._member.err}") from None
        if not fine:
            raise answer
        return answer


class Member(Child):
    """One process: a node, a light member, or one in no cluster."""

    name = ""
    address = ""
    """Where its Pulsing listens: what others take as a seed."""
    port = ""
    """Its port of the switch, where it has a network of its own."""

    def __init__(self) -> None:
        folder = NURSERY.folder()
        with Listener(str(folder / SOCKET), "AF_UNIX") as listener:
            super().__init__(NURSERY, f"{__name__}:serve", {}, folder=folder, whole_end=True)
            self.connection: Connection = listener.accept()

    def call(self, function: Callable[..., Answer], *arguments: Any, **options: Any) -> Answer:
        """What the function returns there; raises what it raises there."""
        answer: Answer = self.begin(function, *arguments, **options).result()
        return answer

    def begin(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Pending:
        """Have it done, and go on here meanwhile."""
        self.connection.send_bytes(pickle.dumps((function, arguments, options)))
        return Pending(self)

    def stop(self) -> None:
        self.send(signal.SIGSTOP)

    def go_on(self) -> None:
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; once this returns the process is gone. Also of one that is gone already."""
        self.send(signal.SIGKILL)
        self.await_end()

    def end(self, seconds: float = LONGEST) -> None:
        """The normal end of an interpreter."""
        self.connection.send_bytes(b"")
        self.await_end(seconds)

    def leave(self) -> None:
        """cluster.shutdown(), and a normal end."""
        self.call(shut_down)
        self.end()

    def is_alive(self) -> bool:
        return self.status is None

    def await_end(self, seconds: float = LONGEST) -> None:
        self.wait(seconds)


class Cluster:
    """The processes of one test; they are killed at its end."""

    def __init__(self, passphrase: str | None = None) -> None:
        self.passphrase = passphrase
        self.nodes: list[Member] = []
        self.others: list[Member] = []
        self.seeds: list[str] = []
        """Addresses that all join by, besides those of the nodes."""

    def grow(self, count: int) -> list[Member]:
        """So many further nodes, the first of all being the seed. They know each other."""
        added = [self._new_node() for _ in range(count)]
        self.await_nodes()
        return added

    def _new_node(self) -> Member:
        node = Member()
        node.name = f"node-{len(self.nodes)}"
        self._join(node, addr="127.0.0.1:0", name=node.name)
        self.nodes.append(node)
        return node

    def start(self, node: Member) -> Member:
        """A node that has ended, anew: in its place here, under its name, at its port."""
        again = Member()
        again.name, again.address = node.name, node.address
        at = self.nodes.index(node)
        self.nodes[at] = again
        self._join(again, addr=node.address, name=node.name)
        return again

    def client(self, **options: Any) -> Member:
        """A light member: it puts and reads, and owns nothing."""
        member = Member()
        self.others.append(member)
        self._join(member, addr=None, owns_buckets=False, **options)
        return member

    def _join(self, member: Member, **options: Any) -> None:
        seeds = [*self.seeds, *(node.address for node in self.nodes if node.address)]
        member.address = member.call(join, seeds=seeds, passphrase=self.passphrase, **options)

    @contextmanager
    def alone(self) -> Iterator[Member]:
        """A process that is in no cluster, to open queues as if there were none."""
        member = Member()
        self.others.append(member)
        yield member
        member.kill()

    def await_nodes(self, seconds: float = LONGEST) -> None:
        """Until every living node sees just the living ones."""
        living = [node for node in self.nodes if node.is_alive()]
        names = sorted(node.name for node in living)
        deadline = time.monotonic() + seconds
        for node in living:
            while (seen := node.call(nodes_seen)) != names:
                assert time.monotonic() < deadline, (seen, names)
                time.sleep(0.02)

    def __getitem__(self, number: int) -> Member:
        return self.nodes[number]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in [*self.others, *self.nodes]:
            member.send(signal.SIGKILL)
        for member in [*self.others, *self.nodes]:
            member.await_end()
            member.connection.close()
            if error is not None and member.err:
                note(error, f"{member.name or 'a client'} wrote:\n{member.err[-4000:]}")


# Which node is to have which bucket follows from their names and the storage path alone.


def by_weight(path: str, bucket: int, names: Sequence[str], queue: str = "q") -> list[str]:
    """These nodes in the order in which they are to have the bucket."""
    nodes = [Named(name, "") for name in names]
    return [node.name for node in rank_nodes(nodes, Target(queue, path, bucket))]


def spread(folder: Path, count: int, head: str | None = None) -> str:
    """A storage path by which each of so many nodes gets buckets of queue "q", this one the first.

    Where there are three, so that each of the first two does as long as they are alone.
    """
    names = [f"node-{number}" for number in range(count)]
    for number in itertools.count():
        path = folder / f"storage-{number}"
        owners = [
            [by_weight(str(path), bucket, names[:some])[0] for bucket in range(4)]
            for some in range(2, count + 1)
        ]
        each = all(len(set(own)) == some for some, own in enumerate(owners, 2))
        if each and head in (None, owners[-1][0]):
            path.mkdir()
            return str(path)
    raise AssertionError


# What members do


def join(**options: Any) -> str:
    """Become part of the cluster; where Pulsing listens."""
    import asyncio

    from persisting_torch import cluster
    from persisting_torch.cluster.runtime import current

    asyncio.run(cluster.init(**options))
    return str(current().address)


def shut_down() -> None:
    import asyncio

    from persisting_torch import cluster

    asyncio.run(cluster.shutdown())


def nodes_seen() -> list[str]:
    """Names of the nodes that this process knows of."""
    from persisting_torch.cluster.runtime import current

    return sorted(node.name for node in current().discover() if not node.doubtful)


def buckets_owned() -> list[tuple[str, int]]:
    """Queue and bucket of what this node owns."""
    from persisting_torch.cluster.runtime import current

    node = current().node
    assert node is not None
    return sorted((key.queue, key.bucket) for key, kept in node._kept.items() if kept.held)


def hold(path: str, name: str = "q", **options: Any) -> int:
    """Open a queue and keep it open, as HELD[name]; into how many buckets it is split."""
    from persisting_torch import Queue

    HELD[name] = Queue(name, path, **options)
    return int(HELD[name].num_buckets)


def let_go(name: str = "q") -> None:
    """Close it again."""
    HELD.pop(name).close()
