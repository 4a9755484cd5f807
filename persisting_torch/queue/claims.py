"""Who takes which samples: claims, assignments and cursors, each decided in one transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pyroaring import BitMap64

from persisting_torch.errors import PersistingError
from persisting_torch.queue.books import Books, View
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.ready import ReadyIndexes
from persisting_torch.queue.sets import pack_list, pack_set, set_of, unpack_list

Last = Literal["drop", "pad", "split"]


class Sampler(Protocol):
    """What the engine needs of a sampler; persisting_torch.samplers.BaseSampler has it."""

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]: ...

    def clear_cache(self, partition_id: str) -> None: ...


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
    """What a task asks for in each global batch: dp_size slices of batch_size samples."""

    task: str
    partition: str
    fields: frozenset[str]
    batch_size: int
    dp_size: int
    last: Last = "drop"
    sampler: Sampler | None = None

    @property
    def size(self) -> int:
        return self.batch_size * self.dp_size


class End:
    """The answer that a sealed partition holds no further batch."""


class Claims:
    """Consumption of one bucket's samples by its tasks."""

    def __init__(self, ledger: Ledger, books: Books) -> None:
        self.ledger = ledger
        self.books = books

    def available(self, task: str, partition: str, fields: frozenset[str]) -> int:
        """How many samples the task could take now."""
        with self.ledger.reading() as tx:
            self.books.refresh(tx)
            return len(self.books.view(task, partition, fields).available)

    # Claims by batch, as get_meta makes them

    def claim(
        self,
        task: str,
        partition: str,
        fields: frozenset[str],
        batch_size: int,
        sampler: Sampler | None,
        sampling: dict[str, Any],
    ) -> list[int]:
        """Indexes that the sampler chose; those that it consumes are taken for good.

        With dp_rank and batch_index among the sampling arguments the answer is remembered, and
        every process that asks for the same gets the same.
        """
        rank, batch = sampling.get("dp_rank"), sampling.get("batch_index")
        place = None if rank is None or batch is None else (int(rank), int(batch))
        with self.ledger.transaction() as tx:
            self.books.refresh(tx)
            known = self._remembered(tx, task, partition, place)
            if known is not None:
                return known
            view = self.books.view(task, partition, fields)
            sampled, consumed = self._sample(view, batch_size, sampler, sampling)
            if not sampled and not consumed:
                return []
            number = self.books.task_id(tx, task, partition)
            _take(tx, number, set_of(consumed))
            if place is not None:
                tx.execute(
                    "INSERT INTO rank_batches VALUES (?, ?, ?, ?, ?, ?)",
                    (number, *place, *pack_list(sampled)),
                )
            return list(sampled)

    def _remembered(
        self,
        tx: sqlite3.Connection,
        task: str,
        partition: str,
        place: tuple[int, int] | None,
    ) -> list[int] | None:
        known = self.books.tasks.get((task, partition))
        if place is None or known is None:
            return None
        found = tx.execute(
            "SELECT first, count, members FROM rank_batches"
            " WHERE task = ? AND dp_rank = ? AND batch_index = ?",
            (known.id, *place),
        ).fetchone()
        return None if found is None else unpack_list(*found)

    def _sample(
        self, view: View, batch_size: int, sampler: Sampler | None, sampling: dict[str, Any]
    ) -> tuple[Sequence[int], Sequence[int]]:
        ready = ReadyIndexes(view.available)
        if sampler is None:
            first = ready.first(batch_size)
            return first, first
        sampled, consumed = sampler.sample(
            ready, batch_size, task_name=view.task, partition_id=view.partition, **sampling
        )
        stray = BitMap64(consumed) - self.books.ready_whoever_took(view.partition, frozenset())
        if stray:
            raise PersistingError(
                f"the sampler {type(sampler).__name__} consumed indexes that"
                f" {self.books.ledger.place.queue}/{view.partition} does not hold:"
                f" {list(stray)[:10]}. It may only return what it finds in ready_indexes."
            )
        return sampled, consumed

    def mark(self, task: str, partition: str, indexes: Sequence[int]) -> None:
        """Take these samples for the task, whoever decided it.

        Raises KeyError naming indexes that the partition does not hold.
        """
        members = set_of(indexes)
        with self.ledger.transaction() as tx:
            self.books.refresh(tx)
            where = self.books.partitions.get(partition)
            unknown = members - where.arrived if where is not None else members
            if unknown:
                raise KeyError(
                    f"{self.ledger.place.queue}/{partition} holds no samples with global indexes"
                    f" {list(unknown)[:10]}, so task {task!r} cannot have consumed them."
                )
            _take(tx, self.books.task_id(tx, task, partition), members)

    def reset(self, task: str, partition: str) -> None:
        """Forget all that the task has taken in the partition."""
        with self.ledger.transaction() as tx:
            self.books.refresh(tx)
            known = self.books.tasks.get((task, partition))
            if known is None:
                return
            for table in ("claims", "consumed", "assignments", "rank_batches"):
                tx.execute(f"DELETE FROM {table} WHERE task = ?", (known.id,))
            tx.execute("UPDATE tasks SET epoch = epoch + 1, cursor = 0 WHERE id = ?", (known.id,))

    def fold(self, tx: sqlite3.Connection, most: int) -> None:
        """Join a task's claims into one set where there are more than `most`."""
        self.books.refresh(tx)
        crowded = tx.execute(
            "SELECT task, max(seq) FROM claims GROUP BY task HAVING count(*) > ?", (most,)
        ).fetchall()
        taken = {task.id: task.taken for task in self.books.tasks.values()}
        for task, seq in crowded:
            tx.execute(
                "INSERT OR REPLACE INTO consumed VALUES (?, ?, ?)",
                (task, seq, taken[task].serialize()),
            )
            tx.execute("DELETE FROM claims WHERE task = ? AND seq <= ?", (task, seq))

    # Assignments: global batches that are replayed exactly

    def assignment(self, order: Order, k: int) -> Assignment | type[End] | None:
        """Global batch k: the one decided before, else a new one, None if not enough is ready.

        `End` if the partition is sealed and has no batch k.
        """
        with self.ledger.transaction() as tx:
            self.books.refresh(tx)
            task = self.books.task_id(tx, order.task, order.partition)
            found = self._decided(tx, task, order, k)
            if found is not None:
                return found
            last = tx.execute("SELECT max(k) FROM assignments WHERE task = ?", (task,)).fetchone()
            view = self.books.view(order.task, order.partition, order.fields)
            left = view.available.copy()
            answer: Assignment | type[End] | None = None
            for number in range(0 if last[0] is None else last[0] + 1, k + 1):
                answer = self._decide(tx, task, order, number, left)
                if not isinstance(answer, Assignment):
                    break
            return answer

    def _decided(
        self, tx: sqlite3.Connection, task: int, order: Order, k: int
    ) -> Assignment | None:
        found = tx.execute(
            "SELECT sizes, padding, first, count, members FROM assignments"
            " WHERE task = ? AND k = ?",
            (task, k),
        ).fetchone()
        if found is None:
            return None
        sizes, padding = json.loads(found[0]), json.loads(found[1])
        if len(sizes) != order.dp_size or max(sizes) > order.batch_size:
            raise PersistingError(
                f"batch {k} of task {order.task!r} on {self.ledger.place.queue}/{order.partition}"
                f" was formed for {len(sizes)} ranks of {max(sizes)} samples and is now asked for"
                f" {order.dp_size} ranks of {order.batch_size}. Resume with the same batch_size and"
                " number of ranks, use another task_name, or reset_consumption."
            )
        return _cut(k, unpack_list(*found[2:]), sizes, padding)

    def _decide(
        self, tx: sqlite3.Connection, task: int, order: Order, k: int, left: BitMap64
    ) -> Assignment | type[End] | None:
        chosen = self._choose(order, k, left, order.size)
        sizes, padding = [order.batch_size] * order.dp_size, [0] * order.dp_size
        if len(chosen) < order.size:
            if not self.books.is_sealed(order.partition):
                return None
            if order.last == "drop":
                return End
            chosen = self._choose(order, k, left, min(len(left), order.size))
            if len(chosen) < (order.dp_size if order.last == "split" else 1):
                return End
            if order.last == "split":
                each, more = divmod(len(chosen), order.dp_size)
                sizes = [each + (rank < more) for rank in range(order.dp_size)]
            else:
                chosen, padding = _pad(chosen, order)
        tx.execute(
            "INSERT INTO assignments VALUES (?, ?, ?, ?, ?, ?, ?)",
            (task, k, json.dumps(sizes), json.dumps(padding), *pack_list(chosen)),
        )
        taken = BitMap64(chosen)
        _take(tx, task, taken)
        left -= taken
        return _cut(k, chosen, sizes, padding)

    def _choose(self, order: Order, k: int, left: BitMap64, size: int) -> list[int]:
        ready = ReadyIndexes(left)
        if not size or len(left) < size:
            return []
        if order.sampler is None:
            return ready.first(size)
        order.sampler.clear_cache(order.partition)
        sampled, _ = order.sampler.sample(
            ready,
            size,
            task_name=order.task,
            partition_id=order.partition,
            dp_rank=0,
            batch_index=k,
        )
        stray = BitMap64(sampled) - left
        if stray or len(set(sampled)) != len(sampled):
            raise PersistingError(
                f"the sampler {type(order.sampler).__name__} returned indexes that are not ready"
                f" or came twice: {list(stray)[:10] or list(sampled)[:10]}. It may only return what"
                " it finds in ready_indexes, each once."
            )
        return list(sampled)

    def cursor(self, task: str, partition: str) -> int:
        """Global batches below the cursor are consumed for good."""
        with self.ledger.reading() as tx:
            self.books.refresh(tx)
            known = self.books.tasks.get((task, partition))
            return 0 if known is None else known.cursor

    def commit_cursor(self, task: str, partition: str, k: int) -> None:
        """Move the cursor up to k; it never moves back."""
        with self.ledger.transaction() as tx:
            self.books.refresh(tx)
            number = self.books.task_id(tx, task, partition)
            tx.execute("UPDATE tasks SET cursor = ? WHERE id = ? AND cursor < ?", (k, number, k))

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

    def describe(self, report: Callable[[str, str], dict[str, Any]]) -> dict[str, Any]:
        """A report for each task and partition, as {task: {partition: report}}."""
        tasks: dict[str, Any] = {}
        for task, partition in sorted(self.books.tasks):
            tasks.setdefault(task, {})[partition] = report(task, partition)
        return tasks


def _take(tx: sqlite3.Connection, task: int, members: BitMap64) -> None:
    if members:
        tx.execute(
            "INSERT INTO claims (task, first, count, members) VALUES (?, ?, ?, ?)",
            (task, *pack_set(members)),
        )


def _cut(k: int, indexes: list[int], sizes: list[int], padding: list[int]) -> Assignment:
    slices, start = [], 0
    for size in sizes:
        slices.append(tuple(indexes[start : start + size]))
        start += size
    return Assignment(k, tuple(slices), tuple(padding))


def _pad(chosen: list[int], order: Order) -> tuple[list[int], list[int]]:
    """Repeat the chosen samples until the batch is full; how much of each slice is repetition."""
    own = len(chosen)
    full = [chosen[at % own] for at in range(order.size)]
    starts = range(0, order.size, order.batch_size)
    return full, [min(order.batch_size, max(0, s + order.batch_size - own)) for s in starts]
