from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from persisting_torch import Queue, as_episodes, as_windows, cut_episodes

STEP = torch.tensor([0, 1, 2, 0, 0, 1])


def steps(**fields) -> TensorDict:
    return TensorDict({"step": STEP, "x": torch.rand(6, 3), **fields}, [6])


def lists(value) -> list:
    return [row.tolist() for row in value.unbind()]


def jagged(*rows) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def stored(tmp_path, records) -> TensorDict:
    """Records as they come back from a queue."""
    with Queue("q", tmp_path) as queue:
        meta = queue.sync.put(records)
        queue.sync.flush()
        return queue.sync.get_data(meta)


# Episodes


def test_episodes_are_jagged_over_the_same_memory():
    flat = steps()
    episodes = as_episodes(flat)
    assert episodes.batch_size == (3,)
    assert lists(episodes["step"]) == [[0, 1, 2], [0], [0, 1]]
    assert episodes["x"].layout == torch.jagged
    assert episodes["x"].shape[0] == 3
    assert episodes["x"].shape[2] == 3
    assert episodes["x"].values().data_ptr() == flat["x"].data_ptr()


def test_fields_of_episodes_can_be_added_and_multiplied():
    episodes = as_episodes(steps(reward=torch.rand(6), value=torch.rand(6)))
    total = episodes["reward"] * 2 - episodes["value"]
    assert torch.equal(
        total.values(), (episodes["reward"].values() * 2 - episodes["value"].values())
    )
    again = pickle.loads(pickle.dumps(episodes))
    assert (again["reward"] - again["value"]).shape[0] == 3


def test_nested_fields_stay_nested():
    episodes = as_episodes(steps(obs={"image": torch.rand(6, 2, 2)}))
    assert episodes["obs"].batch_size == (3,)
    assert episodes["obs", "image"].unbind()[0].shape == (3, 2, 2)
    windows = as_windows(TensorDict({"step": torch.arange(6), "obs": {"y": torch.rand(6)}}, [6]), 3)
    assert windows["obs", "y"].shape == (2, 3)


def test_the_step_may_be_a_nested_field():
    flat = TensorDict({"meta": {"step": STEP}, "x": torch.arange(6)}, [6])
    assert lists(as_episodes(flat, "meta.step")["x"]) == [[0, 1, 2], [3], [4, 5]]


