"""The figures of a point, computed from the measurements of generators."""

import asyncio
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortserve.clock import monotonic_ns
from ortserve.tools.bench.generator import Finished, LoadPart, LoopDriver
from ortserve.tools.bench.generators import Seen
from ortserve.tools.bench.load import Load
from ortserve.tools.bench.measure import is_sustained
from ortserve.tools.bench.outcomes import Chunk, Recorder, Ticket
from ortserve.tools.bench.points import judge_generator, make_point
from ortserve.tools.bench.result import LoadOnTarget, OutputCheck, Percentile, Point
from ortserve.tools.bench.target import ModelPlan, Target
from ortserve.tools.subject import Subject

OPEN = Load(None, 1000.0)
CLOSED = Load(4)


def seen_of(latencies_s: np.ndarray, *, late_s: float = 0.0, cpu_share: float = 0.1, seconds: float = 10.0) -> Seen:
    """The measurements of one generator that sent its requests at equal distances."""
    due = np.linspace(0, seconds * 1e9, len(latencies_s), endpoint=False).astype(np.int64)
    sent = due + int(late_s * 1e9)
    done = due + (latencies_s * 1e9).astype(np.int64)
    times = array("q", np.stack([due, sent, done, np.ones_like(due)], axis=1).ravel().tolist())
    return Seen([Chunk(times)], [Finished(0, int(seconds * 1e9), int(cpu_share * seconds * 1e9), len(due), {})])


def point(
    *rounds: Seen, load: Load = OPEN, outputs: OutputCheck | None = None, server: str = "s", slo_ms: float | None = None
) -> Point:
    subject = LoadOnTarget("url", "rest", server, load.label, load.concurrency, load.rate, 2)
    return make_point(subject, rounds, 99.0, slo_ms, batches={4: 3, 8: 0}, usage=None, outputs=outputs)


def test_open_loop_counts_from_the_schedule_and_closed_loop_from_the_sending() -> None:
    seen = seen_of(np.full(5000, 0.010), late_s=0.004)

    by_schedule, by_sending = point(seen).percentile(50.0), point(seen, load=CLOSED).percentile(50.0)

    assert by_schedule is not None
    assert by_sending is not None
    assert by_schedule.ms == pytest.approx(10)
    assert by_sending.ms == pytest.approx(6)


def test_figures_are_computed_from_latencies() -> None:
    latencies = np.random.default_rng(0).permutation(np.arange(1, 10_001) / 1e6)

    found = point(seen_of(latencies), slo_ms=5.0)

    assert (found.requests, found.answers, found.load) == (10_000, 10_000, "1000/s constant")
    assert [round(one.ms, 3) for one in found.percentiles] == [5.0, 9.0, 9.5, 9.9, 9.99]
    assert found.goodput_per_s == pytest.approx(500, rel=0.01)
    assert found.throughput.value == pytest.approx(1000, rel=0.01)
    assert [(one.rows, one.batches) for one in found.batches] == [(4, 3)]
    assert found.most_ms == pytest.approx(10)
    assert sum(found.histogram) == 10_000
    assert not found.is_overloaded


@pytest.mark.parametrize(("sent", "share", "percent"), [(1000, 0.5, "50.0%"), (0, 0.0, "0.0%")])
def test_requests_that_were_never_sent_are_missed(sent: int, share: float, percent: str) -> None:
    seen = seen_of(np.full(sent, 0.001))
    seen.finished = [Finished(0, seen.finished[0].end_ns, 0, 2000, {})]

    generator = point(seen).generator

    assert generator.sent_share == share
    assert any(f"only {percent} of the requests" in reason for reason in generator.too_slow_because)


def test_rounds_are_joined() -> None:
    found = point(seen_of(np.full(2000, 0.001)), seen_of(np.full(2000, 0.003)))

    assert (found.answers, found.seconds) == (4000, 20.0)
    assert found.mean_ms == pytest.approx(2)


def test_growing_queue_is_overload_and_a_stall_is_not() -> None:
    growing = np.linspace(0, 5, 10_000)
    stalled = np.full(10_000, 0.001)
    stalled[3000:4000] = np.linspace(1, 0.001, 1000)

    assert point(seen_of(growing)).is_overloaded
    assert not point(seen_of(stalled)).is_overloaded
    assert not point(seen_of(growing), load=CLOSED).is_overloaded


