"""This process as a part of the cluster: its view of the nodes, and its own node if it has one."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from persisting_torch.cluster import membership
from persisting_torch.cluster.addresses import Address, listed, parse, send_at_once
from persisting_torch.cluster.finder import Finder, Member
from persisting_torch.cluster.handle import Handle
from persisting_torch.cluster.loop import LoopThread
from persisting_torch.cluster.peer import note_use, refuse_after_fork
from persisting_torch.cluster.secret import Credentials, credentials
from persisting_torch.errors import PersistingError, WaitTimeout
from persisting_torch.queue.lifecycle import after_closing

if TYPE_CHECKING:
    from persisting_torch.cluster.node import Node

log = logging.getLogger(__name__)

PASSPHRASE = "PERSISTING_TORCH_PASSPHRASE"
LOOPBACK = "127.0.0.1"
START_SECONDS = 30.0
SETTLE_SECONDS = 0.3  # without which a process that ends after Pulsing's shutdown may crash
INSTEAD = (
    "For several machines call persisting_torch.cluster.init(addr, seeds, passphrase) in place of"
    f" pulsing.init(); or give that one address of this machine, and set {PASSPHRASE}."
)
SWITCH_SECONDS = 0.0005  # so that a busy thread does not make those wait that answer


class Runtime:
    """What this process knows of the cluster. Thread-safe.

    `node` is None in a light member, which owns no buckets. `finder` finds the owners of buckets.
    """

    def __init__(self, own: Credentials | None) -> None:
        note_use()
        self.credentials = own
        self.node: Node | None = None
        self.finder = Finder(self.discover, own)
        self.system: Any = None
        self._started_here = False
        self._name_tag = ""
        self._loop = LoopThread()

    def start(self, address: Address, seeds: list[Address]) -> None:
        """Start Pulsing. Raises PersistingError if it cannot listen there."""
        import pulsing

        passphrase = None if self.credentials is None else self.credentials.passphrase
        peers = [str(seed) for seed in seeds] or None
        starting = pulsing.init(addr=str(address), seeds=peers, passphrase=passphrase)
        try:
            self.system = self._loop.call(starting, START_SECONDS)
        except RuntimeError as error:
            reason = str(error).partition('"message":"')[2].rstrip('"}') or error
            raise PersistingError(f"Pulsing cannot listen at {address}: {reason}") from error
        except TimeoutError as error:
            raise WaitTimeout(
                f"Pulsing did not start at {address} within {START_SECONDS:g} s: it waits for a"
                f" member that is halted or out of reach, one of {listed(seeds)} or"
                " one that these know. Let that one go on, or try again in half a minute, when"
                " the others hold it to be dead."
            ) from error
        self._started_here = True
        send_at_once(parse(self.system.addr, "addr").port)

    def adopt(self) -> None:
        """Take the Pulsing that the user has started, whether its event loop runs or not."""
        import pulsing

        self.system = pulsing.get_system()

    @property
    def address(self) -> Address:
        """Where this process's Pulsing listens."""
        return parse(self.system.addr, "addr")

    @property
    def host(self) -> str:
        """What its own server listens at: loopback where Pulsing listens at all addresses, so that
        nothing is open to other machines that was not.
        """
        return LOOPBACK if self.address.ip.is_unspecified else self.address.host

    def is_stale(self) -> bool:
        """Whether the user has ended the Pulsing that he had started."""
        import pulsing

        if self._started_here:
            return False
        return not pulsing.is_initialized() or pulsing.get_system() is not self.system

    def start_node(self, name: str | None = None, *, fsync: bool = False) -> None:
        """Make this process one that owns buckets, and tell the cluster."""
        from persisting_torch.cluster import engine
        from persisting_torch.cluster.node import Node

        open_service = partial(engine.BucketStorage, finder=self.finder, fsync=fsync)
        sys.setswitchinterval(min(SWITCH_SECONDS, sys.getswitchinterval()))
        name = name or f"{socket.gethostname()}:{self.address.port}"
        self.node = Node(name, self.host, self.credentials, open_service)
        self.node.discover = self._nodes
        self.finder.serve_here(self.node.server.address, self.node.answer)
        telling = membership.announce(self.system, self.node.member)
        self._name_tag = self._loop.call(telling)

    def discover(self) -> list[Member]:
        """The nodes that own buckets, as Pulsing knows them now.

        Raises PersistingError where some are on other machines and cannot reach this process.
        """
        refuse_after_fork()
        if self.address.ip.is_unspecified:
            self._check_here()
        return self._nodes()

    def _nodes(self) -> list[Member]:
        return self._loop.call(membership.nodes(self.system))

    def _check_here(self) -> None:
        """Raise PersistingError if others are on other machines, which do not reach this one."""
        far = self._loop.call(membership.far(self.system))
        if far:
            raise PersistingError(
                f"Pulsing, as pulsing.init() has started it, listens at {self.address}, so that"
                f" queues are this machine's own; but {', '.join(far)} are members, too."
                f" {INSTEAD}"
            )

    def others(self) -> int:
        """How many members of the cluster there are besides this process."""
        return self._loop.call(membership.others(self.system))

    def handle(self) -> Handle:
        """The way to this cluster for a process that does not join it."""
        return Handle(tuple(self.discover()), self.credentials)

    def end(self) -> None:
        """Give the buckets to others, and leave. Raises what kept a bucket from being closed."""
        try:
            if self.node is not None:
                self.node.close()
        finally:
            self.finder.close()
            try:
                self._loop.call(self._leave())
                time.sleep(SETTLE_SECONDS)
            finally:
                self._loop.stop()

    async def _leave(self) -> None:
        import pulsing

        if pulsing.is_initialized() and pulsing.get_system() is self.system:
            if self._name_tag:
                await membership.withdraw(self.system, self._name_tag)
            if self._started_here:
                await pulsing.shutdown()


