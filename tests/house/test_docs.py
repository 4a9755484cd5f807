"""Every code block of the documentation runs, every command and file that it names exists."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import persisting_torch
from tests.house.markdown import blocks, local_links

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    page.relative_to(REPOSITORY).as_posix()
    for page in [*sorted(REPOSITORY.glob("*.md")), *sorted(REPOSITORY.glob("docs/**/*.md"))]
]
WITH_PYTHON = [page for page in PAGES if blocks((REPOSITORY / page).read_text(), "python")]
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_blocks_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    run = python("-m", "tests.house.run_blocks", str(REPOSITORY / page), cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("page", PAGES)
def test_the_shell_blocks_of_a_page_name_what_exists(page: str, tmp_path: Path) -> None:
    for block in blocks((REPOSITORY / page).read_text(), "bash"):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["make"]:
                targets = {word for word in words[1:] if "=" not in word}
                assert targets <= MAKE_TARGETS, line
            elif words[:1] == ["persisting-torch"]:
                command = "from persisting_torch.cli import main; raise SystemExit(main())"
                run = python("-c", command, words[1], "--help", cwd=tmp_path)
                assert run.returncode == 0, f"{line}\n{run.stderr}"
            else:
                files = [word for word in words if word.endswith(".py")]
                assert all((REPOSITORY / file).is_file() for file in files), line


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_to_files(page: str) -> None:
    path = REPOSITORY / page
    dead = [link for link in local_links(path.read_text()) if not (path.parent / link).exists()]
    assert dead == []


def test_the_examples_in_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prefix = f"{persisting_torch.__name__}."
    modules = [module.name for module in pkgutil.walk_packages(persisting_torch.__path__, prefix)]
    failed = []
    for name in [persisting_torch.__name__, *modules]:
        module = importlib.import_module(name)
        if doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed:
            failed.append(name)
    assert failed == []
