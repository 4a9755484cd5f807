from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persisting_torch.datasets.ranks import Ranks
from persisting_torch.datasets.reading import cut


def batches_of_all_ranks(samples, batch_size, size, *, pad):
    return [
        [b.tolist() for b in cut(np.arange(samples), batch_size, Ranks(r, size), pad=pad)]
        for r in range(size)
    ]


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_every_rank_gets_as_many_batches_and_together_they_have_every_sample(n, b, size, pad):
    ranks = batches_of_all_ranks(n, b, size, pad=pad)
    assert len({len(batches) for batches in ranks}) == 1
    given_out = [s for batches in ranks for batch in batches for s in batch]
    assert sorted(set(given_out)) == list(range(n))
    assert all(0 < len(batch) <= b for batches in ranks for batch in batches)
    if n % (b * size) >= size or n % (b * size) == 0:
        assert pad or len(given_out) == n
    if pad:
        assert all(len(batch) == b for batches in ranks for batch in batches)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (8, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (7, [[[0, 1], [4, 5]], [[2, 3], [6]]]),
        (5, [[[0, 1], [4]], [[2, 3], [0]]]),
        (1, [[[0]], [[0]]]),
        (0, [[], []]),
    ],
)
def test_a_remainder_is_split_over_the_ranks(samples, expected):
    assert batches_of_all_ranks(samples, 2, 2, pad=False) == expected
