"""Interfaces of encoded requests and of encoders of answers, and the choice where a request is decoded."""

from enum import Enum, auto
from typing import Any, Protocol, TypeVar

from ortserve.core.large_memory import LargeMemory
from ortserve.core.request import InferRequest, InferResponse

Answer_co = TypeVar("Answer_co", covariant=True)


class DecodingPlace(Enum):
    """Where a request is decoded. Decoding on the event loop delays all other requests."""

    INLINE = auto()
    """On the event loop: the body is small, or its tensors become views."""
    THREAD = auto()
    """On a thread: numpy does the work without the interpreter lock, or the code releases it often."""
    PROCESS = auto()
    """In another process: the parser holds the interpreter lock until it has finished."""


class EncodedRequest(Protocol):
    """One request in the bytes of its protocol, from a frontend, which it can decode."""

    is_short: bool
    """Whether ``decoding_place`` is INLINE because the body is small."""
    model_name: str
    """Name of the model in the path; empty if only the body names it."""

    def decoding_place(self) -> DecodingPlace:
        """Where ``read`` must be called. Raises ServeError: invalid_input, for a malformed request."""
        ...

    @property
    def json_bytes(self) -> int:
        """Size of the JSON that ``read`` parses."""
        ...

    @property
    def growth_bytes(self) -> int:
        """Memory that ``read`` may use in addition to the body, unless it is called inline."""
        ...

    def read(self) -> InferRequest:
        """Decode the request. Raises ServeError: invalid_input, unsupported, too_large."""
        ...


class JsonRequest(EncodedRequest, Protocol):
    """A request that another process can decode."""

    def for_process(self) -> tuple[str, bytes | memoryview, tuple[Any, ...]]:
        """Name of the reader (``codecs/json_process``), body, and further picklable arguments of the reader."""
        ...


class AnswerEncoder(Protocol[Answer_co]):
    """Encodes answers in the protocol of a frontend."""

    def is_long(self, request: InferRequest, response: InferResponse) -> bool:
        """Whether ``encode`` takes too long for the event loop and must be called on a thread."""
        ...

    def encode(self, request: InferRequest, response: InferResponse, memory: LargeMemory | None = None) -> Answer_co:
        """Encode the answer to a request; a long one on a thread, into ``memory``.

        Raises:
            ServeError: invalid_input, for an answer that the protocol cannot represent.
        """
        ...
