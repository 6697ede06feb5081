"""Ray Serve with a model: one replica, batched and with the high-throughput settings of Ray Serve's documentation.

    python ray_server.py MODEL.onnx PORT

``POST /`` with ``{"x": [64 numbers]}`` is answered with ``{"y": [10 numbers]}``. HAProxy, which comes with Ray Serve,
forwards requests to the replica; its ports 8404 and 9101 are open on all interfaces, like some of Ray's own.
"""

import os
import sys

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Without these two, a request takes more than ten times the processor time.
os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
os.environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"] = "1"
import numpy as np
import onnxruntime as ort
import ray
from ray import serve
from starlette.requests import Request

QUIET = {"log_level": "WARNING", "enable_access_log": False}


# Ray Serve's own limit of 5 requests at a time would keep batches small.
@serve.deployment(num_replicas=1, max_ongoing_requests=1000, logging_config=QUIET)
class Mlp:
    """Requests come one by one; ``predict`` gets them as batches."""

    def __init__(self, file: str) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.001)
    async def predict(self, rows: list[list[float]]) -> list[list[float]]:
        return self.session.run(None, {"x": np.array(rows, np.float32)})[0].tolist()

    async def __call__(self, request: Request) -> dict[str, list[float]]:
        document = await request.json()
        return {"y": await self.predict(document["x"])}


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])}, logging_config=QUIET)
    serve.run(Mlp.bind(sys.argv[1]), blocking=True)
