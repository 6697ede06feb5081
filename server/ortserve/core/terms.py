"""Scheduling of a request: its parameters, the terms that result, and the shape class of requests that run alone."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The parameters of a request that affect its place in a queue.

    Attributes:
        priority: 1 for the most urgent; 0, and values above the model's levels, for the model's default.
        queue_timeout_ns: Time limit of the wait in the queue; None for no limit.
    """

    priority: int = 0
    queue_timeout_ns: int | None = None


NO_SCHEDULING: Final = Scheduling()


@dataclass(slots=True, init=False)
class Terms:
    """Priority and deadlines of one request. Times are monotonic nanoseconds, None for no limit.

    Attributes:
        level: Priority level, 1 is the most urgent; 0 for the model's default.
        finish_by_ns: Deadline of the answer.
        start_by_ns: Deadline of the start of the run, which may then take any time.
        yields_when_late: At ``start_by_ns`` the request moves behind all others of its level instead of being rejected.
    """

    level: Final[int]
    finish_by_ns: Final[int | None]
    start_by_ns: Final[int | None]
    yields_when_late: Final[bool]

    def __init__(
        self,
        level: int = 0,
        finish_by_ns: int | None = None,
        start_by_ns: int | None = None,
        yields_when_late: bool = False,
    ) -> None:
        self.level = level
        self.finish_by_ns = finish_by_ns
        self.start_by_ns = start_by_ns
        self.yields_when_late = yields_when_late


NO_TERMS: Final = Terms()


class Alone:
    """The shape class of a request that must run alone. It is not equal to any other."""

    def __str__(self) -> str:
        return "alone"
