"""From a batch of steps to a batch of episodes or windows, over the same memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

from persisting_torch.queue.dtypes import bits
from persisting_torch.queue.tensors import Rows, pad_rows

Tail = Literal["drop", "pad", "keep"]
Path = tuple[str, ...]


def as_episodes(
    batch: TensorDictBase,
    step_field: str = "step",
    *,
    pad: Mapping[str, float] | None = None,
    mask_field: str = "mask",
) -> TensorDict:
    """Steps [n], one episode after the other, as episodes: a TensorDict of batch size [episodes].

    An episode begins wherever `step_field` is 0. A tensor [n, ...] becomes a jagged tensor
    [episodes, steps, ...] over the same memory; all of them have the same offsets, so that fields
    can be added and multiplied. A field named in `pad` becomes a tensor [episodes, longest, ...]
    with that value after the end, and then a bool tensor `mask_field` [episodes, longest] is True
    where there are steps. Of text and objects each episode has a list, and of a field that is
    jagged in the batch already each has a jagged tensor of its own.

    Raises KeyError where the batch has no `step_field`, ValueError where it does not begin with a
    step 0 or has a field `mask_field` of its own.

    >>> steps = TensorDict({"step": torch.tensor([0, 1, 2, 0, 1]), "x": torch.arange(5)}, [5])
    >>> [x.tolist() for x in as_episodes(steps)["x"].unbind()]
    [[0, 1, 2], [3, 4]]
    >>> as_episodes(steps, pad={"x": -1})["x"].tolist()
    [[0, 1, 2], [3, 4, -1]]
    """
    return _jagged(batch, _offsets(batch, step_field, None), pad or {}, mask_field)


def as_windows(
    batch: TensorDictBase,
    length: int,
    step_field: str = "step",
    *,
    tail: Tail = "drop",
    pad: Mapping[str, float] | None = None,
    mask_field: str = "mask",
) -> TensorDict:
    """Steps [n], one window after the other, as a TensorDict of batch size [windows, length].

    A window begins wherever `step_field` is a multiple of `length`. A tensor [n, ...] is seen as
    [windows, length, ...], without a copy where all windows are full. Text, objects and the rows of
    jagged fields have the same places.

    `tail` says how windows with fewer steps are taken: "drop" has none; "pad" fills them up, with
    the value that `pad` has for the field, else 0 (None for text and objects), and adds a bool
    tensor `mask_field` [windows, length] that is True where there are steps; "keep" leaves them
    short, and gives what `as_episodes` does.

    Raises KeyError where the batch has no `step_field`; ValueError where its steps are not such
    windows, or it has a field `mask_field` of its own.

    >>> steps = TensorDict({"step": torch.tensor([2, 3, 0, 1, 2]), "x": torch.arange(5)}, [5])
    >>> windows = as_windows(steps, 2, tail="pad")
    >>> windows["x"].tolist(), windows["mask"].sum(1).tolist()
    ([[0, 1], [2, 3], [4, 0]], [2, 2, 1])
    """
    _check_tail(tail)
    fills = pad or {}
    offsets = _offsets(batch, step_field, length)
    if tail == "keep":
        return _jagged(batch, offsets, fills, mask_field)
    lengths = offsets.diff()
    full = bool((lengths == length).all())
    if not full and (tail == "drop" or int(lengths.max()) > length):
        raise ValueError(
            f"the batch has windows of {sorted(set(lengths.tolist()))} steps, not of {length}."
            " tail='pad' or 'keep' takes shorter ones. If its task was trained with another sampler"
            " before, give this one another task_name."
        )

    def tensor(path: Path, value: Any) -> Any:
        if value.is_nested:
            return listed(value.unbind())
        if full:
            return value.unflatten(0, (len(lengths), length))
        name = ".".join(path)
        return pad_rows(Rows(value, offsets), fills.get(name, 0), f"field {name!r}", to=length)

    def listed(values: Sequence[Any]) -> Any:
        nothing = [None] * length
        rows = [
            [*values[start:stop], *nothing][:length]
            for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ]
        return NonTensorStack(*(NonTensorStack(*map(_wrapped, row)) for row in rows))

    size = [len(lengths), length]
    windows = TensorDict(_each(batch, tensor, listed), batch_size=size)
    return _with_mask(windows, lengths, length, mask_field) if tail == "pad" else windows


def cut_episodes(
    batch: TensorDictBase,
    length: int,
    fields: Sequence[str],
    *,
    tail: Tail = "drop",
    pad: Mapping[str, float] | None = None,
    mask_field: str = "mask",
) -> TensorDict:
    """Episodes that are one sample each, cut into windows: a TensorDict of batch size [windows].

    `fields` are those that have a row for each step: jagged tensors [episodes, steps, ...] that
    agree in their lengths, or tensors where all episodes are equally long. They become tensors
    [windows, length, ...]. No window crosses an end; what is left at the end of an episode, shorter
    than a window, is dropped, padded (with a mask) or kept short (in jagged tensors), as
    `as_windows` describes. Every other field has, for each window, what its episode has.

    As a transform of a dataset: `functools.partial(cut_episodes, length=16, fields=["obs"])`.

    Raises KeyError for a field that the batch does not have; ValueError where the fields have no
    rows or disagree in their lengths, or the batch has a field `mask_field` of its own.

    >>> walks = torch.nested.nested_tensor([torch.arange(5), torch.arange(3)], layout=torch.jagged)
    >>> batch = TensorDict({"x": walks, "won": torch.tensor([True, False])}, [2])
    >>> windows = cut_episodes(batch, 2, ["x"])
    >>> windows["x"].tolist(), windows["won"].tolist()
    ([[0, 1], [2, 3], [0, 1]], [True, True, False])
    """
    _check_tail(tail)
    rows = {_path(batch, name): _rows(name, _get(batch, name)) for name in fields}
    offsets = _common_offsets(fields, list(rows.values()))
    steps = offsets.diff()
    counts = steps // length if tail == "drop" else -(-steps // length)
    owner = torch.repeat_interleave(counts)
    nth = torch.arange(len(owner)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    starts = offsets[owner] + nth * length
    lengths = torch.minimum(offsets[owner + 1] - starts, torch.tensor(length))
    within = torch.arange(length) < lengths[:, None]
    cuts = torch.cat([starts, offsets[-1:]])

    def tensor(path: Path, value: Any) -> Any:
        if path in rows:
            values = rows[path].values
            if tail == "keep":
                return torch.nested.nested_tensor_from_jagged(values, cuts)
            name = ".".join(path)
            places = (starts[:, None] + torch.arange(length))[within]
            taken = Rows(bits(values)[places].view(values.dtype), _from_zero(lengths))
            return pad_rows(taken, (pad or {}).get(name, 0), f"field {name!r}", to=length)
        if not value.is_nested:
            return value[owner]
        parts = value.unbind()
        chosen = [parts[at] for at in owner.tolist()]
        cut_at = _from_zero(value.offsets().diff()[owner])
        return torch.nested.nested_tensor_from_jagged(
            torch.cat([value.values()[:0], *chosen]), cut_at
        )

    def listed(values: Sequence[Any]) -> Any:
        if not len(owner):
            return NonTensorData(data=[], batch_size=[0])
        return NonTensorStack(*(_wrapped(values[at]) for at in owner.tolist()))

    windows = TensorDict(_each(batch, tensor, listed), batch_size=[len(owner)])
    return _with_mask(windows, lengths, length, mask_field) if tail == "pad" else windows


def _jagged(
    batch: TensorDictBase, offsets: torch.Tensor, pad: Mapping[str, float], mask_field: str
) -> TensorDict:
    bounds = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    padded = False

    def tensor(path: Path, value: Any) -> Any:
        nonlocal padded
        name = ".".join(path)
        if value.is_nested:
            at, values = value.offsets(), value.values()
            parts = [
                torch.nested.nested_tensor_from_jagged(
                    values[int(at[start]) : int(at[stop])], at[start : stop + 1] - at[start]
                )
                for start, stop in bounds
            ]
            return NonTensorStack(*(NonTensorData(data=part) for part in parts))
        if name in pad:
            padded = True
            return pad_rows(Rows(value, offsets), pad[name], f"field {name!r}")
        return torch.nested.nested_tensor_from_jagged(value, offsets)

    def listed(values: Sequence[Any]) -> Any:
        return NonTensorStack(
            *(NonTensorData(data=list(values[start:stop])) for start, stop in bounds)
        )

    episodes = TensorDict(_each(batch, tensor, listed), batch_size=[len(bounds)])
    if not padded:
        return episodes
    lengths = offsets.diff()
    return _with_mask(episodes, lengths, int(lengths.max()), mask_field)


def _each(
    batch: TensorDictBase,
    tensor: Callable[[Path, Any], Any],
    listed: Callable[[Sequence[Any]], Any],
    above: Path = (),
) -> dict[str, Any]:
    """The fields of a batch, nested as they are, made anew by one function or the other."""
    made: dict[str, Any] = {}
    for key in batch.keys():  # noqa: SIM118  (iterating over a TensorDict gives its rows)
        value = batch.get(key)
        if is_non_tensor(value):
            made[key] = listed([entry.data for entry in value.unbind(0)])
        elif is_tensor_collection(value):
            made[key] = _each(value, tensor, listed, (*above, key))
        else:
            made[key] = tensor((*above, key), value)
    return made


def _with_mask(batch: TensorDict, lengths: torch.Tensor, longest: int, name: str) -> TensorDict:
    if name in batch.keys():  # noqa: SIM118
        raise ValueError(
            f"the batch has a field {name!r} of its own, and padding needs a name for the mask of"
            " its steps. Give another as mask_field."
        )
    batch[name] = torch.arange(longest) < lengths[:, None]
    return batch


def _offsets(batch: TensorDictBase, step_field: str, length: int | None) -> torch.Tensor:
    """Where each episode, or window of `length` steps, begins among the steps; and their end."""
    steps = _get(batch, step_field)
    if not isinstance(steps, torch.Tensor) or steps.is_nested or steps.ndim != 1 or not len(steps):
        raise ValueError(
            f"the numbers of the steps, one for each, are expected in field {step_field!r}, which"
            f" is {steps!r}."
        )
    begins = steps == 0 if length is None else steps % length == 0
    if not begins[0]:
        what = "0" if length is None else f"a multiple of {length}"
        raise ValueError(
            f"the batch begins with step {steps[0].item()} in field {step_field!r}, not with"
            f" {what}. Give whole ones, as EpisodeSampler and WindowSampler do."
        )
    return torch.cat([begins.nonzero().flatten(), torch.tensor([len(steps)])])


def _path(batch: TensorDictBase, name: str) -> Path:
    if name in batch.keys():  # noqa: SIM118
        return (name,)
    return tuple(name.split("."))


def _get(batch: TensorDictBase, name: str) -> Any:
    path = _path(batch, name)
    value = batch.get(path if len(path) > 1 else path[0], None)
    if value is None:
        raise KeyError(
            f"the batch has no field {name!r}. It has: {', '.join(map(str, batch.keys()))}."
        )
    return value


def _rows(name: str, value: Any) -> Rows:
    if getattr(value, "is_nested", False):
        return Rows(value.values(), value.offsets())
    if isinstance(value, torch.Tensor) and value.ndim > 1:
        number, steps = value.shape[:2]
        return Rows(value.flatten(0, 1), torch.arange(number + 1) * steps)
    raise ValueError(
        f"field {name!r} has no row for each step: {value!r}. Name those that have, in `fields`."
    )


def _common_offsets(fields: Sequence[str], rows: list[Rows]) -> torch.Tensor:
    if not rows:
        raise ValueError("fields is empty. Name those that have a row for each step.")
    for name, own in zip(fields, rows, strict=True):
        if not torch.equal(own.offsets, rows[0].offsets):
            raise ValueError(
                f"fields {fields[0]!r} and {name!r} disagree: the batch's episodes have"
                f" {rows[0].offsets.diff().tolist()} and {own.offsets.diff().tolist()} rows. Name"
                " in `fields` only those that have a row for each step."
            )
    return rows[0].offsets


def _from_zero(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def _wrapped(value: Any) -> Any:
    """TensorDicts that are one step's object are wrapped, or the stack would merge them."""
    return NonTensorData(data=value) if is_tensor_collection(value) else value


def _check_tail(tail: str) -> None:
    if tail not in get_args(Tail):
        raise ValueError(f"tail must be 'drop', 'pad' or 'keep', got {tail!r}.")
