"""Trajectories that were put step by step: whole episodes, or windows of so many steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from pyroaring import BitMap64

from persisting_torch.errors import SchemaError
from persisting_torch.queue.ready import ReadyIndexes
from persisting_torch.samplers.aged import AgedReady
from persisting_torch.samplers.base import BaseSampler
from persisting_torch.samplers.memory import Memories
from persisting_torch.samplers.pieces import Piece, Pieces
from persisting_torch.samplers.shapes import Tail, as_episodes, as_windows

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from persisting_torch.queue.look import Look

Unfinished = Literal["drop", "keep"]

# Steps are read so many at a time, and no further than it takes to fill a batch.
READ_AT_ONCE = 4096
MOST_NAMED = 3


class EpisodeSampler(BaseSampler):
    """Gives whole episodes of samples that were put step by step.

    Each sample is a step. `episode_field` says of which episode (a number or text, unique in the
    partition), `step_field` the how manieth it is (0, 1, 2, ...), and `end_field` is true in the
    last; where several fields are named, such as ("terminated", "truncated"), one of them. Any
    process may put any step, in any order, and the fields may arrive later than the sample. An
    episode is complete when its last step is there and all before it; episodes go out in the order
    in which they were completed, each as a whole, its steps in order.

    `batch_size` counts episodes. A dataset gives each batch the form that `as_episodes` describes:
    batch size [batch_size], each field a jagged tensor [batch_size, steps, ...].

    An episode that does not end waits, and is named when a wait takes too long. Once
    `abandon_after` seconds have passed without a new step of it, or when the partition is sealed,
    it is waited for no longer: with `unfinished="drop"` its steps are dropped, for the reason
    "unfinished"; with "keep" the steps up to the first that is missing are given as an episode.
    Of a step that was put twice the newer sample counts, and the other is dropped as "repeated"; a
    step after the last is dropped as "beyond the end".

    The fields named here are read once, when all that a sample needs to be ready is there. Within
    MaxStaleness an episode is as old as its oldest step, and is dropped as a whole.

    Raises ValueError for arguments out of range; SchemaError, when a batch is asked for, where a
    step is not numbered, or an episode not named, as said above.

    >>> import tempfile, torch
    >>> from persisting_torch import PersistingDataset, Queue
    >>> queue = Queue("walks", tempfile.mkdtemp())
    >>> for episode, length in [("a", 3), ("b", 2)]:
    ...     for step in range(length):
    ...         _ = queue.sync.put(
    ...             {"episode": episode, "step": step, "x": step / 2, "done": step == length - 1}
    ...         )
    >>> batch = next(iter(PersistingDataset(queue, sampler=EpisodeSampler(), batch_size=2)))
    >>> [x.tolist() for x in batch["x"].unbind()]
    [[0.0, 0.5, 1.0], [0.0, 0.5]]
    """

    looks = True
    counts = "episodes"

    def __init__(
        self,
        episode_field: str = "episode",
        step_field: str = "step",
        end_field: str | Sequence[str] = "done",
        *,
        unfinished: Unfinished = "drop",
        abandon_after: float | None = None,
        mask_field: str = "mask",
    ) -> None:
        super().__init__()
        if unfinished not in get_args(Unfinished):
            raise ValueError(f"unfinished must be 'drop' or 'keep', got {unfinished!r}.")
        if abandon_after is not None and not abandon_after > 0:
            raise ValueError(
                f"abandon_after must be positive, got {abandon_after}. It is the number of seconds"
                " without a new step after which an episode is waited for no longer; None for ever."
            )
        self.episode_field = episode_field
        self.step_field = step_field
        self.end_fields = (end_field,) if isinstance(end_field, str) else tuple(end_field)
        self.unfinished = unfinished
        self.abandon_after = abandon_after
        self.mask_field = mask_field
        self.recheck_seconds = None if abandon_after is None else abandon_after / 4
        self.needs = (step_field, episode_field, *self.end_fields)
        self.shaped_by = (step_field,)
        self._new_pieces: Callable[[], Pieces] = Pieces
        self._memories = Memories(self._new_pieces)

    def shape(
        self, batch: TensorDictBase, pad: Mapping[str, float] | None = None
    ) -> TensorDictBase:
        """A batch of steps, as this sampler chose them, in its final form."""
        return as_episodes(batch, self.step_field, pad=pad, mask_field=self.mask_field)

    def deal(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        dp_size: int,
        *,
        look: Look,
        **where: Any,
    ) -> list[list[int]]:
        """`batch_size` episodes for each of `dp_size` ranks, or [] while there are not so many."""
        found = self._first(ready_indexes, batch_size * dp_size, look)
        if len(found) < batch_size * dp_size:
            return []
        starts = range(0, len(found), batch_size)
        return [list(chain(*found[start : start + batch_size])) for start in starts]

    def sample(
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        *args: Any,
        look: Look | None = None,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """The steps of the first `batch_size` complete episodes, to read and to consume.

        Both lists are empty while there are not so many; where no more can come, what there is.
        """
        if look is None:
            raise ValueError(
                f"{type(self).__name__} reads fields of the samples, so only a queue can call it:"
                " give it to get_meta, get_batch or a dataset as `sampler`."
            )
        found = self._first(ready_indexes, batch_size, look)
        if len(found) < batch_size and not look.over:
            return [], []
        sampled = list(chain(*found))
        return sampled, sampled.copy()

    def list_all(self, indexes: Sequence[int], look: Look) -> list[list[int]]:
        """The complete episodes of these samples, for a pass over all of them."""
        pieces = self._new_pieces()
        for start in range(0, len(indexes), READ_AT_ONCE):
            self._read(indexes[start : start + READ_AT_ONCE], pieces, look, 0.0)
        pieces.let_go(0.0, self.unfinished == "keep")
        return [piece.indexes() for piece in pieces.whole.values()]

    def let_go(
        self, stale: BitMap64, ready_indexes: Sequence[int], look: Look, reason: str
    ) -> BitMap64:
        """Drop every episode that has one of these samples; all samples that are dropped."""
        pieces = self._memories.of(look)
        self._follow(pieces, ready_indexes, look, time.monotonic(), math.inf)
        gone = pieces.with_any(stale) | stale
        look.drop(gone, reason)
        return gone

    def what_is_missing(self) -> str:
        """Which episodes lack what, as of the newest question."""
        known = self._memories.latest
        unfinished = [] if known is None else known.open
        if known is None or not unfinished:
            return ""
        named = "; ".join(self._tell(piece) for piece in unfinished[:MOST_NAMED])
        more = len(unfinished) - MOST_NAMED
        return (
            f"{self.counts} complete: {len(known.whole)}, unfinished: {len(unfinished)} ({named}"
            f"{f'; and {more} more' if more > 0 else ''})"
        )

    def _tell(self, piece: Piece) -> str:
        if piece.ends or piece.gap < max(piece.steps):
            return f"episode {piece.episode!r} lacks step {piece.gap}"
        return f"episode {piece.episode!r} has not ended at step {piece.gap - 1}"

    def _first(self, ready: Sequence[int], wanted: int, look: Look) -> list[list[int]]:
        """The first complete episodes, `wanted` at most; what is waited for no longer is dropped.

        Nothing is taken from memory here, since the transaction may fail: what was taken for good
        is not among the ready ones next time.
        """
        pieces = self._memories.of(look)
        now = time.monotonic()
        unread = self._follow(pieces, ready, look, now, wanted)
        if not unread and look.over:
            pieces.let_go(now, self.unfinished == "keep")
        elif not unread and self.abandon_after is not None:
            pieces.let_go(now - self.abandon_after, self.unfinished == "keep")
        for reason, members in pieces.spare.items():
            look.drop(members, reason)
        return [piece.indexes() for piece in islice(pieces.whole.values(), wanted)]

    def _follow(
        self, pieces: Pieces, ready: Sequence[int], look: Look, now: float, wanted: float
    ) -> BitMap64:
        """Read what is new until `wanted` episodes are complete; what is then not read yet."""
        try:
            unread = pieces.follow(_members(ready))
            while len(pieces.whole) < wanted and unread:
                news = list(islice(unread, READ_AT_ONCE))
                unread -= BitMap64(news)
                self._read(news, pieces, look, now)
        except BaseException:
            pieces.forget()  # Ctrl-C, too, would leave it half way.
            raise
        return unread

    def _read(self, indexes: Sequence[int], pieces: Pieces, look: Look, now: float) -> None:
        """Add these steps to the pieces, by the values of their fields."""
        numbers, names = (look.values(field, indexes) for field in self.needs[:2])
        steps, episodes = _plain(numbers), _plain(names)
        if not _are_steps(numbers):
            self._check(indexes, self.step_field, steps, _is_step, "a whole number from 0", look)
        if not isinstance(names, np.ndarray):
            self._check(indexes, self.episode_field, episodes, _is_name, "a number or text", look)
        ends = np.zeros(len(indexes), dtype=bool)
        for name in self.end_fields:
            ends |= np.array([bool(value) for value in look.values(name, indexes)], dtype=bool)
        pieces.add(indexes, episodes, list(map(int, steps)), ends.tolist(), now)

    def _check(
        self,
        indexes: Sequence[int],
        field: str,
        values: list[Any],
        is_good: Callable[[Any], bool],
        expected: str,
        look: Look,
    ) -> None:
        bad = next((at for at, value in enumerate(values) if not is_good(value)), None)
        if bad is not None:
            raise SchemaError(
                f"{type(self).__name__}: sample {indexes[bad]} of {look.queue}/{look.partition} has"
                f" {values[bad]!r} in field {field!r}, where {expected} is needed. Name the right"
                f" field, or remove the sample with queue.clear([{indexes[bad]}],"
                f" {look.partition!r})."
            )


class WindowSampler(EpisodeSampler):
    """Gives windows of `length` consecutive steps of one episode, of samples put step by step.

    The windows of an episode are its steps 0 to length - 1, length to 2 * length - 1, and so on: no
    window crosses an end, no step is in two, and a window goes out as soon as its steps are there,
    though its episode still goes on. Steps are put as EpisodeSampler describes.

    `batch_size` counts windows. A dataset gives each batch the form that `as_windows` describes:
    batch size [batch_size, length]. What is left at the end of an episode, shorter than a window,
    is dropped with `tail="drop"`, for the reason "tail"; with "pad" it is filled up, and every
    batch has a field `mask_field` that is True where there are steps; with "keep" it stays
    short, and batches are jagged, as `as_episodes` describes.

    `unfinished` and `abandon_after` are those of EpisodeSampler, for windows whose steps did not
    all arrive.

    Raises ValueError for arguments out of range, and SchemaError as EpisodeSampler does.

    >>> import tempfile, torch
    >>> from persisting_torch import PersistingDataset, Queue
    >>> queue = Queue("walks", tempfile.mkdtemp())
    >>> for step in range(5):
    ...     _ = queue.sync.put({"episode": "a", "step": step, "x": step / 2, "done": step == 4})
    >>> sampler = WindowSampler(2, tail="pad")
    >>> batch = next(iter(PersistingDataset(queue, sampler=sampler, batch_size=3)))
    >>> batch["x"].tolist(), batch["mask"].sum(1).tolist()
    ([[0.0, 0.5], [1.0, 1.5], [2.0, 0.0]], [2, 2, 1])
    """

    counts = "windows"

    def __init__(
        self,
        length: int,
        episode_field: str = "episode",
        step_field: str = "step",
        end_field: str | Sequence[str] = "done",
        *,
        tail: Tail = "drop",
        unfinished: Unfinished = "drop",
        abandon_after: float | None = None,
        mask_field: str = "mask",
    ) -> None:
        super().__init__(
            episode_field,
            step_field,
            end_field,
            unfinished=unfinished,
            abandon_after=abandon_after,
            mask_field=mask_field,
        )
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}. It counts steps a window.")
        if tail not in get_args(Tail):
            raise ValueError(f"tail must be 'drop', 'pad' or 'keep', got {tail!r}.")
        self.length = length
        self.tail = tail
        self._new_pieces = partial(Pieces, length, drop_tails=tail == "drop")
        self._memories = Memories(self._new_pieces)

    def shape(
        self, batch: TensorDictBase, pad: Mapping[str, float] | None = None
    ) -> TensorDictBase:
        """A batch of steps, as this sampler chose them, in its final form."""
        return as_windows(
            batch,
            self.length,
            self.step_field,
            tail=self.tail,
            pad=pad,
            mask_field=self.mask_field,
        )

    def _tell(self, piece: Piece) -> str:
        what = f"window {piece.start // self.length} of episode {piece.episode!r}"
        return f"{what} lacks step {piece.gap}"


def _members(ready: Sequence[int]) -> BitMap64:
    return ready.members if isinstance(ready, ReadyIndexes | AgedReady) else BitMap64(ready)


def _plain(values: Any) -> list[Any]:
    """Values as Python's own numbers and text, which know when they are equal."""
    if isinstance(values, np.ndarray):
        return list(values.tolist())
    return [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]


def _are_steps(values: Any) -> bool:
    """Whether these are an array of whole numbers from 0."""
    return isinstance(values, np.ndarray) and bool(((values >= 0) & (values % 1 == 0)).all())


def _is_step(value: Any) -> bool:
    return isinstance(value, (int, float)) and value >= 0 and value % 1 == 0


def _is_name(value: Any) -> bool:
    return isinstance(value, (int, float, str, bytes))
