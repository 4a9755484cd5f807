"""What goes over the wire: messages, and errors that keep their kind.

A message is a JSON header, then raw bytes that it describes: `attached` holds their lengths.

    4 bytes, little-endian: the header's length | the header, UTF-8 JSON | the attached bytes
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from persisting_torch import errors
from persisting_torch.errors import BucketUnavailable, PersistingError

LARGEST_MESSAGE = 1 << 30
LONGEST_ERROR = 4 << 10  # bytes; gRPC turns errors of 16 KB and more into something else

_LENGTH = struct.Struct("<I")

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        KeyError,
        IndexError,
        ValueError,
        TypeError,
        *(kind for kind in vars(errors).values() if isinstance(kind, type)),
    )
}


@dataclass(frozen=True)
class Message:
    """A header and the bytes attached to it."""

    header: dict[str, Any]
    attached: Sequence[bytes] = field(default=())

    def pack(self) -> bytes:
        """The message as bytes. Raises ValueError if it is too large for the wire."""
        header = {**self.header, "attached": [len(part) for part in self.attached]}
        text = json.dumps(header, separators=(",", ":")).encode()
        packed = b"".join((_LENGTH.pack(len(text)), text, *self.attached))
        if len(packed) > LARGEST_MESSAGE:
            raise ValueError(f"a message of {len(packed)} bytes; the most is {LARGEST_MESSAGE}")
        return packed

    @staticmethod
    def unpack(data: bytes | pa.Buffer) -> Message:
        """The message in these bytes. Raises ValueError if they are none."""
        view = memoryview(data)
        if not _LENGTH.size <= len(view) <= LARGEST_MESSAGE:
            raise ValueError(f"a message of {len(view)} bytes")
        start = _LENGTH.size + _LENGTH.unpack_from(view)[0]
        try:
            header = json.loads(bytes(view[_LENGTH.size : start]))
        except RecursionError as error:
            raise ValueError("a message whose header is nested too deep") from error
        lengths = header.pop("attached", None) if isinstance(header, dict) else None
        if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
            raise ValueError("a message whose header does not say what is attached")
        if start + sum(lengths) != len(view):
            raise ValueError("a message whose parts do not add up to its length")
        attached = []
        for length in lengths:
            attached.append(bytes(view[start : start + length]))
            start += length
        return Message(header, attached)


def to_wire(error: Exception) -> flight.FlightError:
    """An error as Flight carries it: its kind and text beside, nothing else of this process."""
    kind = next((c.__name__ for c in type(error).__mro__ if _KINDS.get(c.__name__) is c), None)
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if kind is None:
        kind, text = PersistingError.__name__, f"{type(error).__name__}: {text}"
    cut = text.encode(errors="replace")[:LONGEST_ERROR].decode(errors="ignore")
    told = json.dumps({"kind": kind, "text": cut}, ensure_ascii=False).encode()
    return flight.FlightServerError("refused", extra_info=told)


def from_wire(error: Exception, peer: str) -> Exception:
    """The error that the peer raised, or BucketUnavailable with what kept it from answering."""
    told = getattr(error, "extra_info", None)
    if told:
        try:
            found = json.loads(told)
            raised = _KINDS[found["kind"]](found["text"])
            if isinstance(raised, BucketUnavailable):
                raised.relayed = True
            return raised
        except (ValueError, TypeError, LookupError):  # whatever answered there, it is none of ours
            return BucketUnavailable(f"{peer} does not speak as persisting_torch does.")
    text = str(error).partition(". Detail:")[0]
    text = text.encode()[:LONGEST_ERROR].decode(errors="ignore")
    if isinstance(error, flight.FlightTimedOutError):
        return BucketUnavailable(f"{peer} did not answer in time.")
    if any(sign in text.lower() for sign in ("certificate", "handshake", "ssl", "tls")):
        return BucketUnavailable(
            f"{peer} has another passphrase than this process, or only one of them has any:"
            f" {text}. Give all processes the same."
        )
    return BucketUnavailable(f"{peer} does not answer: {text}.")
