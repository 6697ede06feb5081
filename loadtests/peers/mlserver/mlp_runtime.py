"""A custom runtime of MLServer, as its documentation shows: the model ``mlp`` with ONNX Runtime.

``ONNX_FILE`` in the environment names the model. MLServer batches by itself, as ``model-settings.json`` says.
"""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import onnxruntime as ort
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Mlp(MLModel):
    """Requests come batched."""

    async def load(self) -> bool:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(os.environ["ONNX_FILE"], options, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        x = NumpyCodec.decode_input(payload.inputs[0])
        y = self.session.run(None, {"x": x})[0]
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", y)])
