"""Rejected requests, the limits, and the errors."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.inflight import inflight
from fakes.runner import Idler
from interpreted import interpreted_only
from ortserve.batching.admission import (
    Admission,
    Backlog,
    QueueLimits,
    TooLate,
    judge,
)
from ortserve.batching.instances import Instances
from ortserve.batching.latency import MIN_OBSERVATIONS, LatencyModel
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import RequestQueue
from ortserve.batching.statistics import Decisions
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError

MS = 1_000_000
NOW = 5_000 * MS
MAX_ROWS = 4
KNOWN = [(1, 10.0 * MS), (4, 16.0 * MS)]


def backlog(
    busy_ns: float = 0, queued_ns: float = 0, own_ns: float = 10, solo_ns: float = 10, error_ns: float = 0
) -> Backlog:
    return Backlog(busy_ns, queued_ns, own_ns, solo_ns, error_ns)


@pytest.mark.parametrize(
    ("left_ns", "before", "observations", "verdict"),
    [
        # in time, to the nanosecond: wait, the request's batch, and error
        (116, backlog(busy_ns=100, error_ns=5), 8, None),
        (115, backlog(busy_ns=100, error_ns=5), 8, None),
        (114, backlog(busy_ns=100, error_ns=5), 8, TooLate(1, is_hopeless=False)),
        (50, backlog(busy_ns=100, queued_ns=30, error_ns=5), 8, TooLate(95, is_hopeless=False)),
        (50, backlog(queued_ns=100), 8, TooLate(60, is_hopeless=False)),
        # the request alone takes longer than its remaining time
        (10, backlog(busy_ns=100), 8, TooLate(100, is_hopeless=False)),
        (9, backlog(busy_ns=100), 8, TooLate(101, is_hopeless=True)),
        # a passed deadline is hopeless with any prediction
        (0, backlog(), 0, TooLate(0, is_hopeless=True)),
        (-5, backlog(busy_ns=100), 8, TooLate(0, is_hopeless=True)),
        # a prediction never rejects without earlier requests,
        (1, backlog(), 1000, None),
        (1, backlog(error_ns=1e12), 1000, None),
        # nor after too few observations,
        (1, backlog(busy_ns=100), 7, None),
    ],
)
def test_request_is_late_only_if_it_can_no_longer_finish_in_time(
    left_ns: float, before: Backlog, observations: int, verdict: TooLate | None
) -> None:
    assert judge(left_ns, before, observations) == verdict


class Stage:
    """An admission with a queue that tests fill."""

    def __init__(
        self,
        *,
        max_rows: int = 100,
        max_bytes: int = 1000,
        instances: int = 1,
        observations: int = MIN_OBSERVATIONS,
    ) -> None:
        self.queue = RequestQueue(KNOWN)
        self.shape_class = self.queue.shape_class("a")
        self.shape_class.batch_latency.observations = observations
        self.decisions = Decisions()
        self.policy = BatchPolicy(MAX_ROWS)
        self.last_rows = 0
        limits = QueueLimits(max_rows, max_bytes)
        self.instances = Instances([Idler() for _ in range(instances)])
        self.admission = Admission(self.queue, limits, self.decisions, self.instances)

    def wait(self, rows: int, nbytes: int = 0, level: int = 1, finish_by_ns: int = NOW + 1) -> None:
        """Add rows to the queue that are due before all others."""
        queued = inflight((), rows, Timing(NOW, queued_ns=NOW), level, finish_by_ns=finish_by_ns, nbytes=nbytes)
        self.queue.push(self.shape_class, queued, MAX_ROWS)

    def check(self, rows: int = 1, *, left_ms: float, busy_ms: float = 0, level: int = 1, slowdown: float = 1) -> None:
        request = inflight((), rows, Timing(0), level, finish_by_ns=NOW + int(left_ms * MS))
        self.admission.check_deadline(
            request, self.shape_class, self.policy, self.last_rows, 0, busy_ms * MS, slowdown, NOW
        )

    def refusal(
        self, rows: int = 1, *, left_ms: float, busy_ms: float = 0, level: int = 1, slowdown: float = 1
    ) -> ServeError:
        with pytest.raises(ServeError) as caught:
            self.check(rows, left_ms=left_ms, busy_ms=busy_ms, level=level, slowdown=slowdown)
        return caught.value

    def check_room(self, rows: int = 1, nbytes: int = 0) -> None:
        self.admission.check_room(inflight((), rows, nbytes=nbytes), self.shape_class, self.policy)

    def no_room(self, rows: int = 1, nbytes: int = 0) -> ServeError:
        with pytest.raises(ServeError) as caught:
            self.check_room(rows, nbytes)
        return caught.value


def test_empty_queue_accepts_any_request() -> None:
    stage = Stage(max_rows=2, max_bytes=2)
    stage.check_room(rows=1000, nbytes=1000)
    assert stage.decisions == Decisions()


@pytest.mark.parametrize(
    ("rows", "nbytes", "is_refused"), [(5, 50, False), (6, 50, True), (5, 51, True), (1, 51, True), (6, 0, True)]
)
def test_queue_is_full_in_rows_or_in_bytes(rows: int, nbytes: int, is_refused: bool) -> None:
    stage = Stage(max_rows=10, max_bytes=100)
    stage.wait(5, 50)
    if not is_refused:
        stage.check_room(rows, nbytes)
        return
    error = stage.no_room(rows, nbytes)
    assert error.kind is ErrorKind.OVERLOADED
    assert error.message == (
        "Exceeds maximum queue size: 5 rows with 50 bytes are queued, the limits are max_queue_rows 10 and "
        "max_queue_bytes 100"
    )
    assert error.retry_after_s == pytest.approx(5 / 4 * 0.016)  # the time until the queued requests have run
    assert stage.decisions == Decisions(refused_full=1)


def test_full_queue_answers_retry_after_one_second_without_a_prediction() -> None:
    stage = Stage(max_rows=1, max_bytes=1000)
    stage.shape_class.batch_latency = LatencyModel()
    stage.wait(1)
    assert stage.no_room().retry_after_s == 1


def test_retry_time_is_the_predicted_excess() -> None:
    stage = Stage()
    stage.shape_class.batch_latency.residual_ns = 2 * MS
    # 8 rows before it are 2 batches of 16 ms, its own will be as full: 5 + 32 + 16, and 2 · √4 for four runs in a row
    stage.wait(4)
    stage.wait(4)
    stage.check(left_ms=57, busy_ms=5)
    error = stage.refusal(left_ms=50, busy_ms=5)
    assert error.kind is ErrorKind.OVERLOADED
    assert error.retry_after_s == pytest.approx(0.007)
    assert error.message == (
        "deadline cannot be met: 50.0 ms are left, and the answer is expected in 57.0 ms, 37.0 ms of it waiting"
    )
    assert stage.decisions == Decisions(refused_late=1)


def test_instances_share_the_queued_work() -> None:
    stage = Stage(instances=2)
    stage.wait(4)
    stage.wait(4)
    stage.check(left_ms=5 + 16 + 16, busy_ms=5)
    assert stage.refusal(left_ms=5 + 16 + 15, busy_ms=5).retry_after_s == pytest.approx(0.001)


def test_lost_instance_no_longer_shares_the_queued_work() -> None:
    stage = Stage(instances=2)
    stage.instances.retire(stage.instances.free[0])
    stage.wait(4)
    stage.wait(4)
    stage.check(left_ms=5 + 32 + 16, busy_ms=5)
    assert stage.refusal(left_ms=5 + 32 + 15, busy_ms=5).retry_after_s == pytest.approx(0.001)


def test_other_models_on_the_device_lengthen_the_wait() -> None:
    stage = Stage()
    stage.wait(4)
    stage.check(left_ms=5 + 3 * 16 + 16, busy_ms=5, slowdown=3)
    error = stage.refusal(left_ms=5 + 3 * 16 + 15, busy_ms=5, slowdown=3)
    assert error.retry_after_s == pytest.approx(0.001)


def test_rows_of_the_same_batch_lengthen_the_batch_and_not_the_wait() -> None:
    stage = Stage()
    stage.wait(3)  # with one more row, a full batch of 16 ms
    stage.check(left_ms=32, busy_ms=16)
    assert stage.refusal(left_ms=32, busy_ms=17).retry_after_s == pytest.approx(0.001)


def test_batches_ahead_are_as_small_as_a_tight_deadline_makes_them() -> None:
    stage = Stage()
    stage.wait(3)
    # In half of 25 ms 2 rows can run (12 ms): one batch of 2 runs first, then its own batch with the third row.
    stage.check(left_ms=25, busy_ms=1)
    assert stage.refusal(left_ms=25, busy_ms=2).retry_after_s == pytest.approx(0.001)


def test_batch_is_expected_to_be_as_full_as_the_last() -> None:
    stage = Stage()
    stage.check(left_ms=32, busy_ms=22)
    stage.last_rows = 4
    stage.check(left_ms=32, busy_ms=16)
    assert stage.refusal(left_ms=32, busy_ms=17).retry_after_s == pytest.approx(0.001)


def test_only_requests_that_run_first_count() -> None:
    stage = Stage()
    for _ in range(10):
        stage.wait(4, level=2)
    stage.check(left_ms=15, busy_ms=5, level=1)
    assert stage.refusal(left_ms=15, busy_ms=5, level=2).kind is ErrorKind.OVERLOADED
    stage.check(left_ms=15, busy_ms=5)  # a request without a level has the first level
    stage.check(left_ms=1000, busy_ms=5, level=2)
    for _ in range(2):
        stage.wait(4, finish_by_ns=NOW + 1000 * MS)  # due later
    stage.check(left_ms=15, busy_ms=5, level=1)


def test_request_that_takes_too_long_alone_gets_no_retry_time() -> None:
    stage = Stage()
    error = stage.refusal(left_ms=9, busy_ms=5)
    assert (error.kind, error.retry_after_s) == (ErrorKind.DEADLINE, None)
    assert error.message == "deadline cannot be met: 9.0 ms are left, and the request alone takes 10.0 ms"
    assert stage.refusal(rows=4, left_ms=15, busy_ms=5).kind is ErrorKind.DEADLINE


def test_request_in_pieces_takes_as_many_batches() -> None:
    stage = Stage()
    stage.check(rows=12, left_ms=5 + 48, busy_ms=5)
    assert stage.refusal(rows=12, left_ms=47, busy_ms=5).kind is ErrorKind.DEADLINE


@pytest.mark.parametrize("left_ms", [0, -1])
def test_passed_deadline_is_rejected_even_by_an_idle_server(left_ms: float) -> None:
    stage = Stage(observations=0)
    error = stage.refusal(left_ms=left_ms)
    assert (error.kind, error.retry_after_s) == (ErrorKind.DEADLINE, None)
    assert stage.decisions == Decisions(refused_late=1)


def test_prediction_rejects_no_request_while_idle_or_unsure() -> None:
    Stage().check(left_ms=0.001)
    unsure = Stage(observations=MIN_OBSERVATIONS - 1)
    unsure.wait(90)
    unsure.check(left_ms=0.001, busy_ms=1000)


def test_batch_is_expected_to_fill_up_as_the_last_one_did() -> None:
    stage = Stage()
    stage.check(left_ms=20, busy_ms=8)
    stage.last_rows = 3  # 14 ms
    stage.check(left_ms=28, busy_ms=14)
    assert stage.refusal(left_ms=28, busy_ms=15).retry_after_s == pytest.approx(0.001)


def test_batch_is_not_expected_to_outgrow_half_of_the_time_left() -> None:
    stage = Stage()
    stage.last_rows = 4
    stage.check(left_ms=24, busy_ms=12)  # 12 ms: 2 rows
    assert stage.refusal(left_ms=24, busy_ms=13).kind is ErrorKind.OVERLOADED


def test_tight_deadlines_of_a_turn_of_the_loop_share_a_batch() -> None:
    stage = Stage()
    stage.wait(2, finish_by_ns=NOW + 15 * MS)
    stage.check(left_ms=15)  # all three in one batch: 14 ms
    stage.wait(1, finish_by_ns=NOW + 15 * MS)
    assert stage.refusal(left_ms=15).kind is ErrorKind.OVERLOADED


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    known=st.lists(st.floats(1.0, 4.0), min_size=3, max_size=3),
    waiting=st.lists(st.tuples(st.integers(1, MAX_ROWS), st.floats(0.1, 1e4), st.booleans()), max_size=12),
    rows=st.integers(1, 3 * MAX_ROWS),
    left_ms=st.floats(0.1, 1e4),
    busy_ms=st.floats(0, 100),
    residual_ms=st.floats(0, 100),
    slowdown=st.floats(1, 4),
)
@interpreted_only
def test_far_deadlines_are_met_by_the_forecast_that_they_are_not_worth(
    known: list[float],
    waiting: list[tuple[int, float, bool]],
    rows: int,
    left_ms: float,
    busy_ms: float,
    residual_ms: float,
    slowdown: float,
) -> None:
    stage = Stage(max_rows=10**6)
    for size, ms in zip((1, 2, 4), known, strict=True):
        for shape in ("a", "b"):
            stage.queue.shape_class(shape).batch_latency._set_knot(size, ms * MS)
    stage.shape_class.batch_latency.residual_ns = residual_ms * MS
    for waiting_rows, due_ms, is_other in waiting:
        queued = inflight((), waiting_rows, Timing(0), 1, finish_by_ns=NOW + int(due_ms * MS))
        stage.queue.push(stage.queue.shape_class("b" if is_other else "a"), queued, MAX_ROWS)
    if stage.admission._is_far(rows, stage.shape_class, stage.policy, left_ms * MS, busy_ms * MS, slowdown):
        stage.admission._is_far = lambda *_: False  # type: ignore[method-assign]
        stage.check(rows, left_ms=left_ms, busy_ms=busy_ms, slowdown=slowdown)


def test_request_limit_of_a_level_is_kept() -> None:
    stage = Stage()
    limits = QueueLimits(10**6, 10**6, {1: 2})
    admission = Admission(stage.queue, limits, stage.decisions, stage.instances)
    stage.wait(rows=1, level=1)
    stage.wait(rows=1, level=2)
    admission.check_room(inflight(level=1), stage.shape_class, stage.policy)
    stage.wait(rows=5, level=1)
    with pytest.raises(ServeError, match="2 requests of its priority level are queued, the limit is 2") as caught:
        admission.check_room(inflight(level=1), stage.shape_class, stage.policy)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert caught.value.retry_after_s == 1
    assert stage.decisions.refused_full == 1
    admission.check_room(inflight(level=2), stage.shape_class, stage.policy)


class TwoShapes(Stage):
    """New requests of one shape, with full batches of 16 ms, behind others with full batches of 160 ms."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.other = self.queue.shape_class("other")
        self.other.batch_latency = LatencyModel([(1, 100.0 * MS), (4, 160.0 * MS)])

    def wait_other(self, rows: int, finish_by_ns: int = NOW + 1) -> None:
        queued = inflight((), rows, Timing(NOW, queued_ns=NOW), finish_by_ns=finish_by_ns)
        self.queue.push(self.other, queued, MAX_ROWS)


