"""LitServe with a model: one worker process, batched as LitServe's documentation shows.

    python litserve_server.py MODEL.onnx PORT

``POST /predict`` with ``{"x": [64 numbers]}`` is answered with ``{"y": [10 numbers]}``.
"""

import os
import sys
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import litserve
import numpy as np
import onnxruntime as ort


class Mlp(litserve.LitAPI):
    """The methods of LitServe's interface, in the order of a request."""

    def setup(self, device: str) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])

    def decode_request(self, request: dict[str, list[float]], **_: Any) -> np.ndarray:
        return np.array(request["x"], np.float32)

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, x: np.ndarray, **_: Any) -> np.ndarray:
        return self.session.run(None, {"x": x})[0]

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray, **_: Any) -> dict[str, list[float]]:
        return {"y": output.tolist()}


if __name__ == "__main__":
    api = Mlp(max_batch_size=32, batch_timeout=0.001)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", generate_client_file=False)
