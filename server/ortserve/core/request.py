"""One inference request and its answer, the same for every protocol, and the interfaces of their encodings.

Codecs implement ``EncodedRequest`` and ``AnswerEncoder``, and the service calls them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from ortserve.core.large_memory import LargeMemory
from ortserve.core.region import RegionUse
from ortserve.core.tensor import Tensor

Parameter: TypeAlias = str | int | float | bool

Answer_co = TypeVar("Answer_co", covariant=True)


@dataclass(slots=True, init=False)
class RequestedOutput:
    """An output that the request lists.

    ``binary`` selects the encoding of REST; gRPC always answers raw bytes. ``classes``, if not 0, is the number of
    largest elements to return instead of the tensor.
    """

    name: Final[str]
    binary: Final[bool]
    classes: Final[int]

    def __init__(self, name: str, binary: bool = False, classes: int = 0) -> None:
        self.name = name
        self.binary = binary
        self.classes = classes


@dataclass(slots=True, init=False)
class InferRequest:
    """A decoded request; its names and shapes are not checked against the model yet.

    Attributes:
        model_version: The requested version; ``""`` if the server chooses it.
        inputs: The inputs in the request, without those in ``regions``.
        outputs: The requested outputs; empty for all outputs of the model.
        binary_output: Selects the encoding of REST for outputs that are not listed.
        raw_input: The bytes of the model's only input, whose name, datatype and shape the signature defines; ``inputs``
            are then empty.
        regions: The tensors in shared memory; None if there are none.
    """

    model_name: Final[str]
    model_version: Final[str]
    id: Final[str]
    inputs: Final[Sequence[Tensor]]
    outputs: Final[Sequence[RequestedOutput]]
    parameters: Final[Mapping[str, Parameter]]
    binary_output: Final[bool]
    raw_input: Final[bytes | memoryview | None]
    regions: Final[RegionUse | None]

    def __init__(
        self,
        model_name: str,
        model_version: str,
        id: str,  # noqa: A002 - the protocol's name for it
        inputs: Sequence[Tensor],
        outputs: Sequence[RequestedOutput],
        parameters: Mapping[str, Parameter],
        binary_output: bool = False,
        raw_input: bytes | memoryview | None = None,
        regions: RegionUse | None = None,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.inputs = inputs
        self.outputs = outputs
        self.parameters = parameters
        self.binary_output = binary_output
        self.raw_input = raw_input
        self.regions = regions


@dataclass(slots=True, init=False)
class InferResponse:
    """The answer: the version that ran, and the requested outputs in the requested order.

    ``in_regions`` names the outputs whose elements are in shared memory and not in the answer.
    """

    model_name: Final[str]
    model_version: Final[str]
    id: Final[str]
    outputs: Final[Sequence[Tensor]]
    in_regions: Final[Collection[str]]

    def __init__(
        self,
        model_name: str,
        model_version: str,
        id: str,  # noqa: A002 - as above
        outputs: Sequence[Tensor],
        in_regions: Collection[str] = (),
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.outputs = outputs
        self.in_regions = in_regions


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
    def body_bytes(self) -> int:
        """Size of the body."""
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
