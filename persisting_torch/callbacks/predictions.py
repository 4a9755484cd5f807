"""What `predict_step` returns, written into a queue."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from persisting_torch.callbacks.holding import WritableQueue
from persisting_torch.callbacks.keyed import put_under_keys
from persisting_torch.errors import SchemaError
from persisting_torch.queue.meta import BatchMeta
from persisting_torch.queue.names import check_name

if TYPE_CHECKING:
    from persisting_torch.queue import Queue

INDEX = "_index"
SOURCE = "source_index"


class QueuePredictionWriter(BasePredictionWriter):
    """Writes the predictions of each batch into a queue, with the ids of their samples.

    `predict_step` returns, for a batch of B samples, a TensorDict of batch size [B], a dict of
    tensors of B rows, or a tensor of B rows, which becomes the field "prediction". What is written
    is detached, on the CPU, and a copy.

    Ids come from the field `id_field` of the batch, int or str for each sample; by default from
    "_index", where the batch has it (name it in the `fields` of the data module). They are written
    as a field of the same name ("_index" as "source_index"), and each sample is put under its id
    as the key (`KVInterface`): each batch is on disk when its hook returns, and a second prediction
    of the same samples, after a crash or with a better model, updates instead of adding. Without
    ids, samples are put as they come and flushed at the end, and predicting again adds them again.

    With `late=True` the predictions become fields of the very samples that they were made from, in
    the partition that was predicted (`partition_id` of `queue`): for log-probabilities and rewards
    that training waits for. It needs "_index" in the batch.

    Each rank writes its own predictions; when `predict` returns, those of all ranks are on disk.
    Give it return_predictions=False, unless they are wanted in memory as well.

    Args:
        queue: the queue, or its name under `storage_path`, made if it is not there.
        fields: names of the predictions to write; a mapping also gives them new names.
            None writes all.

    Raises SchemaError where a prediction does not fit the batch, or ids are asked for that the
    batch lacks.
    """

    def __init__(
        self,
        queue: Queue | str,
        partition_id: str = "default",
        fields: Sequence[str] | Mapping[str, str] | None = None,
        *,
        storage_path: str | os.PathLike[str] = "./data",
        id_field: str | None = None,
        late: bool = False,
    ) -> None:
        super().__init__(write_interval="batch")
        if isinstance(fields, str):
            raise TypeError(f"fields must be a list or mapping, got {fields!r}: [{fields!r}]?")
        if late and id_field not in (None, INDEX):
            raise ValueError(
                f"late=True writes into the samples that {INDEX!r} names, so id_field="
                f"{id_field!r} has no meaning. Leave it out."
            )
        self._handle = WritableQueue(queue, storage_path)
        self.partition_id = check_name(partition_id, "partition_id")
        if fields is None or isinstance(fields, Mapping):
            self.fields = fields
        else:
            self.fields = {name: name for name in fields}
        self.id_field = INDEX if late else id_field
        self.late = late

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if prediction is None:
            return
        rows = self._select(as_rows(prediction))
        ids = self._ids(batch, len(rows))
        queue = self._handle.queue
        if ids is None:
            queue.sync.put(rows, self.partition_id)
            return
        # The last batch may hold a sample twice, to be as long as that of the other ranks.
        places = list({each: at for at, each in enumerate(ids)}.values())
        if len(places) < len(ids):
            rows, ids = rows[places], [ids[at] for at in places]
        if self.late:
            queue.sync.put(rows, metadata=BatchMeta(ids, self.partition_id))
            return
        field = self.id_field or INDEX
        rows[SOURCE if field == INDEX else field] = cast(Any, ids)
        put_under_keys(queue, [str(each) for each in ids], rows, self.partition_id)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._handle.queue.sync.flush()
        trainer.strategy.barrier("QueuePredictionWriter")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._handle.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._handle.close()

    def _select(self, rows: TensorDictBase) -> TensorDictBase:
        if self.fields is None:
            return rows
        lacking = [name for name in self.fields if rows.get(name, None) is None]
        if lacking:
            raise SchemaError(
                f"predict_step returned no {', '.join(map(repr, lacking))}, which `fields` of"
                f" QueuePredictionWriter names. It returned {', '.join(map(repr, rows.keys()))}."
            )
        chosen = {new: rows.get(name) for name, new in self.fields.items()}
        return TensorDict(chosen, batch_size=rows.batch_size[:1])

    def _ids(self, batch: Any, rows: int) -> list[Any] | None:
        """The id of each sample; None where the batch has none and none were asked for."""
        field = self.id_field or INDEX
        found = batch.get(field, None) if isinstance(batch, TensorDictBase | Mapping) else None
        if found is None and self.id_field is None:
            return None
        if found is None:
            raise SchemaError(
                f"the batch has no field {field!r} to tell the samples apart. Name it in the"
                " `fields` of the data module or dataset."
            )
        ids = found.tolist() if hasattr(found, "tolist") else found
        if len(ids) != rows:
            raise SchemaError(f"predict_step returned {rows} rows for {len(ids)} samples.")
        return list(ids)


def as_rows(prediction: Any) -> TensorDictBase:
    """A prediction as a TensorDict of its own, on the CPU; its batch size is its first dimension.

    Raises SchemaError for what is neither a TensorDict nor a dict of tensors nor a tensor.
    """
    if isinstance(prediction, Tensor):
        prediction = {"prediction": prediction}
    if isinstance(prediction, Mapping) and not is_tensor_collection(prediction):
        tensors = [value for value in prediction.values() if isinstance(value, Tensor)]
        if not tensors or any(not tensor.dim() for tensor in tensors):
            raise SchemaError(
                "predict_step returned a dict without tensors of one row for each sample:"
                f" {', '.join(map(repr, prediction))}."
            )
        prediction = TensorDict(dict(prediction), batch_size=tensors[0].shape[:1])
    if not is_tensor_collection(prediction) or not prediction.batch_dims:
        raise SchemaError(
            "predict_step has to return a TensorDict with a batch size, a dict of tensors, or a"
            f" tensor of one row for each sample; it returned {type(prediction).__name__}."
        )
    return cast(TensorDictBase, prediction.to_tensordict().detach().cpu().clone())
