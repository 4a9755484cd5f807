"""Imports point one way, and importing the package costs next to nothing."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import persisting_torch

PACKAGE = Path(persisting_torch.__file__).parent
ROOT = PACKAGE.name

# What each room may import of this package; `errors` stands for the module that all may use.
ALLOWED: dict[str, set[str]] = {
    "__init__": {"errors", "queue", "samplers", "datasets", "callbacks"},
    "errors": set(),
    "queue": {"errors"},
    "samplers": {"errors", "queue"},
    "datasets": {"errors", "queue", "samplers"},
    "callbacks": {"errors", "queue", "samplers", "datasets"},
    "cluster": {"errors", "queue"},
    "cli": {"errors", "queue"},
}
# Who may import these at all, by any of their top-level packages.
RESERVED: dict[str, set[str]] = {
    "lightning": {"datasets", "callbacks"},
    "lightning_fabric": {"datasets", "callbacks"},
    "pytorch_lightning": {"datasets", "callbacks"},
    "pulsing": {"cluster"},
}


def imported_modules(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports, in functions and type checks too."""
    here = (package.name, *path.relative_to(package).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def room_of(name: str) -> str:
    """The room that a name below the package belongs to, lazily exported names included."""
    first = name.split(".")[1]
    return persisting_torch._ROOM_OF.get(
        first, "errors" if first in persisting_torch.__all__ else first
    )


def violations(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).with_suffix("").parts[0]
        for line, name in imported_modules(path, package):
            top = name.split(".")[0]
            where = f"{path.relative_to(package)}:{line}: {room} imports {name}"
            if top == package.name and name != package.name:
                target = room_of(name)
                if target not in {room, *ALLOWED[room]}:
                    found.append(where)
            elif top == package.name or room not in RESERVED.get(top, {room}):
                found.append(where)
    return found


def test_imports_within_the_package_point_one_way() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("queue/x.py", "from persisting_torch.samplers import BaseSampler"),
        (
            "queue/x.py",
            "if TYPE_CHECKING:\n    from persisting_torch.samplers.base import BaseSampler",
        ),
        ("queue/x.py", "from ..samplers import BaseSampler"),
        ("queue/x.py", "from .. import cluster"),
        ("queue/x.py", "from persisting_torch import ShuffleSampler"),
        ("queue/x.py", "def f():\n    import persisting_torch.datasets.loader"),
        ("queue/x.py", "import pulsing"),
        ("samplers/x.py", "import persisting_torch"),
        ("samplers/x.py", "from persisting_torch.datasets import PersistingDataset"),
        ("samplers/x.py", "import lightning.pytorch as L"),
        ("datasets/x.py", "from persisting_torch.callbacks import ConsumptionCheckpoint"),
        ("cluster/x.py", "from persisting_torch.samplers import BaseSampler"),
        ("errors.py", "from persisting_torch.queue import Queue"),
    ],
)
def test_an_import_against_the_direction_is_found(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / ROOT / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert len(violations(tmp_path / ROOT)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (
            "queue/x.py",
            "from persisting_torch.errors import SchemaError\nfrom .names import escape",
        ),
        ("queue/x.py", "from persisting_torch import SchemaError, __version__"),
        ("samplers/x.py", "from persisting_torch.queue.meta import BatchMeta"),
        (
            "callbacks/x.py",
            "import lightning\nfrom persisting_torch.datasets import PersistingDataset",
        ),
    ],
)
def test_an_import_along_the_direction_is_allowed(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / ROOT / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert violations(tmp_path / ROOT) == []


def in_a_fresh_interpreter(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_importing_the_package_loads_neither_lightning_nor_pulsing_nor_lance() -> None:
    loaded = in_a_fresh_interpreter("""
        import sys
        import persisting_torch
        print(*sys.modules)
    """).split()
    assert not {"lightning", "pytorch_lightning", "pulsing", "lance", "torch"} & set(loaded)


def test_a_worker_that_only_uses_the_queue_loads_neither_lightning_nor_pulsing() -> None:
    loaded = in_a_fresh_interpreter("""
        import sys
        from persisting_torch import KVInterface, Queue, SequentialSampler
        print(*sys.modules)
    """).split()
    assert not {"lightning", "pytorch_lightning", "pulsing"} & set(loaded)


def test_importing_the_package_costs_at_most_150_ms_beside_torch_and_tensordict() -> None:
    code = """
        import time
        import torch, tensordict
        start = time.perf_counter()
        import persisting_torch
        print(time.perf_counter() - start)
    """
    seconds = statistics.median(float(in_a_fresh_interpreter(code)) for _ in range(3))
    assert seconds <= 0.15


@pytest.mark.parametrize("name", persisting_torch.__all__)
def test_every_exported_name_resolves(name: str) -> None:
    assert getattr(persisting_torch, name) is not None
    assert name in dir(persisting_torch)


def test_the_lazy_names_are_what_type_checkers_see() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (checking,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module.split(".")[1]
        for node in checking.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert seen == persisting_torch._ROOM_OF
    assert set(seen) <= set(persisting_torch.__all__)


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Qeue'"):
        _ = persisting_torch.Qeue