def test_rates_leave_out_the_share_of_wrong_answers() -> None:
    found = point(seen_of(np.full(10_000, 0.001)), outputs=OutputCheck(200, 50, "x", "different"), slo_ms=5.0)

    assert found.goodput_per_s == pytest.approx(750)
    assert found.throughput.value == pytest.approx(750, rel=0.01)
    assert found.throughput.low is not None
    assert found.throughput.low <= found.throughput.value


@pytest.mark.parametrize("load", [OPEN, CLOSED], ids=["open", "closed"])
def test_rates_count_the_answers_of_the_measurement_whenever_their_requests_were_sent(load: Load) -> None:
    begin_ns, end_ns, ns = 2 * 10**9, 12 * 10**9, 10**9
    recorder = Recorder(begin_ns)
    for number in range(12):  # an answer each second, 3 s after its request was sent
        recorder.answered(Ticket(number, number * ns, number * ns), number * ns + 3 * ns + 1, 10)
    seen = Seen([recorder.take()], [Finished(begin_ns, end_ns, 0, 10, {})])

    found, late = point(seen, load=load, slo_ms=3001.0), point(seen, load=load, slo_ms=2999.0)

    assert (found.requests, found.answers) == (10, 10)
    assert (found.throughput.value, found.goodput_per_s, late.goodput_per_s) == (0.9, 0.9, 0.0)


def test_failures_are_counted_by_kind_over_generators() -> None:
    first, second = Recorder(0), Recorder(0)
    for number, kind in enumerate(["http_503", "timeout", "http_503"]):
        first.failed(Ticket(number, number, number), number + 5, kind, f"example of {kind}")
    second.failed(Ticket(0, 0, 0), 5, "timeout", "example of timeout")
    second.answered(Ticket(1, 1, 1), 7, 10)
    seen = Seen([first.take(), second.take()], [Finished(0, 10**9, 0, None, {})] * 2)

    found = point(seen, outputs=OutputCheck(5, 1, "x", "different"))

    counts = {one.kind: (one.count, one.example) for one in found.failures}
    assert counts == {
        "http_503": (2, "example of http_503"),
        "timeout": (2, "example of timeout"),
        "wrong_output": (1, "different"),
    }
    assert (found.requests, found.answers, found.failed) == (5, 0, 5)


def test_warm_up_is_left_out() -> None:
    recorder = Recorder(100)
    recorder.answered(Ticket(0, 99, 99), 200, 1)
    recorder.answered(Ticket(1, 100, 101), 300, 1, b"a;dur=1", "body")

    chunk = recorder.take()

    assert list(chunk.times) == [100, 101, 300, 1]
    assert (chunk.timings, chunk.bodies) == ([b"a;dur=1"], [(1, "body")])
    assert not recorder.take().times


def test_phases_are_read_and_other_text_is_not() -> None:
    seen = seen_of(np.full(1000, 0.001))
    timings = [b"queue;dur=1.5, compute;dur=2", b"queue;dur=2.5", b"cache;desc=hit;dur=3", b"x;dur=abc, ,;", b"\xff"]
    seen.chunks[0].timings.extend(timings)

    phases = {one.name: one.mean_ms for one in point(seen).phases}

    assert phases == {"queue": 2.0, "compute": 2.0, "cache": 3.0}


def test_nothing_answered_has_no_percentiles() -> None:
    recorder = Recorder(0)
    recorder.failed(Ticket(0, 0, 0), 5, "timeout", "")
    seen = Seen([recorder.take()], [Finished(0, 10**9, 0, None, {})])

    found = point(seen)

    assert (found.answers, found.percentiles, found.mean_ms, found.throughput.value) == (0, (), None, 0.0)


ASKED = Percentile(99.0, 10.0, None, None)


@pytest.mark.parametrize(
    ("cpu_share", "late_us", "sent_share", "reasons"),
    [
        (0.5, 100.0, 1.0, []),
        (0.9, 100.0, 1.0, ["kept its processor busy for 90%"]),
        (0.5, 100.0, 0.97, ["only 97.0% of the requests"]),
        (0.5, 1500.0, 1.0, ["p50 of requests was sent 1,500", "p99 of requests was sent 1,500"]),
    ],
)
def test_slow_generator_is_named(cpu_share: float, late_us: float, sent_share: float, reasons: list[str]) -> None:
    found = judge_generator(cpu_share, np.full(1000, late_us), sent_share, ASKED)

    assert len(found) == len(reasons)
    for text, reason in zip(found, reasons, strict=True):
        assert reason in text


