"""A bound on how old the policy may be that made a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pyroaring import BitMap64

from persisting_torch.errors import SchemaError
from persisting_torch.queue.ready import ReadyIndexes
from persisting_torch.samplers.aged import AgedReady
from persisting_torch.samplers.base import BaseSampler
from persisting_torch.samplers.memory import Memories

if TYPE_CHECKING:
    from persisting_torch.queue.look import Look

READ_AT_MOST = 1 << 20

PolicyVersion = int | Callable[[], int | None] | None


class MaxStaleness(BaseSampler):
    """Keeps from another sampler what too old a policy has made, and gives it the oldest first.

    A sample is stale where its field `version_field` is less than the current version less
    `max_staleness`. The current version is `policy_version`, a number or a function that tells it,
    as given to `get_meta` or the dataset; without it, the newest that a PolicyPublisher announced
    for the queue; before the first, nothing is stale. Stale samples are dropped when a batch is
    asked for: they count as consumed, with reason "stale" in the queue's books, and hold nothing
    up. What is in a batch stays in it, whenever it is replayed.

    The others are handed to `inner` ordered by (version, index). A sample without a version is
    never stale and comes last. Groups of a GRPOGroupNSampler are as old as their oldest member, and
    go or are dropped as a whole: with `group_by` incomplete ones too, whose members are late
    then, and without it complete ones only, since an incomplete group may not shift the others.

    In all else it is the inner sampler. Each version is read once, when its sample is first ready.

    Raises ValueError for a negative `max_staleness`; SchemaError, when a batch is asked for, where
    the versions are no numbers.

    >>> import tempfile
    >>> from persisting_torch import Queue, SequentialSampler
    >>> queue = Queue("rollouts", tempfile.mkdtemp())
    >>> _ = queue.sync.put([{"policy_version": version} for version in (3, 1, 2, 2)])
    >>> sampler = MaxStaleness(SequentialSampler(), max_staleness=1)
    >>> queue.sync.get_meta(["policy_version"], 3, sampler=sampler, policy_version=3).global_indexes
    [2, 3, 0]
    """

    looks = True

    def __init__(
        self, inner: Any, max_staleness: float, version_field: str = "policy_version"
    ) -> None:
        super().__init__()
        if not max_staleness >= 0:
            raise ValueError(
                f"max_staleness must not be negative, got {max_staleness}. Give the number of"
                " policy versions that a sample may lie behind; 0 takes the newest only."
            )
        self.inner = inner
        self.max_staleness = max_staleness
        self.version_field = version_field
        for name in ("recheck_seconds", "counts", "needs", "shaped_by"):
            setattr(self, name, getattr(inner, name, getattr(self, name)))
        self.counts = getattr(inner, "counts", "samples")
        self.needs = getattr(inner, "needs", ())
        self.shaped_by = getattr(inner, "shaped_by", ())
        self._memories: Memories[Versions] = Memories(Versions)
        self._dropped = 0

    def __getattr__(self, name: str) -> Any:
        """What else the queue may ask of a sampler, such as n_samples_per_prompt."""
        if name.startswith("_") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """What the inner sampler chooses of the samples that are not stale."""
        look = kwargs.pop("look", None)
        place = (kwargs.get("partition_id", ""), kwargs.get("task_name", ""))
        if not self.has_cached_result(*place, kwargs):
            ready_indexes = self._within_bound(ready_indexes, look, kwargs)
        if getattr(self.inner, "looks", False):
            kwargs["look"] = look
        sampled, consumed = self.inner.sample(ready_indexes, batch_size, *args, **kwargs)
        return sampled, consumed

    def deal(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        dp_size: int,
        look: Look | None = None,
        **kwargs: Any,
    ) -> list[list[int]]:
        """The slices of a global batch that the inner sampler makes of what is not stale."""
        aged = self._within_bound(ready_indexes, look, kwargs)
        assert look is not None
        return look.deal(self.inner, aged, batch_size, dp_size, **kwargs)

    def what_is_missing(self) -> str:
        """What the inner sampler waits for, and how many samples were too old."""
        told = [getattr(self.inner, "what_is_missing", str)()]
        if self._dropped:
            told.append(
                f"{self._dropped} samples were dropped, {self.version_field!r} more than"
                f" {self.max_staleness:g} behind"
            )
        return "; ".join(filter(None, told))

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether the inner sampler would repeat an earlier answer."""
        return bool(self.inner.has_cached_result(partition_id, task_name, sampling_config))

    def clear_cache(self, partition_id: str) -> None:
        """Let the inner sampler forget its answers for a partition."""
        self.inner.clear_cache(partition_id)

    def save_checkpoint(self) -> dict[str, Any]:
        """The inner sampler's."""
        state: dict[str, Any] = self.inner.save_checkpoint()
        return state

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """The inner sampler's."""
        self.inner.load_checkpoint(state)

    def _within_bound(
        self, ready_indexes: Sequence[int], look: Look | None, where: dict[str, Any]
    ) -> AgedReady:
        """The ready samples that are not stale, oldest first; those that are, are dropped."""
        if look is None:
            raise ValueError(
                "MaxStaleness needs to read samples, which only a queue allows. Give the sampler"
                " to get_meta, get_batch or a dataset."
            )
        ready = (
            ready_indexes.members
            if isinstance(ready_indexes, ReadyIndexes | AgedReady)
            else BitMap64(ready_indexes)
        )
        memory = self._memories.of(look)
        memory.follow(ready, self.version_field, look)
        current = _current(where.get("policy_version"), look)
        if current is not None:
            stale = memory.below(current - self.max_staleness)
            if stale:
                ready = ready - self._drop(stale, ready_indexes, look)
        return AgedReady(ready, memory.oldest_first())

    def _drop(self, stale: BitMap64, ready_indexes: Sequence[int], look: Look) -> BitMap64:
        let_go = getattr(self.inner, "let_go", None)
        if let_go is None:
            look.drop(stale, "stale")
            gone = stale
        else:
            gone = let_go(stale, ready_indexes, look, "stale")
        self._dropped += len(gone)
        return gone


