"""Waiting for a global batch, and saying what is missing when the wait is over."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from persisting_torch.errors import WaitTimeout
from persisting_torch.queue.assignments import Assignment, End, Last, Order
from persisting_torch.queue.look import Sampler, needs_of
from persisting_torch.queue.pacing import check_order
from persisting_torch.queue.patience import FIRST_NOTICE_SECONDS, Patience
from persisting_torch.queue.producers import Vigil
from persisting_torch.queue.report import supply
from persisting_torch.queue.waiting import News

if TYPE_CHECKING:
    from persisting_torch.queue.engine import Engine

log = logging.getLogger(__name__)


@dataclass
class Demand:
    """What one task asks for: dp_size slices of batch_size samples (or what the sampler counts)."""

    engine: Engine
    task: str
    partition: str
    fields: Sequence[str] | None
    batch_size: int
    dp_size: int
    last: Last
    sampler: Sampler | None
    sampling: dict[str, Any] = field(default_factory=dict)

    def wait(self, k: int, limit: float, stop: threading.Event | None) -> Assignment | None:
        """Global batch k, None at the end of a sealed partition or when `stop` is set.

        Says in the log what is missing after 30 s, a minute, two, ... Raises WaitTimeout after
        `limit` seconds, ProducerFailed when no producer is left, QueueFull when the producers
        wait for room until this task has taken what it cannot take without more.
        """
        engine = self.engine
        deadline = time.monotonic() + limit
        news, vigil = News(engine.hub, engine.ledger), Vigil(engine.producers)
        patience = Patience(log, FIRST_NOTICE_SECONDS)
        while True:
            engine.writes.flush_partition(self.partition)
            order = self._order()
            found = engine.assignments.assignment(order, k)
            if isinstance(found, Assignment):
                return found
            if found is End:
                return None
            if not self._wait_for_news(news, vigil, patience, order, deadline, limit, stop):
                return None

    def recut(self, k: int) -> None:
        """Form the batches from k on anew, where they were formed for other sizes."""
        self.engine.assignments.recut(self._order(), k)

    def _order(self) -> Order:
        return Order(
            self.task,
            self.partition,
            self.engine.needed([*(self.fields or ()), *needs_of(self.sampler)]),
            self.batch_size,
            self.dp_size,
            self.last,
            self.sampler,
            self.sampling,
        )

    def _wait_for_news(
        self,
        news: News,
        vigil: Vigil,
        patience: Patience,
        order: Order,
        deadline: float,
        limit: float,
        stop: threading.Event | None,
    ) -> bool:
        often = getattr(self.sampler, "recheck_seconds", None)
        again = math.inf if often is None else time.monotonic() + often
        while True:
            fresh = news.wait(min(deadline, vigil.due, again), stop)
            now = time.monotonic()
            if stop is not None and stop.is_set():
                return False
            if now >= deadline:
                raise WaitTimeout(self._what_is_missing(order, limit))
            if vigil.watch():
                check_order(self.engine, order)
                patience.check(partial(self._what_is_missing, order))
            self.engine.check_open()
            if fresh or now >= again:
                return True

    def _what_is_missing(self, order: Order, waited: float) -> str:
        engine = self.engine
        with engine.ledger.reading() as tx:
            engine.books.refresh(tx)
            view = engine.books.view(order.task, order.partition, order.fields)
            lacking = engine.books.lacking(view)
            ready = len(view.available)
            since = supply(tx)
        asked = f" with fields {', '.join(sorted(order.fields))}" if order.fields else ""
        lacks = "".join(f", {count} lack {name}" for name, count in lacking.items())
        return (
            f"waited {waited:g} s for {order.size} {order.unit} of"
            f" {engine.place.queue}/{order.partition}{asked} for task {order.task!r}; {ready}"
            f"{'' if order.unit == 'samples' else ' samples'} ready"
            f"{lacks}{self._what_the_sampler_misses()}; {since}."
            " Start or check the producers, seal the partition if no more will come, or raise"
            " timeout."
        )

    def _what_the_sampler_misses(self) -> str:
        tell = getattr(self.sampler, "what_is_missing", None)
        told = tell() if tell is not None else ""
        return f"; {told}" if told else ""