def test_queued_work_of_each_shape_is_predicted_from_its_own_batches() -> None:
    stage = TwoShapes()
    stage.wait_other(4)
    stage.wait_other(1)
    # 160 for a full batch, 100 for the remaining one, and 10 for its own
    stage.check(left_ms=5 + 160 + 100 + 10, busy_ms=5)
    assert stage.refusal(left_ms=5 + 160 + 100 + 9, busy_ms=5).retry_after_s == pytest.approx(0.001)
    cheap = TwoShapes()
    cheap.other.batch_latency = LatencyModel([(1, 0.1 * MS), (4, 0.1 * MS)])
    for _ in range(10):
        cheap.wait_other(4)
    cheap.check(left_ms=5 + 1 + 10, busy_ms=5)
    assert cheap.refusal(left_ms=5 + 1 + 9, busy_ms=5).kind is ErrorKind.OVERLOADED


def test_other_shapes_that_are_due_later_do_not_count() -> None:
    stage = TwoShapes()
    stage.wait_other(4, finish_by_ns=NOW + 10_000 * MS)
    stage.check(left_ms=15, busy_ms=5)


def test_instances_and_other_models_share_the_work_of_other_shapes_too() -> None:
    stage = TwoShapes(instances=2)
    stage.wait_other(4)
    stage.check(left_ms=5 + 80 + 10, busy_ms=5)
    assert stage.refusal(left_ms=5 + 80 + 9, busy_ms=5).kind is ErrorKind.OVERLOADED
    stage.check(left_ms=5 + 240 + 10, busy_ms=5, slowdown=3)
    assert stage.refusal(left_ms=5 + 240 + 9, busy_ms=5, slowdown=3).kind is ErrorKind.OVERLOADED


