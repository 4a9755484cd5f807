"""What befalls producers."""

from __future__ import annotations

from persisting_torch import Queue
from persisting_torch.queue.leases import holders


def hold_to_be_dead(queue: Queue, name: str) -> None:
    """As another process would enter it of a producer that was stopped."""
    producers, is_held = queue.engine.producers, True
    while is_held:  # it may have beaten between the look and the burial
        [one] = [each for each, _ in producers.look() if each.name == name]
        producers._bury([(one, "failed: it was stopped")])
        with queue.engine.ledger.reading() as tx:
            is_held = name in holders(tx)
