"""A cluster on one machine loses a node: three nodes, two rollout processes, two training ranks.

Each is a process of its own, and they meet on loopback. Amid the training the node that owns bucket
0, and with it the queue's ledger, is killed with SIGKILL. The other two take its buckets over,
rollouts and trainer wait for that and go on. At the end all nodes are stopped, and the queue is
opened from its files alone: its books, and a count that is part of the weights' checkpoint, say how
often each sample was trained.

    python examples/cluster/demo.py

Exits with 1 if any sample was trained twice or never. Everything is under cluster_data/.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from settings import BATCH, QUEUE, SAMPLES, TASK, TRAIN

STORAGE = Path("cluster_data").absolute()
HERE = Path(__file__).parent
NODES, ROLLOUTS, RANKS = 3, 2, 2

KILL_AT = SAMPLES // (RANKS * BATCH) // 3  # step
LONGEST_SILENCE_SECONDS = 90.0
END_SECONDS = 10.0

# SIGTERM for a child whose parent dies, however that dies (Linux).
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1


class Crew:
    """The processes, all of which speak into one pipe, a line at a time."""

    def __init__(self) -> None:
        self.members: dict[str, subprocess.Popen[bytes]] = {}
        self.dead: set[str] = set()
        self._reads, self._writes = os.pipe()

    def start(self, name: str, *command: object) -> None:
        self.members[name] = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=self._writes,
            # With PYTHONUNBUFFERED a line is written in two pieces, and those of two processes mix.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )

    def kill(self, name: str) -> None:
        self.members[name].kill()
        self.members[name].wait()
        self.dead.add(name)

    def lines(self, *until: str) -> Iterator[str]:
        """What they say, until these have ended well. Exits if one ends otherwise."""
        said, heard = b"", time.monotonic()
        while not all(self.members[name].poll() == 0 for name in until):
            for name, process in self.members.items():
                if process.poll() not in (None, 0) and name not in self.dead:
                    sys.exit(f"{name} ended with {process.returncode}; its message is above")
            if select.select([self._reads], [], [], 0.5)[0]:
                said, heard = said + os.read(self._reads, 1 << 16), time.monotonic()
                *whole, said = said.split(b"\n")
                yield from (line.decode() for line in whole)
            elif time.monotonic() - heard > LONGEST_SILENCE_SECONDS:
                sys.exit(f"nobody has said anything for {LONGEST_SILENCE_SECONDS:g} s")

    def stop(self) -> None:
        """Ask all that still run to end, nodes last; those that do not are killed."""
        for process in reversed(self.members.values()):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def end_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# The play


def main() -> int:
    began = time.monotonic()
    shutil.rmtree(STORAGE, ignore_errors=True)
    crew = Crew()
    try:
        start(crew)
        pauses = play(crew)
    finally:
        crew.stop()
    ended = {name: process.returncode for name, process in crew.members.items()}
    if any(status for name, status in ended.items() if name not in crew.dead):
        sys.exit(f"not all processes ended well: {ended}")
    return show(pauses, time.monotonic() - began)


def start(crew: Crew) -> None:
    """All at once: those who come before the seeds wait for them."""
    nodes = [f"127.0.0.1:{port}" for port in free_ports(NODES)]
    common = ["--seeds", ",".join(nodes), "--storage", STORAGE]
    for node in nodes:
        crew.start(node, HERE / "node.py", "--addr", node, *common)
    for worker in range(ROLLOUTS):
        which = ["--worker", worker, "--workers", ROLLOUTS, "--ranks", RANKS]
        crew.start(f"rollout-{worker}", HERE / "rollout.py", *which, *common)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    crew.start("trainer", *torchrun, HERE / "train.py", *common)


def play(crew: Crew) -> dict[str, float]:
    """Until all is trained, with a kill on the way; how many seconds it made whom wait.

    The takeover takes from the kill until the first flush or step that needed the new owner.
    """
    last: dict[str, float] = {}
    longest: dict[str, float] = defaultdict(float)
    killed, victim, successor = 0.0, "", ""
    for line in crew.lines("trainer", *(f"rollout-{worker}" for worker in range(ROLLOUTS))):
        now, who = time.monotonic(), line.split()[0]
        if killed:
            longest[who] = max(longest[who], now - last.get(who, now))
            if not successor and owner() != victim:
                successor = owner()
                longest["takeover"] = now - killed
                say(f"{successor} has taken bucket 0 over")
        last[who] = now
        if who == "node" or "sealed" in line:
            say(line)
        if not killed and line == f"trainer has done step {KILL_AT}":
            victim = owner()
            crew.kill(victim)
            killed = time.monotonic()
            say(f"{victim}, which owns bucket 0, is killed at step {KILL_AT}")
    return dict(longest)


def owner() -> str:
    """The node that owns bucket 0: the file with the largest number tells."""
    files = (STORAGE / QUEUE / "bucket-0" / "owner").glob("[0-9]*")
    newest = max(files, key=lambda file: int(file.name))
    return str(json.loads(newest.read_text())["node"])


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


# Counting


def show(pauses: dict[str, float], seconds: float) -> int:
    """The table that says what happened; 0 if each sample was trained once."""
    import torch

    from persisting_torch import Queue

    with Queue(QUEUE, STORAGE) as queue:  # no cluster any more: this process alone
        by_queue = queue.engine.books_of(TASK, TRAIN)
    end = torch.load(STORAGE / "checkpoints" / "end.ckpt", weights_only=True)
    trained = end["state_dict"]["trained"]
    by_weights = {
        "put": SAMPLES,
        "once": int((trained == 1).sum()),
        "twice": int((trained > 1).sum()),
        "never": int((trained == 0).sum()),
    }
    print(f"\n  {'':32}{'by the queue':>14}{'by the weights':>16}")
    lines = {
        "samples put": "put",
        "trained once": "once",
        "trained twice": "twice",
        "lost": "never",
    }
    for title, key in lines.items():
        print(f"  {title:32}{by_queue[key]:>14,}{by_weights[key]:>16,}")
    rollouts = max(pauses[f"rollout-{worker}"] for worker in range(ROLLOUTS))
    times = {
        "takeover": f"{pauses['takeover']:.1f} s",
        "longest pause of a rollout": f"{rollouts:.1f} s",
        "longest pause of the trainer": f"{pauses['trainer']:.1f} s",
        "time": f"{seconds:.0f} s",
    }
    for title, figure in times.items():
        print(f"  {title:32}{figure:>14}")
    exact = {"put": SAMPLES, "once": SAMPLES, "twice": 0, "never": 0}
    return 0 if by_weights == exact and by_queue == {**exact, "dropped": 0} else 1


def say(line: str) -> None:
    print(f"  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