def test_callers_of_a_closed_loop_are_never_late() -> None:
    late = seen_of(np.full(1000, 0.2), late_s=0.009)

    assert point(late, load=CLOSED).generator.too_slow_because == ()
    assert point(late).generator.too_slow_because


def test_lateness_is_allowed_to_be_a_twentieth_of_the_percentile() -> None:
    late = np.full(1000, 50.0)
    late[:100] = 4000.0

    assert judge_generator(0.1, late, 1.0, Percentile(99.0, 100.0, None, None)) == []
    assert judge_generator(0.1, late, 1.0, ASKED)


def test_rate_that_the_generator_may_have_missed_is_no_limit_of_the_target() -> None:
    growing = np.linspace(0, 5, 10_000)

    assert is_sustained(point(seen_of(np.full(1000, 0.001), late_s=0.01)), 99.0, None) is True
    assert is_sustained(point(seen_of(growing)), 99.0, None) is False
    assert is_sustained(point(seen_of(growing, late_s=0.5)), 99.0, None) is None


class Bursts(Target):
    """Answers four requests at once, each of which takes 100 µs to process."""

    def __init__(self) -> None:
        self.waiting: list[Ticket] = []

    async def open(self, count: int) -> None:
        """Nothing to open."""

    def send(self, ticket: Ticket) -> None:
        self.waiting.append(ticket)
        if len(self.waiting) == 4:
            asyncio.get_running_loop().call_later(0.001, self._answer)

    def _answer(self) -> None:
        tickets, self.waiting = self.waiting, []
        now_ns = monotonic_ns()
        for number, ticket in enumerate(tickets):
            self.sink.answered(ticket, now_ns + number * 100_000, 1)

    def expire(self, sent_before_ns: int) -> None:
        """All are answered in time, except for those of the last burst, which is not full."""
        late = [ticket for ticket in self.waiting if ticket.sent_ns < sent_before_ns]
        self.waiting = [ticket for ticket in self.waiting if ticket not in late]
        for ticket in late:
            self.sink.failed(ticket, monotonic_ns(), "timeout", "")

    async def close(self) -> None:
        """Nothing to close."""


def test_answers_that_come_together_wait_for_each_other() -> None:
    chunks: list[Chunk] = []
    channel: Any = SimpleNamespace(send=chunks.append)
    plan = ModelPlan(Subject("m", Path("m.onnx")), "batcher", None, None, ((),), 1)

    async def run() -> Finished:
        part = LoadPart(0, plan, 4, None, 0.0, 0.2, 1.0)
        return await LoopDriver(Bursts(), part, channel, monotonic_ns() + 10_000_000).run()

    finished = asyncio.run(run())

    answers = sum(chunk.answers for chunk in chunks)
    assert answers >= 8
    assert finished.waited_ns == answers / 4 * (1 + 2 + 3) * 100_000


def test_verdict_is_refused_if_answers_wait_for_the_generator() -> None:
    """A mean of 400 µs is much for answers of 2 ms, and little for answers of 200 ms."""

    def reasons(latency_s: float) -> tuple[str, ...]:
        seen = seen_of(np.full(10_000, latency_s))
        seen.finished = [replace(seen.finished[0], waited_ns=10_000 * 400_000)]
        found = point(seen, load=CLOSED).generator
        assert found.waited_us == 400
        return found.too_slow_because

    assert any("answers waited 400 µs for the generator" in reason for reason in reasons(0.002))
    assert reasons(0.2) == ()


def test_generator_in_the_process_of_the_model_is_busy_with_the_model() -> None:
    assert point(seen_of(np.full(100, 0.1), cpu_share=1.0), server="").generator.too_slow_because == ()
    assert point(seen_of(np.full(100, 0.1), cpu_share=1.0)).generator.too_slow_because != ()


def test_kinds_of_failures_keep_their_text() -> None:
    recorder = Recorder(0)
    recorder.failed(Ticket(0, 0, 0), 5, "http_400", "x" * 1000)

    assert recorder.take().examples == {"http_400": "x" * 300}
