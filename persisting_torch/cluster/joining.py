"""Joining a cluster and leaving it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from persisting_torch.cluster import runtime as runtimes
from persisting_torch.cluster.addresses import (
    Address,
    answers,
    listed,
    look_up,
    own_address,
    parse,
    towards,
)
from persisting_torch.cluster.peer import refuse_after_fork
from persisting_torch.cluster.runtime import PASSPHRASE, Runtime
from persisting_torch.cluster.secret import credentials
from persisting_torch.errors import PersistingError, WaitTimeout
from persisting_torch.queue.lifecycle import listen_to_sigterm
from persisting_torch.queue.threads import at_once, in_thread

JOIN_SECONDS = 20.0
TORCHRUN_SECONDS = 60.0
POLL_SECONDS = 0.05
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


async def init(
    addr: str | None = None,
    seeds: Sequence[str] | None = None,
    passphrase: str | None = None,
    *,
    owns_buckets: bool = True,
    name: str | None = None,
    insecure: bool = False,
    durability: Literal["flush", "fsync"] = "flush",
    timeout: float = JOIN_SECONDS,
) -> None:
    """Join the cluster: from now on every Queue of this process is distributed.

    addr: host:port that this process listens on, in the network that the cluster uses; by default
        some port of 127.0.0.1. Seeds need a port that stays the same. The data goes over another
        port of the same address.
    seeds: host:port of processes that are there already, two or three that stay; none for the
        first. All may get the same list: a process that is itself in it may be the first.
    passphrase: the cluster's one secret, by default that in the environment variable
        PERSISTING_TORCH_PASSPHRASE. All traffic is encrypted, and only who has it takes part.
        Without one, only addresses of this machine (127.x.x.x) are allowed.
    owns_buckets: False for a light member, which only puts and reads: producers and trainers.
    name: the node's name, by default the host's and the port. Give one where the port changes: a
        node that starts again under its name gets its buckets back.
    insecure: allow other addresses without a passphrase. Whoever reaches the port can run code.
    durability: what is flushed to a bucket of this node survives the death of all processes
        ("flush"), or a loss of power too ("fsync"). Give all nodes the same.
    timeout: seconds to wait for a seed.

    Raises ValueError for an address that is none, or that would be open to everybody;
    PersistingError if this process is part of a cluster already, or cannot listen at `addr`;
    WaitTimeout if no seed takes this process in: it is not there, or it has another passphrase.
    """
    join = _Join(
        addr, list(seeds or ()), passphrase, owns_buckets, name, insecure, durability, timeout
    )
    try:
        await in_thread(join.run)
    except asyncio.CancelledError:
        join.cancelled = True
        raise
    listen_to_sigterm()


def init_from_torchrun(
    passphrase: str | None = None,
    *,
    port: int | None = None,
    insecure: bool = False,
    durability: Literal["flush", "fsync"] = "flush",
    timeout: float = TORCHRUN_SECONDS,
) -> None:
    """Join a cluster made of the ranks of this torchrun job; blocks until that is done.

    Rank 0 is the seed, at MASTER_ADDR and `port`, which is by default the one after MASTER_PORT.
    The first rank of each machine owns buckets, the others are light members. Where all ranks are
    on one machine, they use its address 127.0.0.1; otherwise a passphrase is needed, as for `init`.

    Raises PersistingError outside of torchrun, else as `init` does.
    """
    missing = [key for key in TORCHRUN if key not in os.environ]
    if missing:
        raise PersistingError(
            f"init_from_torchrun() needs {', '.join(missing)} in the environment, which torchrun"
            " sets. Start with torchrun, or call init(addr, seeds)."
        )
    rank, local, world, local_world = (int(os.environ[key]) for key in TORCHRUN[:4])
    master = "127.0.0.1"
    if world > local_world:
        master = look_up(os.environ["MASTER_ADDR"], "MASTER_ADDR")
    number = int(os.environ["MASTER_PORT"]) + 1 if port is None else port
    seed = str(parse(f"{master}:{number}", "MASTER_ADDR"))
    name = f"{socket.gethostname()}:{local}"
    own = seed if rank == 0 else f"{towards(master)}:0"
    owns, seeds = local == 0, [seed]
    _Join(own, seeds, passphrase, owns, name, insecure, durability, timeout).run()
    listen_to_sigterm()


async def shutdown() -> None:
    """Leave the cluster. Buckets that this process owns go to other nodes at once.

    Raises what kept a bucket from being closed, once everything is left.
    """
    runtime = runtimes.replace(None)
    if runtime is not None:
        await in_thread(runtime.end)


@dataclass
class _Join:
    """One try to become part of a cluster."""

    addr: str | None
    seeds: list[str]
    passphrase: str | None
    owns_buckets: bool
    name: str | None
    insecure: bool
    durability: str
    timeout: float
    cancelled: bool = False

    def run(self) -> None:
        import pulsing

        refuse_after_fork()
        if self.durability not in ("flush", "fsync"):
            raise ValueError(f"durability must be 'flush' or 'fsync', got {self.durability!r}.")
        secret = self.passphrase or os.environ.get(PASSPHRASE)
        own = own_address(self.addr or "127.0.0.1:0", secret, self.insecure)
        seeds = [parse(seed, "seeds") for seed in self.seeds]
        others = [seed for seed in seeds if seed != own]
        with runtimes._lock:
            if runtimes.is_joined() or pulsing.is_initialized():
                raise PersistingError(
                    "this process is part of a cluster already. Call shutdown() before init()."
                )
            runtime = Runtime(None if secret is None else credentials(secret))
            deadline = time.monotonic() + self.timeout
            try:
                found = self._await_seeds(others, may_be_first=own in seeds, deadline=deadline)
                runtime.start(own, found or others)
                if found:
                    self._await_others(runtime, found[0], deadline)
                if self.owns_buckets:
                    runtime.start_node(self.name, fsync=self.durability == "fsync")
                self._check_wanted()
            except BaseException:
                runtime.end()
                raise
            runtimes.replace(runtime)

    def _await_seeds(
        self, seeds: list[Address], may_be_first: bool, deadline: float
    ) -> list[Address]:
        """The seeds that answer; none for a process that may be the first.

        Pulsing looks for a late seed only now and then, so that it had better be there before; and
        it waits for one that is halted, or out of reach, whatever others there are.
        """
        said: dict[Address, bool | None] = {}

        def ask(seed: Address) -> None:
            said[seed] = answers(seed)

        while seeds:
            at_once([partial(ask, seed) for seed in seeds])
            if found := [seed for seed in seeds if said[seed]]:
                return found
            silent = [seed for seed in seeds if said[seed] is False]
            if may_be_first and not silent:
                return []
            if silent:
                trouble = (
                    f"what listens at {listed(silent)} does not answer. It may be halted: let it"
                    " go on, or name others."
                )
            else:
                trouble = (
                    f"nobody listens at {listed(seeds)}. Check that a seed runs there, and that"
                    " it is reached from here; and then, that all have the same passphrase."
                )
            self._go_on(deadline, trouble)
        return []

    def _await_others(self, runtime: Runtime, seed: Address, deadline: float) -> None:
        """Until Pulsing has met others: by itself it would go on alone, and say nothing."""
        while runtime.others() == 0:
            self._go_on(
                deadline,
                f"somebody listens at {seed}, but does not take this process at {runtime.address}"
                " in. Most likely one of them has another passphrase, or none: give all the same."
                f" Or it is out of reach from there, or what listens at {seed} is no Pulsing.",
            )

    def _go_on(self, deadline: float, trouble: str) -> None:
        self._check_wanted()
        if time.monotonic() >= deadline:
            raise WaitTimeout(f"waited {self.timeout:g} s to join the cluster: {trouble}")
        time.sleep(POLL_SECONDS)

    def _check_wanted(self) -> None:
        if self.cancelled:
            raise PersistingError("the call of init() was cancelled.")
