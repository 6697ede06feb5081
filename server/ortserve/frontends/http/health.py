"""What health probes are told: on the HTTP port, and on the metrics port, which answers on threads of its own.

The metrics port has it for probes that cannot come by the HTTP port, because it asks for a client's certificate or
callers have all its connections.
"""

import asyncio
from concurrent.futures import Future
from typing import Final, Literal, Protocol

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.answers import Answer, Header, failure

_JSON: Final[tuple[Header, ...]] = ((b"content-type", b"application/json"),)

_PATIENCE_S: Final = 10.0
"""For the event loop, from another thread; probes themselves wait less."""

Question = Literal["live", "ready"]


class Readiness(Protocol):
    """Who knows; on the loop."""

    @property
    def is_exiting(self) -> bool: ...
    @property
    def lost(self) -> str: ...
    def is_ready(self) -> bool: ...


def answer_health(models: Readiness, question: Question) -> Answer:
    """Say on the loop whether the server is of use, or whether it should be sent requests."""
    if models.is_exiting or models.lost:
        return failure(ServeError(ErrorKind.NOT_READY, "Server exiting" if models.is_exiting else models.lost))
    if question == "live":
        return Answer(200, b'{"live":true}', _JSON)
    return Answer(200, b'{"ready":true}', _JSON) if models.is_ready() else Answer(400, b'{"ready":false}', _JSON)


class HealthFromThreads:
    """Asks the loop, so that a loop that is stuck is not live here either."""

    def __init__(self, models: Readiness, loop: asyncio.AbstractEventLoop) -> None:
        self._models = models
        self._loop = loop

    def answer(self, path: str) -> tuple[int, bytes] | None:
        """Status and JSON for the paths of both questions, whatever their queries; None for any other path.

        From any thread but the loop's.
        """
        question: Question
        match path.partition("?")[0]:
            case "/v2/health/live":
                question = "live"
            case "/v2/health/ready":
                question = "ready"
            case _:
                return None
        future: Future[Answer] = Future()
        self._loop.call_soon_threadsafe(lambda: future.set_result(answer_health(self._models, question)))
        try:
            answer = future.result(_PATIENCE_S)
        except TimeoutError:
            answer = failure(ServeError(ErrorKind.NOT_READY, f"the event loop did not answer within {_PATIENCE_S:g} s"))
        return answer.status, bytes(answer.body)
