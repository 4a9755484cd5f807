"""Messages arrive as they were sent or are refused, and errors keep their kind."""

from __future__ import annotations

import json
import struct

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persisting_torch import errors
from persisting_torch.cluster import wire
from persisting_torch.cluster.wire import Message, from_wire, to_wire
from persisting_torch.errors import (
    BucketUnavailable,
    PersistingError,
    SchemaError,
    StaleOwner,
    WaitTimeout,
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text().filter("attached".__ne__), plain), st.lists(st.binary()))
def test_a_message_arrives_as_it_was_sent(header, attached):
    packed = Message(header, attached).pack()
    for data in (packed, pa.py_buffer(packed)):
        arrived = Message.unpack(data)
        assert arrived.header == header
        assert arrived.attached == attached
        assert all(type(part) is bytes for part in arrived.attached)


@given(st.data(), st.binary(max_size=40))
def test_a_message_that_was_cut_is_refused(data, part):
    packed = Message({"op": "x", "n": 5}, [part, b"end"]).pack()
    with pytest.raises(ValueError):  # noqa: PT011
        Message.unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])
    with pytest.raises(ValueError):  # noqa: PT011
        Message.unpack(packed + b"x")


@given(st.data())
def test_a_message_that_was_changed_is_refused_or_another_message(data):
    packed = bytearray(Message({"op": "x", "n": [1, "y"]}, [b"abc", b"defg"]).pack())
    for _ in range(data.draw(st.integers(1, 5))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        arrived = Message.unpack(bytes(packed))
    except ValueError:
        return
    assert isinstance(arrived.header, dict)
    assert "attached" not in arrived.header


@given(st.binary(max_size=200))
def test_what_is_no_message_is_refused(data):
    header = data if len(data) % 2 else struct.pack("<I", len(data)) + data
    try:
        Message.unpack(header)
    except ValueError:
        return
    assert json.loads(header[4:])["attached"] == []


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        "[1, 2]",
        '{"attached": 5}',
        '{"attached": [-1, 1]}',
        '{"attached": [true]}',
        '{"attached": [0.0]}',
        '{"attached": ["1"]}',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_a_header_that_is_none_is_refused(text):
    header = text.encode(errors="surrogatepass")
    with pytest.raises(ValueError):  # noqa: PT011
        Message.unpack(struct.pack("<I", len(header)) + header)


def test_a_message_that_is_too_large_is_refused_on_both_sides(monkeypatch):
    packed = Message({}, [bytes(100)]).pack()
    monkeypatch.setattr(wire, "LARGEST_MESSAGE", 100)
    with pytest.raises(ValueError, match="the most is 100"):
        Message({}, [bytes(100)]).pack()
    with pytest.raises(ValueError, match="bytes"):
        Message.unpack(packed)


@pytest.mark.parametrize(
    "error",
    [
        *(
            kind("what happened")
            for kind in vars(errors).values()
            if isinstance(kind, type) and issubclass(kind, PersistingError)
        ),
        KeyError("what happened"),
        ValueError("what happened"),
        IndexError("what happened"),
        TypeError("what happened"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_its_kind_and_text(error):
    arrived = from_wire(to_wire(error), "the process at x")
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)


class Private(SchemaError):
    """Of a kind that nobody else knows."""


class Pretending(Exception):
    """Named as one that others know."""


Pretending.__name__ = "StaleOwner"


def test_an_error_of_a_kind_of_its_own_arrives_as_the_nearest_known_one():
    assert type(from_wire(to_wire(Private("x")), "it")) is SchemaError
    arrived = from_wire(to_wire(ZeroDivisionError("by nought")), "it")
    assert type(arrived) is PersistingError
    assert str(arrived) == "ZeroDivisionError: by nought"
    assert type(from_wire(to_wire(Pretending("x")), "it")) is PersistingError


@pytest.mark.parametrize("text", ["x" * 100_000, "ä" * 100_000, "😀" * 100_000, "\udc80" * 9_000])
def test_a_long_error_is_cut_to_what_the_wire_can_carry(text):
    sent = to_wire(WaitTimeout(text))
    assert len(sent.extra_info) <= 3 * wire.LONGEST_ERROR
    arrived = from_wire(sent, "it")
    assert type(arrived) is WaitTimeout
    assert len(str(arrived).encode()) <= wire.LONGEST_ERROR


@pytest.mark.parametrize("info", [b"{", b"[]", b'{"kind": "Nothing", "text": ""}', b"\xff", b"7"])
def test_an_error_that_is_not_ours_is_a_peer_that_is_not_available(info):
    found = from_wire(flight.FlightServerError("x", extra_info=info), "the process at y")
    assert type(found) is BucketUnavailable
    assert "the process at y" in str(found)


def test_an_error_says_nothing_else_of_the_process_that_raised_it():
    try:
        raise StaleOwner("gone")
    except StaleOwner as error:
        sent = to_wire(error)
    assert json.loads(sent.extra_info) == {"kind": "StaleOwner", "text": "gone"}
    assert "Traceback" not in str(sent)
