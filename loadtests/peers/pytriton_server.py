"""PyTriton with a model: Triton's dynamic batcher calls a Python function, as PyTriton's documentation shows.

    python pytriton_server.py MODEL.onnx PORT

HTTP with the Open Inference Protocol is on PORT, gRPC and metrics are on the next two ports. A batch does not wait for
more requests, as Triton's documentation recommends to begin with: those that arrive during a run form the next one.
"""

import os
import sys
from pathlib import Path

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import numpy as np
import onnxruntime as ort
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

HOST, PORT = "127.0.0.1", int(sys.argv[2])

if __name__ == "__main__":
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])

    @batch
    def predict(x: np.ndarray) -> list[np.ndarray]:
        return session.run(None, {"x": x})

    config = TritonConfig(
        http_address=HOST,
        http_port=PORT,
        grpc_address=HOST,
        grpc_port=PORT + 1,
        metrics_port=PORT + 2,
        log_file=Path(os.devnull),
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name="mlp",
            infer_func=predict,
            inputs=[Tensor(name="x", dtype=np.float32, shape=(64,))],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(10,))],
            config=ModelConfig(max_batch_size=32, batcher=DynamicBatcher()),
        )
        triton.serve()
