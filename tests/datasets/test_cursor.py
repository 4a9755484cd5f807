from __future__ import annotations

from persisting_torch.datasets.cursor import Cursor


def at(k: int) -> Cursor:
    cursor = Cursor()
    cursor.seek(k)
    cursor.begin(k)
    return cursor


def test_finished_batches_are_used_only_once_a_step_has_covered_them():
    cursor = at(5)
    cursor.hand_out(5)
    cursor.hand_out(6)
    assert cursor.finish()
    assert (cursor.position, cursor.used) == (6, 5)
    cursor.step()
    assert (cursor.position, cursor.used) == (6, 6)


def test_batches_handed_out_and_not_finished_come_again_in_the_next_pass():
    cursor = at(0)
    for k in range(3):
        cursor.hand_out(k)
    cursor.finish()
    cursor.begin(1)
    assert cursor.position == 1
    assert not cursor.holding
    assert not cursor.finish()


def test_a_seek_while_batches_are_out_says_that_they_are_overtaken_until_a_pass_begins():
    cursor = at(0)
    cursor.hand_out(0)
    cursor.seek(7)
    assert cursor.overtaken
    assert (cursor.position, cursor.used, cursor.holding) == (7, 7, False)
    cursor.begin(7)
    assert not cursor.overtaken


def test_a_plain_loop_counts_the_batch_in_hand_and_a_driven_one_does_not():
    cursor = at(2)
    cursor.hand_out(2)
    assert cursor.reached() == cursor.following == 3
    cursor.driven = True
    assert cursor.following == 2
