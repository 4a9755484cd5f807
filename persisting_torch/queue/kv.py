"""Samples by key: a durable key-value view of a queue."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import TensorDict, TensorDictBase

from persisting_torch.errors import SchemaError
from persisting_torch.queue.again import again
from persisting_torch.queue.meta import BatchMeta
from persisting_torch.queue.names import check_name
from persisting_torch.queue.sets import set_of
from persisting_torch.queue.threads import in_thread, undisturbed

if TYPE_CHECKING:
    from persisting_torch.queue.queue import Queue

Tag = dict[str, Any]


class KVInterface:
    """Keys for the samples of a queue, each with a tag (a dict that JSON can hold).

    Keys are unique within a partition. What a method has done is on disk, and seen by all
    processes, when it returns. `kv.sync` has the same methods without await.

    >>> import asyncio, tempfile
    >>> from persisting_torch import Queue
    >>> async def main():
    ...     with Queue("rollouts", tempfile.mkdtemp()) as queue:
    ...         kv = KVInterface(queue)
    ...         await kv.kv_put("a", {"reward": 0.5}, "train", tag={"step": 1})
    ...         return await kv.kv_list("train")
    >>> asyncio.run(main())
    [('a', {'step': 1})]
    """

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.sync = SyncKV(queue)

    async def kv_put(
        self,
        key: str,
        data: dict[str, Any] | TensorDictBase | None,
        partition_id: str,
        tag: Tag | None = None,
    ) -> BatchMeta:
        """Put one sample under a key; on a known key, update the given fields and keep the others.

        With data=None only the tag is updated. Returns the metadata of the sample, with the fields
        and the tag given. Raises SchemaError for a value or tag that cannot be stored, KeyError for
        data=None with an unknown key.
        """
        return await in_thread(self.sync.kv_put, key, data, partition_id, tag)

    async def kv_batch_put(
        self,
        keys: Sequence[str],
        data: Sequence[dict[str, Any]] | TensorDictBase | None,
        partition_id: str,
        tags: Sequence[Tag | None] | None = None,
    ) -> BatchMeta:
        """Put a sample under each key: a list of dicts, or a TensorDict of batch size [len(keys)].

        Known keys are updated; new ones are put, when a queue with a capacity has room. Returns the
        metadata of the samples, in the order of the keys. Raises as kv_put does.
        """
        return await in_thread(self.sync.kv_batch_put, keys, data, partition_id, tags)

    async def kv_batch_get(
        self,
        keys: str | Sequence[str],
        partition_id: str,
        fields: str | Sequence[str] | None = None,
    ) -> TensorDict:
        """The samples of these keys, in their order, as a TensorDict of batch size [len(keys)].

        A single key or field may be given as it is. Raises KeyError naming unknown keys.
        """
        return await in_thread(self.sync.kv_batch_get, keys, partition_id, fields)

    async def kv_meta(
        self,
        keys: str | Sequence[str],
        partition_id: str,
        fields: Sequence[str] | None = None,
    ) -> BatchMeta:
        """The metadata of the samples of these keys, in their order, the tags as `custom_meta`.

        It names `fields`; with None, all fields that every one of the samples has. Raises KeyError
        naming unknown keys.
        """
        return await in_thread(self.sync.kv_meta, keys, partition_id, fields)

    async def kv_keys(self, global_indexes: int | Sequence[int], partition_id: str) -> list[str]:
        """The keys of these samples, in their order. Raises KeyError for those without one."""
        return await in_thread(self.sync.kv_keys, global_indexes, partition_id)

    async def kv_list(self, partition_id: str) -> list[tuple[str, Tag | None]]:
        """All keys of a partition with their tags, sorted by key."""
        return await in_thread(self.sync.kv_list, partition_id)

    async def kv_clear(self, keys: str | Sequence[str], partition_id: str) -> None:
        """Remove keys and their samples for good. Raises KeyError naming unknown keys."""
        await in_thread(self.sync.kv_clear, keys, partition_id)


class SyncKV:
    """The methods of KVInterface without await, for scripts, notebooks and callbacks."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._engine = queue.engine

    def kv_put(
        self,
        key: str,
        data: dict[str, Any] | TensorDictBase | None,
        partition_id: str,
        tag: Tag | None = None,
    ) -> BatchMeta:
        """See KVInterface.kv_put."""
        rows: list[dict[str, Any]] | TensorDictBase | None
        if isinstance(data, TensorDictBase):
            rows = data.unsqueeze(0) if not data.batch_dims else data
        else:
            rows = None if data is None else [data]
        return self.kv_batch_put([key], rows, partition_id, None if tag is None else [tag])

    def kv_batch_put(
        self,
        keys: Sequence[str],
        data: Sequence[dict[str, Any]] | TensorDictBase | None,
        partition_id: str,
        tags: Sequence[Tag | None] | None = None,
    ) -> BatchMeta:
        """See KVInterface.kv_batch_put."""
        put: BatchMeta = undisturbed(self._put, list(keys), data, partition_id, tags)
        if tags is not None:
            put.update_custom_meta([tag or {} for tag in tags])
        return put

    def kv_batch_get(
        self,
        keys: str | Sequence[str],
        partition_id: str,
        fields: str | Sequence[str] | None = None,
    ) -> TensorDict:
        """See KVInterface.kv_batch_get."""
        indexes = self._indexes(keys, partition_id)
        names = [fields] if isinstance(fields, str) else fields
        return self._engine.read_batch(partition_id, indexes, names)

    def kv_meta(
        self,
        keys: str | Sequence[str],
        partition_id: str,
        fields: Sequence[str] | None = None,
    ) -> BatchMeta:
        """See KVInterface.kv_meta."""
        indexes = self._indexes(keys, partition_id)
        if fields is None:
            with self._engine.ledger.lock:
                having = self._engine.books.partitions[partition_id].having.items()
                fields = [name for name, members in having if set_of(indexes) <= members]
        return BatchMeta(indexes, partition_id, fields, self._engine.custom.of(indexes))

    def kv_keys(self, global_indexes: int | Sequence[int], partition_id: str) -> list[str]:
        """See KVInterface.kv_keys."""
        indexes = [global_indexes] if isinstance(global_indexes, int) else list(global_indexes)
        self._engine.check_open()
        ask = (
            "SELECT sample, key FROM keys JOIN partitions ON partitions.id = keys.partition"
            " WHERE sample IN (SELECT value FROM json_each(?)) AND partitions.name = ?"
        )
        with self._engine.ledger.reading() as tx:
            known = dict(tx.execute(ask, (json.dumps(indexes), partition_id)).fetchall())
        without = [index for index in indexes if index not in known]
        if without:
            raise KeyError(
                f"{self.queue.name}/{partition_id} has no keys for samples {without[:10]}."
            )
        return [known[index] for index in indexes]

    def _indexes(self, keys: str | Sequence[str], partition: str) -> list[int]:
        """The global indexes of keys, in their order; KeyError naming unknown ones."""
        asked = [keys] if isinstance(keys, str) else list(keys)
        known = self.find(asked, partition)
        if not known.keys() >= set(asked):
            self._engine.ledger.catch_up()
            known = self.find(asked, partition)
        _refuse_unknown(asked, known, self.queue.name, partition)
        return [known[key] for key in asked]

    def _put(
        self,
        keys: list[str],
        data: Sequence[dict[str, Any]] | TensorDictBase | None,
        partition: str,
        tags: Sequence[Tag | None] | None,
    ) -> BatchMeta:
        texts = _texts(keys, tags)
        if data is None:
            indexes = self._indexes(keys, partition)
            self._tag(keys, partition, texts)
            return BatchMeta(indexes, partition)
        if len(data) != len(keys):
            raise SchemaError(
                f"queue {self.queue.name!r}: {len(data)} samples were given for {len(keys)} keys."
                " Give one for each, in their order."
            )
        if len(self.find(keys, partition)) < len(keys):
            self._engine.writes.await_room(partition)
        # Two processes that both find a key unknown would both put a sample for it.
        with self._engine.writes.alone():
            return self._put_samples(keys, data, partition, texts)

    def _put_samples(
        self,
        keys: list[str],
        data: Sequence[dict[str, Any]] | TensorDictBase,
        partition: str,
        texts: list[str | None],
    ) -> BatchMeta:
        known = self.find(keys, partition)
        old = [at for at, key in enumerate(keys) if key in known]
        new = [at for at, key in enumerate(keys) if key not in known]
        if old and new:
            self._engine.writes.admit(data)
            self._engine.producers.finishing(np.array([known[keys[at]] for at in old]))
        fields: tuple[str, ...] = ()
        if new:
            put = self._engine.writes.put_with_keys(
                _pick(data, new), partition, [keys[at] for at in new], [texts[at] for at in new]
            )
            known |= zip([keys[at] for at in new], put.global_indexes, strict=True)
            fields = tuple(put.field_names)
        if old:
            meta = BatchMeta([known[keys[at]] for at in old], partition, fields)
            meta = self._engine.writes.put_fields(
                _pick(data, old), meta, [(keys[at], known[keys[at]], texts[at]) for at in old]
            )
            fields = tuple(meta.field_names)
        return BatchMeta([known[key] for key in keys], partition, fields)

    def find(self, keys: Sequence[str], partition: str) -> dict[str, int]:
        """The global indexes of those keys that the partition has."""
        self._engine.check_open()
        with self._engine.ledger.reading() as tx:
            self._engine.books.refresh(tx)
            where = self._engine.books.partitions.get(partition)
            if where is None:
                return {}
            found = {}
            for key in keys:
                row = tx.execute(
                    "SELECT sample FROM keys WHERE partition = ? AND key = ?", (where.id, key)
                ).fetchone()
                if row is not None:
                    found[key] = int(row[0])
            return found

    @again
    def _tag(self, keys: list[str], partition: str, texts: list[str | None]) -> None:
        self._engine.check_open(writing=True)
        with self._engine.ledger.transaction() as tx:
            self._engine.books.refresh(tx)
            where = self._engine.books.partitions[partition].id
            tx.executemany(
                "UPDATE keys SET tag = ? WHERE partition = ? AND key = ? AND ? IS NOT NULL",
                [(text, where, key, text) for key, text in zip(keys, texts, strict=True)],
            )

    def kv_list(self, partition_id: str) -> list[tuple[str, Tag | None]]:
        """See KVInterface.kv_list."""
        self._engine.check_open()
        with self._engine.ledger.reading() as tx:
            rows = tx.execute(
                "SELECT key, tag FROM keys JOIN partitions ON partitions.id = keys.partition"
                " WHERE partitions.name = ? ORDER BY key",
                (partition_id,),
            ).fetchall()
        return [(key, None if tag is None else json.loads(tag)) for key, tag in rows]

    def kv_clear(self, keys: str | Sequence[str], partition_id: str) -> None:
        """See KVInterface.kv_clear."""
        self._engine.clear(partition_id, self._indexes(keys, partition_id))


