"""One inference request and its answer, the same for every protocol and encoding."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ortserve.core.region import RegionUse
from ortserve.core.tensor import Tensor

Parameter: TypeAlias = str | int | float | bool


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

    ``placed`` names the outputs whose elements are in shared memory and not in the answer.
    """

    model_name: Final[str]
    model_version: Final[str]
    id: Final[str]
    outputs: Final[Sequence[Tensor]]
    placed: Final[Collection[str]]

    def __init__(
        self,
        model_name: str,
        model_version: str,
        id: str,  # noqa: A002 - as above
        outputs: Sequence[Tensor],
        placed: Collection[str] = (),
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.outputs = outputs
        self.placed = placed
