"""Transactions that are tried again when the owner of a ledger in a cluster is replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from persisting_torch.errors import BucketUnavailable

ATTEMPTS = 3

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class Interrupted(BucketUnavailable):
    """A transaction came to nothing since its owner was replaced in the middle of it."""


def again(method: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """Do it anew where its transaction was interrupted, so that nobody notices the new owner."""

    @functools.wraps(method)
    def tried(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
        for _ in range(ATTEMPTS - 1):
            try:
                return method(*args, **kwargs)
            except Interrupted:
                continue
        return method(*args, **kwargs)

    return tried
