"""gRPC inference requests: serialized ``ModelInferRequest`` to core. ``grpc_answer`` encodes the answers.

Both modules work on the bytes of the wire and keep raw tensors out of protobuf messages, whose byte fields are copies.
Raw tensors of a request are views on its bytes. Raw tensors of an answer are joined with its head once. Measured for
one FP32 tensor of 600 kB: parsing 28 -> 1.3 us, serializing 1,200 -> 18 us. The rest of a message, its head, is equal
in many calls, so parsed and encoded heads are cached, which saves about 4 us in a small call.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from ortserve._pb.grpc_service_pb2 import InferParameter, ModelInferRequest
from ortserve.codecs.binary_tensor import (
    BYTE_SIZE,
    OFFSET,
    REGION,
    decode_binary_tensor,
    read_span,
)
from ortserve.codecs.bounds import INLINE_BYTES, INLINE_FLAG_BYTES, INLINE_TEXTS, MIN_TEXT_BYTES
from ortserve.codecs.grpc_contents import decode_contents
from ortserve.codecs.grpc_wire import (
    USUAL_HEAD_BYTES,
    Contents,
    Parts,
    check_field_count,
    malformed,
    name_fields,
    split_request,
    split_small_request,
    usual_head,
)
from ortserve.core.dtypes import DATATYPES, DataType
from ortserve.core.region import RegionInput, RegionSpan, RegionUse
from ortserve.core.request import DecodingPlace, InferRequest, Parameter, RequestedOutput
from ortserve.core.tensor import MAX_DIMS, Tensor, format_shape, shape_fault
from ortserve.core.version_names import is_version
from ortserve.errors import ContentsError, ServeError, invalid_input

M = TypeVar("M", bound=Message)

_SHORT_BYTES: Final = 8 * 1024
"""Maximum size of messages that are decoded on the event loop without counting their parts first."""

_KEPT: Final = 1024
"""Maximum number of cached heads. The least recently used one is evicted first."""


@dataclass(frozen=True, slots=True)
class _Input:
    """An input as the head of a request declares it.

    ``position`` is the index among all inputs of the request. ``has_contents``: whether the head contains the typed
    contents of the input, which happens only in a request that also has raw contents.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    position: int
    has_contents: bool


@dataclass(frozen=True, slots=True)
class _Head:
    """A request without its id and contents. Many requests share a head, so it is immutable.

    ``inputs`` are the inputs whose elements are in the message. ``in_regions`` maps positions to the names of inputs in
    shared memory.
    """

    model: str
    version: str
    inputs: tuple[_Input, ...]
    in_regions: Mapping[int, str]
    outputs: tuple[RequestedOutput, ...]
    parameters: Mapping[str, Parameter]
    regions: RegionUse | None


class GrpcRequest:
    """A serialized ``ModelInferRequest``. An ``EncodedRequest``."""

    __slots__ = ("_data", "_parts", "is_short", "model_name")

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self._parts: Parts | None = None
        self.is_short = len(data) <= _SHORT_BYTES
        self.model_name = ""

    def decoding_place(self) -> DecodingPlace:
        """Choose the place to decode: a thread for many parts, BOOL values, and elements that do not become views."""
        data = self._data
        if len(data) <= INLINE_BYTES:
            parts = self._parts = split_small_request(data)
            if parts is None:
                return DecodingPlace.THREAD
            head_bytes, _, raw, _ = parts
            may_be_many = raw and len(data) > MIN_TEXT_BYTES * INLINE_TEXTS and b"BYTES" in head_bytes
            return DecodingPlace.INLINE if not may_be_many or _has_few_texts(head_bytes) else DecodingPlace.THREAD
        head = usual_head(data)
        if head is None or b"BYTES" in head or (b"BOOL" in head and len(data) > INLINE_FLAG_BYTES):
            return DecodingPlace.THREAD
        return DecodingPlace.INLINE

    @property
    def body_bytes(self) -> int:
        return len(self._data)

    @property
    def json_bytes(self) -> int:
        return 0

    @property
    def growth_bytes(self) -> int:
        """Memory that decoding may take: integers have 1 byte or more on the wire, and up to 8 bytes in memory."""
        head = usual_head(self._data)
        return 8 * len(self._data) if head is None or b"BYTES" in head else 0

    def read(self) -> InferRequest:
        """Decode the request. Tensors from raw contents are read-only views on the message.

        Raises:
            ServeError: invalid_input for a malformed message and for too many parts; too_large for too many texts.
        """
        head_bytes, request_id, raw, contents = self._parts or split_request(self._data)
        head = _cached_head(head_bytes) if len(head_bytes) <= USUAL_HEAD_BYTES else _parse_head(head_bytes)
        return InferRequest(
            head.model,
            head.version,
            request_id,
            _tensors(head, request_id, raw, contents),
            list(head.outputs),
            head.parameters,
            regions=head.regions,
        )


