"""The process that parses large JSON for the server: it receives bodies on a socket and returns their tensors.

orjson holds the interpreter lock for a whole body, 20 ms per 1 MB, so neither the event loop nor a thread of the server
may parse a large one. orjson also aborts the process if memory runs out; that ends this process instead of the server.
``service/codec_threads`` starts this module and owns the other end of the socket.
"""

import contextlib
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ortserve.codecs.binary_tensor import decode_bytes_elements, encode_bytes_elements
from ortserve.codecs.bounds import INLINE_BYTES
from ortserve.codecs.generate import decode_generate_request
from ortserve.codecs.json_text import LoadParameter, decode_load_body
from ortserve.codecs.rest import RestRequest
from ortserve.core.dtypes import DATATYPES, DataType
from ortserve.core.large_memory import LargeMemory
from ortserve.core.region import RegionInput, RegionSpan, RegionUse
from ortserve.core.request import InferRequest, RequestedOutput
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import Tensor
from ortserve.errors import ContentsError, ErrorKind, ServeError, out_of_memory

_COUNT: Final = struct.Struct("<I")
_NICENESS: Final = 5
"""Small requests, which the server parses itself, take precedence over large ones."""
_OOM_SCORE: Final = b"500"
"""If memory runs out, the kernel kills this process instead of the server."""


def _read_generate(
    body: memoryview, model: str, version: str, inputs: list[tuple[str, str, tuple[int, ...]]], is_stream: bool
) -> InferRequest:
    specs = [TensorSpec(name, DATATYPES[datatype], shape) for name, datatype, shape in inputs]
    return decode_generate_request(body, model, version, specs, is_stream=is_stream)


_READERS: Final[dict[str, Callable[..., list[bytes | memoryview]]]] = {
    "infer": lambda *arguments: pack_request(RestRequest(*arguments).read()),
    "generate": lambda *arguments: pack_request(_read_generate(*arguments)),
    "load": lambda body: _pack_load(decode_load_body(body)),
}


def send_parts(connection: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """Send byte strings with their sizes. Blocks."""
    sizes = [len(part) for part in parts]
    connection.sendall(struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
    for part in parts:
        connection.sendall(part)


def receive_parts(connection: socket.socket, memory: LargeMemory | None = None) -> list[memoryview]:
    """Receive the parts of ``send_parts``; large ones into ``memory``. Blocks.

    Raises:
        EOFError: The other end closed the socket.
    """
    (count,) = _COUNT.unpack(_receive(connection, _COUNT.size))
    sizes = struct.unpack(f"<{count}Q", _receive(connection, 8 * count))
    return [_receive(connection, size, memory if size > INLINE_BYTES else None) for size in sizes]


def _receive(connection: socket.socket, size: int, memory: LargeMemory | None = None) -> memoryview:
    room = np.empty(size, np.uint8).data if memory is None else memory.take(size)
    came = 0
    while came < size:
        count = connection.recv_into(room[came:], 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError
        came += count
    return room


def pack_request(request: InferRequest) -> list[bytes | memoryview]:
    """Encode a request as parts: a pickled header, then the elements of each input, BYTES in their binary form."""
    regions = request.regions
    small = (
        request.model_name,
        request.model_version,
        request.id,
        [(tensor.name, tensor.datatype.value, tensor.array.shape) for tensor in request.inputs],
        [(output.name, output.binary, output.classes) for output in request.outputs],
        dict(request.parameters),
        request.binary_output,
        None if regions is None else ([_pack_region(given) for given in regions.inputs], _spans(regions)),
    )
    elements: list[bytes | memoryview] = []
    for tensor in request.inputs:
        if tensor.datatype is DataType.BYTES:
            elements.append(encode_bytes_elements(tensor.array))
        else:
            elements.append(np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data)
    return [pickle.dumps((True, small)), *elements]


def _pack_load(parameters: dict[str, LoadParameter]) -> list[bytes | memoryview]:
    """Encode the parameters of a load as parts: a pickled header, then the content of each file."""
    small = {name: None if isinstance(value, bytes) else value for name, value in parameters.items()}
    return [pickle.dumps((True, small)), *(value for value in parameters.values() if isinstance(value, bytes))]


def pack_error(error: ServeError) -> list[bytes | memoryview]:
    """Encode an error as one part."""
    request = (error.request_id, error.model, error.model_version) if isinstance(error, ContentsError) else None
    return [pickle.dumps((False, (error.kind.value, error.message, error.retry_after_s, request)))]


def unpack_request(parts: Sequence[memoryview]) -> InferRequest:
    """Decode a request, with arrays as views on ``parts``. Raises the ServeError that was packed instead."""
    model, version, request_id, inputs, outputs, parameters, binary_output, regions = _small(parts)
    tensors = []
    for (name, datatype_name, shape), elements in zip(inputs, parts[1:], strict=True):
        datatype = DATATYPES[datatype_name]
        if datatype is DataType.BYTES:
            array = decode_bytes_elements(elements, shape, name)
        else:
            array = np.frombuffer(elements, datatype.numpy).reshape(shape)
        tensors.append(Tensor(name, datatype, array))
    return InferRequest(
        model,
        version,
        request_id,
        tensors,
        [RequestedOutput(*output) for output in outputs],
        parameters,
        binary_output,
        regions=None if regions is None else _unpack_regions(*regions),
    )


def unpack_load(parts: Sequence[memoryview]) -> dict[str, LoadParameter]:
    """Decode the parameters of a load. Raises the ServeError that was packed instead."""
    files = iter(parts[1:])
    return {name: bytes(next(files)) if value is None else value for name, value in _small(parts).items()}


def _small(parts: Sequence[memoryview]) -> Any:
    """Decode the header. Raises the ServeError that was packed instead."""
    is_read, small = pickle.loads(parts[0])  # noqa: S301 - from our own process, over a socket pair
    if not is_read:
        raise _unpack_error(*small)
    return small


def _unpack_error(
    kind: str, message: str, retry_after_s: float | None, request: tuple[str, str, str] | None
) -> ServeError:
    error = ServeError(ErrorKind(kind), message, retry_after_s=retry_after_s)
    return error if request is None else ContentsError(error, *request)


def _pack_region(given: RegionInput) -> tuple[Any, ...]:
    span = given.span
    return given.name, given.datatype.value, given.shape, (span.region, span.offset, span.byte_size)


def _spans(regions: RegionUse) -> dict[str, tuple[str, int, int]]:
    return {name: (span.region, span.offset, span.byte_size) for name, span in regions.outputs.items()}


def _unpack_regions(inputs: list[tuple[Any, ...]], outputs: dict[str, tuple[str, int, int]]) -> RegionUse:
    return RegionUse(
        [RegionInput(name, DATATYPES[datatype], shape, RegionSpan(*span)) for name, datatype, shape, span in inputs],
        {name: RegionSpan(*span) for name, span in outputs.items()},
    )


def _answer(parts: Sequence[memoryview]) -> list[bytes | memoryview]:
    reader, arguments = pickle.loads(parts[0])  # noqa: S301 - as above
    try:
        return _READERS[reader](parts[1], *arguments)
    except ServeError as error:
        return pack_error(error)
    except MemoryError:
        return pack_error(out_of_memory("parsing the JSON of a request"))


def main() -> None:
    """Serve until the server closes its end. Ignores stop signals, which may be sent to the whole process group."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_OOM_SCORE)
    connection = socket.socket(fileno=int(sys.argv[1]))
    memory = LargeMemory()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            send_parts(connection, _answer(receive_parts(connection, memory)))
