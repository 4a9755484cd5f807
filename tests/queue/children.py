"""Scripts that run as the `__main__` of a process of their own, to a real end of the interpreter.

The process is a fork of one that has imported the package, and starts in milliseconds.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from tests.children import Child, Nursery

NURSERY = Nursery(
    "torch",
    "persisting_torch.queue.kv",
    "persisting_torch.queue.queue",
    "persisting_torch.queue.report",
    "persisting_torch.samplers",
    __name__,
)


def start(script: str, *arguments: object, whole_end: bool = False) -> Child:
    """Run a script in a process of its own."""
    folder = NURSERY.folder()
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    argv = [str(path), *map(str, arguments)]
    order = {"argv": argv, "as_main": whole_end}
    return Child(NURSERY, f"{__name__}:execute", order, folder=folder, whole_end=whole_end)


def run(script: str, *arguments: object, status: int = 0, whole_end: bool = False) -> Child:
    """Run a script to its end, which has to have this exit status."""
    child = start(script, *arguments, whole_end=whole_end)
    assert child.wait() == status, child.err
    return child


def execute(argv: list[str], as_main: bool) -> None:
    """What the process does. `as_main`: in the very module `__main__`, emptied for it."""
    sys.argv = argv
    script = compile(Path(argv[0]).read_text(), argv[0], "exec")
    space: dict[str, object] = {"__name__": "__main__"}
    if as_main:
        space = vars(sys.modules["__main__"])
        for name in [name for name in space if not name.startswith("__")]:
            del space[name]
    exec(script, space)
