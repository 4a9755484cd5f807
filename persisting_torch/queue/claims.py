"""Who takes which samples, as get_meta decides it: one transaction for each decision."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyroaring import BitMap64

from persisting_torch.errors import PersistingError
from persisting_torch.queue.again import again
from persisting_torch.queue.books import Books, Task, View
from persisting_torch.queue.leases import finish, withdraw
from persisting_torch.queue.ledger import Ledger
from persisting_torch.queue.look import Look, Sampler
from persisting_torch.queue.reads import Reads
from persisting_torch.queue.ready import ReadyIndexes
from persisting_torch.queue.sets import pack_list, pack_set, set_of, unpack_list

if TYPE_CHECKING:
    from persisting_torch.queue.producers import Producer

TABLES_OF_A_TASK = (
    "claims",
    "consumed",
    "assignments",
    "past",
    "ends",
    "rank_batches",
    "dropped",
    "notes",
    "leased",
    "checkpoints",
)


class Claims:
    """Consumption of one bucket's samples by its tasks."""

    def __init__(self, ledger: Ledger, books: Books, reads: Reads) -> None:
        self.ledger = ledger
        self.books = books
        self.reads = reads
        self._epochs: dict[tuple[str, str, int], int] = {}

    def available(self, task: str, partition: str, fields: frozenset[str]) -> int:
        """How many samples the task could take now."""
        with self.ledger.lock:
            self.books.follow()
            return len(self.books.view(task, partition, fields).available)

    # Claims by batch, as get_meta makes them

    @again
    def claim(
        self,
        task: str,
        partition: str,
        fields: frozenset[str],
        batch_size: int,
        sampler: Sampler | None,
        sampling: dict[str, Any],
        producer: Producer | None = None,
    ) -> Sequence[int]:
        """Indexes that the sampler chose; those that it consumes are taken for good.

        Or, for a producer, until it dies without having finished them. With dp_rank and batch_index
        among the sampling arguments the answer is remembered, and every process that asks for the
        same gets the same; so a death loses nothing, and the producer has no lease.
        """
        rank, batch = sampling.get("dp_rank"), sampling.get("batch_index")
        place = None if rank is None or batch is None else (int(rank), int(batch))
        with self.ledger.lock:
            with self.ledger.transaction(hurry=sampler is None) as tx:
                self.books.refresh(tx)
                known = self._remembered(tx, task, partition, place)
                if known is not None:
                    return known
                view = self.books.view(task, partition, fields)
                look = Look(tx, self.books, self.reads, task, partition, fields)
                sampled, consumed = self._sample(view, batch_size, sampler, sampling, look)
                if not sampled and not consumed and not look.changes:
                    return []
                number = self.books.task_id(tx, task, partition)
                dropped = look.enter(tx, number)
                taken = set_of(consumed) | dropped
                leased = set_of(sampled) & taken & view.available
                if producer is not None and place is None:
                    producer.lease(tx, number, leased)
                seq = take(tx, number, taken)
                if place is not None and (sampled or consumed):
                    tx.execute(
                        "INSERT INTO rank_batches VALUES (?, ?, ?, ?, ?, ?)",
                        (number, *place, *pack_list(sampled)),
                    )
            if producer is not None and place is None:
                producer.hold(number, leased)
            if not dropped:
                self.books.note_claim(task, partition, taken, seq)
            return sampled

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
        self,
        view: View,
        batch_size: int,
        sampler: Sampler | None,
        sampling: dict[str, Any],
        look: Look,
    ) -> tuple[Sequence[int], Sequence[int]]:
        ready = ReadyIndexes(view.available)
        if sampler is None:
            first = _as_range(ready.first(batch_size))
            return first, first
        self._forget_what_was_reset(view, sampler)
        if getattr(sampler, "looks", False):
            sampling = {**sampling, "look": look}
        sampled, consumed = sampler.sample(
            ready, batch_size, task_name=view.task, partition_id=view.partition, **sampling
        )
        stray = self.books.strays(view.partition, [*sampled, *consumed])
        stray = stray or list(self.books.cleared_indexes & BitMap64(consumed))
        if stray:
            raise PersistingError(
                f"the sampler {type(sampler).__name__} returned indexes that"
                f" {self.books.ledger.place.queue}/{view.partition} does not hold: {stray[:10]}."
                " It may only return what it finds in ready_indexes."
            )
        look.drop(list((set_of(consumed) - set_of(sampled)) & view.available), "sampler")
        return sampled, consumed

    def _forget_what_was_reset(self, view: View, sampler: Sampler) -> None:
        """Let a sampler forget what it answered before its task was reset."""
        known = self.books.tasks.get((view.task, view.partition))
        epoch = 0 if known is None else known.epoch
        place = (view.task, view.partition, id(sampler))
        if self._epochs.get(place, epoch) != epoch:
            sampler.clear_cache(view.partition)
        self._epochs[place] = epoch

    @again
    def mark(self, task: str, partition: str, indexes: Sequence[int]) -> None:
        """Take these samples for the task, whoever decided it. Of none, make the task known.

        Raises KeyError naming indexes that the partition does not hold.
        """
        with self.ledger.transaction(hurry=True) as tx:
            self.books.refresh(tx)
            unknown = self.books.strays(partition, indexes)
            if unknown:
                raise KeyError(
                    f"{self.ledger.place.queue}/{partition} holds no samples with global indexes"
                    f" {unknown}, so task {task!r} cannot have consumed them."
                )
            members = set_of(indexes)
            number = self.books.task_id(tx, task, partition)
            if members:
                take(tx, number, members)
                finish(tx, members, task=number)

    @again
    def reset(self, task: str, partition: str) -> None:
        """Forget all that the task has taken in the partition."""
        with self.ledger.transaction() as tx:
            self.books.refresh(tx)
            known = self.books.tasks.get((task, partition))
            if known is None:
                return
            for table in TABLES_OF_A_TASK:
                tx.execute(f"DELETE FROM {table} WHERE task = ?", (known.id,))
            tx.execute("DELETE FROM meta WHERE key IN ('doomed', 'doomed_at')")
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


