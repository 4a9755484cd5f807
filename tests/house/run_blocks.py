"""Runs the Python blocks of a Markdown file in order, as one program: run_blocks.py FILE.

Blocks share one namespace and one event loop; a block may await at its top level, as in a notebook.
Tracebacks name the Markdown file and its lines.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
import types
from pathlib import Path

from tests.house.markdown import blocks


def run(path: Path) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    loop = asyncio.new_event_loop()
    try:
        for block in blocks(path.read_text(), "python"):
            code = compile(
                "\n" * (block.line - 1) + block.text,
                str(path),
                "exec",
                flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            )
            result = eval(code, main.__dict__)
            if code.co_flags & inspect.CO_COROUTINE:
                loop.run_until_complete(result)
    finally:
        loop.close()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