def test_errors_of_all_shapes_add_up_like_independent_ones() -> None:
    stage = TwoShapes()
    stage.wait_other(4)
    stage.shape_class.batch_latency.residual_ns = 3 * MS / math.sqrt(2)  # two runs: the current one, and its own
    stage.other.batch_latency.residual_ns = 4 * MS
    stage.check(left_ms=5 + 160 + 10 + 5.001, busy_ms=5)
    assert stage.refusal(left_ms=5 + 160 + 10 + 4.999, busy_ms=5).kind is ErrorKind.OVERLOADED


@pytest.mark.parametrize("latency", [LatencyModel(), LatencyModel([(1, math.inf)])])
def test_other_shape_without_a_prediction_rejects_no_request(latency: LatencyModel) -> None:
    stage = TwoShapes()
    stage.other.batch_latency = latency
    stage.wait_other(4)
    stage.check(left_ms=15, busy_ms=5)


def test_shapes_beyond_the_limit_are_predicted_as_the_new_requests_own() -> None:
    stage = Stage(max_rows=10_000)
    for number in range(100):
        other = stage.queue.shape_class(number)
        other.batch_latency = LatencyModel([(4, 1.0 * MS)])
        queued = inflight((), 4, Timing(0), finish_by_ns=NOW + 1)
        stage.queue.push(other, queued, MAX_ROWS)
    # 16 of 1 ms, 84 of 16 ms, and its own
    stage.check(left_ms=5 + 16 + 84 * 16 + 16, busy_ms=5)
    assert stage.refusal(left_ms=5 + 16 + 84 * 16 + 15, busy_ms=5).kind is ErrorKind.OVERLOADED
