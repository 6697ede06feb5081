"""The order and the size of the queue, and the shape classes that it stores."""

import random
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any

import pytest

from fakes.inflight import inflight
from interpreted import interpreted_only
from ortserve.batching.closed_loop import ClosedLoopWait
from ortserve.batching.queue import DUE_RUNS, MAX_CLASSES, MIN_DUE_NS, Alone, RequestQueue, ShapeClass
from ortserve.core.inflight import InflightRequest
from ortserve.core.timing import Timing

MAX_ROWS = 8
FULL_NS = 200_000_000


def request(
    rows: int = 1,
    queued_ns: int = 0,
    *,
    level: int = 1,
    finish_by_ns: int | None = None,
    nbytes: int = 0,
) -> InflightRequest:
    timing = Timing(0, queued_ns)
    return inflight((), rows, timing, level, finish_by_ns=finish_by_ns, nbytes=nbytes)


def known_queue() -> RequestQueue:
    """A full batch takes ``FULL_NS``."""
    return RequestQueue([(MAX_ROWS, FULL_NS)])


def push(queue: RequestQueue, key: Hashable, *requests: InflightRequest) -> ShapeClass:
    shape_class = queue.shape_class(key)
    for one in requests:
        queue.push(shape_class, one, MAX_ROWS)
    return shape_class


def keys(classes: list[ShapeClass]) -> list[object]:
    return [shape_class.key for shape_class in classes]


def test_requests_of_a_class_are_dequeued_in_order() -> None:
    queue = RequestQueue()
    waiting = [request(queued_ns=number) for number in range(5)]
    shape_class = push(queue, "a", *waiting)
    assert queue.take(shape_class, 2) == waiting[:2]
    assert queue.take(shape_class, 3) == waiting[2:]


def test_requests_that_are_put_back_keep_their_places() -> None:
    queue = known_queue()
    waiting = [request(2, nbytes=3), request(2), request(1, finish_by_ns=10**12), request(1)]
    shape_class = push(queue, "a", *waiting)
    taken = queue.take(shape_class, 2)
    later = request()
    push(queue, "a", later)
    queue.put_back(shape_class, taken)
    assert (queue.rows, queue.nbytes, shape_class.rows, shape_class.has_limits) == (7, 3, 7, True)
    assert queue.take(shape_class, 5) == [*waiting, later]


def test_requests_that_are_put_back_join_the_class_that_replaced_theirs() -> None:
    queue = RequestQueue()
    evicted = queue.shape_class("a")
    requests = [inflight((), 1, Timing(0, number)) for number in range(2)]
    queue.push(evicted, requests[0], 8)
    taken = queue.take(evicted, 1)
    for number in range(MAX_CLASSES):
        queue.shape_class(number)
    queue.push(queue.shape_class("a"), requests[1], 8)
    queue.put_back(evicted, taken)
    (waiting,) = queue.waiting
    assert (waiting.requests, queue.rows) == (requests, 2)


def test_class_whose_requests_are_put_back_keeps_its_learned_times_among_many_waiting_classes() -> None:
    queue = known_queue()
    for number in range(MAX_CLASSES):
        push(queue, number, request())
    waiting = request()
    shape_class = push(queue, "a", waiting)
    shape_class.run_latency.observe(1, 5)
    taken = queue.take(shape_class, 1)  # evicts the class, which is idle
    queue.put_back(shape_class, taken)
    assert queue.shape_class("a") is shape_class
    assert (shape_class.requests, len(queue.waiting)) == ([waiting], MAX_CLASSES + 1)


def test_higher_level_goes_first_and_within_a_level_the_earlier_deadline() -> None:
    queue = known_queue()
    late, early, urgent, same = (
        request(level=level, finish_by_ns=by_ns) for level, by_ns in ((2, 900), (2, 500), (1, 5000), (2, 500))
    )
    shape_class = push(queue, "a", late, early, urgent, same)
    assert queue.take(shape_class, 4) == [urgent, early, same, late]


def test_request_without_a_deadline_is_due_after_ten_full_batches() -> None:
    queue = known_queue()
    due_ns = 50 + DUE_RUNS * FULL_NS
    free = request(queued_ns=50)
    just_before, just_after = (request(queued_ns=60, finish_by_ns=due_ns + by_ns) for by_ns in (-1, 20))
    shape_class = push(queue, "a", free, just_after, just_before)
    assert queue.take(shape_class, 3) == [just_before, free, just_after]