class Versions:
    """The versions of one task's ready samples in one partition."""

    def __init__(self) -> None:
        self._read = BitMap64()
        self._of: dict[float, BitMap64] = {}

    def follow(self, ready: BitMap64, name: str, look: Look) -> None:
        """Read the versions of samples that are newly ready, and forget those that are not."""
        try:
            gone = self._read - ready
            if gone:
                self._forget(gone)
            unread = (ready & look.having(name)) - self._read
            if unread:
                indexes = np.array(unread.to_array(), dtype=np.int64)
                for start in range(0, len(indexes), READ_AT_MOST):
                    self._enter(indexes[start : start + READ_AT_MOST], name, look)
        except BaseException:
            self._read, self._of = BitMap64(), {}  # Ctrl-C, too, would leave a gap
            raise

    def below(self, bound: float) -> BitMap64:
        """All samples with a version below the bound."""
        return BitMap64().union(*(self._of[version] for version in self._of if version < bound))

    def oldest_first(self) -> list[BitMap64]:
        """The samples of each version, by rising version."""
        return [self._of[version] for version in sorted(self._of)]

    def _forget(self, gone: BitMap64) -> None:
        self._read -= gone
        for version in [v for v, members in self._of.items() if members.intersect(gone)]:
            self._of[version] = self._of[version] - gone
            if not self._of[version]:
                del self._of[version]

    def _enter(self, indexes: np.ndarray[Any, Any], name: str, look: Look) -> None:
        versions = look.values(name, indexes)
        if not isinstance(versions, np.ndarray) or versions.dtype.kind not in "iuf":
            raise SchemaError(
                f"queue {look.queue!r}: field {name!r} of partition {look.partition!r} holds no"
                " numbers, and versions have to be. Name the field of the policy's version in"
                " version_field."
            )
        order = np.argsort(versions, kind="stable")
        values, starts = np.unique(versions[order], return_index=True)
        for value, members in zip(
            values.tolist(), np.split(indexes[order], starts[1:]), strict=True
        ):
            if value == value:
                known = self._of.get(value, BitMap64())
                self._of[value] = known | BitMap64(members)
        self._read |= BitMap64(indexes)


def _current(given: PolicyVersion, look: Look) -> float | None:
    """The version that samples are compared with; None if none is known."""
    if given is None:
        return look.policy_version
    return given() if callable(given) else given
