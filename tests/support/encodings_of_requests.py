"""The four encodings of one inference request, each as its own clients write it; answers are arrays by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import httpx
import ml_dtypes
import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2, service_pb2_grpc

from servers import LONG_S, ServerProcess, json_input, rest_url, wire_datatype
from wire import TYPED_FIELDS

Arrays: TypeAlias = Mapping[str, np.ndarray]
Infer: TypeAlias = Callable[[ServerProcess, str, Arrays], dict[str, np.ndarray]]

_NUMPY: Final[Mapping[str, npt.DTypeLike]] = {
    "FP16": "float16",
    "BF16": ml_dtypes.bfloat16,
    "FP32": "float32",
    "FP64": "float64",
    "BYTES": "object",
}


def rest_json(server: ServerProcess, model: str, inputs: Arrays) -> dict[str, np.ndarray]:
    """JSON in both directions."""
    document = {"inputs": [json_input(name, array) for name, array in inputs.items()]}
    answer = httpx.post(rest_url(server, model), json=document, timeout=LONG_S)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return {output["name"]: json_array(output) for output in answer.json()["outputs"]}


def rest_binary(server: ServerProcess, model: str, inputs: Arrays) -> dict[str, np.ndarray]:
    """Binary tensors after the JSON part, in both directions."""
    with triton_http.InferenceServerClient(server.http) as client:
        answer = client.infer(model, triton_inputs(triton_http, inputs))
    return {output["name"]: as_text(answer.as_numpy(output["name"])) for output in answer.get_response()["outputs"]}


def grpc_raw(server: ServerProcess, model: str, inputs: Arrays) -> dict[str, np.ndarray]:
    """Raw contents in both directions."""
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        answer = client.infer(model, triton_inputs(triton_grpc, inputs))
    return {output.name: as_text(answer.as_numpy(output.name)) for output in answer.get_response().outputs}


def grpc_typed(server: ServerProcess, model: str, inputs: Arrays) -> dict[str, np.ndarray]:
    """Typed contents in the request; the server always answers with raw contents."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        datatype = wire_datatype(array)
        tensor = request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        elements = array.ravel().tolist()
        if datatype == "BYTES":
            elements = [element.encode() for element in elements]
        getattr(tensor.contents, TYPED_FIELDS[datatype]).extend(elements)
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(client._channel)
        answer = triton_grpc.InferResult(stub.ModelInfer(request, timeout=LONG_S))
    return {output.name: as_text(answer.as_numpy(output.name)) for output in answer.get_response().outputs}


ENCODINGS: Final[Sequence[Infer]] = (rest_json, rest_binary, grpc_raw, grpc_typed)


def triton_inputs(library: Any, inputs: Arrays) -> list[Any]:
    """Inputs for ``tritonclient.http`` or ``tritonclient.grpc``, in binary form."""
    tensors = []
    for name, array in inputs.items():
        tensor = library.InferInput(name, list(array.shape), wire_datatype(array))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def json_array(output: Mapping[str, Any]) -> np.ndarray:
    """The array of an entry of ``outputs`` of a REST answer."""
    datatype = output["datatype"]
    return np.array(output["data"], _NUMPY.get(datatype, datatype.lower())).reshape(output["shape"])


def as_text(array: np.ndarray) -> np.ndarray:
    """Convert BYTES elements, which tritonclient returns as bytes, to text."""
    if array.dtype.kind != "O":
        return array
    text = np.empty(array.size, object)
    text[:] = [element.decode() for element in array.ravel()]
    return text.reshape(array.shape)
