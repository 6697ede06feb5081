"""Riders that wait, in a queue for each shape class, so that no request is flushed or held by a stranger's shape."""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from operator import attrgetter
from typing import Final

from ortserve.batching.echo import EchoProfile
from ortserve.batching.latency import LatencyModel, known_ns
from ortserve.batching.riders import Rider
from ortserve.core.terms import Alone

MAX_CLASSES: Final = 64
"""Shape classes whose learning is kept while nobody of them waits; the least recently used is forgotten first."""
OPEN_DUE_RUNS: Final = 10
"""A request without a deadline counts as due after this many full batches, so that deadlines cannot starve it."""

_PATIENCE_BATCHES: Final = 16
_MOST_OF_RUN: Final = 1000.0
"""Runs count nearly as they were seen: of a model that has become slow, the second is not on the loop any more."""

_order = attrgetter("order")


class ShapeClass:
    """Requests of one shape: who waits, in the order of going, and how long their batches take.

    Attributes:
        riders: By priority level, then by when they are due; in order of arrival where none has a deadline.
        rows: Rows of them all.
        batch_latency: Of a batch, from being chosen to its answers being ready on the loop.
        run_latency: Of the model alone, which decides about runs on the event loop.
        echo: How soon callers come back, and the wait for them.
        runs_alone: Whether it is the class of one request, which is run as it is, whatever its size.
        takes_one_row: Whether the model is known to run a single row of this shape. What it refuses alone it may take
            among others, and mix with them.
    """

    __slots__ = (
        "_last_open_due_ns",
        "_open",
        "_patience",
        "_patience_until",
        "batch_latency",
        "echo",
        "key",
        "riders",
        "rows",
        "run_latency",
        "runs_alone",
        "takes_one_row",
    )

    def __init__(
        self, key: Hashable, batch_latency: LatencyModel, run_latency: LatencyModel, *, takes_one_row: bool = True
    ) -> None:
        self.key = key
        # A list: taking from its front moves some kilobytes at most, and anybody is found in it by the order.
        self.riders: list[Rider] = []
        self.rows = 0
        self.batch_latency = batch_latency
        self.run_latency = run_latency
        self.echo = EchoProfile()
        self.runs_alone = isinstance(key, Alone)
        self.takes_one_row = takes_one_row
        self._last_open_due_ns = 0.0
        self._open = 0
        self._patience = 0.0
        self._patience_until = -1

    def push(self, rider: Rider, max_rows: int) -> None:
        """Let a rider wait, at its place in the order."""
        if rider.finish_by_ns is not None:
            rider.due_ns = float(rider.finish_by_ns)
        else:
            # Never before one that waits since earlier on the same terms, whatever was learned in between.
            last_ns = self._last_open_due_ns if self._open else 0.0
            rider.due_ns = max(rider.timing.queued_ns + self._patience_ns(max_rows), last_ns)
            self._last_open_due_ns = rider.due_ns
            self._open += 1
        self.rows += rider.rows
        riders = self.riders
        if not riders or rider.order >= riders[-1].order:
            riders.append(rider)
        else:
            insort(riders, rider, key=_order)

    def count_out(self, rows: int, without_deadline: int) -> None:
        """Note that riders were removed, who have so many rows together and of whom so many have no deadline."""
        self.rows -= rows
        self._open -= without_deadline
        if not self.riders:
            self.echo.abandon_wait()

    def _patience_ns(self, max_rows: int) -> float:
        """How long a request without a deadline may be overtaken; looked at anew once in a few batches."""
        observations = self.batch_latency.observations
        if self._patience_until < observations:
            self._patience_until = observations + _PATIENCE_BATCHES
            self._patience = OPEN_DUE_RUNS * known_ns(self.batch_latency.predict_ns(max_rows))
        return self._patience

    def rows_ahead(self, order: tuple[int, float]) -> int:
        """Rows that go before somebody of this order."""
        riders = self.riders
        if not riders or riders[-1].order <= order:
            return self.rows
        ahead = bisect_right(riders, order, key=_order)
        if ahead < len(riders) // 2:
            return sum([rider.rows for rider in riders[:ahead]])
        return self.rows - sum([rider.rows for rider in riders[ahead:]])


