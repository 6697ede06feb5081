"""ortserve: serve ONNX models with ONNX Runtime over REST and gRPC."""

import os

# The official ONNX Runtime wheels start an uploader thread when they are imported. This package is always imported
# before onnxruntime, so setting the variable here disables it for server, tools and tests.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

__version__ = "0.1.0"
