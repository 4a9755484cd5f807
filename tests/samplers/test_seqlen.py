"""Groups dealt to ranks by their lengths: whole, in equal numbers, with even sums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from persisting_torch import BatchMeta, PersistingDataset, Queue, SchemaError, SeqlenBalancedSampler
from persisting_torch.samplers.balance import deal_evenly, deal_in_order, imbalance, swap_evenly


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue("q", tmp_path) as opened:
        yield opened


class Lengths:
    """What TransferQueue's controller gives its samplers, as far as they use it."""

    def __init__(self, *lengths: float) -> None:
        self.lengths = lengths

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, float]]:
        return {at: {"total_lengths": self.lengths[at]} for at in indexes if at < len(self.lengths)}


EIGHT = Lengths(10, 1, 7, 3, 9, 2, 5, 5)


def slices(n: int, ranks: int, size: int, **asked: Any) -> list[list[int]]:
    sampler = SeqlenBalancedSampler(n, ranks)
    asked = {"ready_indexes": list(range(8)), "partition": EIGHT, "batch_index": 0, **asked}
    got = [sampler.sample(batch_size=size, dp_rank=rank, **asked) for rank in range(ranks)]
    assert all(sampled == consumed for sampled, consumed in got)
    return [sampled for sampled, _ in got]


# Called directly: what TransferQueue 0.1.11 answers to the same


@pytest.mark.parametrize(
    ("n", "ranks", "size", "asked", "expected"),
    [
        (1, 2, 4, {}, [[2, 3, 4, 5], [0, 1, 6, 7]]),
        (2, 2, 4, {}, [[2, 3, 4, 5], [0, 1, 6, 7]]),
        (2, 2, 4, {"partition": Lengths()}, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (2, 2, 4, {"ready_indexes": [7, 6, 5, 4, 3, 2, 1, 0]}, [[2, 3, 4, 5], [0, 1, 6, 7]]),
        (2, 2, 2, {"ready_indexes": [0, 2, 3, 5, 6, 7]}, [[2, 3], [5, 6]]),
        (4, 2, 2, {"partition": None}, [[0, 1], [2, 3]]),
        (2, 2, 6, {}, [[], []]),
        (2, 2, 0, {}, [[], []]),
    ],
)
def test_directly_called_it_answers_as_transferqueues_does(n, ranks, size, asked, expected):
    assert slices(n, ranks, size, **asked) == expected


@pytest.mark.parametrize(
    ("n", "ranks", "size", "error"),
    [(4, 2, 2, AssertionError), (2, 2, 3, AssertionError), (3, 2, 4, ValueError)],
)
def test_directly_called_it_refuses_what_transferqueues_refuses(n, ranks, size, error):
    with pytest.raises(error):
        slices(n, ranks, size)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((0, 1), "n_samples_per_prompt must be positive"), ((1, 0), "dp_size must be positive")],
)
def test_numbers_that_are_not_positive_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        SeqlenBalancedSampler(*arguments)


def test_the_slices_of_a_batch_stay_until_the_cache_is_cleared():
    sampler = SeqlenBalancedSampler(1, 2)
    where: dict[str, Any] = {"task_name": "t", "partition_id": "p", "partition": EIGHT}
    first = sampler.sample(list(range(8)), 4, dp_rank=0, batch_index=3, **where)
    assert sampler.has_cached_result("p", "t", {"dp_rank": 1, "batch_index": 3})
    assert sampler.sample([], 99, dp_rank=0, batch_index=3, **where) == first
    assert sampler.sample([], 99, dp_rank=1, batch_index=3, **where)[0] == [0, 1, 6, 7]
    assert sampler.sample([], 99, dp_rank=2, batch_index=3, **where) == ([], [])
    other = SeqlenBalancedSampler(1, 2)
    other.load_checkpoint(sampler.save_checkpoint())
    sampler.clear_cache("p")
    assert sampler.sample([], 4, dp_rank=0, batch_index=3, **where) == ([], [])
    assert other.sample([], 4, dp_rank=0, batch_index=3, **where) == first


# The dealing itself


def test_karmarkar_and_karp_deal_their_own_example():
    assert deal_evenly([8, 7, 6, 5, 4], 1) == [[0, 1, 2, 3, 4]]
    shares = deal_evenly([8, 7, 6, 5, 4, 0], 2)
    assert sorted(sum([8, 7, 6, 5, 4, 0][at] for at in share) for share in shares) == [14, 16]


