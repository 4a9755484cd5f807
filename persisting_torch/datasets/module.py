"""A queue as a LightningDataModule: train from it exactly once, with nothing else to add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins import Precision
from lightning.pytorch import Callback, LightningDataModule, Trainer
from tensordict import TensorDictBase

from persisting_torch.datasets.arguments import Last
from persisting_torch.datasets.consumption import ConsumptionCheckpoint
from persisting_torch.datasets.dataset import PersistingDataset
from persisting_torch.datasets.handle import QueueHandle
from persisting_torch.datasets.loader import PersistingDataLoader
from persisting_torch.datasets.parcel import Parcel, wrap
from persisting_torch.datasets.ranks import Ranks, discover
from persisting_torch.queue import Queue
from persisting_torch.samplers import BaseSampler
from persisting_torch.samplers.staleness import PolicyVersion


class PersistingDataModule(LightningDataModule):
    """Trains a LightningModule from a queue, each sample exactly once, through kills and resumes.

    Training consumes `partition_id` as `task_name`: it waits for samples that are still to come and
    ends when the partition is sealed. The data module adds ConsumptionCheckpoint to the Trainer, so
    that `fit(..., ckpt_path=...)` goes on with exactly what the restored weights have not used.
    Validation, test and prediction go over all samples of their partitions that are ready when they
    start, and mark nothing. Without a partition for them validation is skipped; test and prediction
    raise ValueError.

    The arguments are those of PersistingDataset and PersistingDataLoader; `pin_memory=None` pins
    where the Trainer runs on CUDA. The queue has to exist when training starts; it is opened in
    `setup` and, if given by name, closed in `teardown`.

    >>> import tempfile, torch
    >>> from lightning.pytorch import LightningModule, Trainer
    >>> from persisting_torch import Queue
    >>> class Mean(LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.mean = torch.nn.Parameter(torch.zeros(()))
    ...     def training_step(self, batch):
    ...         return ((batch["reward"] - self.mean) ** 2).mean()
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    >>> queue = Queue("rollouts", tempfile.mkdtemp())
    >>> _ = queue.sync.put([{"reward": torch.tensor(1.0)}] * 100)
    >>> queue.sync.seal()
    >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    >>> trainer = Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, **quiet)
    >>> trainer.fit(Mean(), PersistingDataModule(queue, batch_size=10))
    >>> trainer.global_step
    10
    """

    def __init__(
        self,
        queue: Queue | str,
        storage_path: str = "./data",
        *,
        batch_size: int = 32,
        fields: list[str] | None = None,
        task_name: str = "train",
        partition_id: str = "default",
        val_partition_id: str | None = None,
        test_partition_id: str | None = None,
        predict_partition_id: str | None = None,
        sampler: BaseSampler | None = None,
        last: Last = "drop",
        timeout: float | None = None,
        pad: dict[str, float] | None = None,
        shuffle_seed: int | None = None,
        transform: Callable[[TensorDictBase], Any] | None = None,
        num_workers: int = 0,
        prefetch_batches: int = 2,
        pin_memory: bool | None = None,
        policy_version: PolicyVersion = None,
    ) -> None:
        super().__init__()
        self._handle = QueueHandle(queue, storage_path)
        self.batch_size = batch_size
        self.fields = fields
        self.task_name = task_name
        self.partition_id = partition_id
        self.val_partition_id = val_partition_id
        self.test_partition_id = test_partition_id
        self.predict_partition_id = predict_partition_id
        self.sampler = sampler
        self.last: Last = last
        self.timeout = timeout
        self.pad = pad
        self.shuffle_seed = shuffle_seed
        self.transform = transform
        self.num_workers = num_workers
        self.prefetch_batches = prefetch_batches
        self.pin_memory = pin_memory
        self.policy_version = policy_version
        self._consumption: ConsumptionCheckpoint | None = None
        self._loaders: list[PersistingDataLoader] = []
        if val_partition_id is None and type(self).val_dataloader is _OWN_VAL_DATALOADER:
            # Lightning validates unless the hook is that of its own base class.
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]
        self._training_dataset()  # bad arguments raise here, before a Trainer has started anything

    def prepare_data(self) -> None:
        self._handle.check()

    def setup(self, stage: str) -> None:
        self._handle.check()
        if self.trainer is not None:
            self._consumption = _installed(self.trainer)

    def train_dataloader(self) -> PersistingDataLoader:
        loader = self._loader(self._training_dataset())
        if self.trainer is not None:
            if self._consumption is None:
                raise RuntimeError(
                    f"{type(self).__name__}.setup was not called by the Trainer as"
                    " PersistingDataModule has it. Where you override setup, call"
                    " super().setup(stage)."
                )
            self._consumption.adopt(loader)
        return loader

    def val_dataloader(self) -> PersistingDataLoader:
        return self._evaluating(_required(self.val_partition_id, "val"))

    def test_dataloader(self) -> PersistingDataLoader:
        return self._evaluating(_required(self.test_partition_id, "test"))

    def predict_dataloader(self) -> PersistingDataLoader:
        return self._evaluating(_required(self.predict_partition_id, "predict"))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Converts TensorDicts to the Trainer's precision, whole; the model's own hook follows."""
        if self.trainer is None:
            return batch
        if isinstance(batch, Parcel):
            batch = batch.unpack(self.trainer.precision_plugin.convert_input)
        # Lightning calls this hook of the data module in place of the model's.
        return self.trainer.lightning_module.on_before_batch_transfer(batch, dataloader_idx)

    def on_exception(self, exception: BaseException) -> None:
        # Checkpoints written on the way out, after ConsumptionCheckpoint had its turn.
        if self.trainer is not None and self._consumption is not None:
            self._consumption.commit_written(self.trainer)
        self._release()

    def teardown(self, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()
        self._handle.close()

    def _training_dataset(self) -> PersistingDataset:
        return self._dataset(
            self.partition_id,
            last=self.last,
            sampler=self.sampler,
            shuffle_seed=self.shuffle_seed,
            policy_version=self.policy_version,
        )

    def _evaluating(self, partition_id: str) -> PersistingDataLoader:
        sampler = self.sampler if hasattr(self.sampler, "list_all") else None
        dataset = self._dataset(partition_id, consume=False, last="split", sampler=sampler)
        return self._loader(dataset)

    def _dataset(self, partition_id: str, **choices: Any) -> PersistingDataset:
        ranks = self._ranks()
        dataset = PersistingDataset(
            self._handle.name,
            batch_size=self.batch_size,
            fields=self.fields,
            task_name=self.task_name,
            partition_id=partition_id,
            timeout=self.timeout,
            pad=self.pad,
            transform=self.transform,
            dp_rank=ranks.rank if ranks else None,
            dp_size=ranks.size if ranks else None,
            **choices,
        )
        dataset.handle = self._handle
        return dataset

    def _ranks(self) -> Ranks | None:
        if self.trainer is None:
            return None
        return discover(sampler_kwargs=self.trainer.distributed_sampler_kwargs)

    def _converts(self) -> bool:
        """Whether the Trainer's precision converts inputs, which TensorDicts do not survive."""
        if self.trainer is None:
            return False
        return type(self.trainer.precision_plugin).convert_input is not Precision.convert_input

    def _loader(self, dataset: PersistingDataset) -> PersistingDataLoader:
        pins = self.pin_memory
        if pins is None:
            on = None if self.trainer is None else self.trainer.strategy.root_device
            pins = on is not None and on.type == "cuda" and torch.cuda.is_available()
        loader = PersistingDataLoader(
            dataset,
            num_workers=self.num_workers,
            collate_fn=wrap if self._converts() else None,
            prefetch_batches=self.prefetch_batches,
            pin_memory=pins,
            persistent_workers=self.num_workers > 0 and dataset.consume,
        )
        self._loaders.append(loader)
        return loader


_OWN_VAL_DATALOADER = PersistingDataModule.val_dataloader


def _installed(trainer: Trainer) -> ConsumptionCheckpoint:
    """The Trainer's ConsumptionCheckpoint, which is added if it has none.

    It comes first, so that whoever saves a checkpoint in a later callback finds the cursor moved.
    Lightning restores callbacks after it has set up the data module, hence this one too.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found = [each for each in callbacks if isinstance(each, ConsumptionCheckpoint)]
    if not found:
        found = [ConsumptionCheckpoint()]
        callbacks.insert(0, found[0])
    return found[0]


def _required(partition_id: str | None, stage: str) -> str:
    if partition_id is None:
        raise ValueError(
            f"PersistingDataModule has no {stage}_partition_id. Give it the partition to {stage}"
            " with."
        )
    return partition_id
