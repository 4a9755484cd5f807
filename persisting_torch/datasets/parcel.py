"""A wrapping that carries a TensorDict past Lightning's conversion of inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor


class Parcel:
    """A batch that Lightning's precision plugins leave as it is.

    Those that convert inputs (bf16-true, 64-true and the like) rebuild a TensorDict as if it were a
    dict: its batch size is lost, and so is what it holds besides tensors.
    """

    def __init__(self, batch: TensorDictBase) -> None:
        self.batch = batch

    def pin_memory(self) -> Parcel:
        """Pinned by DataLoader's own means, which look for this method."""
        return Parcel(self.batch.pin_memory())

    def unpack(self, convert: Callable[[Tensor], Tensor]) -> TensorDictBase:
        """The batch, each of its tensors converted."""
        unpacked = self.batch.apply(convert)
        assert unpacked is not None
        return unpacked


def wrap(batch: Any) -> Any:
    """A TensorDict in a parcel; anything else as it is."""
    return Parcel(batch) if isinstance(batch, TensorDictBase) else batch
