"""Training runs in real processes that start in milliseconds: forks of one that has Lightning."""

from __future__ import annotations

from typing import Any

from tests import children

NURSERY = children.Nursery("tests.exactly_once.training")


class Child(children.Child):
    """A function that runs in a process of its own."""

    patience = 90.0


def start(function: str, /, **arguments: Any) -> Child:
    """Run "module:function" with arguments that JSON can carry."""
    return Child(NURSERY, function, arguments)
