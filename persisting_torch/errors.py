"""Errors of persisting_torch. Each message says what happened, where, and what to do."""

from __future__ import annotations


class PersistingError(Exception):
    """Base of every error that this package raises on its own account."""


class SchemaError(PersistingError, ValueError):
    """A value does not fit the field it was put into; nothing of that put was stored."""


class QueueClosed(PersistingError):
    """The queue handle was closed before the call."""


class QueueSealed(PersistingError):
    """A put reached a partition whose producer said that no more samples will come."""


class QueueFull(PersistingError):
    """There is no room for a put, or a demand that waits for more than there is room for."""


class WaitTimeout(PersistingError, TimeoutError):
    """A wait reached its limit; the message says what is missing."""


class ProducerFailed(PersistingError):
    """The producer that a wait depends on failed or died."""


class BucketUnavailable(PersistingError):
    """The owner of a bucket cannot be reached, or the queue is open on another host.

    `relayed`: whether a process that was asked has said so, of another one that it needs.
    """

    relayed = False


class StaleOwner(PersistingError):
    """A write came from an owner whose lease has passed to another."""


class FormatError(PersistingError):
    """The files at a path are not a queue that this version can read."""


class FlushFailed(PersistingError, OSError):
    """Waiting samples could not be written; they are kept in memory for the next flush."""
