"""Pools of threads on a system that permits no further thread."""

import threading

import pytest

from ortserve.core.thread_pool import ThreadPool, start_thread
from ortserve.errors import ErrorKind, ServeError
from scarcity import no_threads
from servers import LONG_S


def test_work_waits_for_the_existing_thread_if_no_further_one_starts() -> None:
    end = threading.Event()
    with ThreadPool(3, "few") as pool:
        first = pool.submit(end.wait, LONG_S)
        with no_threads():
            others = [pool.submit(threading.get_ident) for _ in range(3)]
        assert not any(other.done() for other in others)
        end.set()
        assert first.result(LONG_S)
        assert len({other.result(LONG_S) for other in others}) == 1


def test_further_threads_start_once_the_system_permits_them() -> None:
    together = threading.Barrier(2)
    with ThreadPool(2, "few") as pool:
        with no_threads():
            first = pool.submit(together.wait, LONG_S)
        second = pool.submit(together.wait, LONG_S)
        assert {first.result(LONG_S), second.result(LONG_S)} == {0, 1}


def test_a_pool_without_any_thread_is_an_error() -> None:
    with no_threads(), pytest.raises(ServeError, match="to start the thread 'few', got none") as caught:
        ThreadPool(1, "few")
    assert caught.value.kind is ErrorKind.OVERLOADED


def test_a_thread_that_cannot_start_is_named() -> None:
    with no_threads(), pytest.raises(ServeError, match="to start the thread 'run m/1', got none") as caught:
        start_thread(threading.Thread(target=int, name="run m/1"))
    assert caught.value.kind is ErrorKind.OVERLOADED
