"""What samplers remember of the samples that they have read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from persisting_torch.queue.look import Look

M = TypeVar("M")


class Memories(Generic[M]):
    """One memory for each open queue, partition, task and set of fields that was asked for.

    A copy, such as that of another process, begins with none and reads for itself.
    """

    def __init__(self, make: Callable[[], M]) -> None:
        self._make = make
        self._of: WeakKeyDictionary[object, dict[Any, M]] = WeakKeyDictionary()
        self.latest: M | None = None

    def of(self, look: Look) -> M:
        """The memory for a look's place."""
        here = self._of.setdefault(look.opened, {})
        place = (look.partition, look.task, look.fields)
        if place not in here:
            here[place] = self._make()
        self.latest = here[place]
        return self.latest

    def __deepcopy__(self, memo: Any) -> Memories[M]:
        return Memories(self._make)

    def __reduce__(self) -> tuple[Any, ...]:
        return Memories, (self._make,)
