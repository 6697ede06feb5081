"""A minimal server without optimisation: FastAPI, pydantic documents, ``session.run`` in the thread pool.

    python naive_server.py PORT NAME=MODEL.onnx … [--one-thread]

It reads and writes the same JSON documents as ortserve, so that both do the same work. It creates the session as in
ONNX Runtime's first example; ``--one-thread`` limits it to one thread, as an expert would for very small models.
"""

import os
import sys
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import numpy as np
import onnxruntime as ort
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()
sessions: dict[str, ort.InferenceSession] = {}
DATATYPES = {"FP32": np.float32, "INT64": np.int64}
NAMES = {np.dtype(kind): name for name, kind in DATATYPES.items()}


class Tensor(BaseModel):
    name: str
    datatype: str
    shape: list[int]
    data: list[float]


class Request(BaseModel):
    inputs: list[Tensor]


class Response(BaseModel):
    model_name: str
    outputs: list[Tensor]


@app.get("/health")
def health() -> dict[str, bool]:
    return {"ready": True}


@app.post("/v2/models/{model}/infer")
def infer(model: str, request: Request) -> Response:
    session = sessions[model]
    feeds = {
        tensor.name: np.array(tensor.data, dtype=DATATYPES[tensor.datatype]).reshape(tensor.shape)
        for tensor in request.inputs
    }
    outputs: list[Any] = session.run(None, feeds)
    return Response(
        model_name=model,
        outputs=[
            Tensor(name=meta.name, datatype=NAMES[array.dtype], shape=list(array.shape), data=array.ravel().tolist())
            for meta, array in zip(session.get_outputs(), outputs, strict=True)
        ],
    )


if __name__ == "__main__":
    options = ort.SessionOptions()
    if "--one-thread" in sys.argv:
        options.intra_op_num_threads = 1
    for pair in sys.argv[2:]:
        name, separator, path = pair.partition("=")
        if separator:
            sessions[name] = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
