"""The interface of a rollout for the request path. This module is not compiled, because the subclass is not."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, TypeAlias

from ortserve.core.batch import Arrays
from ortserve.core.request import InferRequest
from ortserve.core.timing import Timing

Headers: TypeAlias = Iterable[tuple[Any, Any]]
"""Headers or metadata of a call: names in lower case and values, both ``bytes`` or ``str``."""


class Rollout(ABC):
    """Tries a candidate version with requests for the version to which the rollout is attached. Loop thread only."""

    is_canary: bool
    """Whether the candidate may answer requests."""

    @abstractmethod
    def candidate_for(self, request: InferRequest, headers: Headers) -> str:
        """The version number of the candidate if it should answer this request; otherwise empty."""

    @abstractmethod
    def observe(self, request: InferRequest, headers: Headers, outputs: Arrays, timing: Timing) -> None:
        """Record a request that the version has answered, with outputs in the form of clients.

        The outputs are not modified any more, and ``timing`` is complete up to ``computed_ns``.
        """

    @abstractmethod
    def candidate_answered(self, timing: Timing) -> None:
        """Record a request that the candidate has answered."""

    @abstractmethod
    def candidate_failed(self, error: Exception) -> None:
        """Record a request that the candidate rejected or failed, and that the version answered instead."""