def test_named_fields_of_episodes_are_padded_and_come_with_a_mask():
    episodes = as_episodes(steps(a=torch.arange(6)), pad={"a": -1})
    assert episodes["a"].tolist() == [[0, 1, 2], [3, -1, -1], [4, 5, -1]]
    assert episodes["mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert episodes["x"].layout == torch.jagged
    assert "mask" not in as_episodes(steps(), pad={"other": 0}).keys()  # noqa: SIM118


def test_a_mask_that_would_hide_a_field_is_refused():
    with pytest.raises(ValueError, match=r"a field 'mask' of its own.*mask_field"):
        as_episodes(steps(mask=torch.ones(6)), pad={"mask": 0})
    named = as_episodes(steps(mask=torch.ones(6)), pad={"mask": 0}, mask_field="there")
    assert named["there"].sum() == 6


def test_text_comes_as_a_list_for_each_episode(tmp_path):
    records = [{"step": s, "text": f"t{n}"} for n, s in enumerate([0, 1, 0, 1])]
    episodes = as_episodes(stored(tmp_path, records))
    assert list(episodes["text"]) == [["t0", "t1"], ["t2", "t3"]]
    assert episodes.batch_size == (2,)


def test_steps_of_varying_length_come_as_a_jagged_tensor_for_each_episode(tmp_path):
    tokens = [torch.arange(n) for n in (2, 4, 1, 3)]
    records = [{"step": s, "t": t} for s, t in zip([0, 1, 2, 0], tokens, strict=True)]
    episodes = as_episodes(stored(tmp_path, records))
    assert [lists(each) for each in episodes["t"]] == [[[0, 1], [0, 1, 2, 3], [0]], [[0, 1, 2]]]


def test_a_batch_that_is_not_of_whole_episodes_is_refused():
    with pytest.raises(ValueError, match="begins with step 2 in field 'step', not with 0"):
        as_episodes(TensorDict({"step": torch.tensor([2, 3])}, [2]))
    with pytest.raises(KeyError, match=r"no field .*step.*It has: x"):
        as_episodes(TensorDict({"x": torch.tensor([2, 3])}, [2]))
    with pytest.raises(ValueError, match="one for each, are expected in field 'step'"):
        as_episodes(TensorDict({"step": torch.rand(2, 2)}, [2]))


# Windows


def test_full_windows_are_a_view():
    flat = TensorDict({"step": torch.tensor([0, 1, 4, 5, 2, 3]), "x": torch.rand(6, 3)}, [6])
    windows = as_windows(flat, 2)
    assert windows.batch_size == (3, 2)
    assert windows["x"].shape == (3, 2, 3)
    assert windows["x"].data_ptr() == flat["x"].data_ptr()
    padded = as_windows(flat, 2, tail="pad")
    assert padded["mask"].all()
    assert padded["x"].data_ptr() == flat["x"].data_ptr()


def test_short_windows_are_padded_with_what_the_field_is_to_be_padded_with():
    flat = steps(a=torch.arange(6), ok=torch.ones(6, dtype=torch.bool), h=torch.ones(6).bfloat16())
    windows = as_windows(flat, 2, tail="pad", pad={"a": -1})
    assert windows["a"].tolist() == [[0, 1], [2, -1], [3, -1], [4, 5]]
    assert windows["ok"].tolist() == [[1, 1], [1, 0], [1, 0], [1, 1]]
    assert windows["h"].dtype == torch.bfloat16
    assert windows["x"].shape == (4, 2, 3)
    assert torch.equal(windows["mask"], windows["ok"])


def test_short_windows_are_refused_where_there_should_be_none_and_kept_where_wanted():
    with pytest.raises(ValueError, match=r"windows of \[1, 2\] steps, not of 2"):
        as_windows(steps(), 2)
    assert lists(as_windows(steps(), 2, tail="keep")["step"]) == [[0, 1], [2], [0], [0, 1]]


def test_windows_of_another_length_than_asked_for_are_refused():
    with pytest.raises(ValueError, match=r"windows of \[3\] steps, not of 2"):
        as_windows(TensorDict({"step": torch.tensor([2, 3, 5])}, [3]), 2, tail="pad")


def test_text_and_jagged_rows_have_their_places_in_windows(tmp_path):
    rows = [torch.arange(n) for n in (2, 4, 1)]
    records = [{"step": n, "s": f"t{n}", "t": row} for n, row in enumerate(rows)]
    windows = as_windows(stored(tmp_path, records), 2, tail="pad")
    assert [list(each) for each in windows["s"]] == [["t0", "t1"], ["t2", None]]
    assert windows.get("t").batch_size == (2, 2)
    assert windows[0, 1]["t"].tolist() == [0, 1, 2, 3]


# Episodes that are one sample each


def test_episodes_are_cut_into_windows_that_cross_no_end():
    batch = TensorDict(
        {"x": jagged([0, 1, 2, 3, 4], [10, 11], [20]), "prize": torch.tensor([7, 8, 9])}, [3]
    )
    dropped = cut_episodes(batch, 2, ["x"])
    assert dropped["x"].tolist() == [[0, 1], [2, 3], [10, 11]]
    assert dropped["prize"].tolist() == [7, 7, 8]
    padded = cut_episodes(batch, 2, ["x"], tail="pad", pad={"x": -1})
    assert padded["x"].tolist() == [[0, 1], [2, 3], [4, -1], [10, 11], [20, -1]]
    assert padded["mask"].sum() == 8
    assert padded["prize"].tolist() == [7, 7, 7, 8, 9]
    kept = cut_episodes(batch, 2, ["x"], tail="keep")
    assert lists(kept["x"]) == [[0, 1], [2, 3], [4], [10, 11], [20]]
    assert kept["x"].values().data_ptr() == batch["x"].values().data_ptr()


def test_equally_long_episodes_are_cut_too():
    batch = TensorDict({"x": torch.arange(12).reshape(2, 6).bfloat16()}, [2])
    assert cut_episodes(batch, 4, ["x"])["x"].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]


def test_every_other_field_goes_with_its_windows(tmp_path):
    records = [
        {"x": torch.arange(n), "name": f"e{n}", "prompt": torch.arange(n + 1)} for n in (4, 1, 3)
    ]
    windows = cut_episodes(stored(tmp_path, records), 2, ["x"])
    assert list(windows["name"]) == ["e4", "e4", "e3"]
    assert lists(windows["prompt"]) == [list(range(5)), list(range(5)), list(range(4))]


def test_where_no_episode_is_long_enough_there_is_no_window():
    windows = cut_episodes(TensorDict({"x": jagged([1.0], [2.0])}, [2]), 2, ["x"])
    assert windows.batch_size == (0,)
    assert windows["x"].shape == (0, 2)


def test_fields_that_disagree_or_have_no_rows_are_refused():
    batch = TensorDict({"x": jagged([1, 2], [3]), "y": jagged([1], [2]), "z": torch.ones(2)}, [2])
    with pytest.raises(ValueError, match=r"'x' and 'y' disagree.*\[2, 1\] and \[1, 1\]"):
        cut_episodes(batch, 2, ["x", "y"])
    with pytest.raises(ValueError, match="'z' has no row for each step"):
        cut_episodes(batch, 2, ["z"])
    with pytest.raises(ValueError, match="tail must be"):
        cut_episodes(batch, 2, ["x"], tail="cut")


def test_cutting_is_a_transform_that_pickles():
    pickle.dumps(partial(cut_episodes, length=2, fields=["x"]))
