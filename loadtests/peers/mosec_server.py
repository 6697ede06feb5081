"""mosec with a model: one worker process, batched as mosec's documentation shows.

    ONNX_FILE=MODEL.onnx python mosec_server.py --port PORT

``POST /inference`` with ``{"x": [64 numbers]}`` is answered with ``{"y": [10 numbers]}``.
"""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import numpy as np
import onnxruntime as ort
from mosec import Server, Worker, get_logger

get_logger().setLevel("WARNING")


class Mlp(Worker):
    """Receives each batch as a list of the requests' decoded bodies."""

    def __init__(self) -> None:
        """Each worker process has its own session."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(os.environ["ONNX_FILE"], options, providers=["CPUExecutionProvider"])

    def forward(self, data: list[dict[str, list[float]]]) -> list[dict[str, list[float]]]:
        rows = np.array([one["x"] for one in data], np.float32)
        return [{"y": row} for row in self.session.run(None, {"x": rows})[0].tolist()]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Mlp, num=1, max_batch_size=32, max_wait_time=1)
    server.run()
