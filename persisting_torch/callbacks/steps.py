"""When callbacks act that feed the training, or feed those who feed it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.trainer.states import TrainerFn


class EveryNSteps(Callback):
    """Acts when training begins, before its first batch is asked for, and every n optimizer steps.

    The Trainer asks for the first batch before `on_train_start`, and would wait for ever for
    samples that come of an action there. So the first action is in `on_fit_start`, when the model
    is on its device; there the step of a checkpoint is known, although `trainer.global_step` is
    not yet restored. With strategies that restore later (FSDP, ModelParallel) it is then.

    For the same reason the Trainer is kept from asking for a batch before the step before it is
    done, as it does where the length of the loader is unknown.
    """

    def __init__(self, every_n_steps: int) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(
                f"{type(self).__name__}: every_n_steps must be at least 1, got {every_n_steps}."
            )
        self.every_n_steps = every_n_steps
        self._step = 0
        self._restored: int | None = None
        self._is_set_up = False

    def act(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """What is to be done after `step` optimizer steps; called on every rank."""
        raise NotImplementedError

    def begin(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """What is to be done before training goes on after `step` optimizer steps."""
        self.act(trainer, pl_module, step)

    def restore(self, state: dict[str, Any]) -> None:
        """Take over this callback's state from a checkpoint that training resumes from."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restored = None
        self._is_set_up = False

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Lightning calls load_state_dict only after this, and not with the checkpoint's step.
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._restored = checkpoint["global_step"]
        self.restore(checkpoint.get("callbacks", {}).get(self.state_key, {}))
        if self._is_set_up:
            self._begin(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_set_up = True
        if not (trainer.strategy.restore_checkpoint_after_setup and trainer.ckpt_path):
            self._begin(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _ask_no_batch_ahead(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # reload_dataloaders_every_n_epochs makes another fetcher, which has fetched already.
        _ask_no_batch_ahead(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before, self._step = self._step, trainer.global_step
        if self._step // self.every_n_steps > before // self.every_n_steps:
            self.act(trainer, pl_module, self._step)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step if self._restored is None else self._restored
        self.begin(trainer, pl_module, self._step)


def _ask_no_batch_ahead(trainer: Trainer) -> None:
    """Make the Trainer ask for a batch when it needs it, and give back one it has fetched ahead.

    What is given back comes again as the first batch of the new iteration.
    """
    fetcher = trainer.fit_loop._data_fetcher
    if isinstance(fetcher, _PrefetchDataFetcher) and fetcher.length is None:
        fetcher.prefetch_batches = 0
        if fetcher.batches:
            iter(fetcher)
