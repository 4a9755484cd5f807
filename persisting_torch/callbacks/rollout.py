"""On-policy rollouts from the module that is being trained."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Union, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDictBase, is_tensor_collection

from persisting_torch.callbacks.holding import WritableQueue
from persisting_torch.callbacks.keyed import known_keys, put_under_keys
from persisting_torch.callbacks.steps import EveryNSteps
from persisting_torch.queue.names import check_name

if TYPE_CHECKING:
    from persisting_torch.queue import Queue

Rollouts = Union["TensorDictBase", Sequence[dict[str, Any]], dict[str, Any], None]


class RolloutCallback(EveryNSteps):
    """Puts rollouts of the module being trained into the queue that it is trained from.

    `generate(pl_module, trainer)` is called before the first batch is asked for, and after every
    `every_n_steps` optimizer steps (the last of `max_steps` excepted), with the module in eval mode
    and without gradients; every submodule's mode is restored. It returns what `Queue.put` takes: a
    TensorDict of batch size [B], a list of dicts, a dict (one sample), or None. The samples are on
    disk, and the loader that waits for them goes on, when the callback is done.

    Each sample gets the field `version_field`, an int: the optimizer steps behind the weights that
    made it. Where `generate` gives that field itself, it stays.

    Each call has to give enough for the steps to the next one: at least every_n_steps *
    accumulate_grad_batches global batches. Else the loader waits for samples that nobody makes;
    `timeout` of the dataset makes that an error that says what is missing.

    No batch is asked for before the step that it depends on is done: Lightning's habit to ask one
    batch ahead, where the length of the loader is unknown, is turned off. So the Trainer learns of
    the end of a sealed queue only by asking beyond it: batches accumulated there for a step that
    stays incomplete are not used by any step, and there is no validation at that end.

    Rollouts are put once for each step of a run, whatever is killed and resumed: a training that
    resumes from a checkpoint finds those that it had put after it. A fit without a checkpoint is a
    new run and makes its own.

    Args:
        queue: the queue, or its name under `storage_path`.
        ranks: "zero": only global rank zero generates. "all": every rank does and puts its share;
            needed where the module's forward is a collective operation (FSDP).

    Raises ValueError for `every_n_steps` below 1 or unknown `ranks`.

    >>> import tempfile
    >>> from lightning.pytorch import LightningModule, Trainer
    >>> from persisting_torch import PersistingDataModule, Queue
    >>> class Policy(LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.mean = torch.nn.Parameter(torch.zeros(()))
    ...     def training_step(self, batch):
    ...         return ((batch["action"] - self.mean - 1) ** 2).mean()
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    >>> def act(policy, trainer):
    ...     return [{"action": policy.mean + torch.randn(())} for _ in range(8)]
    >>> queue = Queue("rollouts", tempfile.mkdtemp())
    >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    >>> trainer = Trainer(
    ...     accelerator="cpu", max_steps=3, callbacks=[RolloutCallback(queue, act)],
    ...     enable_checkpointing=False, **quiet,
    ... )
    >>> trainer.fit(Policy(), PersistingDataModule(queue, batch_size=8, timeout=60))
    >>> [record["policy_version"] for record in queue.sync.get(limit=24)][::8]
    [0, 1, 2]
    """

    def __init__(
        self,
        queue: Queue | str,
        generate: Callable[[LightningModule, Trainer], Rollouts],
        every_n_steps: int = 1,
        partition_id: str = "default",
        *,
        storage_path: str | os.PathLike[str] = "./data",
        version_field: str = "policy_version",
        ranks: Literal["zero", "all"] = "zero",
    ) -> None:
        super().__init__(every_n_steps)
        if ranks not in ("zero", "all"):
            raise ValueError(f"ranks must be 'zero' or 'all', got {ranks!r}.")
        self._handle = WritableQueue(queue, storage_path)
        self.generate = generate
        self.partition_id = check_name(partition_id, "partition_id")
        self.version_field = check_name(version_field, "version_field")
        self.ranks = ranks
        self._run: str | None = None
        self._version: int | None = None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(queue=self._handle.name, partition=self.partition_id)

    def state_dict(self) -> dict[str, Any]:
        """The run, and the version of the newest rollouts of it."""
        return {"run": self._run, "version": self._version}

    def restore(self, state: dict[str, Any]) -> None:
        self._run, self._version = state.get("run"), state.get("version")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and trainer.global_step == 0:
            self._run = self._version = None

    def begin(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        if self._run is None:
            self._run = trainer.strategy.broadcast(uuid.uuid4().hex)
        n = self.every_n_steps
        if self._version is None or step // n > self._version // n:
            self.act(trainer, pl_module, step)

    def act(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        if -1 < trainer.max_steps <= step:
            return
        self._version = step
        if self.ranks == "zero" and not trainer.is_global_zero:
            return
        stem = f"rollout {self._run} {step} {trainer.global_rank}"
        queue = self._handle.queue
        if known_keys(queue, [f"{stem} 0"], self.partition_id):
            return
        with evaluating(pl_module):
            rollouts = self.generate(pl_module, trainer)
        samples = _with_version(rollouts, self.version_field, step)
        keys = [f"{stem} {number}" for number in range(len(samples))]
        put_under_keys(queue, keys, samples, self.partition_id)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._handle.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._handle.close()


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; each submodule's own mode is restored."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for each, training in modes:
            each.training = training


def _with_version(
    rollouts: Rollouts, field: str, version: int
) -> TensorDictBase | list[dict[str, Any]]:
    """The samples with the field that tells their version."""
    if rollouts is None:
        return []
    if isinstance(rollouts, dict):
        rollouts = [rollouts]
    if not is_tensor_collection(rollouts):
        return [{field: version, **record} for record in rollouts]
    batch = cast("TensorDictBase", rollouts).to_tensordict()
    if not batch.batch_dims:
        batch = batch.unsqueeze(0)
    if batch.get(field, None) is None:
        batch[field] = torch.full(batch.batch_size[:1], version, device=batch.device)
    return batch
