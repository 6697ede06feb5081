"""Requests in the bytes of their protocol, answers that are to be spelled in it, and where that is to happen."""

from enum import Enum, auto
from typing import Any, Protocol, TypeVar

from ortserve.core.large_memory import LargeMemory
from ortserve.core.request import InferRequest, InferResponse

Answer_co = TypeVar("Answer_co", covariant=True)


class Reading(Enum):
    """Where a request is read. Reading on the event loop delays all other callers."""

    INLINE = auto()
    """On the event loop: the bytes are few, or become views."""
    THREAD = auto()
    """On a thread: numpy does the work, or the code gives way to the event loop."""
    PROCESS = auto()
    """In another process: the parser keeps the interpreter lock until it has read all."""


class EncodedRequest(Protocol):
    """What a frontend hands over: the bytes of one request and how to read them."""

    is_short: bool
    """Whether ``reading`` is INLINE for its few bytes alone."""

    def reading(self) -> Reading:
        """Where ``read`` is to be called. Raises ServeError: invalid_input, for what is no request."""
        ...

    @property
    def json_bytes(self) -> int:
        """Of JSON that ``read`` parses."""
        ...

    @property
    def growth_bytes(self) -> int:
        """Memory that ``read`` may take beside the bytes, unless it is called inline."""
        ...

    def read(self) -> InferRequest:
        """Read the request. Raises ServeError: invalid_input, unsupported, too_large."""
        ...


class JsonRequest(EncodedRequest, Protocol):
    """A request that another process can read."""

    def for_process(self) -> tuple[str, bytes | memoryview, tuple[Any, ...]]:
        """The name of its reader (``codecs/json_process``), its body, and the reader's further arguments, picklable."""
        ...


class AnswerEncoder(Protocol[Answer_co]):
    """How a frontend spells answers."""

    def is_long(self, request: InferRequest, response: InferResponse) -> bool:
        """Whether ``encode`` takes too long for the event loop. It then gives way to others on a thread."""
        ...

    def encode(self, request: InferRequest, response: InferResponse, memory: LargeMemory | None = None) -> Answer_co:
        """Spell the answer to a request; a long one on a thread, and in ``memory``.

        Raises:
            ServeError: invalid_input, for an answer that the protocol cannot carry.
        """
        ...
