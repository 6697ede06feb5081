"""The helper process that parses large JSON: it receives bodies and returns their tensors.

orjson holds the interpreter lock for a whole body, 20 ms per 1 MB, so neither the event loop nor a thread of the server
may parse a large body. orjson also aborts its process if memory runs out, which here ends the helper process instead of
the server. ``service/codec_threads`` starts this module.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ortserve.codecs.binary_tensor import decode_bytes_elements, encode_bytes_elements
from ortserve.codecs.bounds import MAX_JSON_HEAD_BYTES, too_many
from ortserve.codecs.embeddings import decode_embeddings_request
from ortserve.codecs.generate import decode_generate_request
from ortserve.codecs.json_text import LoadParameter, decode_load_body
from ortserve.codecs.rest import RestRequest
from ortserve.core.dtypes import DataType
from ortserve.core.helper_process import Parts, pack, serve, unpack
from ortserve.core.request import InferRequest, RequestedOutput
from ortserve.core.tensor import Tensor

_READERS: Final[dict[str, Callable[..., Parts]]] = {
    "infer": lambda *arguments: pack_request(RestRequest(*arguments).read()),
    "generate": lambda *arguments: pack_request(decode_generate_request(*arguments)),
    "embeddings": lambda body: pack_request(decode_embeddings_request(body)),
    "load": lambda body: _pack_load(decode_load_body(body)),
}


def pack_request(request: InferRequest) -> Parts:
    """Encode a request as parts: a pickled header, then the elements of each input as raw bytes.

    Raises:
        ServeError: invalid_input for too large a header.
    """
    small = (
        request.model_name,
        request.model_version,
        request.id,
        [(tensor.name, tensor.datatype, tensor.array.shape) for tensor in request.inputs],
        [(output.name, output.binary, output.classes) for output in request.outputs],
        dict(request.parameters),
        request.binary_output,
        request.regions,
    )
    head = pack(small)
    if len(head) > MAX_JSON_HEAD_BYTES:
        raise too_many("bytes of names, shapes and parameters", MAX_JSON_HEAD_BYTES)
    elements: Parts = []
    for tensor in request.inputs:
        if tensor.datatype is DataType.BYTES:
            elements.append(encode_bytes_elements(tensor.array))
        else:
            elements.append(np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data)
    return [head, *elements]


def _pack_load(parameters: dict[str, LoadParameter]) -> Parts:
    """Encode the parameters of a load call as parts: a pickled header, then the content of each file."""
    small = {name: None if isinstance(value, bytes) else value for name, value in parameters.items()}
    return [pack(small), *(value for value in parameters.values() if isinstance(value, bytes))]


def unpack_request(parts: Sequence[memoryview]) -> InferRequest:
    """Decode a request. Its arrays are views on ``parts``, except BYTES. Raises a ServeError of the helper process."""
    model, version, request_id, inputs, outputs, parameters, binary_output, regions = unpack(parts[0])
    tensors = []
    for (name, datatype, shape), elements in zip(inputs, parts[1:], strict=True):
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
        regions=regions,
    )


def unpack_load(parts: Sequence[memoryview]) -> dict[str, LoadParameter]:
    """Decode the parameters of a load call; files are views on ``parts``. Raises a ServeError of the helper process."""
    files = iter(parts[1:])
    return {name: next(files) if value is None else value for name, value in unpack(parts[0]).items()}


def _read(arguments: tuple[str, tuple[Any, ...]], body: memoryview) -> Parts:
    reader, further = arguments
    return _READERS[reader](body, *further)


def main() -> None:
    """Parse bodies from the server until it ends."""
    serve(_read, "parsing the JSON of a request")
