"""Calls with KServe's client library. It runs in a separate process and environment with that library.

    python kserve_calls.py HTTP GRPC

calls ``simple`` in every way that the library supports and prints the results as JSON.
"""

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.ones((1, 16), np.int32)


def request(*, binary: bool, rows: int = 1) -> InferRequest:
    inputs = []
    for name, array in (("INPUT0", A[:rows]), ("INPUT1", B[:rows])):
        tensor = InferInput(name=name, shape=list(array.shape), datatype="INT32")
        tensor.set_data_from_numpy(array, binary_data=binary)
        inputs.append(tensor)
    return InferRequest(model_name="simple", infer_inputs=inputs, request_id="7")


async def main(http: str, grpc: str) -> None:
    came = {}
    rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    base = f"http://{http}"
    came["rest"] = [
        await rest.is_server_live(base),
        await rest.is_server_ready(base),
        await rest.is_model_ready(base, "simple"),
    ]
    for binary in (False, True):
        response = await rest.infer(base, request(binary=binary), model_name="simple")
        came[f"rest binary={binary}"] = [response.id, *(output.as_numpy().tolist() for output in response.outputs)]
        response = await rest.infer(base, request(binary=binary, rows=0), model_name="simple")
        came[f"rest binary={binary} rows=0"] = [output.as_numpy().shape for output in response.outputs]
    await rest.close()
    client = InferenceGRPCClient(grpc)
    came["grpc"] = [
        await client.is_server_live(),
        await client.is_server_ready(),
        await client.is_model_ready("simple"),
    ]
    for binary in (False, True):
        response = await client.infer(request(binary=binary))
        came[f"grpc binary={binary}"] = [response.id, *(output.as_numpy().tolist() for output in response.outputs)]
        response = await client.infer(request(binary=binary, rows=0))
        came[f"grpc binary={binary} rows=0"] = [output.as_numpy().shape for output in response.outputs]
    await client.close()
    print(json.dumps(came))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
