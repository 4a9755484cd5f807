"""A client that is interrupted in a transaction wherever CPython 3.11 looks for signals.

interrupted_process.py FOLDER near|far
"""

from __future__ import annotations

import dis
import functools
import sys
import time
from typing import Any

from persisting_torch.cluster.bucket import Bucket
from persisting_torch.cluster.finder import Finder, Target
from persisting_torch.cluster.head import Head
from persisting_torch.cluster.node import Node
from persisting_torch.cluster.replica import Replica
from persisting_torch.queue.place import open_place
from persisting_torch.queue.waiting import Hub
from tests.cluster.ledger_process import QUEUE, note, noted, open_ledger

# After these instructions CPython looks whether a signal has come.
LOOKS = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")}
handlers = functools.cache(dis._parse_exception_table)  # type: ignore[attr-defined]


def handler(code: Any, at: int) -> int | None:
    """Where an error of the instruction at this offset goes."""
    return next((e.target for e in reversed(handlers(code)) if e.start <= at < e.end), None)


class Interrupt:
    """Raises KeyboardInterrupt where CPython looks for signals for the nth time."""

    def __init__(self, n: int) -> None:
        self.left, self.frame, self.at = n, None, 0

    def __call__(self, frame: Any, event: str, argument: Any) -> Interrupt:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        looked, code, now = self.frame, frame.f_code, frame.f_lasti
        self.frame = None
        if event == "opcode":
            # Raised one instruction late, so only where that makes no difference.
            if looked is frame and handler(code, now) == handler(code, self.at):
                self.left -= 1
                if not self.left:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            if code.co_code[now] in LOOKS:
                self.frame, self.at = frame, now
        return self


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
