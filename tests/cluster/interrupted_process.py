"""A client that is interrupted in a transaction wherever CPython 3.11 looks for signals.

interrupted_process.py FOLDER near|far
"""

from __future__ import annotations

import sys
import time

from persisting_torch.cluster.bucket import Bucket
from persisting_torch.cluster.finder import Finder, Target
from persisting_torch.cluster.head import Head
from persisting_torch.cluster.node import Node
from persisting_torch.cluster.replica import Replica
from persisting_torch.queue.place import open_place
from persisting_torch.queue.waiting import Hub
from tests.cluster.ledger_process import QUEUE, note, noted, open_ledger
from tests.interrupt import Interrupt


def main(folder: str, way: str) -> None:
    node = Node("a", "127.0.0.1", None, open_ledger)
    finder = Finder(lambda: [node.member], None)
    if way == "near":
        finder.serve_here(node.member.address, node.answer)
    head = Head(Bucket(finder, Target(QUEUE, folder, 0)))
    replica, other = (Replica(open_place(QUEUE, folder), head, Hub()) for _ in range(2))
    interrupts, slowest = 0, 0.0
    while True:
        try:
            sys.settrace(Interrupt(interrupts + 1))
            note(replica, f"a{interrupts}")
            replica.catch_up()
            with replica.transaction():
                pass
            sys.settrace(None)
            break
        except KeyboardInterrupt:
            interrupts += 1
        began = time.monotonic()
        note(replica, f"b{interrupts}")
        slowest = max(slowest, time.monotonic() - began)
    other.catch_up()
    replica.catch_up()
    assert noted(replica) == noted(other)
    assert {f"b{n}" for n in range(1, interrupts + 1)} <= set(noted(other))
    with replica.reading() as mine, other.reading() as others:
        assert list(mine.iterdump()) == list(others.iterdump())
    print(interrupts, slowest, flush=True)
    replica.close()
    other.close()
    node.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
