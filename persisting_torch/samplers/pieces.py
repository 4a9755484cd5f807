"""Steps of episodes, gathered piece by piece: whole episodes, or windows of so many steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count

from pyroaring import BitMap64

Key = tuple[Hashable, int]


@dataclass(slots=True, eq=False)
class Piece:
    """The steps of one episode from `start` on, as far as they have come: all, or `most` of them.

    `steps` has their global indexes by number, `ends` those that are said to be the last, and `cut`
    is where the piece ends because nothing more is waited for. `news_at` is the time of its newest
    step, and `turn` rises from one step that arrived to the next.
    """

    episode: Hashable
    start: int
    most: int | None
    steps: dict[int, int] = field(default_factory=dict)
    ends: set[int] = field(default_factory=set)
    cut: int | None = None
    news_at: float = 0.0
    turn: int = 0

    @property
    def key(self) -> Key:
        return self.episode, self.start

    @property
    def stop(self) -> int | None:
        """The step after its last; None while that is not known."""
        if self.ends:
            return min(self.ends) + 1
        if self.most is not None and self.cut is None:
            return self.start + self.most
        return self.cut

    @property
    def gap(self) -> int:
        """The first step that is not there."""
        return next(step for step in count(self.start) if step not in self.steps)

    @property
    def is_whole(self) -> bool:
        stop = self.stop
        if stop is None or len(self.steps) < stop - self.start:
            return False
        return sum(step < stop for step in self.steps) == stop - self.start

    def indexes(self) -> list[int]:
        """Global indexes of the steps, in the order of the steps; of a whole piece."""
        assert self.stop is not None
        return [self.steps[step] for step in range(self.start, self.stop)]

    def surplus(self) -> list[int]:
        """Global indexes of what lies beyond the end."""
        stop = self.stop
        return [] if stop is None else [at for step, at in self.steps.items() if step >= stop]

    def lose(self, indexes: set[int]) -> None:
        """Forget these samples."""
        self.steps = {step: at for step, at in self.steps.items() if at not in indexes}
        self.ends &= self.steps.keys()


class Pieces:
    """What is known of the ready steps of a partition: whole pieces, and open ones.

    It mirrors what is ready and not taken: `follow` forgets what is gone, `add` enters what is new.
    `length` steps make a piece (None: all of an episode); with `drop_tails` a piece that ends with
    fewer is not given. `spare` are samples that are to be dropped, by reason.
    """

    def __init__(self, length: int | None = None, drop_tails: bool = False) -> None:
        self.length = length
        self.drop_tails = drop_tails
        self.forget()

    def forget(self) -> None:
        """Begin anew, with nothing known."""
        self.whole: dict[Key, Piece] = {}
        """In the order in which they became whole."""
        self.spare: dict[str, BitMap64] = {}
        self._all: dict[Key, Piece] = {}
        self._of: dict[int, Piece] = {}
        self._seen = BitMap64()
        self._turn = 0

    @property
    def open(self) -> list[Piece]:
        """The pieces that are not whole."""
        return [piece for key, piece in list(self._all.items()) if key not in self.whole]

    def __len__(self) -> int:
        """How many samples are remembered."""
        return len(self._seen)

    def follow(self, ready: BitMap64) -> BitMap64:
        """Forget what is no longer ready; the ready samples that were not added yet."""
        gone = self._seen - ready
        self._seen -= gone
        for members in self.spare.values():
            members.difference_update(gone)
        lost: dict[Piece, set[int]] = {}
        for index in gone:
            piece = self._of.pop(index, None)
            if piece is not None:
                lost.setdefault(piece, set()).add(index)
        for piece, indexes in lost.items():
            piece.lose(indexes)
            self._sort(piece)
        return ready - self._seen

    def add(
        self,
        indexes: Sequence[int],
        episodes: Sequence[Hashable],
        steps: Sequence[int],
        ends: Sequence[bool],
        now: float,
    ) -> None:
        """Enter steps, in the order of their arrival. Of one that came twice the newest counts."""
        touched: dict[Key, Piece] = {}
        for index, episode, step, is_end in zip(indexes, episodes, steps, ends, strict=True):
            start = 0 if self.length is None else step - step % self.length
            key = (episode, start)
            piece = self._all.get(key)
            if piece is None:
                piece = self._all[key] = Piece(episode, start, self.length)
            if step in piece.steps:
                self._spare(piece, [min(index, piece.steps[step])], "repeated")
                if step in piece.steps:
                    continue
            self._turn += 1
            piece.turn = self._turn
            piece.steps[step] = index
            if is_end:
                piece.ends.add(step)
            self._of[index] = piece
            touched[key] = piece
        self._seen.update(indexes)
        for piece in sorted(touched.values(), key=lambda piece: piece.turn):
            piece.news_at, piece.cut = now, None
            self._sort(piece)

    def with_any(self, members: BitMap64) -> BitMap64:
        """All samples of the pieces that have one of these."""
        pieces = {self._of[index] for index in members if index in self._of}
        return BitMap64().union(*(BitMap64(piece.steps.values()) for piece in pieces))

    def let_go(self, silent_since: float, keep: bool) -> None:
        """Wait no longer for what open pieces lack that had no news later than `silent_since`.

        With `keep` the steps before the first gap become a whole piece; all others are spare.
        """
        for piece in self.open:
            if piece.news_at <= silent_since:
                piece.ends, piece.cut = set(), piece.gap if keep else piece.start
                self._spare(piece, piece.surplus(), "unfinished")
                self._sort(piece)

    def _sort(self, piece: Piece) -> None:
        """Put a piece that has changed where it belongs."""
        is_whole = piece.is_whole
        if is_whole:
            self._spare(piece, piece.surplus(), "beyond the end")
            if self.drop_tails and self.length is not None and len(piece.steps) < self.length:
                self._spare(piece, piece.indexes(), "tail")
        if not piece.steps:
            del self._all[piece.key]
        if is_whole and piece.steps:
            self.whole[piece.key] = piece
        else:
            self.whole.pop(piece.key, None)

    def _spare(self, piece: Piece, indexes: list[int], reason: str) -> None:
        if indexes:
            piece.lose(set(indexes))
            for index in indexes:
                self._of.pop(index, None)
            self.spare.setdefault(reason, BitMap64()).update(indexes)
