"""How figures, samples and values are printed: tables for eyes, JSON for programs."""

from __future__ import annotations

import base64
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MOST_VALUES = 64
MOST_VALUES_SHOWN = 6
MOST_CHARACTERS = 160


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """One JSON document, without what JSON lacks: NaN and infinities are strings."""
    print(json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """The value in terms of JSON.

    A tensor is {"dtype", "shape"} and, up to 64 elements, "values"; bytes are {"bytes", "base64"};
    any other object is {"object", "repr"}.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else _name_of(value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, bytes):
        return {"bytes": len(value), "base64": base64.b64encode(value[:MOST_VALUES]).decode()}
    if _is_tensor(value):
        return _plain_tensor(value)
    kind = type(value)
    return {"object": f"{kind.__module__}.{kind.__qualname__}", "repr": short(repr(value))}


def _plain_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    described: dict[str, Any] = {"dtype": _dtype(tensor), "shape": list(tensor.shape)}
    if tensor.numel() <= MOST_VALUES:
        described["values"] = plain(_values(tensor))
    return described


def line(value: Any) -> str:
    """The value in one short line."""
    if _is_tensor(value):
        text = f"{_dtype(value)} {tuple(value.shape)}"
        if value.numel() <= MOST_VALUES_SHOWN:
            text += f" {_rounded(_values(value))}"
        return text
    if isinstance(value, bytes) and len(value) > MOST_VALUES:
        return f"{len(value)} bytes {value[:16]!r}..."
    return short(repr(value))


def short(text: str) -> str:
    """The text, cut where it is long."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def record(number: int, values: Mapping[str, Any]) -> str:
    """A sample: its number in the order of samples, and a line for each field."""
    width = max(map(len, values), default=0)
    lines = [f"  {name:<{width}}  {line(value)}" for name, value in values.items()]
    return "\n".join([f"#{number}", *lines])


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table: drawn by rich on a terminal, aligned columns elsewhere."""
    texts = [["" if cell is None else str(cell) for cell in row] for row in rows]
    numeric = [all(_is_number(row[at]) for row in rows) for at in range(len(headers))]
    if sys.stdout.isatty() and find_spec("rich"):
        _rich_table(headers, texts, numeric)
        return
    lines = [list(headers), *texts]
    widths = [max(len(row[at]) for row in lines) for at in range(len(headers))]
    for row in lines:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _rich_table(
    headers: Sequence[str], texts: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table()
    for header, right in zip(headers, numeric, strict=True):
        drawn.add_column(header, justify="right" if right else "left", overflow="fold")
    for row in texts:
        drawn.add_row(*map(Text, row))
    Console().print(drawn)


def size(count: float) -> str:
    """Bytes, for eyes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def ago(moment: float | None) -> str:
    """How long ago a time since 1970 was, for eyes."""
    if moment is None:
        return "never"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _is_number(cell: Any) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _values(tensor: torch.Tensor) -> Any:
    """The elements as nested lists; complex ones as [real, imaginary]."""
    if tensor.is_complex():
        import torch

        return torch.view_as_real(tensor.to(torch.complex128)).tolist()
    if tensor.is_floating_point():
        return tensor.double().tolist()
    return tensor.tolist()


def _rounded(values: Any) -> str:
    if isinstance(values, list):
        return f"[{', '.join(map(_rounded, values))}]"
    return f"{values:.6g}" if isinstance(values, float) else str(values)


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
