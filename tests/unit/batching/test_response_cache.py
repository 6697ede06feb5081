"""The response cache without models: requests are enqueued in a list, and the test settles them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import numpy as np
import pytest

from fakes.clock import FakeClock
from ortserve.batching.cached_runs import CachedRuns
from ortserve.batching.response_cache import ResponseCache
from ortserve.core.inflight import COMPUTED, FAILED, NO_TERMS, InflightRequest, Terms
from ortserve.core.tensor import absent
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError
from ortserve.telemetry.readings import CacheCounts

ROW = np.array([[1.0, 2.0]], np.float32)
LARGE = np.zeros((1, 1_000_000), np.float32)


class Stage:
    """A cache for one model, whose requests wait in ``queue`` until the test answers them."""

    def __init__(self, max_bytes: int = 1 << 20, cache: ResponseCache | None = None) -> None:
        self.clock = FakeClock()
        self.counts = CacheCounts()
        self.cache = cache or ResponseCache(max_bytes)
        self.runs = CachedRuns(self.cache, self.counts, asyncio.get_running_loop(), self.clock)
        self.queue: list[InflightRequest] = []

    def submit(self, *inputs: np.ndarray, terms: Terms = NO_TERMS) -> InflightRequest:
        request = InflightRequest(Timing(self.clock()), inputs or (ROW,), 1)
        self.runs.submit(request, terms, self.queue.append)
        return request

    def answer(self, output: float = 7.0) -> np.ndarray:
        """Answer the first request of the queue. Returns the memory of its outputs, which a later run may reuse."""
        memory = np.array([[output]], np.float32)
        self.queue.pop(0).complete((memory,))
        return memory

    async def cached(self, *inputs: np.ndarray) -> float | None:
        """The output of a request that is answered by the cache; None if it was enqueued."""
        before = len(self.queue)
        request = self.submit(*inputs)
        if len(self.queue) > before:
            self.queue.pop().cancel()
            return None
        return value_of(await request)


def value_of(outputs: Sequence[np.ndarray]) -> float:
    return float(outputs[0][0, 0])


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.001)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


def test_equal_requests_run_once() -> None:
    async def test() -> None:
        stage = Stage()
        first = stage.submit()
        stage.answer()
        assert value_of(await first) == 7
        assert await stage.cached() == 7
        assert (stage.counts.misses, stage.counts.hits) == (1, 1)

    run(test)


def test_a_hit_is_answered_after_submit_has_returned() -> None:
    async def test() -> None:
        stage = Stage()
        stage.submit()
        stage.answer()
        request = stage.submit()
        assert not request.is_settled
        await request
        assert request.timing.phases_ns()[1:4] == (0, 0, 0)

    run(test)


def test_outputs_are_copied_before_their_memory_is_used_again() -> None:
    async def test() -> None:
        stage = Stage()
        stage.submit()
        stage.answer()[:] = 99
        (output,) = await stage.submit()
        assert output[0, 0] == 7
        assert not output.flags.writeable

    run(test)


@pytest.mark.parametrize(
    "other",
    [
        (ROW.reshape(2, 1),),
        (ROW.view(np.int32),),
        (ROW.astype(np.float64),),
        (np.array([[1.0, 3.0]], np.float32),),
        (np.array([["ab"]], object),),
    ],
    ids=["shape", "datatype", "width", "value", "texts"],
)
def test_different_inputs_are_run(other: tuple[np.ndarray, ...]) -> None:
    async def test() -> None:
        stage = Stage()
        stage.submit()
        stage.answer()
        assert await stage.cached(*other) is None
        assert await stage.cached() == 7

    run(test)


def test_borders_between_texts_and_inputs_count() -> None:
    async def test() -> None:
        stage = Stage()
        seen = [
            (np.array(["ab", "c"], object),),
            (np.array(["a", "bc"], object),),
            (np.array([b"ab", b"\xff"], object),),
            (np.array(["ab"], object), np.array(["c"], object)),
            (np.array(["ab", "c"], object), absent(2)),
            (absent(2), np.array(["ab", "c"], object)),
        ]
        for number, inputs in enumerate(seen):
            stage.submit(*inputs)
            stage.answer(number)
        assert [await stage.cached(*inputs) for inputs in seen] == [0, 1, 2, 3, 4, 5]
        other = np.frombuffer(b"xy", absent(2).dtype)  # the memory of an absent tensor is not initialized
        assert await stage.cached(np.array(["ab", "c"], object), other) == 4

    run(test)


def test_strided_inputs_are_their_elements() -> None:
    async def test() -> None:
        stage = Stage()
        stage.submit(np.arange(6, dtype=np.float32).reshape(2, 3).T)
        stage.answer()
        assert await stage.cached(np.array([[0, 3], [1, 4], [2, 5]], np.float32)) == 7

    run(test)


def test_large_inputs_and_outputs_go_through_threads() -> None:
    async def test() -> None:
        stage = Stage(max_bytes=16 << 20)
        first = stage.submit(LARGE)
        await until(lambda: bool(stage.queue))
        stage.queue.pop().complete((np.ones((1, 1_000_000), np.float32),))
        await first
        await until(lambda: stage.cache.reading().entries == 1)
        again = stage.submit(LARGE.copy())
        assert (await again)[0].sum() == 1_000_000
        assert stage.counts.hits == 1

    run(test)


@pytest.mark.parametrize("texts", [["x" * 2**20], [""] * 2000], ids=["one long", "many short"])
def test_long_and_many_texts_are_digested_on_a_thread(texts: list[str]) -> None:
    async def test() -> None:
        stage = Stage()
        stage.submit(np.array(["short"], object))
        assert len(stage.queue) == 1
        stage.submit(np.array(texts, object))
        assert len(stage.queue) == 1, "the event loop has digested it"
        await until(lambda: len(stage.queue) == 2)

    run(test)


def test_equal_requests_wait_for_a_run_under_way() -> None:
    async def test() -> None:
        stage = Stage()
        requests = [stage.submit() for _ in range(2)]
        run = stage.queue[0].timing
        run.queued_ns, run.taken_ns = stage.clock(), stage.clock() + 1
        stage.clock.advance(5)
        requests.append(stage.submit())
        run.staged_ns, run.computed_ns = stage.clock() + 2, stage.clock() + 6
        assert len(stage.queue) == 1
        stage.answer()
        assert [value_of(await request) for request in requests] == [7, 7, 7]
        assert (stage.counts.misses, stage.counts.hits) == (1, 2)
        times = [(one.timing.queued_ns, one.timing.taken_ns, one.timing.staged_ns) for one in requests]
        began_ns = stage.clock() - 5
        assert times == [(began_ns, began_ns + 1, began_ns + 7)] * 2 + [(began_ns + 5, began_ns + 5, began_ns + 7)]
        assert {one.timing.computed_ns for one in requests} == {began_ns + 11}
        assert stage.counts.saved_ns == 2 * (11 - 7)
        assert await stage.cached() == 7
        assert stage.counts.saved_ns == 3 * (11 - 7)

    run(test)


def test_many_requests_that_wait_for_a_run_are_answered_over_several_turns_of_the_loop() -> None:
    async def test() -> None:
        stage = Stage()
        requests = [stage.submit() for _ in range(50)]
        stage.answer()
        requests[40].cancel()
        counts = []
        while not all(request.is_settled for request in requests):
            counts.append(sum(request.state == COMPUTED for request in requests))
            await asyncio.sleep(0)
        assert counts == [16, 32, 47]
        assert (stage.counts.misses, stage.counts.hits) == (1, 48)

    run(test)


def test_many_requests_that_wait_for_a_failed_run_fail_over_several_turns_of_the_loop() -> None:
    async def test() -> None:
        stage = Stage()
        requests = [stage.submit() for _ in range(50)]
        stage.queue.pop().fail(ServeError(ErrorKind.REJECTED_BY_MODEL, "no"))
        counts = []
        while not all(request.is_settled for request in requests):
            counts.append(sum(request.is_settled for request in requests))
            await asyncio.sleep(0)
        assert counts == [16, 32, 48]

    run(test)


def test_many_requests_whose_run_was_late_are_submitted_again_over_several_turns_of_the_loop() -> None:
    async def test() -> None:
        stage = Stage()
        first = stage.submit(terms=Terms(answer_by_ns=5))

        def reject(request: InflightRequest) -> None:
            raise MemoryError if request.rows == 2 else ServeError(ErrorKind.OVERLOADED, "full")

        requests = [InflightRequest(Timing(0), (ROW,), rows) for rows in (2, *[1] * 49)]
        for request in requests:
            stage.runs.submit(request, NO_TERMS, reject)
        stage.queue.pop().fail(ServeError(ErrorKind.DEADLINE, "late"))
        requests[40].cancel()
        idle = asyncio.create_task(stage.runs.wait_until_idle())
        counts = []
        while not all(request.is_settled for request in [first, *requests]):
            counts.append(sum(request.state == FAILED for request in requests))
            await asyncio.sleep(0)
            assert not idle.done(), "the others may still be enqueued"
        assert counts == [16, 32, 47]
        with pytest.raises(MemoryError):
            await requests[0]
        await idle

    run(test)


def test_errors_reach_all_waiting_requests_and_are_not_cached() -> None:
    async def test() -> None:
        stage = Stage()
        requests = [stage.submit() for _ in range(2)]
        run = stage.queue.pop()
        run.timing.queued_ns, run.timing.taken_ns = 3, 8
        run.fail(ServeError(ErrorKind.REJECTED_BY_MODEL, "no"))
        for request in requests:
            with pytest.raises(ServeError, match="no"):
                await request
        assert (requests[0].timing.queued_ns, requests[0].timing.taken_ns) == (3, 8)
        assert await stage.cached() is None

    run(test)


def test_a_run_goes_on_until_all_its_requests_are_cancelled() -> None:
    async def test() -> None:
        stage = Stage()
        first, second = stage.submit(), stage.submit()
        first.cancel()
        assert not stage.queue[0].is_settled
        second.cancel()
        assert stage.queue.pop().is_settled
        assert await stage.cached() is None

    run(test)


def test_the_first_request_may_leave() -> None:
    async def test() -> None:
        stage = Stage()
        first, second = stage.submit(), stage.submit()
        first.cancel()
        stage.answer()
        assert value_of(await second) == 7

    run(test)


@pytest.mark.parametrize(
    "terms",
    [
        Terms(level=2, answer_by_ns=5, start_by_ns=10),
        Terms(level=2, answer_by_ns=10, start_by_ns=5),
        Terms(level=1),
    ],
    ids=["finish", "start", "level"],
)
def test_a_more_urgent_request_does_not_wait(terms: Terms) -> None:
    async def test() -> None:
        stage = Stage()
        stage.submit(terms=Terms(level=2, answer_by_ns=10, start_by_ns=10))
        stage.submit(terms=terms)
        assert len(stage.queue) == 2
        stage.submit(terms=Terms(level=2, answer_by_ns=11, start_by_ns=11))
        stage.submit(terms=Terms(level=3))
        assert len(stage.queue) == 2

    run(test)


@pytest.mark.parametrize("kind", [ErrorKind.DEADLINE, ErrorKind.OVERLOADED])
def test_requests_outlive_the_deadline_of_the_first(kind: ErrorKind) -> None:
    async def test() -> None:
        stage = Stage()
        first = stage.submit(terms=Terms(answer_by_ns=5))
        second, third = stage.submit(), stage.submit()
        stage.queue.pop().fail(ServeError(kind, "late"))
        with pytest.raises(ServeError, match="late"):
            await first
        assert len(stage.queue) == 1
        stage.answer()
        assert [value_of(await second), value_of(await third)] == [7, 7]

    run(test)


def test_requests_fail_if_no_run_is_accepted_after_the_deadline_of_the_first() -> None:
    async def test() -> None:
        stage = Stage()
        stage.submit(terms=Terms(answer_by_ns=5))
        runs = stage.queue.copy()

        def reject(request: InflightRequest) -> None:
            raise ServeError(ErrorKind.OVERLOADED, "full")

        waiting = [InflightRequest(Timing(0), (ROW,), 1) for _ in range(2)]
        for request in waiting:
            stage.runs.submit(request, NO_TERMS, reject)
        runs[0].fail(ServeError(ErrorKind.DEADLINE, "late"))
        for request in waiting:
            with pytest.raises(ServeError, match="full"):
                async with asyncio.timeout(10):
                    await request
        await stage.runs.wait_until_idle()

    run(test)


@pytest.mark.parametrize("by_ns", [None, 5])
def test_requests_with_the_same_deadline_are_not_run_again_in_an_overload(by_ns: int | None) -> None:
    async def test() -> None:
        stage = Stage()
        waiting = [stage.submit(terms=Terms(answer_by_ns=by_ns)) for _ in range(3)]
        stage.queue.pop().fail(ServeError(ErrorKind.OVERLOADED, "full"))
        assert stage.queue == []
        for request in waiting:
            with pytest.raises(ServeError, match="full"):
                await request

    run(test)


@pytest.mark.parametrize("error", [ServeError(ErrorKind.OVERLOADED, "full"), MemoryError()], ids=["full", "memory"])
def test_a_rejected_run_leaves_nothing_behind(error: Exception) -> None:
    async def test() -> None:
        stage = Stage()

        def reject(_: InflightRequest) -> None:
            raise error

        request = InflightRequest(Timing(0), (ROW,), 1)
        with pytest.raises(type(error)):
            stage.runs.submit(request, NO_TERMS, reject)
        assert await stage.cached() is None

    run(test)


def test_a_run_that_ends_at_once_answers() -> None:
    async def test() -> None:
        stage = Stage()
        request = InflightRequest(Timing(0), (ROW,), 1)
        stage.runs.submit(request, NO_TERMS, lambda child: child.complete((ROW,)))
        assert value_of(await request) == 1

    run(test)


def test_the_cache_counts_the_lookups_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count(1)
    monkeypatch.setattr(FakeClock, "__call__", lambda clock: next(ticks))

    async def test() -> None:
        one = Stage()
        other = Stage(cache=one.cache)
        for stage in (one, other):
            requests = [stage.submit(), stage.submit()]
            stage.answer()
            for request in [*requests, stage.submit()]:
                await request
        reading = one.cache.reading()
        assert (reading.hits, reading.misses) == (4, 2)
        assert one.counts.hits == other.counts.hits == 2
        passed_ns = sum(counts.hit_ns + counts.miss_ns for counts in (one.counts, other.counts))
        assert reading.lookup_ns + reading.store_ns == passed_ns == 8

    run(test)


def test_letters_of_several_bytes_count_as_such() -> None:
    async def test() -> None:
        stage = Stage(max_bytes=10_000)
        for letter, entries in (("a", 1), ("\N{GRINNING FACE}", 1), ("b", 2)):
            stage.submit(np.array([[letter]], object))
            stage.queue.pop(0).complete((np.array([[letter * 3000]], object),))
            assert stage.cache.reading().entries == entries
        assert stage.cache.reading().evictions == 0

    run(test)


def test_the_least_recently_used_entry_goes_first() -> None:
    async def test() -> None:
        stage = Stage(max_bytes=2 * (512 + 4))
        for number in range(2):
            stage.submit(np.array([number]))
            stage.answer(number)
        assert await stage.cached(np.array([0])) == 0
        stage.submit(np.array([2]))
        stage.answer(2)
        assert [await stage.cached(np.array([number])) for number in range(3)] == [0, None, 2]
        reading = stage.cache.reading()
        assert (reading.entries, reading.nbytes, reading.evictions) == (2, 2 * 516, 1)
        await stage.runs.close()
        assert (stage.cache.reading().entries, stage.cache.reading().nbytes) == (0, 0)

    run(test)


def test_a_load_stores_nothing_after_its_end() -> None:
    """A thread still copies the outputs of the last request when the load ends."""

    async def test() -> None:
        stage = Stage(max_bytes=16 << 20)
        request = stage.submit()
        stage.queue.pop().complete((LARGE,))
        await request
        await stage.runs.close()
        assert stage.cache.reading().entries == 0
        assert not stage.runs._copies

    run(test)


def test_an_entry_that_two_runs_store_takes_its_memory_once() -> None:
    """The second run begins while a thread copies the large outputs of the first."""
    cache = ResponseCache(1 << 20)
    key = cache.key(cache.begin_load(), (ROW,))
    for _ in range(2):
        cache.store(key, (ROW,), ROW.nbytes, 1)
        reading = cache.reading()
        assert (reading.entries, reading.nbytes) == (1, 512 + ROW.nbytes)


def test_too_large_outputs_are_answered_and_not_kept() -> None:
    async def test() -> None:
        stage = Stage(max_bytes=515)
        request = stage.submit()
        stage.answer()
        assert value_of(await request) == 7
        assert stage.cache.reading().entries == 0

    run(test)


def test_another_load_finds_nothing_and_the_memory_is_freed() -> None:
    async def test() -> None:
        stage = Stage()
        stage.submit()
        stage.answer()
        other = Stage(cache=stage.cache)
        assert await other.cached() is None
        other.submit()
        other.answer(8)
        await stage.runs.close()
        assert stage.cache.reading().entries == 1
        assert await other.cached() == 8

    run(test)


@pytest.mark.parametrize("output", [ROW, LARGE], ids=["small", "large"])
def test_outputs_that_cannot_be_copied_are_answered(output: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    def lack_memory(_: object) -> None:
        raise MemoryError

    async def test() -> None:
        monkeypatch.setattr(np, "array", lack_memory)
        stage = Stage(max_bytes=1 << 30)
        first, second = stage.submit(), stage.submit()
        stage.queue.pop().complete((output,))
        assert (await first)[0] is (await second)[0] is output
        await stage.runs.close()
        assert stage.cache.reading().entries == 0

    run(test)


def test_a_load_closes_although_no_thread_can_be_started_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def test() -> None:
        monkeypatch.setattr(asyncio, "to_thread", refuse)
        stage = Stage(max_bytes=1 << 30)
        request = stage.submit()
        stage.queue.pop().complete((LARGE,))
        await stage.runs.close()
        assert (await request)[0] is LARGE
        assert stage.cache.reading().entries == 0

    run(test)


def test_requests_are_enqueued_before_the_load_is_idle() -> None:
    """Its batcher is then closed and rejects later requests."""

    async def test() -> None:
        stage = Stage()
        large = stage.submit(LARGE)
        idle = asyncio.create_task(stage.runs.wait_until_idle())
        await until(lambda: bool(stage.queue))
        assert not idle.done()
        stage.answer()
        assert value_of(await large) == 7
        await idle
        stage.submit(terms=Terms(answer_by_ns=5))
        second = stage.submit()
        idle = asyncio.create_task(stage.runs.wait_until_idle())
        await asyncio.sleep(0)
        stage.queue.pop().fail(ServeError(ErrorKind.DEADLINE, "late"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not idle.done()
        stage.answer()
        await idle
        assert value_of(await second) == 7

    run(test)


def test_the_entries_of_a_load_are_dropped_in_several_turns_of_the_loop() -> None:
    async def test() -> None:
        stage = Stage(max_bytes=1 << 30)
        other = Stage(cache=stage.cache)
        for number in range(2500):
            for one in (stage, other):
                one.submit(np.array([number]))
                one.answer(number)
        ending = asyncio.create_task(stage.runs.close())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert 2500 < stage.cache.reading().entries < 5000
        await ending
        assert stage.cache.reading().entries == 2500

    run(test)
