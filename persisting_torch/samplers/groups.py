"""Which ready samples belong together by the value of a field, at the cost of what is new."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from pyroaring import BitMap64

from persisting_torch.errors import SchemaError

if TYPE_CHECKING:
    from persisting_torch.queue.look import Look

READ_FIRST = 1024
READ_AT_MOST = 1 << 17


@dataclass(eq=False, slots=True)
class Group:
    """Ready samples with one value. It may go, though incomplete, from the deadline on."""

    value: Any
    deadline: float
    members: list[int] = field(default_factory=list)


class Groups:
    """The groups of one task's ready samples in one partition.

    It holds what is ready and in a group that was not given: members are forgotten once they are
    ready no more, whoever took or cleared them, and nothing is forgotten because it was given. So
    it stays right when the transaction of a batch fails. What has to outlive it, the groups that
    went incomplete, is noted in the queue.
    """

    def __init__(self, name: str, size: int, least: int, patience: float) -> None:
        self.name = name
        self.size = size
        self.least = least
        self.patience = patience
        self._forget_all()

    def _forget_all(self) -> None:
        self.going: dict[Group, None] = {}
        """Groups that may be given: complete ones and those whose time is up, in that order."""
        self.members_going = BitMap64()
        """The members of these."""
        self.gathered = BitMap64()
        """All samples that were read and are in a group."""
        self.what_is_missing = ""
        # Incomplete groups. They go only when all that is ready has been read, so that none goes
        # without a member that is there.
        self._waiting: dict[Group, None] = {}  # by rising deadline
        self._overdue: dict[Group, None] = {}  # past it, with too few members
        self._due: dict[Group, None] = {}  # past it, with enough; those that are going, too
        self._open: dict[Any, Group] = {}  # the group that takes the next member with a value
        self._group_of: dict[int, Group] = {}

    def follow(self, ready: BitMap64, look: Look, enough: float = math.inf) -> None:
        """Take note of what is ready now, reading on until `enough` groups may be given.

        Samples are read once, in the order of their indexes. Late members of groups that went
        incomplete are dropped.
        """
        try:
            self._follow(ready, look, enough)
        except BaseException:
            self._forget_all()  # Ctrl-C, too, would leave a sample that is half in a group
            raise

    def _follow(self, ready: BitMap64, look: Look, enough: float) -> None:
        self._forget(self.gathered - ready)
        self._expire(self._past(time.monotonic()))
        there = ready & look.having(self.name)
        unread = there - self.gathered - look.gone
        step = READ_FIRST
        while unread and (self._due or len(self.going) < enough):
            front = list(islice(unread, step))
            self._read(front, ready, look)
            unread -= BitMap64(front)
            step = min(2 * step, READ_AT_MOST)
        if not unread:
            if look.over and len(self.going) < enough:
                self._expire(self._waiting)
            for group in self._due:
                self._go(group)
        self.what_is_missing = self._tell(len(ready) - len(there))

    def groups_of(self, indexes: BitMap64) -> list[Group]:
        """The groups that have any of these samples."""
        return list(self.groups_in(indexes & self.gathered))

    def groups_in(self, members: Iterable[int]) -> Iterator[Group]:
        """The groups of these members, in the order in which they are first met."""
        met: set[Group] = set()
        for member in members:
            group = self._group_of[member]
            if group not in met:
                met.add(group)
                yield group

    def note(self, group: Group, look: Look) -> None:
        """The group goes: if it is incomplete, keep in mind how many members are yet to come.

        And which samples of its value are none of those, since they are in a group that stays.
        """
        lacks = self.size - len(group.members)
        if lacks > 0:
            others = [each for each in self.going if each.value == group.value and each != group]
            went = {
                "lacks": lacks,
                "members": sorted(group.members),
                "others": sorted(at for each in others for at in each.members),
            }
            look.note(_key(group.value), went)

    def _tell(self, without: int) -> str:
        incomplete = len(self._waiting) + len(self._overdue)
        told = []
        if incomplete:
            oldest = next(iter(self._overdue or self._waiting))
            told.append(
                f"{incomplete} group{'s' * (incomplete > 1)} of {self.name!r} incomplete; the"
                f" oldest, {oldest.value!r}, has {len(oldest.members)} of {self.size} samples"
            )
        if without:
            told.append(f"{without} ready samples have no {self.name!r} and are in no group")
        return "; ".join(told)

    def _forget(self, gone: BitMap64) -> None:
        """Dissolve the groups of samples that are ready no more; the rest of them is read anew."""
        for group in self.groups_of(gone):
            for groups in (self.going, self._waiting, self._overdue, self._due):
                groups.pop(group, None)
            if self._open.get(group.value) is group:
                del self._open[group.value]
            for member in group.members:
                del self._group_of[member]
            self.gathered -= BitMap64(group.members)
            self.members_going -= BitMap64(group.members)

    def _past(self, now: float) -> Iterator[Group]:
        return takewhile(lambda group: group.deadline <= now, self._waiting)

    def _expire(self, groups: Iterable[Group]) -> None:
        """The time of some waiting groups is up."""
        for group in list(groups):
            del self._waiting[group]
            (self._due if len(group.members) >= self.least else self._overdue)[group] = None

    def _read(self, indexes: list[int], ready: BitMap64, look: Look) -> None:
        values = look.values(self.name, indexes)
        if not isinstance(values, list):
            values = values.tolist()
        now = time.monotonic()
        for index, value in zip(indexes, values, strict=True):
            value = self._plain(value, index, look)
            group = self._open.get(value)
            if group is None:
                group = self._begin(value, index, ready, look, now)
            if group is not None:
                self._join(group, index)

    def _begin(
        self, value: Any, index: int, ready: BitMap64, look: Look, now: float
    ) -> Group | None:
        """A new group, unless its sample is a late one, which is dropped."""
        deadline = now + self.patience
        went = look.recall(_key(value))
        if went is not None and index not in went["others"]:
            if not ready & BitMap64(went["members"]):
                went["lacks"] -= 1
                look.note(_key(value), went if went["lacks"] else None)
                look.drop([index], "late")
                return None
            deadline = -math.inf  # its batch was undone: it may go again as it went
        group = self._open[value] = Group(value, deadline)
        (self._overdue if deadline <= now else self._waiting)[group] = None
        return group

    def _join(self, group: Group, index: int) -> None:
        group.members.append(index)
        self._group_of[index] = group
        self.gathered.add(index)
        if group in self.going:
            self.members_going.add(index)
        if len(group.members) == self.size:
            del self._open[group.value]
            for groups in (self._waiting, self._overdue, self._due):
                groups.pop(group, None)
            self._go(group)
        elif group in self._overdue and len(group.members) >= self.least:
            del self._overdue[group]
            self._due[group] = None

    def _go(self, group: Group) -> None:
        if group not in self.going:
            self.going[group] = None
            self.members_going |= BitMap64(group.members)

    def _plain(self, value: Any, index: int, look: Look) -> Any:
        """The value as something that equals itself in every process."""
        if getattr(value, "ndim", None) == 0:
            value = value.item()  # a tensor of no dimensions
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, int | str | bytes) or (isinstance(value, float) and value == value):
            return value
        raise SchemaError(
            f"queue {look.queue!r}: sample {index} of partition {look.partition!r} has"
            f" {type(value).__name__} {str(value)[:80]!r} in field {self.name!r}, by which samples"
            " cannot be grouped. Group by a field of int, str, bytes, bool or float."
        )


def _key(value: Any) -> str:
    """Under which a group that went incomplete is noted."""
    return f"went {value!r}"
