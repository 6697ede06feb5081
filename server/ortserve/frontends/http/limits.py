"""What one HTTP connection may cost before a request is whole, and how long its caller is waited for."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from ortserve.config.option_groups import HttpOptions


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Of each connection, but for the number of connections. Times are seconds.

    Attributes:
        max_connections: Of the port.
        max_headers: Of one request, trailers included.
        max_header_bytes: Of its request line and headers, and of what a chunked body brings beside its content.
        max_chunk_bytes: Of one chunk of a body.
        header_timeout_s: From the first byte of a request to the last of its headers.
        body_timeout_s: A body is whole in so long, or has come at the rate below in each such time.
        min_body_bytes_per_s: That rate.
        send_timeout_s: While its caller takes nothing of an answer.
        idle_timeout_s: Without a request.
        answers_half_closed: Whether requests that came whole before a FIN are answered.
    """

    max_connections: int
    max_headers: int
    max_header_bytes: int
    max_chunk_bytes: int
    header_timeout_s: float
    body_timeout_s: float
    min_body_bytes_per_s: int
    send_timeout_s: float
    idle_timeout_s: float
    answers_half_closed: bool = True

    @property
    def tick_s(self) -> float:
        """How often to look at a connection. One look notices a wait, another ends it, both up to a tick late: short
        bounds by half of them, longer ones by two seconds.
        """
        bounds = (self.header_timeout_s, self.body_timeout_s, self.send_timeout_s, self.idle_timeout_s)
        return max(0.01, min(1.0, *(bound / 4 for bound in bounds)))


def http_limits(options: HttpOptions, *, idle_timeout_s: float, max_body_bytes: int) -> HttpLimits:
    """The limits that the options ask for."""
    return HttpLimits(
        max_connections=options.http_max_connections,
        max_headers=options.http_max_headers,
        max_header_bytes=options.http_max_header_bytes,
        max_chunk_bytes=max_body_bytes,
        header_timeout_s=options.http_header_timeout_s,
        body_timeout_s=options.http_body_timeout_s,
        min_body_bytes_per_s=options.http_min_body_bytes_per_s,
        send_timeout_s=options.http_send_timeout_s,
        idle_timeout_s=idle_timeout_s,
        answers_half_closed=options.http_answer_half_closed,
    )


def header_bytes(url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Bytes of a URL and headers as they travel."""
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)


class Stage(Enum):
    """What a connection waits for."""

    REQUEST = auto()
    HEADERS = auto()
    BODY = auto()
    ANSWER = auto()
    """The server, or the caller to take what is sent."""


class Due(Enum):
    """What is to be done with a connection now."""

    NOTHING = auto()
    CLOSE = auto()
    REFUSE = auto()
    """Say that its request took too long, then close."""
    ABORT = auto()
    """Its caller takes nothing of what is sent."""


class Waiting:
    """Of one connection: how long its caller has kept it in a stage. Pure; asked now and then."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._stage: Stage | None = None
        self._subject: object = None
        self._since_ns = 0
        self._since_bytes = 0

    def look(self, now_ns: int, stage: Stage, subject: object, came_bytes: int, unsent_bytes: int) -> Due:
        """Say what is due.

        Args:
            now_ns: Monotonic.
            stage: What the connection waits for.
            subject: The request that it is about, by identity; another one begins another wait.
            came_bytes: All that ever came.
            unsent_bytes: Of answers, what the caller has not taken.
        """
        limits = self._limits
        if stage is Stage.ANSWER:
            # Nothing unsent: the server itself is waited for. Less than before: the caller takes it.
            goes_on = 0 < self._since_bytes <= unsent_bytes
            n_bytes = unsent_bytes
        else:
            goes_on = True
            n_bytes = came_bytes
        if not goes_on or stage is not self._stage or subject is not self._subject:
            self._begin(now_ns, stage, subject, n_bytes)
            return Due.NOTHING
        waited_s = (now_ns - self._since_ns) / 1e9
        if stage is Stage.HEADERS:
            return Due.REFUSE if waited_s >= limits.header_timeout_s else Due.NOTHING
        if stage is Stage.BODY:
            if waited_s < limits.body_timeout_s:
                return Due.NOTHING
            if came_bytes - self._since_bytes < waited_s * limits.min_body_bytes_per_s:
                return Due.REFUSE
            self._begin(now_ns, stage, subject, came_bytes)
            return Due.NOTHING
        if stage is Stage.ANSWER:
            return Due.ABORT if waited_s >= limits.send_timeout_s else Due.NOTHING
        return Due.CLOSE if waited_s >= limits.idle_timeout_s else Due.NOTHING

    def _begin(self, now_ns: int, stage: Stage, subject: object, n_bytes: int) -> None:
        self._stage, self._subject, self._since_ns, self._since_bytes = stage, subject, now_ns, n_bytes
