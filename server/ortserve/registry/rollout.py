"""What the path of requests knows of a rollout. Not compiled, because its subclass is not."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, TypeAlias

from ortserve.core.batch import Arrays
from ortserve.core.request import InferRequest
from ortserve.core.timing import Timing

Headers: TypeAlias = Iterable[tuple[Any, Any]]
"""Headers or metadata of a call: names in lower case and values, both ``bytes`` or ``str``."""


class Rollout(ABC):
    """Tries a candidate with requests for the version that it is attached to. Loop thread only."""

    is_canary: bool
    """Whether the candidate may answer requests."""

    @abstractmethod
    def candidate_for(self, request: InferRequest, headers: Headers) -> str:
        """The number of the candidate, if it should answer this request; otherwise empty."""

    @abstractmethod
    def observe(self, request: InferRequest, headers: Headers, outputs: Arrays, timing: Timing) -> None:
        """Note a request that the version has answered.

        Args:
            request: As the caller sent it.
            headers: Of its call.
            outputs: As clients see them; nothing writes to them any more.
            timing: Of the request, up to ``computed_ns``.
        """

    @abstractmethod
    def candidate_answered(self, timing: Timing) -> None:
        """Note a request that the candidate has answered."""

    @abstractmethod
    def candidate_failed(self, error: Exception) -> None:
        """Note a request that the candidate rejected or failed, and that the version has answered."""
