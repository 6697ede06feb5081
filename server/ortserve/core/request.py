"""One inference request and its answer, the same for every protocol and encoding."""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from ortserve.core.quick_dataclass import quick_dataclass
from ortserve.core.region import RegionUse
from ortserve.core.tensor import Tensor

Parameter: TypeAlias = str | int | float | bool


@quick_dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output the caller listed.

    ``binary`` says how REST encodes it; gRPC always answers raw bytes. ``classes``, where it is not 0, asks for so many
    of its largest elements in the place of the tensor.
    """

    name: str
    binary: bool = False
    classes: int = 0


@quick_dataclass(frozen=True, slots=True)
class InferRequest:
    """What a codec makes of a request's bytes; names and shapes are not yet checked against the model.

    ``model_version`` is ``""`` where the caller left the choice to the server. Empty ``outputs`` mean all outputs of
    the model, which REST encodes as ``binary_output`` says. ``raw_input`` holds the bytes of the model's only input,
    whose name, datatype and shape the caller left to the model's signature; ``inputs`` are empty then.
    Inputs that ``regions`` names are not among ``inputs``.
    """

    model_name: str
    model_version: str
    id: str
    inputs: Sequence[Tensor]
    outputs: Sequence[RequestedOutput]
    parameters: Mapping[str, Parameter]
    binary_output: bool = False
    raw_input: bytes | None = None
    regions: RegionUse | None = None


@quick_dataclass(frozen=True, slots=True)
class InferResponse:
    """The answer: the version that ran, and the requested outputs in the order they were requested.

    Of outputs that are ``placed``, by name, the caller finds the elements in shared memory and not in the answer.
    """

    model_name: str
    model_version: str
    id: str
    outputs: Sequence[Tensor]
    placed: Collection[str] = ()