def test_request_of_a_fast_model_is_due_after_a_second() -> None:
    queue = RequestQueue([(MAX_ROWS, 1000)])
    free, far = request(queued_ns=50), request(queued_ns=60, finish_by_ns=10 * MIN_DUE_NS)
    near = request(queued_ns=70, finish_by_ns=MIN_DUE_NS)
    shape_class = push(queue, "a", free, far, near)
    assert queue.take(shape_class, 3) == [near, free, far]


def test_stream_of_requests_without_deadlines_does_not_starve_a_far_deadline() -> None:
    queue = known_queue()
    far = request(finish_by_ns=3600 * MIN_DUE_NS)
    shape_class = push(queue, "a", far, request())
    for now_ns in range(1, 10):
        push(queue, "a", *[request(queued_ns=now_ns) for _ in range(2)])
        if queue.take(shape_class, 1) == [far]:
            return
    raise AssertionError("the request with a deadline is still queued")


def test_stream_of_deadlines_does_not_starve_requests_without_one() -> None:
    queue = known_queue()
    free = request()
    shape_class = push(queue, "a", free)
    served_ns = None
    for now_ns in range(0, 100 * FULL_NS, FULL_NS):  # each run takes one of two new requests with deadlines
        push(queue, "a", *[request(queued_ns=now_ns, finish_by_ns=now_ns + 2 * FULL_NS) for _ in range(2)])
        if queue.take(shape_class, 1) == [free]:
            served_ns = now_ns
            break
    assert served_ns is not None
    assert served_ns <= 2 * DUE_RUNS * FULL_NS


@pytest.mark.parametrize("seed", range(20))
def test_requests_without_deadlines_keep_their_order_whatever_is_learned_meanwhile(seed: int) -> None:
    draw = random.Random(seed)
    queue = RequestQueue()
    shape_class = queue.shape_class("a")
    waiting = []
    for now_ns in range(0, 40_000, 1000):
        waiting.append(request(queued_ns=now_ns))
        push(queue, "a", waiting[-1])
        shape_class.batch_latency.observe(MAX_ROWS, draw.choice([10, 1000, 1_000_000]))
        if draw.random() < 0.3:
            push(queue, "a", request(queued_ns=now_ns, finish_by_ns=now_ns + draw.randrange(1_000_000)))
    taken = queue.take(shape_class, len(shape_class.requests))
    assert [one for one in taken if one.finish_by_ns is None] == waiting


def test_far_too_long_prediction_is_forgotten_once_no_request_waits_by_it() -> None:
    queue = RequestQueue([(MAX_ROWS, 1000 * FULL_NS)])
    shape_class = push(queue, "a", request())
    queue.take(shape_class, 1)
    for _ in range(300):
        shape_class.batch_latency.observe(MAX_ROWS, FULL_NS)
    free, later = request(queued_ns=10), request(queued_ns=20, finish_by_ns=20 * FULL_NS)
    push(queue, "a", free, later)
    assert queue.take(shape_class, 2) == [free, later]


def test_class_whose_head_is_due_first_comes_first() -> None:
    queue = RequestQueue()
    b = push(queue, "b", request(queued_ns=5))
    push(queue, "a", request(queued_ns=7))
    push(queue, "b", request(queued_ns=9))
    assert keys(queue.waiting) == ["b", "a"]
    queue.take(b, 1)
    assert keys(queue.waiting) == ["a", "b"]
    push(queue, "c", request(queued_ns=20, finish_by_ns=6))
    assert keys(queue.waiting) == ["c", "a", "b"]
    push(queue, "d", request(queued_ns=30, level=0))
    assert keys(queue.waiting) == ["d", "c", "a", "b"]


def test_rows_and_bytes_count_all_queued_requests_and_return_to_zero() -> None:
    queue = RequestQueue()
    left = request(rows=3, nbytes=30)
    a = push(queue, "a", left)
    b = push(queue, "b", request(rows=2, nbytes=20), request(rows=5, nbytes=50))
    left.cancel()
    assert (queue.rows, queue.nbytes, a.rows, b.rows) == (10, 100, 3, 7)
    queue.take(b, 1)
    assert (queue.rows, queue.nbytes, a.rows, b.rows) == (8, 80, 3, 5)
    queue.remove(a, [left])
    assert (queue.rows, queue.nbytes, a.rows, b.rows) == (5, 50, 0, 5)
    assert queue
    queue.take(b, 1)
    assert (queue.rows, queue.nbytes, a.rows, b.rows) == (0, 0, 0, 0)
    assert not queue


