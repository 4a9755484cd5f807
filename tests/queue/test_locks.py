from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from persisting_torch import PersistingError
from persisting_torch.errors import WaitTimeout
from persisting_torch.queue.locks import FileLock
from tests.queue import children

COUNT_UP = """
import sys, time
from persisting_torch.queue.locks import FileLock

lock = FileLock(sys.argv[1] + ".lock")
for _ in range(200):
    with lock:
        number = int(open(sys.argv[1]).read())
        if number % 7 == 0:
            time.sleep(0.0002)
        open(sys.argv[1], "w").write(str(number + 1))
"""

HOLD = """
import sys, time
from persisting_torch.queue.locks import FileLock

lock = FileLock(sys.argv[1])
with lock:
    print("true", flush=True)
    time.sleep(60)
"""


def test_two_processes_never_hold_it_at_once(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    both = [children.start(COUNT_UP, counter) for _ in range(2)]
    assert [child.wait() for child in both] == [0, 0]
    assert counter.read_text() == "400"


@pytest.mark.parametrize("shared", [True, False], ids=["one lock", "a lock each"])
def test_threads_never_hold_it_at_once(tmp_path, shared):
    path = str(tmp_path / "lock")
    one = FileLock(path)
    number = [0]

    def count_up():
        lock = one if shared else FileLock(path)
        for _ in range(100):
            with lock:
                before = number[0]
                time.sleep(0)
                number[0] = before + 1

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert number == [400]


def test_its_holder_may_take_it_again(tmp_path):
    lock, other = FileLock(str(tmp_path / "lock")), FileLock(str(tmp_path / "lock"))
    with lock:
        with lock, lock:
            assert not other.acquire(0)
        assert not other.acquire(0)
    assert other.acquire(0)
    other.release()


def test_a_wait_that_is_too_long_ends_in_an_error_that_says_what_to_do(tmp_path):
    path = str(tmp_path / "lock")
    holder, waiter = FileLock(path), FileLock(path, limit=0.05)
    with holder:
        with pytest.raises(WaitTimeout, match=r"0\.05 s for the lock .*lock, .*lslocks") as caught:
            waiter.__enter__()
        assert isinstance(caught.value, PersistingError | TimeoutError)
    with waiter:
        pass


def test_a_thread_waits_no_longer_than_its_limit_for_another_thread(tmp_path):
    lock = FileLock(str(tmp_path / "lock"), limit=0.05)
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    with pytest.raises(WaitTimeout):
        lock.__enter__()
    done.set()
    thread.join()
    with lock:
        pass


def test_an_error_inside_frees_it(tmp_path):
    lock, other = FileLock(str(tmp_path / "lock")), FileLock(str(tmp_path / "lock"))
    with pytest.raises(KeyError), lock:
        raise KeyError
    assert other.acquire(0)
    other.release()


def test_a_lock_that_cannot_be_made_can_be_tried_again(tmp_path):
    lock = FileLock(str(tmp_path / "folder" / "lock"))
    with pytest.raises(FileNotFoundError):
        lock.__enter__()
    (tmp_path / "folder").mkdir()
    with lock:
        pass


def test_a_lock_that_nobody_has_any_more_gives_its_files_back(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with FileLock(str(tmp_path / "lock")):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_death_of_its_holder_frees_it(tmp_path):
    path = tmp_path / "lock"
    holder = children.start(HOLD, path)
    holder.await_line()
    lock = FileLock(str(path), limit=10)
    assert not lock.acquire(0)
    holder.send(signal.SIGKILL)
    with lock:
        pass


def test_the_fork_of_a_dead_holder_does_not_keep_it(tmp_path):
    path = tmp_path / "lock"
    holder = children.start(
        """
        import os, signal, sys, time
        from persisting_torch.queue.locks import FileLock

        lock = FileLock(sys.argv[1])
        lock.__enter__()
        if os.fork():
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2)
        """,
        path,
    )
    assert holder.wait() == -signal.SIGKILL
    assert FileLock(str(path)).acquire(1.0)
