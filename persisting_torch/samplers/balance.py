"""Dealing weights to ranks so that the sums are even."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Share: TypeAlias = tuple[float, int, list[tuple[int, float]]]
"""What one rank has: the sum of its weights, their number, and (position, weight) of each.

All of it negated, so that Python's order of tuples, smallest first, is largest first.
"""


def deal_evenly(weights: Sequence[float], ranks: int) -> list[list[int]]:
    """The positions of the weights for each rank, in ascending order: equal numbers, even sums.

    The largest differencing method of Karmarkar and Karp (The Differencing Method of Set
    Partitioning, Report UCB/CSD 82/113, Berkeley 1982), for more than two ranks and equal numbers:
    the weights, in ascending order, are cut into deals of one for each rank, and again and again
    the two deals whose shares differ most are joined, the largest share of one with the smallest
    of the other. Ties are decided as TransferQueue's SeqlenBalancedSampler decides them.

    `len(weights)` is a positive multiple of `ranks`.

    >>> deal_evenly([8, 7, 6, 5, 4, 2], 2)
    [[0, 2, 5], [1, 3, 4]]
    """
    rising = sorted(range(len(weights)), key=lambda at: (weights[at], at))
    deals: list[tuple[float, list[Share]]] = []
    for start in range(0, len(rising), ranks):
        dealt = rising[start : start + ranks]
        heapq.heappush(deals, _deal([(-weights[at], -1, [(-at, -weights[at])]) for at in dealt]))
    while len(deals) > 1:
        one, other = heapq.heappop(deals)[1], heapq.heappop(deals)[1]
        joined = [_join(*pair) for pair in zip(one, reversed(other), strict=True)]
        heapq.heappush(deals, _deal(joined))
    return [sorted(-at for at, _ in held) for _, _, held in deals[0][1]]


def _deal(shares: list[Share]) -> tuple[float, list[Share]]:
    """Shares, the largest first, and before them how much they differ, negated."""
    shares.sort()
    return shares[0][0] - shares[-1][0], shares


def _join(one: Share, other: Share) -> Share:
    total, count, held = one
    for _, weight in other[2]:
        total += weight  # one by one: the sum of floats depends on the order
    return total, count + other[1], held + other[2]


def swap_evenly(weights: Sequence[float], shares: Sequence[Sequence[int]]) -> list[list[int]]:
    """Shares made more even by swaps: of one of the heaviest rank's weights for another's.

    The swap that leaves the heavier of the two ranks lightest is made again and again, as long as
    it makes the heaviest lighter. That mends what differencing with equal numbers leaves uneven
    where a few weights are much larger than the others.
    """
    held = [np.array(share, dtype=np.int64) for share in shares]
    numbers = np.asarray(weights, dtype=np.float64)
    sums = np.array([numbers[share].sum() for share in held])
    for _ in range(len(weights)):
        heavy = int(sums.argmax())
        best: tuple[Any, ...] = (sums[heavy], 0, 0, 0, 0.0)
        for light in range(len(held)):
            moves = numbers[held[heavy]][:, None] - numbers[held[light]][None, :]
            after = np.maximum(sums[heavy] - moves, sums[light] + moves)
            if light != heavy and after.min() < best[0]:
                one, other = np.unravel_index(after.argmin(), after.shape)
                best = (after[one, other], light, one, other, moves[one, other])
        least, light, one, other, move = best
        if not least < sums[heavy]:
            break
        mine, yours = held[heavy][one], held[light][other]
        held[heavy][one], held[light][other] = yours, mine
        sums[heavy] -= move
        sums[light] += move
    return [sorted(share.tolist()) for share in held]


def deal_in_order(count: int, ranks: int) -> list[list[int]]:
    """The positions of `count` weights, cut into equal consecutive parts."""
    each = count // ranks
    return [list(range(rank * each, rank * each + each)) for rank in range(ranks)]


def imbalance(weights: Sequence[float], shares: Sequence[Sequence[int]]) -> tuple[float, float]:
    """The largest sum of any rank, and how much it exceeds the smallest."""
    sums = [sum(weights[at] for at in share) for share in shares]
    return max(sums), max(sums) - min(sums)
