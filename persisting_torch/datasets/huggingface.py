"""Hugging Face's Trainer on a queue: batches as they are assigned, positions in checkpoints."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from persisting_torch.datasets.loader import PersistingDataLoader

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from torch import nn
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

KEY = "persisting_torch"
"""The position's place among `stateful_callbacks` in a checkpoint's trainer_state.json."""

TRAINER_STATE = "trainer_state.json"

log = logging.getLogger(__name__)


def feed_trainer(trainer: Trainer, loader: PersistingDataLoader) -> None:
    """Make a transformers.Trainer train from this loader, each sample in exactly one step.

    Call it once, before `trainer.train()`. From then on

    - the Trainer iterates over the loader itself. Accelerate, which it would have prepare a
      DataLoader of its own, deals an iterable dataset's batches out among the ranks, though each
      rank has its own slice of them, and reads one batch ahead;
    - batches that are TensorDicts become dicts, as the Trainer asks for: the model gets the fields
      as keyword arguments, so the dataset's `fields` should be those of its `forward`;
    - every checkpoint holds the number of global batches that optimizer steps have used, and
      `train(resume_from_checkpoint=...)` goes on with the one after; `args.ignore_data_skip` is
      set, since nothing has to be skipped; with `save_strategy="steps"` one more is written where
      the data end;
    - the queue is told that batches are consumed once the checkpoint that counts them is written,
      or with `save_strategy="no"` at each optimizer step.

    The Trainer needs `max_steps`, as with any source without a length; training ends earlier when
    the partition is sealed and nothing is left. Batches that then do not fill
    `gradient_accumulation_steps` reach no step of the Trainer: they stay unconsumed, for the next
    run, and a warning says so.

    Raises TypeError where `loader` is not a PersistingDataLoader, ValueError where its dataset does
    not consume.

    >>> trainer = Trainer(model, TrainingArguments("out", max_steps=10_000))  # doctest: +SKIP
    >>> dataset = PersistingDataset("rollouts", batch_size=8, fields=["x", "y"])  # doctest: +SKIP
    >>> feed_trainer(trainer, PersistingDataLoader(dataset))  # doctest: +SKIP
    >>> trainer.train(resume_from_checkpoint=last_checkpoint("out"))  # doctest: +SKIP
    """
    from transformers import TrainerCallback

    if not isinstance(loader, PersistingDataLoader):
        raise TypeError(
            f"loader must be a PersistingDataLoader, got {type(loader).__name__}: {loader!r}."
        )
    if not loader.dataset.consume:
        raise ValueError(
            "feed_trainer has each sample trained once, and was given a loader whose dataset has"
            " consume=False. Leave consume=True."
        )
    loader.collate_fn = partial(_as_dict, loader.collate_fn)
    trainer.args.ignore_data_skip = True
    trainer.get_train_dataloader = lambda: loader
    consumption = type("QueueConsumption", (_Consumption, TrainerCallback), {})
    trainer.add_callback(consumption(loader))


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint that a Trainer has written there; None if there is none.

    One whose writing was broken off by a kill lacks the Trainer's state, which comes last, and is
    passed over; `train(resume_from_checkpoint=True)` would fail with it.
    """
    found = {
        int(path.name.removeprefix("checkpoint-")): str(path)
        for path in Path(output_dir).glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdecimal() and _complete(path)
    }
    return found[max(found)] if found else None


class _Consumption:
    """What a TrainerCallback has to do for `feed_trainer`."""

    def __init__(self, loader: PersistingDataLoader) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.saved_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.dataset.cursor.driven = False
        if KEY in state.stateful_callbacks:
            self.dataset.load_state_dict(state.stateful_callbacks[KEY])
        self.dataset.cursor.driven = True
        self.saved_step = state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # The Trainer has fetched the batches of this step, and none beyond.
        while self.dataset.cursor.finish():
            pass
        self.dataset.cursor.step()
        state.stateful_callbacks[KEY] = self.dataset.state_dict()
        if args.save_strategy == "no":
            self._commit(state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.saved_step = state.global_step
        if KEY in state.stateful_callbacks:
            assert args.output_dir is not None
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self.dataset.saved(folder, state.stateful_callbacks[KEY]["k"])
            self._commit(state)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        **_: Any,
    ) -> None:
        if args.save_strategy == "steps" and state.global_step > self.saved_step:
            control.should_save = True
        # Until it is stopped the Trainer begins the next epoch, with gradients that no step took.
        if not self.dataset.cursor.holding or control.should_training_stop:
            return
        model.zero_grad()
        if control.should_epoch_stop:
            return
        control.should_training_stop = True
        log.warning(
            "the last batches of task %r on %s/%s do not fill gradient_accumulation_steps=%d, so no"
            " optimizer step has used them; they stay unconsumed",
            self.dataset.task_name,
            self.dataset.handle.name,
            self.dataset.partition_id,
            args.gradient_accumulation_steps,
        )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.loader.close()
        self.dataset.cursor.driven = False

    def _commit(self, state: TrainerState) -> None:
        self.dataset.commit(state.stateful_callbacks[KEY]["k"])


def _as_dict(collate: Callable[[Any], Any], batch: Any) -> Any:
    batch = collate(batch)
    return dict(batch.items()) if isinstance(batch, TensorDictBase) else batch


def _complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / TRAINER_STATE).read_text())
    except (FileNotFoundError, ValueError):
        return False
    return True
