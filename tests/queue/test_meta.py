from __future__ import annotations

import copy
import json
import pickle
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from persisting_torch.queue.meta import BatchMeta

indexes = st.one_of(
    st.lists(st.integers(0, 2**63 - 1), max_size=30),
    st.builds(range, st.integers(0, 50), st.integers(0, 90), st.integers(1, 4)),
)
notes = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)


@st.composite
def metas(draw, global_indexes=indexes):
    chosen = draw(global_indexes)
    noted = st.lists(notes, min_size=len(chosen), max_size=len(chosen))
    return BatchMeta(chosen, "train_0", ("a", "b"), draw(st.none() | noted))


@pytest.mark.parametrize(
    "given_indexes",
    [
        [7, 8, 2**40],
        (7, 8, 2**40),
        array("q", [7, 8, 2**40]),
        np.array([7, 8, 2**40]),
        np.array([7, 8, 2**40], dtype=np.uint64),
        torch.tensor([7, 8, 2**40]),
    ],
    ids=["list", "tuple", "array", "int64", "uint64", "torch"],
)
def test_any_sequence_of_indexes_reads_back_as_a_list_of_integers(given_indexes):
    meta = BatchMeta(given_indexes, "default", ("x",))
    assert meta.global_indexes == [7, 8, 2**40]
    assert {type(index) for index in meta.global_indexes} == {int}
    assert meta.index_array().tolist() == [7, 8, 2**40]


@pytest.mark.parametrize("wrong", [[1.5], ["1"], [2**63], np.array([1.5])])
def test_what_is_no_int64_cannot_be_an_index(wrong):
    with pytest.raises((TypeError, OverflowError)):
        BatchMeta(wrong, "default", ("x",))


def test_a_range_reads_back_as_its_elements():
    meta = BatchMeta(range(3, 12, 4), "default", ("x",))
    assert meta.global_indexes == [3, 7, 11]
    assert meta.index_array().tolist() == [3, 7, 11]
    assert meta.index_array().dtype == np.int64


def test_a_meta_tells_its_size_partition_and_fields():
    meta = BatchMeta(range(5), "val", ("prompt", "reward"))
    assert (meta.size, len(meta), meta.partition_id) == (5, 5, "val")
    assert meta.field_names == ["prompt", "reward"]


def test_an_empty_meta_has_size_zero_and_is_false():
    meta = BatchMeta([], "default", ("x",))
    assert meta.size == 0
    assert meta.global_indexes == []
    assert not meta


def test_later_changes_to_what_was_given_do_not_show():
    given_indexes, custom = [1, 2], [{"tag": 1}, {}]
    meta = BatchMeta(given_indexes, "default", ("x",), custom)
    given_indexes[0] = 99
    custom[0]["tag"] = 99
    meta.field_names.append("y")
    meta.index_array()[0] = 99
    assert meta == BatchMeta([1, 2], "default", ("x",), [{"tag": 1}, {}])


def test_custom_meta_has_a_dict_for_each_sample_and_keeps_what_is_noted_there():
    meta = BatchMeta(range(3), "default", ("x",))
    assert meta.custom_meta == [{}, {}, {}]
    meta.custom_meta[1]["length"] = 12
    assert meta.custom_meta == [{}, {"length": 12}, {}]
    assert meta.samples[1].custom_meta == {"length": 12}


def test_custom_meta_of_another_length_is_refused():
    with pytest.raises(ValueError, match="custom_meta has 1 entries for 2 samples"):
        BatchMeta([1, 2], "default", ("x",), [{}])


def test_samples_are_views_of_one_sample_each():
    meta = BatchMeta([4, 9], "train_0", ("x", "y"), [{}, {"tag": "t"}])
    assert len(meta.samples) == 2
    assert [sample.global_index for sample in meta.samples] == [4, 9]
    last = meta.samples[-1]
    assert (last.global_index, last.partition_id, last.fields) == (9, "train_0", ("x", "y"))
    assert last.custom_meta == {"tag": "t"}
    assert [sample.global_index for sample in meta.samples[::-1]] == [9, 4]
    assert repr(last) == "Sample(global_index=9, partition_id='train_0', fields=['x', 'y'])"