class RiderQueue:
    """All shape classes of a model; the one whose head is due first goes first. Loop thread only."""

    def __init__(
        self,
        known_batches: Iterable[tuple[int, float]] = (),
        known_runs: Iterable[tuple[int, float]] = (),
        *,
        tries_one_row: bool = False,
        tried: Iterable[Hashable] = (),
    ) -> None:
        """Make an empty queue.

        Args:
            known_batches: What warm-up measured, rows and nanoseconds: every new shape class begins with it.
            known_runs: Likewise, of runs.
            tries_one_row: Whether requests of a new shape class share no batch until one row of it ran.
            tried: Shape classes of which one row ran in warm-up.
        """
        self._tries_one_row = tries_one_row
        self._tried = frozenset(tried)
        self._known_batches = tuple(known_batches)
        self._known_runs = tuple(known_runs)
        self._classes: OrderedDict[Hashable, ShapeClass] = OrderedDict()
        self._waiting: dict[Hashable, ShapeClass] = {}
        self._requests: dict[int, int] = {}
        self.rows = 0
        """Rows that wait."""
        self.nbytes = 0
        """Bytes of their tensors."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def shape_class(self, key: Hashable) -> ShapeClass:
        """The class of a shape, made where it is new; then one that nobody waits in may be forgotten."""
        known = self._classes.get(key)
        if known is None:
            known = self._classes[key] = ShapeClass(
                key,
                LatencyModel(self._known_batches),
                LatencyModel(self._known_runs, most=_MOST_OF_RUN),
                takes_one_row=not self._tries_one_row or key in self._tried,
            )
            self._forget_idle(known)
        elif len(self._classes) > 1:
            self._classes.move_to_end(key)
        return known

    def _forget_idle(self, kept: ShapeClass | None = None) -> None:
        over = len(self._classes) - MAX_CLASSES
        if over > 0:
            idle = (key for key, other in self._classes.items() if not other.riders and other is not kept)
            for key in list(islice(idle, over)):
                del self._classes[key]

    def push(self, shape_class: ShapeClass, rider: Rider, max_rows: int) -> None:
        shape_class.push(rider, max_rows)
        self._waiting[shape_class.key] = shape_class
        self.rows += rider.rows
        self.nbytes += rider.nbytes
        self._requests[rider.level] = self._requests.get(rider.level, 0) + 1

    def waiting(self) -> list[ShapeClass]:
        """The classes that somebody waits in, the one whose head goes first first."""
        if len(self._waiting) == 1:
            return list(self._waiting.values())
        return sorted(self._waiting.values(), key=lambda shape_class: shape_class.riders[0].order)

    def classes(self) -> list[ShapeClass]:
        """Every class that is known, used last last."""
        return list(self._classes.values())

    def requests(self, level: int) -> int:
        """How many wait on a priority level, in constant time."""
        return self._requests.get(level, 0)

    def strangers(self, shape_class: ShapeClass) -> Iterable[ShapeClass]:
        """The other classes that somebody waits in, in no order that means anything."""
        return (other for other in self._waiting.values() if other is not shape_class)

    def take(self, shape_class: ShapeClass, count: int) -> Sequence[Rider]:
        """Remove and return the first ``count`` riders of a class."""
        riders = shape_class.riders
        taken = riders[:count]
        del riders[:count]
        self._count_out(shape_class, taken)
        return taken

    def remove(self, shape_class: ShapeClass, gone: Sequence[Rider]) -> None:
        """Remove riders of a class, at least one, in the order in which they stand in it."""
        riders = shape_class.riders
        first, after = riders.index(gone[0]), riders.index(gone[-1]) + 1
        leaving = set(gone)
        riders[first:after] = [rider for rider in riders[first:after] if rider not in leaving]
        self._count_out(shape_class, gone)

    def leave(self, rider: Rider) -> bool:
        """Remove one rider, wherever it stands; False when it does not wait any more."""
        shape_class = self._waiting.get(rider.key)
        if shape_class is None:
            return False
        riders, order = shape_class.riders, rider.order
        first = bisect_left(riders, order, key=_order)
        try:
            index = riders.index(rider, first, bisect_right(riders, order, lo=first, key=_order))
        except ValueError:
            return False
        del riders[index]
        self._count_out(shape_class, (rider,))
        return True

    def _count_out(self, shape_class: ShapeClass, gone: Iterable[Rider]) -> None:
        rows = nbytes = without_deadline = 0
        for rider in gone:
            rows += rider.rows
            nbytes += rider.nbytes
            without_deadline += rider.finish_by_ns is None
            self._requests[rider.level] -= 1
        self.rows -= rows
        self.nbytes -= nbytes
        shape_class.count_out(rows, without_deadline)
        if not shape_class.riders:
            del self._waiting[shape_class.key]
            self._forget_idle()
