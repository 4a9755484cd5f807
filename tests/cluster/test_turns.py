"""Whose turn it is to write."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from persisting_torch.errors import StaleOwner, WaitTimeout
from persisting_torch.queue import turns as turns_module
from persisting_torch.queue.record import KEPT, Log, Recorder, Statement
from persisting_torch.queue.threads import Background
from persisting_torch.queue.turns import Turns


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    monkeypatch.setattr(turns_module, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(turns_module, "LOOK_SECONDS", 0.05)
    return Turns("a ledger")


def waiting_for(turns: Turns, token: str, had: list[str]) -> threading.Thread:
    def wait() -> None:
        turns.take(token, 60.0)
        had.append(token)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while token not in turns._waiting and token not in had:
        time.sleep(0.001)
    return thread


def test_turns_are_had_in_the_order_in_which_they_were_asked_for(turns: Turns):
    had: list[str] = []
    turns.take("first", 1.0)
    threads = [waiting_for(turns, token, had) for token in "abc"]
    for last in ("first", "a", "b"):
        turns.give(last)
        while turns._holder in (None, last):
            time.sleep(0.001)
    for thread in threads:
        thread.join(5.0)
    assert had == ["a", "b", "c"]


def test_the_next_has_its_turn_at_once_and_does_not_look_for_it_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(turns_module, "LOOK_SECONDS", 60.0)
    turns, had = Turns("a ledger"), list[str]()
    turns.take("first", 1.0)
    threads = [waiting_for(turns, token, had) for token in "ab"]
    began = time.monotonic()
    turns.give("first")
    threads[0].join(30.0)
    turns.give("a")
    threads[1].join(30.0)
    assert had == ["a", "b"]
    assert time.monotonic() - began < 20.0


def test_a_holder_that_is_silent_loses_its_turn_and_one_that_beats_keeps_it(turns: Turns):
    turns.take("first", 1.0)
    for _ in range(5):
        time.sleep(0.1)
        turns.beat("first")
        with pytest.raises(WaitTimeout, match="a turn to write a ledger"):
            turns.take("second", 0.0)
    turns.give("second")
    turns.take("third", 5.0)
    with pytest.raises(StaleOwner, match="silent"):
        turns.beat("first")
    with pytest.raises(StaleOwner), turns.held("first", 0.0):
        pytest.fail("the turn was over")
    with turns.held("third", 0.0):
        time.sleep(0.5)  # what is being used is not lost
        with pytest.raises(WaitTimeout):
            turns.take("fourth", 0.0)


def test_who_asks_again_for_want_of_an_answer_keeps_its_turn_or_its_place(turns: Turns):
    turns.take("first", 1.0)
    turns.take("first", 0.0)
    for token in ("second", "third", "second"):
        with pytest.raises(WaitTimeout):
            turns.take(token, 0.0)
    turns.give("first")
    with pytest.raises(WaitTimeout):
        turns.take("third", 0.0)
    turns.take("second", 0.0)


def test_one_that_waits_and_is_not_heard_of_any_more_holds_nobody_up_for_long(turns: Turns):
    turns.take("first", 1.0)
    with pytest.raises(WaitTimeout):
        turns.take("dead", 0.0)
    turns.give("first")
    began = time.monotonic()
    turns.take("second", 60.0)
    assert time.monotonic() - began < 20.0


def test_a_token_has_one_turn_only_even_if_what_it_asked_for_arrives_late(turns: Turns):
    turns.take("once", 0.0)
    turns.give("once")
    turns.give("never")
    for token in ("once", "never"):
        with pytest.raises(StaleOwner, match="over"):
            turns.take(token, 0.0)
    with turns.held(None, 0.0):
        pass


def test_when_turns_end_whoever_waits_is_told_at_once(turns: Turns):
    began, told = time.monotonic(), []

    def wait() -> None:
        with pytest.raises(StaleOwner, match="no turns"):
            turns.take("waiting", 60.0)
        told.append(time.monotonic() - began)

    with turns.held(None, 0.0):
        waiting = Background(wait)
        time.sleep(0.2)
        turns.end()
        waiting.join(30.0)
    assert told
    assert told[0] < 20.0
    with pytest.raises(StaleOwner, match="no turns"):
        turns.take("late", 0.0)


def test_when_a_log_ends_whoever_waits_is_sent_to_a_snapshot():
    log = Log()
    at = log.id, log.last
    began = time.monotonic()
    waiting = Background(lambda: log.wait(*at, 60.0))
    time.sleep(0.2)
    log.end()
    waiting.join(30.0)
    assert time.monotonic() - began < 20.0
    assert log.since(*at) is None


def test_a_log_tells_those_who_know_some_of_it_the_rest():
    log = Log()
    for number in range(KEPT + 10):
        with log.entry() as change:
            change.append((f"INSERT {number}", [()]))
    with log.entry():
        pass  # wrote nothing
    assert log.last == KEPT + 10
    found = log.since(log.id, KEPT + 7)
    assert found is not None
    assert [change.number for change in found] == [KEPT + 8, KEPT + 9, KEPT + 10]
    assert log.since(log.id, log.last) == []
    assert log.since(log.id, 9) is None
    assert log.since(log.id, log.last + 1) is None
    assert log.since("another", log.last) is None


def test_a_log_forgets_early_what_takes_much_room(monkeypatch: pytest.MonkeyPatch):
    log = Log()
    for _ in range(40):
        with log.entry() as change:
            change.append(("INSERT", [(b"x" * (1 << 20),)]))
    assert log.since(log.id, 39) is not None
    assert log.since(log.id, 20) is None


def test_a_log_begins_anew_where_it_is_open_whether_a_change_was_committed():
    log = Log()
    before = log.id

    def commit_and_break_off(change: list[Statement]) -> None:
        change.append(("INSERT", [()]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), log.entry() as change:
        commit_and_break_off(change)
    assert log.id != before
    assert log.since(before, 0) is None


def test_whoever_waits_for_a_change_hears_of_it_at_once():
    log = Log()
    threading.Timer(0.1, lambda: log._add([("INSERT", [()])])).start()
    began = time.monotonic()
    log.wait(log.id, 0, 60.0)
    assert time.monotonic() - began < 20.0
    log.wait(log.id, log.last, 0.05)


def test_only_what_writes_is_taken_down(tmp_path: Path):
    from persisting_torch.queue.ledger import Ledger
    from persisting_torch.queue.place import open_place

    ledger = Ledger(open_place("q", tmp_path), recorded=True)
    with ledger.transaction() as tx:
        assert isinstance(tx, Recorder)
        tx.taken = []
        tx.execute("SELECT 1")
        tx.execute("  insert into meta values ('a', ?)", (1,))
        tx.executemany("\n    DELETE FROM meta WHERE key = ?", iter([("a",), ("b",)]))
        tx.executemany("DELETE FROM meta WHERE key = ?", iter([]))
        tx.execute_untold("DELETE FROM meta WHERE key = 'c'")
        taken, tx.taken = tx.taken, None
    assert [rows for _, rows in taken] == [[(1,)], [("a",), ("b",)]]
    ledger.close()
