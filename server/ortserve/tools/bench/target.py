"""What a generator sends requests to."""

from typing import Final, Protocol, runtime_checkable

from ortserve.tools.bench.samples import Ticket


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


@runtime_checkable
class Target(Protocol):
    """Sends prepared requests. Loop thread only.

    Attributes:
        sink: Set before the first ``send``.
    """

    sink: Sink

    async def open(self, count: int) -> None:
        """Prepare for so many requests at a time. Raises OSError or ServeError."""
        ...

    def send(self, ticket: Ticket) -> None:
        """Send one request and return; never raises."""
        ...

    def expire(self, sent_before_ns: int) -> None:
        """Fail the requests that were sent earlier and have no answer."""
        ...

    def batches(self) -> dict[int, int]:
        """Sizes and numbers of the batches that ran in this process so far; empty if they run elsewhere."""
        ...

    async def close(self) -> None:
        """Close connections, or free the model."""
        ...


class _Nowhere:
    """Before a target is used."""

    def answered(
        self, ticket: Ticket, done_ns: int, nbytes: int, timing: bytes | None = None, body: object = None
    ) -> None:
        raise AssertionError

    def failed(self, ticket: Ticket, done_ns: int, kind: str, example: str) -> None:
        raise AssertionError


NOWHERE: Final[Sink] = _Nowhere()