@given(st.integers(1, 5), st.lists(st.integers(0, 10_000), min_size=1, max_size=12), st.data())
def test_every_rank_gets_equally_many_of_all_weights(ranks, some, data):
    weights = (some * ranks)[: len(some) * ranks]
    dealt = deal_evenly(weights, ranks)
    swapped = swap_evenly(weights, dealt)
    for shares in (dealt, swapped):
        assert [len(share) for share in shares] == [len(some)] * ranks
        assert sorted(at for share in shares for at in share) == list(range(len(weights)))
    assert imbalance(weights, swapped)[0] <= imbalance(weights, dealt)[0]
    assert (dealt, swapped) == (deal_evenly(weights, ranks), swap_evenly(weights, dealt))


def test_skewed_lengths_are_dealt_far_more_evenly_than_in_order_or_greedily():
    lengths = torch.distributions.LogNormal(6.0, 1.0).sample
    torch.manual_seed(0)
    means = dict.fromkeys(["in order", "greedy", "differencing", "least"], 0.0)
    for _ in range(50):
        weights = lengths((64,)).round().tolist()
        least = max(weights) + sum(sorted(weights)[:7])
        means["least"] += max(1.0, least / (sum(weights) / 8)) / 50
        for how, shares in {
            "in order": deal_in_order(64, 8),
            "greedy": greedily(weights, 8),
            "differencing": swap_evenly(weights, deal_evenly(weights, 8)),
        }.items():
            means[how] += imbalance(weights, shares)[0] / (sum(weights) / 8) / 50
    assert means["differencing"] < means["greedy"]
    assert means["differencing"] - means["least"] < 0.01
    assert means["in order"] - means["least"] > 0.5