_lock = threading.Lock()
_runtime: Runtime | None = None
_ends_with_process = False


def is_joined() -> bool:
    """Whether this process is part of a cluster."""
    runtime = _runtime
    return runtime is not None and not runtime.is_stale()


def current() -> Runtime:
    """The runtime of this process; around the user's own Pulsing where he has called pulsing.init.

    Raises PersistingError if this process is part of no cluster, or a fork of one that is.
    """
    import pulsing

    refuse_after_fork()
    with _lock:
        if _runtime is not None and not _runtime.is_stale():
            return _runtime
        stale = _runtime
        replace(None)
        if stale is not None:
            stale.end()
        if not pulsing.is_initialized():
            raise PersistingError(
                "this process is not part of a cluster. Call persisting_torch.cluster.init() first."
            )
        runtime = _around(pulsing.get_system().addr)
        try:
            runtime.start_node()
        except BaseException:
            runtime.end()
            raise
        replace(runtime)
        return runtime


def _around(addr: str) -> Runtime:
    address, secret = parse(addr, "the address of pulsing.init()"), os.environ.get(PASSPHRASE)
    anywhere = address.ip.is_unspecified
    if secret is None and not anywhere and not address.ip.is_loopback:
        raise PersistingError(
            f"Pulsing, as pulsing.init() has started it, listens at {addr}, where queues would be"
            f" open to everybody. {INSTEAD}"
        )
    runtime = Runtime(None if secret is None else credentials(secret))
    runtime.adopt()
    if anywhere:
        log.warning(
            "Pulsing, as pulsing.init() has started it, listens at %s: whoever reaches that can run"
            " code here, if it has no passphrase. Queues are served at %s, to processes of this"
            " machine. %s",
            addr,
            LOOPBACK,
            INSTEAD,
        )
    return runtime


def replace(runtime: Runtime | None) -> Runtime | None:
    """Let this be the runtime of this process; the one before. Its end is the process's end."""
    global _runtime, _ends_with_process
    before, _runtime = _runtime, runtime
    if runtime is not None and not _ends_with_process:
        after_closing(_at_exit)
        _ends_with_process = True
    return before


def _at_exit() -> None:
    runtime = replace(None)
    if runtime is None:
        return
    try:
        runtime.end()
    finally:
        if runtime.node is not None and not runtime.node.server.ended:
            _skip_teardown()


def _skip_teardown() -> None:
    """Let the process end without taking Flight's server apart, which would wait for its peers.

    A function that the C library calls first of all at exit, with the status, ends the process.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