def test_a_view_of_a_sample_cannot_be_written_through():
    for meta in (BatchMeta([4], "p", ("x",), [{"tag": 1}]), BatchMeta([4], "p", ("x",))):
        with pytest.raises(TypeError):
            meta.samples[0].custom_meta["tag"] = 2


def test_a_sample_position_out_of_range_is_an_index_error():
    with pytest.raises(IndexError):
        BatchMeta([4], "p", ("x",)).samples[1]


def test_select_fields_keeps_the_samples_and_takes_the_order_asked_for():
    meta = BatchMeta(range(3), "p", ("a", "b", "c"), [{"n": 0}, {}, {}])
    assert meta.select_fields(["c", "a", "c"]) == BatchMeta(
        range(3), "p", ("c", "a"), [{"n": 0}, {}, {}]
    )


def test_select_fields_names_the_fields_that_are_not_there():
    with pytest.raises(ValueError, match="no field 'z' in this meta of partition 'p'; it has 'a'"):
        BatchMeta(range(3), "p", ("a",)).select_fields(["a", "z"])


@given(metas(), st.data())
def test_select_samples_takes_positions_in_the_order_given(meta, data):
    positions = data.draw(st.lists(st.integers(0, max(meta.size - 1, 0)), max_size=9))
    positions = positions if meta.size else []
    chosen = meta.select_samples(positions)
    assert chosen.global_indexes == [meta.global_indexes[place] for place in positions]
    assert chosen.custom_meta == [meta.custom_meta[place] for place in positions]
    assert meta.select_samples(np.array(positions, dtype=np.int64)) == chosen


@pytest.mark.parametrize("position", [-1, 3])
def test_select_samples_refuses_a_position_outside_the_meta(position):
    with pytest.raises(ValueError, match=rf"position {position} is outside \[0, 3\)"):
        BatchMeta(range(10, 13), "p", ("a",)).select_samples([0, position])


def test_a_selection_has_its_own_custom_meta():
    meta = BatchMeta(range(2), "p", ("a",), [{"n": 0}, {"n": 1}])
    for part in (meta.select_samples([0]), meta.select_fields(["a"]), meta.chunk(2)[0]):
        part.custom_meta[0]["n"] = 99
    assert meta.custom_meta == [{"n": 0}, {"n": 1}]