@pytest.mark.parametrize("gone", [[0], [4], [1, 3], [0, 1, 2, 3, 4]])
def test_removal_of_requests_keeps_the_order_of_the_others(gone: list[int]) -> None:
    queue = RequestQueue()
    waiting = [request(queued_ns=number) for number in range(5)]
    shape_class = push(queue, "a", *waiting)
    queue.remove(shape_class, [waiting[index] for index in gone])
    assert list(shape_class.requests) == [one for index, one in enumerate(waiting) if index not in gone]
    assert bool(queue) == (len(gone) < 5)


@pytest.mark.parametrize("classes", [1, 3])
def test_classes_may_be_taken_whole_while_they_are_given(classes: int) -> None:
    queue = RequestQueue()
    for key in range(classes):
        push(queue, key, request())
    taken = [queue.take(shape_class, len(shape_class.requests)) for shape_class in queue.waiting.copy()]
    assert [len(requests) for requests in taken] == [1] * classes
    assert queue.waiting == []


def test_rows_ahead_are_those_that_go_first() -> None:
    queue = RequestQueue()
    a = push(queue, "a", request(1, finish_by_ns=10), request(2, finish_by_ns=30))
    assert [a.rows_ahead((1, due_ns)) for due_ns in (9, 10, 29, 30)] == [0, 1, 1, 3]
    push(queue, "a", request(4, finish_by_ns=20), request(8, level=2, finish_by_ns=1))
    assert [a.rows_ahead((1, due_ns)) for due_ns in (9, 10, 20, 30)] == [0, 1, 5, 7]
    assert [a.rows_ahead(order) for order in ((2, 0), (2, 1))] == [7, 15]


def test_other_waiting_classes_are_those_with_queued_requests() -> None:
    queue = RequestQueue()
    a, b, c = (push(queue, key, request()) for key in "abc")
    queue.shape_class("empty")
    assert list(queue.others(b)) == [a, c]
    queue.take(a, 1)
    assert list(queue.others(b)) == [c]
    assert list(queue.others(queue.shape_class("empty"))) == [b, c]


def test_wait_for_callers_ends_when_no_request_is_queued() -> None:
    queue = RequestQueue()
    first, second = request(), request()
    shape_class = push(queue, None, first, second)
    closed_loop = shape_class.closed_loop = ClosedLoopWait(0, 1.0)
    assert closed_loop.begin_wait(2, 0)
    queue.remove_one(first)
    assert not closed_loop.begin_wait(1, 0), "it goes on for the other"
    queue.remove_one(second)
    assert closed_loop.begin_wait(1, 0)


@pytest.mark.parametrize("seed", range(10))
def test_request_is_removed_from_any_position_and_only_once(seed: int) -> None:
    draw = random.Random(seed)
    queue = RequestQueue()
    waiting = [
        request(draw.randint(1, 3), level=draw.randint(1, 2), finish_by_ns=draw.choice([None, 5, 9]), nbytes=7)
        for _ in range(40)
    ]
    shape_class = push(queue, None, *waiting)
    push(queue, "other", request())
    queue.take(shape_class, 1)
    order = list(shape_class.requests)
    for one in draw.sample(waiting, 40):
        stands = one in order
        assert queue.remove_one(one) == stands
        assert not queue.remove_one(one)
        if stands:
            order.remove(one)
        assert shape_class.requests == order
        assert (queue.rows, queue.nbytes) == (1 + sum(one.rows for one in order), 7 * len(order))
    assert queue.waiting == [queue.shape_class("other")]


def test_new_class_begins_with_what_warm_up_measured_and_then_learns_on_its_own() -> None:
    queue = RequestQueue([(8, 800)], [(8, 500)])
    a, b = queue.shape_class("a"), queue.shape_class("b")
    a.batch_latency.observe(8, 1600)
    assert (b.batch_latency.predict_ns(8), b.run_latency.predict_ns(8)) == (800, 500)
    assert (a.batch_latency.predict_ns(8) or 0) > 800
    assert queue.shape_class("a") is a


