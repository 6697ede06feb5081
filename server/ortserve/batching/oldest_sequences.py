"""The strategy ``oldest``: enqueues each request in the batcher when its turn comes.

The batcher batches requests of different sequences.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from ortserve.batching.sequence_table import Turn
from ortserve.batching.sequences import SequenceRuns
from ortserve.core.inflight import QUEUED, InflightRequest, Terms

Enqueue: TypeAlias = Callable[[InflightRequest, Terms], object]
"""Enqueues the run of one request of the model; raises ServeError if it is rejected."""


class OldestRuns:
    """Enqueues each request in the batcher when its turn comes. Loop thread only."""

    def __init__(self, runs: SequenceRuns, enqueue: Enqueue) -> None:
        self._runs: Final = runs
        self._enqueue: Final = enqueue

    def run(self, turn: Turn) -> None:
        child = turn.request.child(turn.inputs, 1)
        child.on_settled = partial(self._on_settled, turn)
        turn.run = child
        try:
            self._enqueue(child, turn.terms)
        except BaseException:
            child.on_settled = turn.run = None
            raise
        child.timing.queued_ns = turn.arrived_ns  # the queue time counts from the arrival of the request

    def withdraw(self, turn: Turn) -> bool:
        child = turn.run
        if child is None or child.state > QUEUED:
            return False
        child.on_settled = None
        child.cancel()
        return True

    @property
    def waiting_rows(self) -> int:
        return 0

    def end_delays(self) -> None:
        pass

    def _on_settled(self, turn: Turn, child: InflightRequest) -> None:
        turn.run = None
        try:
            outputs = child.take_outputs()
        except BaseException as error:  # noqa: BLE001 - the error of the run, which is passed on
            self._runs.on_failed(turn, error)
        else:
            self._runs.on_computed(turn, outputs)