def read_names(data: bytes | memoryview) -> ModelInferRequest:
    """Read the id and names of a serialized ``ModelInferRequest``, for an error message.

    Never fails: for a malformed message the names are empty.
    """
    try:
        return parse_message(ModelInferRequest, name_fields(data))
    except (IndexError, ServeError):
        return ModelInferRequest()


def parse_message(message_type: type[M], data: bytes | memoryview) -> M:
    """Parse a message of any type.

    Raises:
        ServeError: invalid_input if ``data`` is malformed, or has more fields than any message needs.
    """
    if len(data) > USUAL_HEAD_BYTES:
        check_field_count(data, message_type.DESCRIPTOR.full_name)
    try:
        return message_type.FromString(data if isinstance(data, bytes) else bytes(data))
    except (DecodeError, UnicodeDecodeError):  # the Python implementation of protobuf raises the second one
        raise malformed(message_type.DESCRIPTOR.full_name) from None


def require_version(version: str) -> None:
    """Check a model version: decimal digits, a label, or empty for the choice of the server.

    Raises:
        ServeError: invalid_input for any other text. The message begins like the one of Triton.
    """
    if version and not is_version(version):
        raise invalid_input(
            f"failed to get model version from specified version string '{version}' (details: stol), "
            "version should be an integral value > 0 or a label"
        )


def _has_few_texts(head: bytes) -> bool:
    """Whether the event loop may decode the texts that a head declares. Raises ServeError: invalid_input."""
    if len(head) > USUAL_HEAD_BYTES:
        return False
    inputs = _cached_head(head).inputs
    return sum([prod(declared.shape) for declared in inputs if declared.datatype is DataType.BYTES]) <= INLINE_TEXTS


def _parse_head(data: bytes) -> _Head:
    message = parse_message(ModelInferRequest, data)
    model, version = message.model_name, message.model_version
    require_version(version)
    region_inputs: dict[int, RegionInput] = {}
    region_outputs: dict[str, RegionSpan] = {}
    return _Head(
        model,
        version,
        _inputs(message.inputs, model, region_inputs),
        {position: given.name for position, given in region_inputs.items()},
        _outputs(message.outputs, region_outputs),
        _parameters(message.parameters),
        RegionUse(list(region_inputs.values()), region_outputs) if region_inputs or region_outputs else None,
    )


_cached_head: Final = lru_cache(maxsize=_KEPT)(_parse_head)


def _inputs(
    entries: Sequence[ModelInferRequest.InferInputTensor], model: str, region_inputs: dict[int, RegionInput]
) -> tuple[_Input, ...]:
    """Check the declared inputs. Those in shared memory are added to ``region_inputs`` instead, by their position."""
    inputs: list[_Input] = []
    names: set[str] = set()
    for position, entry in enumerate(entries):
        name = entry.name
        if name in names:
            raise invalid_input(f"input '{name}' already exists in request")
        names.add(name)
        datatype = DATATYPES.get(entry.datatype)
        if datatype is None:
            raise invalid_input(
                f"input '{name}' for model '{model}' has the unknown datatype '{entry.datatype}': expected one of "
                f"{', '.join(DATATYPES)}"
            )
        shape = tuple(entry.shape)
        _check_shape(shape, name, model)
        has_contents = entry.HasField("contents")
        if entry.parameters:
            _check_reserved(entry.parameters)
            if REGION in entry.parameters:
                if has_contents:
                    raise _contents_and_region(name, model)
                span = read_span(_parameters(entry.parameters), f"input '{name}'")
                region_inputs[position] = RegionInput(name, datatype, shape, span)
                continue
        inputs.append(_Input(name, datatype, shape, position, has_contents))
    return tuple(inputs)


