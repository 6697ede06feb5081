"""Targets of a load, and the pickled plans from which a generator process makes them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ortserve.core.batch import Arrays
from ortserve.tools.address import Address
from ortserve.tools.bench.outcomes import Recorder, Ticket

if TYPE_CHECKING:
    from ortserve.tools.subject import Subject


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A server and the encoded requests to send to it in turn.

    Attributes:
        address: The address of the server.
        requests: Whole HTTP requests, or gRPC messages with their 5-byte prefix.
        is_stream: Whether gRPC requests use ``ModelStreamInfer``.
        max_connections: Limit of open connections.
        sequence_length: The number of requests of a sequence; 0 if requests do not belong to sequences. For sequences,
            ``requests`` has three per caller: the first, a middle and the last request.
    """

    address: Address
    requests: tuple[bytes, ...]
    is_stream: bool
    max_connections: int
    sequence_length: int = 0

    def request_of(self, number: int, callers: int | None) -> int:
        """The index of the request that ticket ``number`` sends. ``callers`` is None in an open loop."""
        length = self.sequence_length
        if not length or not callers:
            return number % len(self.requests)
        turn, caller = divmod(number, callers)
        place = turn % length
        return 3 * caller + (2 if place == length - 1 else min(1, place))

    def next_number(self, number: int, callers: int, *, is_failed: bool) -> int:
        """The number of a caller's next ticket. After a failure the caller begins its next sequence."""
        turn, caller = divmod(number, callers)
        turn += 1
        if is_failed and self.sequence_length:
            turn += -turn % self.sequence_length
        return turn * callers + caller


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model to run in the generator's process, and the inputs of its runs, used in turn.

    Attributes:
        subject: The model on disk.
        way: One of ``arguments.WAYS``.
        provider: The only execution provider to use; None for the configured ones.
        threads: Threads of a run; None for the configured number.
        inputs: The inputs of each run, in the order of the signature, with their rows on axis 0. For the way
            ``batcher``, as clients send them.
        rows: Rows of each run.
    """

    subject: "Subject"
    way: str
    provider: str | None
    threads: int | None
    inputs: tuple[Arrays, ...]
    rows: int

    def request_of(self, number: int, callers: int | None) -> int:
        return number % len(self.inputs)

    def next_number(self, number: int, callers: int, *, is_failed: bool) -> int:
        return number + callers


Plan: TypeAlias = ServerPlan | ModelPlan


class Target(ABC):
    """Sends prepared requests. Used on the thread of the event loop only.

    Attributes:
        sink: Gets exactly one call of ``answered`` or ``failed`` for each request, on the thread of the event loop. Set
            before the first ``send``.
    """

    sink: Recorder

    @abstractmethod
    async def open(self, count: int) -> None:
        """Prepare for ``count`` concurrent requests. Raises OSError or ServeError."""

    @abstractmethod
    def send(self, ticket: Ticket) -> None:
        """Send one request without waiting for its answer. Never raises."""

    @abstractmethod
    def expire(self, sent_before_ns: int) -> None:
        """Fail unanswered requests that were sent before this time."""

    @abstractmethod
    async def close(self) -> None:
        """Close connections, or free the model."""

    def batches(self) -> dict[int, int]:
        """Counts of the batches that ran in this process so far, by rows; empty if batches run elsewhere."""
        return {}
