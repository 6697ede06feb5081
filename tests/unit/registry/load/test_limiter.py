"""The sharing of processors and devices among loads, with real threads."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from queue import SimpleQueue

import pytest

from ortserve.registry.load.load_limits import LoadLimiter, LoadPermit

WAIT_S = 30


class Load:
    """A load on a separate thread that continues on demand."""

    def __init__(
        self, pool: ThreadPoolExecutor, turns: LoadLimiter, *, threads: int = 1, on_device: bool = False
    ) -> None:
        self.waits = threading.Event()
        self.has_turn = threading.Event()
        self.may_measure = threading.Event()
        self.measures = threading.Event()
        self.may_end = threading.Event()
        self._ended: Future[None] = pool.submit(self._run, turns, threads, on_device)

    def _run(self, turns: LoadLimiter, threads: int, on_device: bool) -> None:
        with turns.permit(self.waits.set) as turn:
            if on_device:
                turn.move_to_device()
            self.has_turn.set()
            assert self.may_measure.wait(WAIT_S)
            with turn.measuring(threads):
                self.measures.set()
                assert self.may_end.wait(WAIT_S)

    def end(self) -> None:
        self.may_measure.set()
        self.may_end.set()
        self._ended.result(WAIT_S)


@pytest.fixture
def begin() -> Iterator[Callable[..., Load]]:
    """Starts loads that share some processors; all end with the test."""
    loads: list[Load] = []
    with ThreadPoolExecutor(16) as pool:

        def begin_load(turns: LoadLimiter, *, threads: int = 1, on_device: bool = False) -> Load:
            loads.append(Load(pool, turns, threads=threads, on_device=on_device))
            return loads[-1]

        yield begin_load
        for load in loads:
            load.may_measure.set()
            load.may_end.set()


def test_concurrent_loads_equal_the_processors(begin: Callable[..., Load]) -> None:
    turns = LoadLimiter(2)
    first, second = begin(turns), begin(turns)
    assert first.has_turn.wait(WAIT_S)
    assert second.has_turn.wait(WAIT_S)
    third = begin(turns)
    assert third.waits.wait(WAIT_S)
    assert not third.has_turn.is_set()
    first.end()
    assert third.has_turn.wait(WAIT_S)


def test_sessions_of_one_thread_are_measured_concurrently(begin: Callable[..., Load]) -> None:
    turns = LoadLimiter(2)
    loads = [begin(turns), begin(turns)]
    for load in loads:
        load.may_measure.set()
    assert all(load.measures.wait(WAIT_S) for load in loads)


@pytest.mark.parametrize("threads", [2, 8])
def test_session_of_all_threads_is_measured_alone(begin: Callable[..., Load], threads: int) -> None:
    turns = LoadLimiter(2)
    wide = begin(turns, threads=threads)
    assert wide.has_turn.wait(WAIT_S)
    other = begin(turns)
    assert other.has_turn.wait(WAIT_S)
    wide.may_measure.set()
    assert wide.waits.wait(WAIT_S)
    later = begin(turns)
    assert later.waits.wait(WAIT_S)  # although a processor is free, it would make the measuring load wait forever
    assert not wide.measures.is_set()
    other.end()
    assert wide.measures.wait(WAIT_S)
    assert not later.has_turn.is_set()
    wide.end()
    assert later.has_turn.wait(WAIT_S)


def test_loads_that_need_all_processors_do_not_deadlock(begin: Callable[..., Load]) -> None:
    turns = LoadLimiter(3)
    loads = [begin(turns, threads=3) for _ in range(8)]
    for load in loads:
        load.may_measure.set()
        load.may_end.set()
    for load in loads:
        load.end()


def test_device_serves_one_load_and_holds_no_processor(begin: Callable[..., Load]) -> None:
    turns = LoadLimiter(1)
    first = begin(turns, on_device=True)
    assert first.has_turn.wait(WAIT_S)
    second = begin(turns, on_device=True)
    assert second.waits.wait(WAIT_S)
    on_cpu = begin(turns, threads=4)
    on_cpu.end()
    assert not second.has_turn.is_set()
    first.end()
    assert second.has_turn.wait(WAIT_S)


@pytest.mark.parametrize("stage", ["turn", "measuring", "device"])
def test_failed_load_releases_its_permit(stage: str) -> None:
    turns = LoadLimiter(2)

    def fail(turn: LoadPermit) -> None:
        if stage == "device":
            turn.move_to_device()
        measuring: AbstractContextManager[None] = turn.measuring(2) if stage == "measuring" else nullcontext()
        with measuring:
            raise RuntimeError(stage)

    for _ in range(3):
        with pytest.raises(RuntimeError, match=stage), turns.permit() as turn:
            fail(turn)
    with turns.permit() as turn, turn.measuring(2):
        pass


def test_proofs_run_one_at_a_time() -> None:
    turns, order = LoadLimiter(4), SimpleQueue[str]()
    may_go_on = threading.Event()

    def prove(name: str) -> None:
        with turns.permit() as turn, turn.analyzing():
            order.put(f"{name} begins")
            assert may_go_on.wait(WAIT_S)
            order.put(f"{name} ends")

    with ThreadPoolExecutor(2) as pool:
        proofs = [pool.submit(prove, name) for name in "ab"]
        first = order.get(timeout=WAIT_S)
        may_go_on.set()
        for proof in proofs:
            proof.result(WAIT_S)
    assert [first[2:], *(order.get()[2:] for _ in range(3))] == ["begins", "ends"] * 2


def test_released_load_holds_nothing_any_more_whatever_its_thread_does(begin: Callable[..., Load]) -> None:
    """The thread waits for a file, and the files of the next loads answer."""
    turns = LoadLimiter(2)
    with turns.permit() as silent:
        with silent.analyzing(), silent.measuring(2):
            silent.release()
            with turns.permit() as other, other.analyzing(), other.measuring(2):
                pass
        silent.move_to_device()
        second = begin(turns, on_device=True)
        assert second.has_turn.wait(WAIT_S)
        second.end()
    third = begin(turns, threads=2)
    third.may_measure.set()
    assert third.measures.wait(WAIT_S)
    third.end()


@pytest.mark.parametrize("stage", ["measuring", "device", "analyzing"])
def test_released_load_waits_for_nothing_and_delays_no_other(begin: Callable[..., Load], stage: str) -> None:
    """It was given up while it waited for what another load holds."""
    turns, permits, waits = LoadLimiter(2), SimpleQueue[LoadPermit](), threading.Event()

    def wait() -> None:
        with turns.permit(waits.set) as permit:
            permits.put(permit)
            if stage == "device":
                permit.move_to_device()
            elif stage == "measuring":
                with permit.measuring(2):
                    pass
            else:
                waits.set()
                with permit.analyzing():
                    pass

    with ThreadPoolExecutor(1) as pool, turns.permit() as holder, ExitStack() as held:
        if stage == "device":
            holder.move_to_device()
        elif stage == "analyzing":
            held.enter_context(holder.analyzing())
        given_up = pool.submit(wait)
        permit = permits.get(timeout=WAIT_S)
        assert waits.wait(WAIT_S)
        permit.release()
        assert begin(turns).has_turn.wait(WAIT_S)
        given_up.result(WAIT_S)
