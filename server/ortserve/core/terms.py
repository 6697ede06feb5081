"""Scheduling terms of a request: priority and deadlines, and the shape class of requests that run alone."""

from dataclasses import dataclass
from typing import Final


@dataclass(slots=True, init=False)
class Terms:
    """Times are monotonic nanoseconds, None for no bound.

    Attributes:
        level: Priority, 1 first; 0 for the model's default.
        finish_by_ns: The caller has no use for an answer after this.
        start_by_ns: It must not wait in the queue beyond this; once it runs it may take as long as it takes.
        yields_when_late: One that does wait beyond it is not refused, but goes behind everybody of its level.
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
    """The key of one request that no other may join, whatever its shape. Equal to no other."""

    def __str__(self) -> str:
        return "alone"
