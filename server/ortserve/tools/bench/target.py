"""What a generator sends requests to, and the plan from which its process makes it. Plans travel as pickles."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from ortserve.core.batch import Arrays
from ortserve.tools.address import Address
from ortserve.tools.bench.samples import Ticket

if TYPE_CHECKING:
    from ortserve.tools.subject import Subject

WAYS: Final = ("run", "bound", "batcher")


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Requests that are sent in turns: over HTTP with their heads, over gRPC messages with their prefix.

    Attributes:
        address: Of the server.
        requests: As bytes.
        is_stream: Whether they go over ``ModelStreamInfer``.
        most_connections: At a time.
        sequence_length: Requests of a sequence; 0 for requests without one. ``requests`` are then the first, a middle
            and the last one of each caller.
    """

    address: Address
    requests: tuple[bytes, ...]
    is_stream: bool
    most_connections: int
    sequence_length: int = 0

    def request_of(self, number: int, callers: int | None) -> int:
        """Which request a ticket of this number sends; ``callers`` are those of a closed loop."""
        length = self.sequence_length
        if not length or not callers:
            return number % len(self.requests)
        turn, caller = divmod(number, callers)
        place = turn % length
        return 3 * caller + (2 if place == length - 1 else min(1, place))

    def next_number(self, number: int, callers: int, *, is_failed: bool) -> int:
        """The number of a caller's next request. After a failure it begins its next sequence."""
        turn, caller = divmod(number, callers)
        turn += 1
        if is_failed and self.sequence_length:
            turn += -turn % self.sequence_length
        return turn * callers + caller


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model, and the inputs of its runs, which are used in turns.

    Attributes:
        subject: The model on disk.
        way: One of ``WAYS``.
        provider: The only execution provider to use; None for the configured ones.
        threads: Of a run; None for the configured ones.
        inputs: Of each run, in the order of the signature, with their rows on axis 0; for the batcher, as clients send
            them.
        rows: Of each run.
    """

    subject: "Subject"
    way: str
    provider: str | None
    threads: int | None
    inputs: tuple[Arrays, ...]
    rows: int

    def request_of(self, number: int, callers: int | None) -> int:
        """As of a ``ServerPlan``."""
        return number % len(self.inputs)

    def next_number(self, number: int, callers: int, *, is_failed: bool) -> int:
        """As of a ``ServerPlan``."""
        return number + callers


Plan: TypeAlias = ServerPlan | ModelPlan


class Sink(Protocol):
    """Receives what became of each request, exactly once, on the loop's thread."""

    def answered(
        self, ticket: Ticket, done_ns: int, nbytes: int, timing: bytes | None = None, body: object = None
    ) -> None:
        """It was answered at ``done_ns``; ``timing`` is the server's own account, ``body`` what the ticket wants."""
        ...

    def failed(self, ticket: Ticket, done_ns: int, kind: str, example: str) -> None:
        """It was rejected, lost or wrong."""
        ...


class Target(ABC):
    """Sends prepared requests. Loop thread only.

    Attributes:
        sink: Set before the first ``send``.
    """

    sink: Sink

    @abstractmethod
    async def open(self, count: int) -> None:
        """Prepare for so many requests at a time. Raises OSError or ServeError."""

    @abstractmethod
    def send(self, ticket: Ticket) -> None:
        """Send one request and return; never raises."""

    @abstractmethod
    def expire(self, sent_before_ns: int) -> None:
        """Fail the requests that were sent earlier and have no answer."""

    @abstractmethod
    async def close(self) -> None:
        """Close connections, or free the model."""

    def batches(self) -> dict[int, int]:
        """Sizes and numbers of the batches that ran in this process so far; empty if they run elsewhere."""
        return {}