def _texts(keys: list[str], tags: Sequence[Tag | None] | None) -> list[str | None]:
    for key in keys:
        check_name(key, "key")
    if len(set(keys)) != len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise SchemaError(f"the keys {twice[:10]} came more than once in one put.")
    if tags is None:
        return [None] * len(keys)
    if len(tags) != len(keys):
        raise SchemaError(f"{len(tags)} tags were given for {len(keys)} keys.")
    texts: list[str | None] = []
    for key, tag in zip(keys, tags, strict=True):
        try:
            texts.append(None if tag is None else json.dumps(tag))
        except (TypeError, ValueError) as error:
            raise SchemaError(
                f"the tag of key {key!r} cannot be stored: {error}. Tags hold what JSON can hold;"
                " put other values in fields."
            ) from error
    return texts


def _refuse_unknown(keys: Sequence[str], known: dict[str, int], queue: str, partition: str) -> None:
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise KeyError(f"{queue}/{partition} has no keys {unknown[:10]}.")


def _pick(
    data: Sequence[dict[str, Any]] | TensorDictBase, positions: list[int]
) -> Sequence[dict[str, Any]] | TensorDictBase:
    if isinstance(data, TensorDictBase):
        return data if len(positions) == len(data) else data[positions]
    return [data[at] for at in positions]