def test_chunks_that_cannot_be_even_give_the_remainder_to_the_first():
    parts = BatchMeta(range(10), "p", ("a",)).chunk(4)
    assert [part.global_indexes for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def test_more_chunks_than_samples_leaves_the_last_ones_empty():
    parts = BatchMeta([5, 6], "p", ("a",)).chunk(3)
    assert [part.global_indexes for part in parts] == [[5], [6], []]
    assert parts[2].field_names == ["a"]


@pytest.mark.parametrize("chunks", [0, -1])
def test_a_number_of_chunks_that_is_not_positive_is_refused(chunks):
    with pytest.raises(ValueError, match="chunks must be positive"):
        BatchMeta(range(3), "p", ("a",)).chunk(chunks)


@given(metas(), st.integers(1, 12))
def test_chunks_are_even_and_concatenate_to_the_whole(meta, chunks):
    parts = meta.chunk(chunks)
    sizes = [part.size for part in parts]
    assert len(parts) == chunks
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert BatchMeta.concat(parts) == meta


@given(st.lists(metas(), min_size=1, max_size=5))
def test_concat_puts_samples_and_their_custom_meta_one_after_another(parts):
    whole = BatchMeta.concat(parts)
    assert whole.global_indexes == [index for part in parts for index in part.global_indexes]
    assert whole.custom_meta == [entry for part in parts for entry in part.custom_meta]
    assert (whole.partition_id, whole.field_names) == ("train_0", ["a", "b"])


def test_concat_leaves_its_parts_as_they_were():
    first, second = BatchMeta([1, 2], "p", ("a",)), BatchMeta([3], "p", ("a",))
    whole = BatchMeta.concat([first, second])
    whole.custom_meta[0]["n"] = 1
    assert (first, second) == (BatchMeta([1, 2], "p", ("a",)), BatchMeta([3], "p", ("a",)))


def test_concat_passes_over_empty_metas_whatever_their_fields():
    full = BatchMeta([1], "p", ("a",))
    assert BatchMeta.concat([BatchMeta([], "q", ()), full]) == full
    assert BatchMeta.concat([BatchMeta([], "q", ())]) == BatchMeta([], "q", ())


def test_concat_takes_fields_in_the_order_of_the_first():
    whole = BatchMeta.concat([BatchMeta([1], "p", ("a", "b")), BatchMeta([2], "p", ("b", "a"))])
    assert whole == BatchMeta([1, 2], "p", ("a", "b"))


def test_concat_refuses_different_partitions_different_fields_and_nothing():
    one = BatchMeta([1], "p", ("a",))
    with pytest.raises(ValueError, match="different partitions: 'p' and, at place 1, 'q'"):
        BatchMeta.concat([one, BatchMeta([2], "q", ("a",))])
    with pytest.raises(ValueError, match=r"different fields: \['a'\] and, at place 2, \['b'\]"):
        BatchMeta.concat([one, one, BatchMeta([2], "p", ("b",))])
    with pytest.raises(ValueError, match="at least one BatchMeta"):
        BatchMeta.concat([])


@given(metas())
def test_a_meta_survives_json_pickle_and_deepcopy(meta):
    assert BatchMeta.from_dict(json.loads(json.dumps(meta.to_dict()))) == meta
    assert pickle.loads(pickle.dumps(meta)) == meta
    assert copy.deepcopy(meta) == meta


def test_a_million_consecutive_samples_pickle_to_under_a_kilobyte():
    meta = BatchMeta(range(10**9, 10**9 + 10**6), "train_0", ("prompt", "response", "reward"))
    assert meta.global_indexes[-1] == 10**9 + 10**6 - 1
    assert meta.custom_meta[-1] == {}
    assert len(pickle.dumps(meta)) < 1000
    halves = meta.chunk(2)
    assert len(pickle.dumps(halves)) < 1000
    assert len(pickle.dumps(BatchMeta.concat(halves))) < 1000


def test_scattered_samples_pickle_to_eight_bytes_each():
    scattered = np.random.default_rng(0).integers(0, 2**62, 100_000)
    assert len(pickle.dumps(BatchMeta(scattered, "p", ("a",)))) < 8 * 100_000 + 1000


def test_metas_are_equal_by_value_however_the_indexes_were_given():
    meta = BatchMeta(range(3), "p", ("a",))
    assert meta == BatchMeta([0, 1, 2], "p", ("a",), [{}, {}, {}])
    assert meta != BatchMeta([0, 1], "p", ("a",))
    assert meta != BatchMeta([0, 2, 1], "p", ("a",))
    assert meta != BatchMeta(range(3), "q", ("a",))
    assert meta != BatchMeta(range(3), "p", ("b",))
    assert meta != BatchMeta(range(3), "p", ("a",), [{}, {}, {"n": 1}])
    assert meta != [0, 1, 2]


def test_the_repr_names_the_ends_of_a_long_meta():
    assert repr(BatchMeta([3, 1], "p", ("a",))) == (
        "BatchMeta(size=2, partition_id='p', field_names=['a'], global_indexes=[3, 1])"
    )
    assert repr(BatchMeta(range(10**6), "p", ("a",))) == (
        "BatchMeta(size=1000000, partition_id='p', field_names=['a'],"
        " global_indexes=[0, 1, 2, 3, ..., 999999])"
    )


def test_one_sample_and_slices_of_a_meta_are_metas():
    meta = BatchMeta([3, 5, 7], "train_0", ("x",), [{"n": 3}, {}, {"n": 7}], {"step": 1})
    assert meta[0] == BatchMeta([3], "train_0", ("x",), [{"n": 3}], {"step": 1})
    assert meta[-1].global_indexes == [7]
    assert meta[1:] == meta.select_samples([1, 2])
    assert meta[::-1] == meta.select_samples([2, 1, 0])
    assert [part.global_indexes for part in meta] == [[3], [5], [7]]
    for outside in (3, -4):
        with pytest.raises(IndexError):
            meta[outside]
    with pytest.raises(TypeError):
        meta["x"]


@given(metas(), st.data())
def test_slicing_is_slicing_of_the_indexes(meta, data):
    part = data.draw(st.slices(meta.size))
    assert meta[part].global_indexes == meta.global_indexes[part]
    assert meta[part].custom_meta == meta.custom_meta[part]


def test_extra_info_goes_with_every_selection_and_each_has_its_own():
    meta = BatchMeta(range(4), "train_0", ("x", "y"), None, {"step": 7})
    parts = [
        *meta.chunk(2),
        meta.select_samples([1]),
        meta.select_fields(["x"]),
        meta.with_fields(["z"]),
        meta[:2],
        copy.deepcopy(meta),
        pickle.loads(pickle.dumps(meta)),
        BatchMeta.from_dict(json.loads(json.dumps(meta.to_dict()))),
        meta.union(meta),
        BatchMeta.concat(meta.chunk(2)),
    ]
    assert all(part.extra_info == {"step": 7} for part in parts)
    for part in parts:
        part.extra_info["step"] = 8
    assert meta.extra_info == {"step": 7}
    assert meta != meta.select_samples(range(4)).union(
        BatchMeta(range(4), "train_0", ("x", "y"), None, {"a": 1})
    )


def test_concatenation_joins_extra_info_and_refuses_contradictions():
    first = BatchMeta([0], "p", ("x",), None, {"step": 1, "mean": torch.ones(2)})
    second = BatchMeta([1], "p", ("x",), None, {"step": 1, "mean": torch.ones(2), "more": 2})
    joined = BatchMeta.concat([first, second])
    assert joined.extra_info.keys() == {"step", "mean", "more"}
    for other in ({"step": 2}, {"mean": torch.zeros(2)}, {"mean": torch.ones(3)}, {"mean": 1}):
        with pytest.raises(ValueError, match="extra_info"):
            BatchMeta.concat([first, BatchMeta([1], "p", ("x",), None, other)])


def test_a_union_has_the_fields_of_both_and_the_later_notes():
    left = BatchMeta([3, 5], "p", ("x", "y"), [{"a": 1, "b": 1}, {}], {"step": 1, "who": "l"})
    right = BatchMeta([3, 5], "p", ("y", "z"), [{"a": 2}, {"c": 3}], {"step": 2})
    united = left.union(right)
    assert united.field_names == ["x", "y", "z"]
    assert united.custom_meta == [{"a": 2, "b": 1}, {"c": 3}]
    assert united.extra_info == {"step": 2, "who": "l"}
    assert left.custom_meta == [{"a": 1, "b": 1}, {}]
    empty = BatchMeta([], "p", ("w",))
    assert left.union(empty) == left == empty.union(left)


@pytest.mark.parametrize("other", [([5, 3], "p"), ([3], "p"), ([3, 5], "q")])
def test_a_union_of_other_samples_is_refused(other):
    with pytest.raises(ValueError, match="different samples"):
        BatchMeta([3, 5], "p", ("x",)).union(BatchMeta(*other, ("y",)))


def test_custom_meta_is_updated_for_all_samples_or_not_at_all():
    meta = BatchMeta([3, 5], "p", (), [{"a": 1}, {}])
    meta.update_custom_meta([{"b": 2}, {"a": 3}])
    assert meta.custom_meta == [{"a": 1, "b": 2}, {"a": 3}]
    with pytest.raises(ValueError, match="1 dicts were given for 2 samples"):
        meta.update_custom_meta([{"b": 3}])
    assert meta.custom_meta == [{"a": 1, "b": 2}, {"a": 3}]
