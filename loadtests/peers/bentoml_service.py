"""BentoML with a model: one worker process, with adaptive batching as BentoML's documentation shows.

    ONNX_FILE=MODEL.onnx bentoml serve bentoml_service:Mlp --port PORT

``POST /predict`` with ``{"x": [[64 numbers]]}`` is answered with ``[[10 numbers]]``: both are batches.
"""

import os
from typing import Annotated

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import bentoml
import numpy as np
import onnxruntime as ort
from bentoml.validators import DType, Shape


@bentoml.service(workers=1, logging={"access": {"enabled": False}})
class Mlp:
    """BentoML learns how long a batch should wait."""

    def __init__(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(os.environ["ONNX_FILE"], options, providers=["CPUExecutionProvider"])

    @bentoml.api(batchable=True, max_batch_size=32)
    def predict(self, x: Annotated[np.ndarray, DType("float32"), Shape((-1, 64))]) -> np.ndarray:
        return self.session.run(None, {"x": x})[0]
