"""What a Queue may be given, checked before anything is opened."""

from __future__ import annotations

from persisting_torch.queue.objects import is_url


def check_options(
    name: str,
    batch_size: int,
    auto_flush_interval_sec: float,
    zerocopy_mode: str,
    durability: str,
    num_buckets: int | None,
    bucket_column: str | None,
    storage_options: dict[str, str] | None,
    storage_path: object,
) -> None:
    """Raise ValueError for an option that makes no sense."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"queue {name!r}: batch_size must be at least 1, got {batch_size!r}.")
    if not auto_flush_interval_sec >= 0:
        raise ValueError(
            f"queue {name!r}: auto_flush_interval_sec must be 0 (never) or more seconds, got"
            f" {auto_flush_interval_sec!r}."
        )
    if zerocopy_mode not in ("auto", "force", "off"):
        raise ValueError(
            f"queue {name!r}: zerocopy_mode must be 'auto', 'force' or 'off', got"
            f" {zerocopy_mode!r}."
        )
    if durability not in ("flush", "fsync"):
        raise ValueError(
            f"queue {name!r}: durability must be 'flush' or 'fsync', got {durability!r}."
        )
    if num_buckets is not None and (not isinstance(num_buckets, int) or num_buckets < 1):
        raise ValueError(f"queue {name!r}: num_buckets must be at least 1, got {num_buckets!r}.")
    if bucket_column is not None and (not isinstance(bucket_column, str) or not bucket_column):
        raise ValueError(f"queue {name!r}: bucket_column must name a field, got {bucket_column!r}.")
    if storage_options and not is_url(storage_path):
        raise ValueError(
            f"queue {name!r}: storage_options are for object stores; this queue lives on a file"
            " system. Leave them out."
        )


def check_batch_size(batch_size: int) -> None:
    """Raise ValueError for a number of samples that nobody can ask for."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
