"""Who is there, by Pulsing: a node is an actor whose name says everything about it.

    persisting_torch/node/<name>/<Flight address>/<when it started, in ns>      each in hexadecimal

Names spread to all members within milliseconds and are looked up in memory, so that finding nodes
asks nobody: neither a busy node nor one whose event loop is at a standstill is overlooked. Whether
a node is alive is seen by speaking with it, never by what Pulsing believes: where one is halted or
out of reach, it may hold all others to be dead as well after half a minute, for as long.
"""

from __future__ import annotations

import time
from typing import Any

from persisting_torch.cluster.addresses import parse
from persisting_torch.cluster.finder import Member

PREFIX = "persisting_torch/node/"


async def announce(system: Any, member: Member) -> str:
    """Tell all members of this node; what `withdraw` takes back."""
    from pulsing import Actor

    class BucketStorage(Actor):  # type: ignore[misc]
        """A node's name tag."""

        async def receive(self, message: Any) -> Any:
            return ("ok", member.name, member.address)

    parts = (member.name.encode(), member.address.encode())
    path = f"{PREFIX}{'/'.join(part.hex() for part in parts)}/{time.time_ns():x}"
    await system.spawn(BucketStorage(), name=path, public=True)
    return path


async def withdraw(system: Any, path: str) -> None:
    """Stop telling of this node; some may still hear of it, until it counts as dead after 30 s."""
    await system.stop(path)


async def nodes(system: Any) -> list[Member]:
    """The nodes that own buckets, as far as they are known; of each name the latest.

    Those that Pulsing holds to be dead are doubtful.
    """
    dead = {m["node_id"] for m in await system.members() if m["status"] == "Dead"}
    latest: dict[str, tuple[int, Member]] = {}
    for actor in await system.all_named_actors():
        if not actor["path"].startswith(PREFIX) or not actor["instances"]:
            continue
        name, address, started = actor["path"].removeprefix(PREFIX).split("/")
        member = Member(
            bytes.fromhex(name).decode(),
            bytes.fromhex(address).decode(),
            doubtful=dead.issuperset(actor["instances"]),
        )
        known = latest.get(member.name)
        if known is None or known[0] < int(started, 16):
            latest[member.name] = int(started, 16), member
    return [member for _, member in latest.values()]


async def others(system: Any) -> int:
    """How many members are there besides this one, and what it was before a restart."""
    members = await system.members()
    return sum(m["status"] == "Alive" and m["addr"] != system.addr for m in members)


async def far(system: Any) -> list[str]:
    """Where the other members are that this process does not know by an address of loopback."""
    found = []
    for member in await system.members():
        address = parse(member["addr"], "the address of a member")
        if member["status"] == "Alive" and not (
            address.ip.is_loopback or address.ip.is_unspecified
        ):
            found.append(member["addr"])
    return found
