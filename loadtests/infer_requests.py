"""Inference requests with one FP32 tensor on both protocols, and the numbers of their answers."""

import json
from typing import Final

import numpy as np

from ortserve._pb import grpc_service_pb2 as pb

INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
"""The path of a gRPC call."""


def json_request(array: np.ndarray, name: str = "x", *, decimals: int | None = None) -> bytes:
    """The body of a REST request. ``decimals`` shortens its numbers, which otherwise have up to 17 digits."""
    numbers = array.ravel().tolist()
    data = numbers if decimals is None else [round(number, decimals) for number in numbers]
    return json.dumps({"inputs": [{"name": name, "shape": array.shape, "datatype": "FP32", "data": data}]}).encode()


def numbers_of_json(body: bytes, output: int = 0) -> np.ndarray:
    """The numbers of an output in the body of a REST answer."""
    return np.array(json.loads(body)["outputs"][output]["data"], np.float32)


def grpc_request(model: str, array: np.ndarray, name: str = "x") -> bytes:
    """The message of a gRPC request, with raw contents."""
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
    request.inputs.add(name=name, datatype="FP32", shape=array.shape)
    return request.SerializeToString()


def numbers_of_grpc(message: bytes) -> np.ndarray:
    """The numbers of the first output in the message of a gRPC answer."""
    return np.frombuffer(pb.ModelInferResponse.FromString(message).raw_output_contents[0], np.float32)


def framed(message: bytes) -> bytes:
    """A gRPC message with its prefix, as HTTP/2 carries it."""
    return b"\0" + len(message).to_bytes(4) + message
