"""What the benchmarks share: medians, tables, and results that say where they were measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "tensordict", "lightning", "pylance", "pyarrow", "pyroaring", "numpy")


def arguments(description: str) -> argparse.Namespace:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the full sizes")
    parser.add_argument("--only", help="run only the parts whose name contains this")
    parser.add_argument("--directory", help="where the data goes (default: a temporary folder)")
    return parser.parse_args()


def tables_of(
    parts: Sequence[Callable[[], list[dict[str, Any]]]], only: str | None
) -> dict[str, list[dict[str, Any]]]:
    """Run the parts of a benchmark, those whose name contains `only`, and show their tables."""
    tables = {}
    for part in parts:
        if not only or only in part.__name__:
            tables[part.__name__] = part()
            show((part.__doc__ or "").strip(), tables[part.__name__])
    return tables


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median(values: list[float]) -> float:
    return statistics.median(values)


def in_turn(runs: int, *works: Callable[[], float]) -> list[float]:
    """Medians of several runs of each work, A B A B ..., so that drift hits all alike."""
    found: list[list[float]] = [[] for _ in works]
    for _ in range(runs):
        for times, work in zip(found, works, strict=True):
            times.append(work())
    return [median(times) for times in found]


def machine(*more: str) -> dict[str, Any]:
    """Hardware and versions (of `more` packages too), without anything that names the machine."""
    versions = {}
    for package in (*PACKAGES, *more):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "packages": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table, one row a dict."""
    columns = list(rows[0])
    cells = [[_text(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]
    print(f"\n{title}")
    for line in (columns, ["-" * width for width in widths], *cells):
        print("  " + "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def save(
    name: str, tables: dict[str, list[dict[str, Any]]], packages: tuple[str, ...] = ()
) -> None:
    """Write the tables beside the versions (of `packages` too) and the machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(*packages), "tables": tables}, indent=2) + "\n")
    print(f"\nwritten to benchmarks/results/{path.name}")
