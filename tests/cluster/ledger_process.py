"""A process that owns ledgers or uses one, and does what it is told, a line of JSON at a time.

ledger_process.py FOLDER node NAME
ledger_process.py FOLDER client ADDRESS...
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from persisting_torch.cluster.bucket import Bucket
from persisting_torch.cluster.finder import Finder, Member, Target
from persisting_torch.cluster.head import Head
from persisting_torch.cluster.keeping import Key
from persisting_torch.cluster.node import Node
from persisting_torch.cluster.replica import Replica
from persisting_torch.cluster.service import LedgerService
from persisting_torch.errors import PersistingError
from persisting_torch.queue.ownership import Ownership
from persisting_torch.queue.place import open_place
from persisting_torch.queue.waiting import Hub
from tests.children import die_with_parent

QUEUE = "q"


def open_ledger(key: Key, ownership: Ownership) -> LedgerService:
    return LedgerService.open(open_place(key.queue, key.storage_path), ownership)


def head_of(folder: str | Path, addresses: list[str]) -> Head:
    """The owner of the test's ledger, which one of these nodes is."""
    members = [Member(f"node at {address}", address) for address in addresses]
    return Head(Bucket(Finder(lambda: members, None), Target(QUEUE, str(folder), 0)))


def replica_of(folder: str | Path, addresses: list[str]) -> Replica:
    return Replica(open_place(QUEUE, folder), head_of(folder, addresses), Hub())


def note(ledger: Any, key: str, seconds: float = 0.0) -> None:
    """A transaction that notes a key; it fails if the key is there already."""
    with ledger.transaction() as tx:
        tx.execute("INSERT INTO notes VALUES (1, ?, '')", (key,))
        time.sleep(seconds)


def noted(ledger: Any) -> list[str]:
    with ledger.reading() as tx:
        return [key for (key,) in tx.execute("SELECT key FROM notes WHERE task = 1 ORDER BY key")]


class Served:
    def __init__(self, folder: str, name: str) -> None:
        self.node = Node(name, "127.0.0.1", None, open_ledger)
        self.address = self.node.member.address
        self.ledger: Any = None

    def remember(self) -> None:
        """Keep the ledger that it owns, so that it can be written past the node."""
        (kept,) = self.node._kept.values()
        self.ledger = kept.held.service.ledger

    def note(self, key: str) -> None:
        note(self.ledger, key)

    def close(self) -> None:
        self.node.close()


class Client:
    def __init__(self, folder: str, *addresses: str) -> None:
        self.replica = replica_of(folder, list(addresses))

    def note(self, key: str, seconds: float = 0.0) -> None:
        note(self.replica, key, seconds)

    def reserve(self, times: int) -> list[int]:
        return [self.replica.reserve(1) for _ in range(times)]

    def write_on(self, name: str) -> None:
        """Note one key after another, and tell of each what came of it."""

        def write() -> None:
            for number in range(1_000_000):
                key = f"{name}{number:06}"
                try:
                    note(self.replica, key)
                    say({"done": key, "at": time.monotonic()})
                except PersistingError as error:
                    say({"failed": key, "error": str(error)})

        threading.Thread(target=write, daemon=True).start()


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def main(folder: str, role: str, *rest: str) -> None:
    die_with_parent()
    actor: Any = Served(folder, *rest) if role == "node" else Client(folder, *rest)
    say({"ready": getattr(actor, "address", None)})
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            say({"answer": getattr(actor, name)(*arguments)})
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
