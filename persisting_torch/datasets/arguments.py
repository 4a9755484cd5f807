"""What is asked of a dataset's arguments, before anything is opened."""

from __future__ import annotations

from typing import Literal, get_args

from persisting_torch.samplers import BaseSampler
from persisting_torch.samplers.staleness import PolicyVersion

Last = Literal["drop", "pad", "split"]


def check_arguments(
    batch_size: int,
    fields: list[str] | None,
    sampler: BaseSampler | None,
    consume: bool,
    last: str,
    timeout: float | None,
    shuffle_seed: int | None,
    policy_version: PolicyVersion = None,
) -> None:
    """Raise ValueError or TypeError for arguments that would fail later, or silently."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool):
        raise TypeError(f"batch_size must be an int, got {batch_size!r}.")
    if batch_size < 1:
        raise ValueError(
            f"batch_size must be at least 1, got {batch_size}. It counts samples per batch and"
            " data-parallel rank (or episodes, or whatever the sampler counts)."
        )
    if isinstance(fields, str):
        raise TypeError(f"fields must be a list of names, got the string {fields!r}: [{fields!r}]?")
    if fields is not None and not fields:
        raise ValueError("fields is empty. Name at least one, or give None for all fields.")
    if last not in get_args(Last):
        raise ValueError(f"last must be one of {', '.join(get_args(Last))}, got {last!r}.")
    if timeout is not None and timeout < 0:
        raise ValueError(f"timeout must be None or seconds from 0, got {timeout}.")
    if sampler is not None and not consume and not hasattr(sampler, "list_all"):
        raise ValueError("consume=False takes every sample, so a sampler has nothing to choose.")
    if policy_version is not None and sampler is None:
        raise ValueError(
            "policy_version is for a sampler that compares samples with it, and there is none."
            " Give sampler=MaxStaleness(...)."
        )
    if sampler is not None and shuffle_seed is not None and consume:
        raise ValueError(
            "sampler and shuffle_seed both decide the order. Give one of them"
            " (shuffle_seed=s stands for ShuffleSampler(s))."
        )