def test_least_recently_used_idle_class_is_forgotten_first() -> None:
    queue = RequestQueue()
    known = [queue.shape_class(key) for key in range(MAX_CLASSES)]
    queue.shape_class(0)
    queue.shape_class("new")
    assert keys(queue.classes()) == [*range(2, MAX_CLASSES), 0, "new"]
    assert queue.shape_class(0) is known[0]
    assert queue.shape_class(1) is not known[1]


def test_class_with_a_queued_request_is_never_forgotten() -> None:
    queue = RequestQueue()
    busy = [push(queue, key, request()) for key in range(3 * MAX_CLASSES)]
    assert queue.waiting == busy
    for key in range(1000):
        queue.shape_class(f"idle {key}")
    assert [queue.shape_class(shape_class.key) for shape_class in busy] == busy


def test_number_of_idle_classes_is_limited_after_a_burst_of_shapes() -> None:
    queue = RequestQueue()
    busy = [push(queue, key, request()) for key in range(3 * MAX_CLASSES)]
    for shape_class in busy:
        queue.take(shape_class, 1)
    assert keys(queue.classes()) == [*range(2 * MAX_CLASSES, 3 * MAX_CLASSES)]


class WatchedClasses(OrderedDict[Hashable, ShapeClass]):
    """Shape classes that count how many of their keys are visited."""

    visited = 0

    def __iter__(self) -> Iterator[Hashable]:
        return self._watch(super().__iter__())

    def __reversed__(self) -> Iterator[Hashable]:
        return self._watch(super().__reversed__())

    def _watch(self, keys: Iterator[Hashable]) -> Iterator[Hashable]:
        for key in keys:
            self.visited += 1
            yield key

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


@interpreted_only
def test_number_of_classes_with_queued_requests_does_not_slow_down_the_next_request() -> None:
    queue = RequestQueue()
    queue._classes = classes = WatchedClasses()
    waiting = [push(queue, Alone(), request()) for _ in range(1000)]
    for _ in range(1000):
        queue.shape_class(Alone())  # rejected
    for shape_class in waiting:
        queue.take(shape_class, 1)
    assert classes.visited <= 2 * 1000
    assert len(classes) == MAX_CLASSES


class WatchedLevel(int):
    """A priority level that counts how often it is compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        WatchedLevel.comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


@interpreted_only
def test_choice_of_the_next_class_compares_few_of_thousands() -> None:
    queue, rng = RequestQueue(), random.Random(0)
    classes = 4096
    for due_ns in rng.sample(range(classes), classes):
        push(queue, Alone(), request(level=WatchedLevel(1), finish_by_ns=due_ns))
    for due_ns in range(100):
        WatchedLevel.comparisons = 0
        (taken,) = queue.take(queue.waiting[0], 1)
        push(queue, Alone(), request(level=WatchedLevel(1), finish_by_ns=due_ns + classes // 2))
        assert taken.finish_by_ns == due_ns
        assert WatchedLevel.comparisons < 50


@interpreted_only
def test_counting_the_requests_of_a_level_visits_no_request() -> None:
    queue = known_queue()
    for key in "ab":
        push(queue, key, *[request(level=WatchedLevel(1)) for _ in range(1000)])
    WatchedLevel.comparisons = 0
    assert queue.requests(1) == 2000
    assert WatchedLevel.comparisons <= 1


def test_requests_of_a_level_are_counted_correctly() -> None:
    queue, rng = known_queue(), random.Random(0)
    for _ in range(300):
        key = rng.choice("ab")
        requests = queue.shape_class(key).requests
        match rng.choice(["push", "push", "take", "leave", "remove"]) if requests else "push":
            case "push":
                push(queue, key, request(level=rng.randint(1, 3), finish_by_ns=rng.randint(1, 9)))
            case "take":
                queue.take(queue.shape_class(key), rng.randint(1, 2))
            case "leave":
                assert queue.remove_one(rng.choice(requests))
            case "remove":
                queue.remove(queue.shape_class(key), requests[:2])
        orders = [shape_class.requests[0].order for shape_class in queue.classes() if shape_class.requests]
        assert [shape_class.requests[0].order for shape_class in queue.waiting] == sorted(orders)
        waiting = [one.level for shape_class in queue.classes() for one in shape_class.requests]
        assert [queue.requests(level) for level in (1, 2, 3, 4)] == [waiting.count(level) for level in (1, 2, 3, 4)]