def greedily(weights: list[float], ranks: int) -> list[list[int]]:
    """Each weight, the largest first, to the rank that has least and is not full."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for at in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        free = [share for share in shares if len(share) < len(weights) // ranks]
        min(free, key=lambda share: sum(weights[other] for other in share)).append(at)
    return shares


# Through a queue


def form(queue: Queue, k: int, sampler: Any, size: int, ranks: int) -> list[list[int]]:
    batch = queue.engine.await_assignment(
        "fit", "default", k, batch_size=size, dp_size=ranks, sampler=sampler, timeout=0
    )
    assert batch is not None
    return [list(part) for part in batch.slices]


def test_a_field_of_numbers_tells_the_lengths(queue: Queue):
    lengths = [10, 1, 7, 3, 9, 2, 5, 5]
    queue.sync.put([{"n": length} for length in lengths])
    got = form(queue, 0, SeqlenBalancedSampler(length_field="n"), 4, 2)
    assert [sum(lengths[at] for at in part) for part in got] == [21, 21]


@pytest.mark.parametrize("kind", ["tensor", "list", "str", "bytes"])
def test_ragged_rows_tell_their_lengths_themselves(queue: Queue, kind: str):
    lengths = [10, 1, 7, 3, 9, 2, 5, 5]
    make: dict[str, Any] = {
        "tensor": torch.zeros,
        "list": lambda n: [0] * n,
        "str": lambda n: "ä" * n,
        "bytes": bytes,
    }
    queue.sync.put([{"ids": make[kind](length)} for length in lengths])
    got = form(queue, 0, SeqlenBalancedSampler(length_field="ids"), 4, 2)
    assert [sum(lengths[at] for at in part) for part in got] == [21, 21]


def test_values_without_a_length_are_refused(queue: Queue):
    queue.sync.put([{"flag": True}] * 2)
    with pytest.raises(SchemaError, match=r"'flag' .* have no length"):
        form(queue, 0, SeqlenBalancedSampler(length_field="flag"), 1, 2)


def test_in_training_it_needs_to_know_the_lengths(queue: Queue):
    queue.sync.put([{"n": 1}] * 2)
    with pytest.raises(ValueError, match="Name a field in length_field"):
        form(queue, 0, SeqlenBalancedSampler(), 1, 2)


@given(
    n=st.integers(1, 3),
    ranks=st.integers(1, 4),
    each=st.integers(1, 3),
    data=st.data(),
)
def test_groups_stay_whole_in_equal_numbers_and_never_less_even_than_in_order(n, ranks, each, data):
    groups = ranks * each
    lengths = data.draw(st.lists(st.integers(0, 99), min_size=n * groups, max_size=n * groups))

    class Told:
        def values(self, field: str, indexes: Any) -> Any:
            return torch.tensor([lengths[at] for at in indexes]).numpy()

    sampler = SeqlenBalancedSampler(n, length_field="n")
    got = sampler.deal(list(range(n * groups)), n * each, ranks, look=Told())  # type: ignore[arg-type]
    assert sorted(at for part in got for at in part) == list(range(n * groups))
    for part in got:
        assert len(part) == n * each
        assert all(part[at + 1] == part[at] + 1 for at in range(len(part)) if (at + 1) % n)
    in_order = [sum(lengths[r * n * each : (r + 1) * n * each]) for r in range(ranks)]
    assert max(sum(lengths[at] for at in part) for part in got) <= max(in_order)


def test_datasets_of_two_ranks_train_balanced_groups_by_prompt(queue: Queue):
    lengths = {"a": (9, 8), "b": (1, 2), "c": (7, 7), "d": (4, 2)}
    queue.sync.put(
        [{"prompt": p, "ids": torch.zeros(lengths[p][turn])} for turn in (0, 1) for p in "dbca"]
    )
    queue.sync.seal()
    tokens, prompts = [], []
    for rank in (1, 0):
        data = PersistingDataset(
            queue,
            batch_size=4,
            sampler=SeqlenBalancedSampler(2, length_field="ids", group_by="prompt"),
            dp_rank=rank,
            dp_size=2,
            timeout=5,
        )
        (batch,) = data
        tokens.append(batch["ids"].values().numel())
        prompts += batch["prompt"].tolist()[::2]
        assert batch["prompt"].tolist()[::2] == batch["prompt"].tolist()[1::2]
    assert tokens == [20, 20]
    assert sorted(prompts) == list("abcd")


def test_short_groups_count_as_groups_and_weigh_what_they_have(queue: Queue):
    queue.sync.put([{"prompt": p, "n": n} for p, n in [("a", 9), ("b", 2), ("b", 2), ("c", 5)]])
    queue.sync.put([{"prompt": "d", "n": 10}])
    queue.sync.seal()
    sampler = SeqlenBalancedSampler(2, length_field="n", group_by="prompt", min_samples=1)
    assert form(queue, 0, sampler, 4, 2) == [[1, 2, 4], [0, 3]]


def test_ranks_in_processes_of_their_own_claim_the_slices_of_one_batch(
    queue: Queue, tmp_path: Path
):
    queue.sync.put([{"n": length} for length in [10, 1, 7, 3, 9, 2, 5, 5, 1, 1]])

    def ask(opened: Queue, rank: int, batch: int) -> BatchMeta:
        sampler = SeqlenBalancedSampler(1, 2, length_field="n")
        where = {"dp_rank": rank, "batch_index": batch}
        return opened.sync.get_meta(["n"], 4 if batch == 0 else 1, sampler=sampler, **where)

    with Queue("q", tmp_path) as other:
        assert ask(queue, 0, 0).global_indexes == [0, 1, 2, 3]
        assert ask(queue, 0, 1).global_indexes == [8]
        assert ask(other, 1, 0).global_indexes == [4, 5, 6, 7]
        assert ask(other, 1, 0).global_indexes == [4, 5, 6, 7]
        assert ask(other, 1, 1).global_indexes == [9]
        assert ask(other, 1, 2).global_indexes == []
        assert queue.sync.stats()["tasks"]["default"]["default"]["available"] == 0


def test_a_claim_that_does_not_say_which_rank_and_batch_is_refused(queue: Queue):
    queue.sync.put([{"n": 1}] * 4)
    sampler = SeqlenBalancedSampler(1, 2, length_field="n")
    for where in ({"dp_rank": 0}, {"batch_index": 0}, {"dp_rank": 2, "batch_index": 0}, {}):
        with pytest.raises(ValueError, match="Give both to get_meta"):
            queue.sync.get_meta(["n"], 1, sampler=sampler, **where)
    one = SeqlenBalancedSampler(length_field="n")
    assert queue.sync.get_meta(["n"], 2, sampler=one).global_indexes == [0, 1]
    assert queue.sync.get_meta(["n"], 2, sampler=one).global_indexes == [2, 3]