def _tensors(head: _Head, request_id: str, raw: Sequence[memoryview], contents: Contents) -> list[Tensor]:
    """Decode the elements of the inputs that ``head`` declares."""
    model = head.model
    tensors: list[Tensor] = []
    taken = 0
    for position in contents:
        if position in head.in_regions:
            raise _contents_and_region(head.in_regions[position], model)
    for declared in head.inputs:
        name, datatype, shape = declared.name, declared.datatype, declared.shape
        typed = contents.get(declared.position) if contents else None
        if typed is not None or declared.has_contents:
            if raw:
                raise invalid_input(
                    "contents field must not be specified when using raw_input_contents "
                    f"for '{name}' for model '{model}'"
                )
        elif taken == len(raw):
            raise invalid_input(f"unable to find data for input tensor '{name}' for model '{model}' in request.")
        try:
            if typed is not None:
                array = decode_contents(typed, datatype, shape, name, model)
            else:
                array = decode_binary_tensor(raw[taken], datatype, shape, name, model)
                taken += 1
        except ServeError as error:
            raise ContentsError(error, request_id, model, head.version) from None
        tensors.append(Tensor(name, datatype, array))
    if taken != len(raw):
        raise invalid_input(
            f"unexpected additional input data for model '{model}': "
            f"{len(raw) - taken} raw_input_contents belong to no input"
        )
    return tensors


def _contents_and_region(name: str, model: str) -> ServeError:
    return invalid_input(f"input '{name}' for model '{model}' has both contents and '{REGION}'")


def _check_shape(shape: tuple[int, ...], name: str, model: str) -> None:
    if shape and min(shape) < 0:
        raise invalid_input(
            f"All input dimensions should be specified for input '{name}' for model '{model}', "
            f"got {format_shape(shape)}"
        )
    if 0 in shape or len(shape) > MAX_DIMS:  # the size of the data limits all other shapes
        fault = shape_fault(shape)
        if fault is not None:
            raise invalid_input(f"input '{name}' for model '{model}' may have {fault}")


def _outputs(
    entries: Iterable[ModelInferRequest.InferRequestedOutputTensor], region_outputs: dict[str, RegionSpan]
) -> tuple[RequestedOutput, ...]:
    """Check the requested outputs. The regions of those in shared memory are added to ``region_outputs``."""
    outputs: list[RequestedOutput] = []
    names: set[str] = set()
    for entry in entries:
        name = entry.name
        if name in names:
            raise invalid_input(f"output '{name}' already exists in request")
        names.add(name)
        classes = 0
        if entry.parameters:
            _check_reserved(entry.parameters)
            classes = _classes(entry.parameters, name)
            if REGION in entry.parameters:
                region_outputs[name] = read_span(_parameters(entry.parameters), f"output '{name}'")
        outputs.append(RequestedOutput(name, classes=classes))
    return tuple(outputs)


def _classes(entries: Mapping[str, InferParameter], output: str) -> int:
    """Return the number of requested classes of an output; 0 if the request asks for the tensor."""
    if "classification" not in entries:
        return 0
    entry = entries["classification"]
    if entry.WhichOneof("parameter_choice") != "int64_param":
        raise invalid_input("invalid value type for 'classification' parameter, expected int64_param.")
    classes = entry.int64_param
    if classes < 1:
        raise invalid_input(
            f"invalid value for 'classification' parameter of output '{output}', expected 1 or more, got {classes}"
        )
    if REGION in entries:
        raise invalid_input(f"Output can't set both '{REGION}' and 'classification': '{output}'")
    return classes


_EMPTY_FINAL_RESPONSE: Final = "triton_enable_empty_final_response"

_PARAMETER_CHOICES: Final = {
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),
    "timeout": ("int64_param",),
    _EMPTY_FINAL_RESPONSE: ("bool_param",),
    REGION: ("string_param",),
    OFFSET: ("int64_param", "uint64_param"),
    BYTE_SIZE: ("int64_param", "uint64_param"),
}
"""Types of the parameters that the protocol defines; other parameters may have any type."""
_ALSO_ACCEPTED: Final = {"sequence_id": "uint64_param"}
"""Accepted types that error texts omit, because clients know these texts."""


def _parameters(entries: Mapping[str, InferParameter]) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    if not entries:
        return parameters
    _check_reserved(entries, _EMPTY_FINAL_RESPONSE)
    for key, entry in entries.items():
        choice = entry.WhichOneof("parameter_choice")
        expected = _PARAMETER_CHOICES.get(key)
        if choice is None or (expected is not None and choice not in expected and choice != _ALSO_ACCEPTED.get(key)):
            wanted = " or ".join(
                expected or ("bool_param", "int64_param", "string_param", "double_param", "uint64_param")
            )
            raise invalid_input(f"invalid value type for '{key}' parameter, expected {wanted}.")
        parameters[key] = getattr(entry, choice)
    return parameters


def _check_reserved(keys: Iterable[str], allowed: str = "") -> None:
    """Raise ServeError: invalid_input for a key of a parameter that the protocol reserves, other than ``allowed``."""
    for key in keys:
        if key.startswith("triton_") and key != allowed:
            raise invalid_input(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified: "
                f"'{key}'"
            )
