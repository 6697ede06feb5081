"""The capture lock: one exclusive hold, or many shared ones, and no starvation of exclusive requests."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from device_models import wait_for_capture
from ortserve.batching.run_limits import MIN_LATE_RUN_NS, RunLimits
from ortserve.device import capture_lock
from ortserve.device.capture_lock import CaptureLock, StillHeldError


def test_an_exclusive_hold_excludes_all_others() -> None:
    lock = CaptureLock()
    shared = exclusive = 0
    counting = threading.Lock()
    seen: list[tuple[int, int]] = []

    def work(number: int) -> None:
        nonlocal shared, exclusive
        if number % 5:
            with lock.shared():
                with counting:
                    shared += 1
                    seen.append((shared, exclusive))
                with counting:
                    shared -= 1
        else:
            with lock.exclusive():
                with counting:
                    exclusive += 1
                    seen.append((shared, exclusive))
                with counting:
                    exclusive -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(500)))
    assert len(seen) == 500
    assert all(exclusive == 0 or (exclusive == 1 and shared == 0) for shared, exclusive in seen)


def test_an_exclusive_request_precedes_later_shared_ones() -> None:
    lock = CaptureLock()
    order: list[str] = []
    lock.acquire_shared()
    captures = threading.Thread(target=lambda: _exclusive(lock, order))
    captures.start()
    wait_for_capture(lock)
    assert not lock.try_acquire_shared()
    newcomer = threading.Thread(target=lambda: _shared(lock, order))
    newcomer.start()
    lock.release_shared()
    captures.join(10)
    newcomer.join(10)
    assert order == ["exclusive", "shared"]


def test_an_exclusive_request_lets_others_pass_if_a_hold_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_lock, "_ATTEMPTS_S", (0.05, 0.05))
    lock = CaptureLock()
    lock.acquire_shared()  # as by a run that does not end
    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(_exclusive, lock, [])
        wait_for_capture(lock)
        pool.submit(lock.acquire_shared).result(10)
        lock.release_shared()
        with pytest.raises(StillHeldError, match="other work on the GPU did not end"):
            failing.result(10)
        assert lock.try_acquire_shared()
        lock.release_shared()
        monkeypatch.setattr(capture_lock, "_ATTEMPTS_S", (0.01, 30))
        following = pool.submit(_exclusive, lock, [])
        wait_for_capture(lock)
        lock.release_shared()
        following.result(10)


def test_a_capture_delays_no_run_until_its_instance_would_be_abandoned() -> None:
    abandoned_after_ns = MIN_LATE_RUN_NS + RunLimits().grace_ns
    assert max(capture_lock._ATTEMPTS_S) * 1e9 < abandoned_after_ns
    assert 2 * sum(capture_lock._ATTEMPTS_S) == pytest.approx(120, abs=10)  # the documented two minutes


def test_another_thread_may_release_a_shared_hold() -> None:
    lock = CaptureLock()
    lock.acquire_shared()
    thread = threading.Thread(target=lock.release_shared)
    thread.start()
    thread.join(10)
    with lock.exclusive():
        pass


def _exclusive(lock: CaptureLock, order: list[str]) -> None:
    with lock.exclusive():
        order.append("exclusive")


def _shared(lock: CaptureLock, order: list[str]) -> None:
    with lock.shared():
        order.append("shared")