def _as_range(rising: list[int]) -> Sequence[int]:
    """Consecutive numbers as a range, which costs the same whatever its length."""
    if rising and rising[-1] - rising[0] + 1 == len(rising):
        return range(rising[0], rising[-1] + 1)
    return rising


def take(tx: sqlite3.Connection, task: int, members: BitMap64) -> int:
    """Enter a claim, and answer its number; 0 for one of nothing, which is not entered."""
    if not members:
        return 0
    done = tx.execute(
        "INSERT INTO claims (task, first, count, members) VALUES (?, ?, ?, ?)",
        (task, *pack_set(members)),
    )
    return done.lastrowid or 0


def replace_taken(tx: sqlite3.Connection, task: Task, taken: BitMap64) -> None:
    """Set what a task has taken; every process then reads the task's books anew."""
    tx.execute("DELETE FROM claims WHERE task = ?", (task.id,))
    tx.execute("INSERT OR REPLACE INTO consumed VALUES (?, ?, ?)", (task.id, 0, taken.serialize()))
    tx.execute("UPDATE tasks SET epoch = epoch + 1 WHERE id = ?", (task.id,))


def give_back(tx: sqlite3.Connection, books: Books, producers: Sequence[str]) -> bool:
    """Make available again what producers have not finished; whether there was anything.

    Once in a transaction, after a refresh of the books, with the commit lock held and notes
    settled: a commit that was under way may have finished some of it.
    """
    returned = withdraw(tx, producers)
    for task in books.tasks.values():
        if task.id in returned:
            replace_taken(tx, task, task.taken - returned[task.id])
    return bool(returned)
