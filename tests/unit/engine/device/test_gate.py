"""One alone, or many beside each other, and nobody for ever."""

import threading
from concurrent.futures import ThreadPoolExecutor

from device_models import wait_for_capture
from ortserve.engine.device.gate import CaptureGate


def test_who_has_the_gate_alone_meets_nobody() -> None:
    gate = CaptureGate()
    inside = alone = 0
    lock = threading.Lock()
    seen: list[tuple[int, int]] = []

    def work(number: int) -> None:
        nonlocal inside, alone
        if number % 5:
            with gate.shared():
                with lock:
                    inside += 1
                    seen.append((inside, alone))
                with lock:
                    inside -= 1
        else:
            with gate.alone():
                with lock:
                    alone += 1
                    seen.append((inside, alone))
                with lock:
                    alone -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(500)))
    assert len(seen) == 500
    assert all(alone == 0 or (alone == 1 and inside == 0) for inside, alone in seen)


def test_who_wants_it_alone_goes_before_newcomers() -> None:
    gate = CaptureGate()
    order: list[str] = []
    gate.enter()
    captures = threading.Thread(target=lambda: _alone(gate, order))
    captures.start()
    wait_for_capture(gate)
    newcomer = threading.Thread(target=lambda: _shared(gate, order))
    newcomer.start()
    gate.leave()
    captures.join(10)
    newcomer.join(10)
    assert order == ["alone", "shared"]


def test_who_entered_may_leave_in_another_thread() -> None:
    gate = CaptureGate()
    gate.enter()
    thread = threading.Thread(target=gate.leave)
    thread.start()
    thread.join(10)
    with gate.alone():
        pass


def _alone(gate: CaptureGate, order: list[str]) -> None:
    with gate.alone():
        order.append("alone")


def _shared(gate: CaptureGate, order: list[str]) -> None:
    with gate.shared():
        order.append("shared")
