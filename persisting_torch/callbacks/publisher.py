"""The weights being trained, published for rollout workers in other processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from persisting_torch.callbacks.steps import EveryNSteps
from persisting_torch.errors import PersistingError
from persisting_torch.queue.place import Place, open_place
from persisting_torch.queue.policies import policy_folder, publish
from persisting_torch.queue.seam import is_distributed

if TYPE_CHECKING:
    from persisting_torch.queue import Queue


class PolicyPublisher(EveryNSteps):
    """Publishes the module's weights beside the queue, with the optimizer's step as their version.

    It does so before the first batch is asked for, and after every `every_n_steps` optimizer steps.
    `persisting_torch.callbacks.policy(queue)` reads them, in any process that sees the storage.
    They are written whole before they are announced, so that a reader never sees part of them,
    whenever the trainer is killed; only rank zero writes, the other ranks help to gather sharded
    weights.
    A resumed training announces the version that it resumes from.

    Workers may wait for the weights of each step before they make the samples of the next: as with
    RolloutCallback, the Trainer asks for no batch ahead.

    Args:
        queue: the queue, or its name under `storage_path`, made if it is not there;
            `storage_options` as for a Queue, where that is s3://bucket/folder.
        keep: how many of the newest policies stay on disk; a reader that is slower than keep - 1
            publications takes the newer one.
        module: the attribute path of the submodule to publish ("actor"), its names without that
            path; None publishes the whole LightningModule.

    Raises ValueError for `every_n_steps` or `keep` below 1, or where there is no such submodule.
    """

    def __init__(
        self,
        queue: Queue | str,
        every_n_steps: int = 1,
        keep: int = 2,
        *,
        storage_path: str | os.PathLike[str] = "./data",
        storage_options: Mapping[str, str] | None = None,
        module: str | None = None,
    ) -> None:
        super().__init__(every_n_steps)
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}.")
        self.queue = queue
        self.storage_path = storage_path
        self.storage_options = storage_options
        self.keep = keep
        self.module = module
        self._made = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        names = [name for name, _ in pl_module.named_modules()]
        if stage == "fit" and self.module is not None and self.module not in names:
            raise ValueError(
                f"PolicyPublisher(module={self.module!r}): {type(pl_module).__name__} has no such"
                f" submodule. It has {', '.join(name for name in names if name)}."
            )

    def act(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        state = whole_tensors(trainer.strategy.lightning_module_state_dict(), self.module)
        if trainer.is_global_zero:
            place = self._place()
            publish(policy_folder(place.root), state, step, keep=self.keep, files=place.files)

    def _place(self) -> Place:
        if not isinstance(self.queue, str):
            return self.queue.engine.place
        if is_distributed() and not self._made:
            from persisting_torch.queue import Queue

            # A queue that is not there yet is made by a node, split as the cluster's queues are.
            options = None if self.storage_options is None else dict(self.storage_options)
            Queue(self.queue, self.storage_path, storage_options=options).close()
            self._made = True
        return open_place(self.queue, self.storage_path, storage_options=self.storage_options)


def whole_tensors(state: Mapping[str, Any], module: str | None) -> dict[str, Tensor]:
    """The tensors below a submodule, gathered where they are sharded, on the CPU.

    Every rank has to call this with the same names. Raises PersistingError for shards that only
    their own kind of checkpoint can gather.
    """
    start = "" if module is None else f"{module}."
    found = {}
    for name, value in state.items():
        if name.startswith(start) and isinstance(value, Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if type(whole).__name__ == "ShardedTensor":
                raise PersistingError(
                    f"the weights {name!r} are sharded in a way that cannot be published. Use"
                    " FSDPStrategy(state_dict_type='full')."
                )
            found[name[len(start) :]] = whole.detach().cpu().clone()
    return found
