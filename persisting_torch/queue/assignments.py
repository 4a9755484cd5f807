"""Global batches of tasks: formed once, stored before anybody sees them, replayed exactly."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, Literal

from pyroaring import BitMap64

from persisting_torch.errors import PersistingError
from persisting_torch.queue.again import again
from persisting_torch.queue.books import Books
from persisting_torch.queue.claims import replace_taken, take
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.look import Look, Sampler, deal, unit_of
from persisting_torch.queue.past import check_not_past, past_of, register
from persisting_torch.queue.reads import Reads
from persisting_torch.queue.ready import ReadyIndexes
from persisting_torch.queue.sets import pack_list, unpack_list

Last = Literal["drop", "pad", "split"]


@dataclass(frozen=True)
class Assignment:
    """Global batch k of a task.

    slices[r] are the global indexes for data-parallel rank r; the last padding[r] of them repeat
    others, so that the batch is full.
    """

    k: int
    slices: tuple[tuple[int, ...], ...]
    padding: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """What a task asks for in each global batch: dp_size slices of batch_size samples.

    Or of as many episodes, or whatever else it is that the sampler counts.
    """

    task: str
    partition: str
    fields: frozenset[str]
    batch_size: int
    dp_size: int
    last: Last = "drop"
    sampler: Sampler | None = None
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.batch_size * self.dp_size

    @property
    def step(self) -> int:
        """How many samples the sampler keeps together."""
        return int(getattr(self.sampler, "n_samples_per_prompt", 1))

    @property
    def unit(self) -> str:
        return unit_of(self.sampler)

    @property
    def terms(self) -> str:
        """What the end of a sealed partition depends on."""
        return json.dumps([self.last, self.batch_size, self.dp_size, sorted(self.fields)])


class End:
    """The answer that a sealed partition holds no further batch."""


class Assignments:
    """The global batches of one bucket's tasks, and how far each task has used them."""

    def __init__(self, ledger: Ledger, books: Books, reads: Reads) -> None:
        self.ledger = ledger
        self.books = books
        self.reads = reads

    @again
    def assignment(self, order: Order, k: int) -> Assignment | type[End] | None:
        """Global batch k: the one decided before, else a new one, None if not enough is ready.

        `End` if the partition is sealed and has no batch k. That is remembered too, so that all
        ranks end together even if another process still had samples of the partition to flush.
        """
        with self.ledger.transaction(hurry=order.sampler is None) as tx:
            self.books.refresh(tx)
            task = self.books.task_id(tx, order.task, order.partition)
            found = self._decided(tx, task, order, k)
            if found is not None:
                return found
            ended = tx.execute("SELECT k, terms FROM ends WHERE task = ?", (task,)).fetchone()
            if ended is not None and ended[0] <= k and ended[1] == order.terms:
                return End
            check_not_past(tx, task, k, self._name(order))
            last = tx.execute("SELECT max(k) FROM assignments WHERE task = ?", (task,)).fetchone()
            first = past_of(tx, task).k if last[0] is None else last[0] + 1
            view = self.books.view(order.task, order.partition, order.fields)
            left = view.available.copy()
            answer: Assignment | type[End] | None = None
            for number in range(first, k + 1):
                answer = self._decide(tx, task, order, number, left)
                if answer is End:
                    tx.execute(
                        "INSERT OR REPLACE INTO ends VALUES (?, ?, ?)", (task, number, order.terms)
                    )
                if not isinstance(answer, Assignment):
                    break
            return answer

    def _decided(
        self, tx: sqlite3.Connection, task: int, order: Order, k: int
    ) -> Assignment | None:
        found = tx.execute(
            "SELECT batch_size, sizes, padding, first, count, members FROM assignments"
            " WHERE task = ? AND k = ?",
            (task, k),
        ).fetchone()
        if found is None:
            return None
        batch_size, sizes, padding = found[0], json.loads(found[1]), json.loads(found[2])
        if (batch_size, len(sizes)) != (order.batch_size, order.dp_size):
            raise PersistingError(
                f"batch {k} of task {order.task!r} on {self.ledger.place.queue}/{order.partition}"
                f" was formed for {len(sizes)} ranks of {batch_size} {order.unit} and is now asked"
                f" for {order.dp_size} ranks of {order.batch_size}: two runs of different sizes"
                " follow the same task. Give one of them another task_name."
            )
        return _cut(k, unpack_list(*found[3:]), sizes, padding)

    def _decide(
        self, tx: sqlite3.Connection, task: int, order: Order, k: int, left: BitMap64
    ) -> Assignment | type[End] | None:
        look = Look(tx, self.books, self.reads, order.task, order.partition, order.fields)
        answer = self._cut_batch(order, k, left, look)
        taken = look.enter(tx, task)
        if isinstance(answer, Assignment):
            chosen = [index for part in answer.slices for index in part]
            tx.execute(
                "INSERT INTO assignments VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    task,
                    k,
                    order.batch_size,
                    json.dumps([len(part) for part in answer.slices]),
                    json.dumps(answer.padding),
                    *pack_list(chosen),
                ),
            )
            taken |= BitMap64(chosen)
        take(tx, task, taken)
        left -= taken
        return answer

    def _cut_batch(
        self, order: Order, k: int, left: BitMap64, look: Look
    ) -> Assignment | type[End] | None:
        """Global batch k of what is left, the rest of a sealed partition included."""
        look.over = self._is_over(order, left)
        slices = self._deal(order, k, left, look)
        if slices:
            return Assignment(k, tuple(map(tuple, slices)), (0,) * order.dp_size)
        if look.gone & left:
            return self._cut_batch(order, k, left - look.gone, look)
        if not look.over:
            return None
        if order.last == "drop":
            return End
        noted = look.noted.copy()
        rest = self._choose_rest(order, k, left, look)
        if order.last == "split" and order.unit == "samples" and len(rest) < order.dp_size:
            rest = [[index] for index in chain(*rest)]
        if len(rest) < (order.dp_size if order.last == "split" else 1):
            look.noted = noted
            return End
        return _split(k, rest, order) if order.last == "split" else _pad(k, rest, order)

    def _is_over(self, order: Order, left: BitMap64) -> bool:
        """Whether the partition is sealed and nothing worth waiting for may become ready."""
        return self.books.is_sealed(order.partition) and not self._may_become_ready(order, left)

    def _may_become_ready(self, order: Order, left: BitMap64) -> bool:
        """Whether samples that are there may still get fields that the order asks for.

        With order.last "drop" only if they could fill a batch. A field that no sample has ever
        had is a wrong name, and not worth waiting for.
        """
        if not order.fields <= self.books.schema.fields.keys():
            return False
        view = self.books.view(order.task, order.partition, order.fields)
        untaken = self.books.view(order.task, order.partition, frozenset())
        lacking = len(untaken.available) - len(view.available)
        return lacking > 0 and (order.last != "drop" or len(left) + lacking >= order.size)

    def _deal(self, order: Order, k: int, left: BitMap64, look: Look) -> list[list[int]]:
        """The slices of a batch as the sampler deals them; [] if there are not enough samples."""
        ready, sampler = ReadyIndexes(left), order.sampler
        if sampler is None:
            chosen = ready.first(order.size) if len(left) >= order.size else []
            return _in_parts(chosen, order.dp_size)
        sampler.clear_cache(order.partition)
        slices = deal(
            sampler,
            ready,
            order.batch_size,
            order.dp_size,
            look,
            task_name=order.task,
            partition_id=order.partition,
            batch_index=k,
            **order.sampling,
        )
        self._check(sampler, slices, left)
        return slices

    def _check(self, sampler: Sampler, slices: list[list[int]], left: BitMap64) -> None:
        sampled = [index for part in slices for index in part]
        stray = BitMap64(sampled) - left
        if stray or len(set(sampled)) != len(sampled):
            raise PersistingError(
                f"the sampler {type(sampler).__name__} returned indexes that are not ready"
                f" or came twice: {list(stray)[:10] or sampled[:10]}. It may only return what"
                " it finds in ready_indexes, each once."
            )

    def _choose_rest(self, order: Order, k: int, left: BitMap64, look: Look) -> list[list[int]]:
        """As many as the sampler gives of what is left, which is no whole batch.

        Single samples, or groups where it keeps those together, or episodes.
        """
        step = order.step
        for count in range(min(len(left), order.size // step), 0, -1):
            singly = replace(order, batch_size=step, dp_size=count)
            rest = self._deal(singly, k, left - look.gone, look)
            if rest:
                return rest
        return []

    @again
    def recut(self, order: Order, k: int) -> None:
        """Let a run that resumes at batch k with other sizes form its batches anew.

        Samples of the batches from k on, if those were formed for another number or size of
        slices, become available again; batches below k stay as they were trained.
        """
        with self.ledger.transaction() as tx:
            self.books.refresh(tx)
            task = self.books.tasks.get((order.task, order.partition))
            if task is None:
                return
            check_not_past(tx, task.id, k, self._name(order))
            rows = tx.execute(
                "SELECT batch_size, sizes, first, count, members FROM assignments"
                " WHERE task = ? AND k >= ?",
                (task.id, k),
            ).fetchall()
            sizes = {(batch_size, len(json.loads(cuts))) for batch_size, cuts, *_ in rows}
            if sizes <= {(order.batch_size, order.dp_size)}:
                return
            returned = BitMap64()
            for _, _, *packed in rows:
                returned |= BitMap64(unpack_list(*packed))
            tx.execute("DELETE FROM assignments WHERE task = ? AND k >= ?", (task.id, k))
            tx.execute("DELETE FROM ends WHERE task = ?", (task.id,))
            replace_taken(tx, task, task.taken - returned)
            tx.execute("UPDATE tasks SET cursor = min(cursor, ?) WHERE id = ?", (k, task.id))

    def cursor(self, task: str, partition: str) -> int:
        """Global batches below the cursor are consumed for good."""
        with self.ledger.reading() as tx:
            self.books.refresh(tx)
            known = self.books.tasks.get((task, partition))
            return 0 if known is None else known.cursor

    @again
    def commit_cursor(self, task: str, partition: str, k: int) -> None:
        """Move the cursor up to k; it never moves back."""
        with self.ledger.transaction() as tx:
            self.books.refresh(tx)
            number = self.books.task_id(tx, task, partition)
            tx.execute("UPDATE tasks SET cursor = ? WHERE id = ? AND cursor < ?", (k, number, k))

    @again
    def note_checkpoint(self, task: str, partition: str, path: str, k: int) -> None:
        """What is at this path may be resumed from batch k, as long as it is there."""
        with self.ledger.transaction() as tx:
            self.books.refresh(tx)
            register(tx, self.books.task_id(tx, task, partition), path, k)

    def past(self, task: str, partition: str) -> list[int]:
        """All samples of the batches that a task can no longer ask for."""
        with self.ledger.reading() as tx:
            self.books.refresh(tx)
            known = self.books.tasks.get((task, partition))
            return [] if known is None else list(past_of(tx, known.id).members)

    def _name(self, order: Order) -> str:
        return f"task {order.task!r} on {self.ledger.place.queue}/{order.partition}"

    def assigned(self, task: str, partition: str) -> list[tuple[int, list[int]]]:
        """All assignments (k, indexes without padding) of a task, in the order of k."""
        with self.ledger.reading() as tx:
            self.books.refresh(tx)
            known = self.books.tasks.get((task, partition))
            if known is None:
                return []
            rows = tx.execute(
                "SELECT k, sizes, padding, first, count, members FROM assignments"
                " WHERE task = ? ORDER BY k",
                (known.id,),
            ).fetchall()
        found = []
        for k, sizes, padding, *packed in rows:
            cut = _cut(k, unpack_list(*packed), json.loads(sizes), json.loads(padding))
            own = [
                part[: len(part) - pad] for part, pad in zip(cut.slices, cut.padding, strict=True)
            ]
            found.append((k, [index for part in own for index in part]))
        return found


def _in_parts(chosen: list[int], parts: int) -> list[list[int]]:
    """Consecutive parts of equal length; [] of nothing."""
    each = len(chosen) // parts
    return [chosen[start : start + each] for start in range(0, len(chosen), each)] if each else []


def _cut(k: int, indexes: list[int], sizes: list[int], padding: list[int]) -> Assignment:
    slices, start = [], 0
    for size in sizes:
        slices.append(tuple(indexes[start : start + size]))
        start += size
    return Assignment(k, tuple(slices), tuple(padding))


def _split(k: int, rest: list[list[int]], order: Order) -> Assignment:
    """Parts that are shared out among the ranks as evenly as it goes."""
    each, more = divmod(len(rest), order.dp_size)
    starts = [rank * each + min(rank, more) for rank in range(order.dp_size + 1)]
    shares = [rest[start:stop] for start, stop in pairwise(starts)]
    return Assignment(k, tuple(tuple(chain(*share)) for share in shares), (0,) * order.dp_size)


def _pad(k: int, rest: list[list[int]], order: Order) -> Assignment:
    """Parts that are repeated until the batch is full."""
    slices, padding = [], []
    each = order.batch_size // order.step
    for start in range(0, each * order.dp_size, each):
        places = range(start, start + each)
        slices.append(tuple(chain(*(rest[at % len(rest)] for at in places))))
        padding.append(sum(len(rest[at % len(rest)]) for at in places if at >= len(rest)))
    return Assignment(k, tuple(slices), tuple(padding))
