"""From users' names to names on disk: reversible, readable, and never outside their folder."""

from __future__ import annotations

from urllib.parse import quote, unquote

from persisting_torch.errors import SchemaError

MAX_FILE_NAME_BYTES = 255
MAX_NAME_CHARACTERS = 1000


def check_name(name: object, what: str) -> str:
    """The given name if it can name a queue, partition, key or field; SchemaError if not."""
    if not isinstance(name, str):
        raise SchemaError(
            f"{what} must be a string, got {type(name).__name__}: {name!r}. Convert it with str()."
        )
    if not name:
        raise SchemaError(f"{what} is an empty string. Give it at least one character.")
    if len(name) > MAX_NAME_CHARACTERS:
        raise SchemaError(
            f"{what} has {len(name)} characters, more than {MAX_NAME_CHARACTERS}: {name[:40]!r}..."
            " Choose a shorter one."
        )
    if "\x00" in name or (not name.isascii() and name != name.encode("utf-8", "replace").decode()):
        raise SchemaError(
            f"{what} {name!r} holds a character that is not valid Unicode text or is NUL."
            " Remove it."
        )
    return name


def directory_name(queue: str) -> str:
    """The folder of a queue: percent-encoded where a file system might mind.

    Raises SchemaError where the encoded name is too long for a file system.
    """
    check_name(queue, "queue name")
    encoded = quote(queue, safe=" -_+=@,()[]{}!#$&'^~")
    if encoded.startswith((".", " ", "~")) or encoded.endswith((".", " ")):
        encoded = "".join(f"%{byte:02X}" for byte in queue[0].encode()) + quote(queue[1:], safe="")
    encoded = encoded.replace(".", "%2E")
    if len(encoded.encode()) > MAX_FILE_NAME_BYTES:
        raise SchemaError(
            f"queue name {queue[:40]!r}... needs {len(encoded.encode())} bytes as a folder name,"
            f" more than {MAX_FILE_NAME_BYTES}. Choose a shorter one."
        )
    return encoded


def queue_name(directory: str) -> str:
    """The queue that a folder name stands for."""
    return unquote(directory)


_ENCODED = frozenset('.`%@"\\*')


def column_name(field: str, variant: int) -> str:
    """The Lance column of a field's n-th stored type.

    Ordinary names stand as they are. Percent-encoded are characters that mean something to Lance's
    SQL, "@", which numbers the variants, and a leading underscore, which begins reserved names.
    """
    encoded = "".join(f"%{ord(c):02X}" if c in _ENCODED or ord(c) < 32 else c for c in field)
    if encoded.startswith("_"):
        encoded = "%5F" + encoded[1:]
    return encoded if variant == 0 else f"{encoded}@{variant}"
