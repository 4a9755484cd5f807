"""The callback that makes training exactly-once: a cursor that counts what optimizer steps used."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils._pytree import tree_leaves

from persisting_torch.datasets.cursor import Cursor
from persisting_torch.datasets.loader import PersistingDataLoader

Identity = tuple[str, str, str]


class ConsumptionCheckpoint(Callback):
    """Keeps in every checkpoint how many global batches the optimizer has used; resumes there.

    PersistingDataModule adds it by itself; give it to the Trainer where PersistingDataLoaders come
    from elsewhere. It counts a batch as used when an optimizer step has covered it, whatever was
    prefetched, accumulated or interrupted, so weights and cursor in one checkpoint always agree. On
    `fit(ckpt_path=...)` the loaders go on with the first batch that the restored weights have not
    used, wherever in an epoch that was. `validate`, `test` and `predict` leave it alone.

    The queue is told that batches are consumed once a checkpoint that counts them has been written;
    where the Trainer has no callback that writes resumable checkpoints, at each optimizer step.
    With AsyncCheckpointIO, which writes behind the training, it is told when `fit` ends. A
    `fast_dev_run` consumes nothing.

    Under manual optimization a step is one made through `self.optimizers()`, which is what the
    Trainer's `global_step` counts.
    """

    def __init__(self) -> None:
        self._loaders: dict[Identity, PersistingDataLoader] = {}
        self._restored: dict[Identity, dict[str, Any]] = {}
        """States of a checkpoint, until their loaders are there."""
        self._written: dict[Identity, int] = {}
        """Cursors in a checkpoint that is being written, or was; not yet told to the queue."""
        self._saving: dict[Identity, int] = {}
        """Cursors that the checkpoint being written holds."""
        self._noted_later: dict[str, dict[Identity, int]] = {}
        """Those of checkpoints that are written behind the training."""
        self._watch: Callable[..., None] | None = None
        """What stands for the Trainer's save_checkpoint."""
        self._stage = ""
        self._global_step = 0

    def adopt(self, loader: PersistingDataLoader) -> None:
        """Count this loader's batches from now on."""
        dataset = loader.dataset
        former = self._loaders.get(dataset.identity)
        if former is not None and former is not loader:
            former.close()
            dataset.go_on_from(former.dataset)
        self._loaders[dataset.identity] = loader
        dataset.cursor.driven = True
        restored = self._restored.pop(dataset.identity, None)
        if restored is not None:
            dataset.restore(restored)

    def commit_written(self, trainer: Trainer) -> None:
        """Tell the queue what the checkpoints written so far count as used."""
        noted, self._noted_later = self._noted_later, {}
        for path, cursors in noted.items():
            self._note(trainer, path, cursors)
        written, self._written = self._written, {}
        self._commit(trainer, written)

    def release(self) -> None:
        """End what reads ahead, and let the loaders count for themselves again."""
        for loader in self._loaders.values():
            loader.close()
            loader.dataset.cursor.driven = False

    # State

    def state_dict(self) -> dict[str, Any]:
        """The loaders' states, as primitives: [{"k": ..., "queue": ..., "partition": ..., ...}]."""
        self._saving = self._used()
        self._written.update(self._saving)
        datasets = [loader.dataset for loader in self._loaders.values()]
        states = [d.state_at(d.cursor.used) for d in datasets if d.cursor.used is not None]
        states += self._restored.values()
        return {"cursors": states} if states else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Seek every loader to the checkpoint's cursor; only while fitting."""
        if self._stage != "fit":
            return
        for state in state_dict["cursors"]:
            key = (state["queue"], state["partition"], state["task"])
            self._written[key] = state["k"]
            if key in self._loaders:
                self._loaders[key].dataset.restore(state)
            else:
                self._restored[key] = state

    # Hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stage = stage
        if stage == "fit":
            self._watch_saving(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._global_step = trainer.global_step
        self._adopt_all(trainer)
        if trainer.ckpt_path is not None:
            # A kill may have come between its writing and its noting.
            self._note(trainer, trainer.ckpt_path, self._written)
        self.commit_written(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._adopt_all(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for loader in self._loaders.values():
            loader.dataset.end_pass()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._commit_if_on_disk(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for cursor in self._cursors():
            cursor.finish()
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        for cursor in self._cursors():
            cursor.step()
        if not _writes_checkpoints(trainer):
            self._commit(trainer, self._used())

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._commit_if_on_disk(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._commit_if_on_disk(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.commit_written(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # The exception may have come from writing the checkpoint.
        self._written.clear()
        self.release()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.release()
            self._end_watch(trainer)

    # What is on disk

    def _watch_saving(self, trainer: Trainer) -> None:
        """Note for the queue which checkpoints hold which cursors, whoever has them written.

        Lightning has no hook for a checkpoint that has been written, with its path.
        """
        self._end_watch(trainer)
        save = trainer.save_checkpoint

        @wraps(save)
        def save_checkpoint(filepath: Any, *args: Any, **options: Any) -> None:
            self._saving = {}
            save(filepath, *args, **options)
            if self._writes_behind(trainer):
                self._noted_later[os.fspath(filepath)] = self._saving
            else:
                self._note(trainer, filepath, self._saving)

        trainer.save_checkpoint = self._watch = save_checkpoint  # type: ignore[method-assign]

    def _end_watch(self, trainer: Trainer) -> None:
        if self._watch is not None and vars(trainer).get("save_checkpoint") is self._watch:
            del trainer.save_checkpoint

    def _note(self, trainer: Trainer, path: Any, cursors: dict[Identity, int]) -> None:
        if not _may_consume(trainer):
            return
        for key, k in cursors.items():
            if key in self._loaders:
                self._loaders[key].dataset.saved(path, k)

    def _cursors(self) -> list[Cursor]:
        return [loader.dataset.cursor for loader in self._loaders.values()]

    def _used(self) -> dict[Identity, int]:
        cursors = zip(self._loaders, self._cursors(), strict=True)
        return {key: cursor.used for key, cursor in cursors if cursor.used is not None}

    def _adopt_all(self, trainer: Trainer) -> None:
        """Adopt the loaders that the Trainer has, and make it drop batches from before a seek."""
        for loader in tree_leaves(trainer.train_dataloader):
            if isinstance(loader, PersistingDataLoader):
                self.adopt(loader)
        if any(cursor.overtaken for cursor in self._cursors()):
            assert trainer.fit_loop._data_fetcher is not None
            iter(trainer.fit_loop._data_fetcher)

    def _commit_if_on_disk(self, trainer: Trainer) -> None:
        if not self._writes_behind(trainer):
            self.commit_written(trainer)

    @staticmethod
    def _writes_behind(trainer: Trainer) -> bool:
        return isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO)

    def _commit(self, trainer: Trainer, used: dict[Identity, int]) -> None:
        if not _may_consume(trainer):
            return
        for key, k in used.items():
            if key in self._loaders:
                self._loaders[key].dataset.commit(k)


def _may_consume(trainer: Trainer) -> bool:
    """Whether this process speaks for all ranks, of a run that is meant."""
    return bool(trainer.is_global_zero and not trainer.fast_dev_run)  # type: ignore[attr-defined]


def _writes_checkpoints(trainer: Trainer) -> bool:
    """Whether some callback writes checkpoints that a run can be resumed from."""
    return any(
        isinstance(callback, Checkpoint) and not getattr(callback, "save_weights_only", False)
        for callback in trainer.checkpoint_callbacks
    )
