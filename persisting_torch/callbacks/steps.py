"""When callbacks act that feed the training, or feed those who feed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.trainer.states import TrainerFn


class EveryNSteps(Callback):
    """Acts when training begins, before its first batch is asked for, and every n optimizer steps.

    The Trainer fetches the first batch before `on_train_start`, and would wait for ever for samples
    that come of an action there. So the first action comes when it asks for the loader: the model
    is on its device, and what a checkpoint holds is restored.

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
        self._has_begun = False

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
        self._has_begun = False
        if stage == "fit":
            _before_the_loader(trainer, lambda: self._begin(trainer, pl_module))

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Lightning calls load_state_dict without the checkpoint's step, and restores its own late.
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._restored = checkpoint["global_step"]
        self.restore(checkpoint.get("callbacks", {}).get(self.state_key, {}))
        if self._has_begun:
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
        self._has_begun = True
        self._step = trainer.global_step if self._restored is None else self._restored
        self.begin(trainer, pl_module, self._step)


def _before_the_loader(trainer: Trainer, call: Callable[[], None]) -> None:
    """Call once, when the Trainer next asks for its training loader.

    No hook comes between the restoring of a checkpoint (in FSDP after `on_fit_start`) and the first
    batch; and `estimated_stepping_batches`, in `configure_optimizers`, fetches that batch already.
    """
    source = trainer.fit_loop._data_source
    dataloader = source.dataloader

    def after_the_call() -> Any:
        source.dataloader = dataloader  # type: ignore[method-assign]
        call()
        return dataloader()

    source.dataloader = after_the_call  # type: ignore[method-assign]


def _ask_no_batch_ahead(trainer: Trainer) -> None:
    """Make the Trainer ask for a batch when it needs it, and give back one it has fetched ahead.

    What is given back comes again as the first batch of the new iteration.
    """
    fetcher = trainer.fit_loop._data_fetcher
    if isinstance(fetcher, _PrefetchDataFetcher) and fetcher.length is None:
        fetcher.prefetch_batches = 0
        if fetcher.batches:
            iter(fetcher)
