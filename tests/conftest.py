"""What every test needs. Importing the package first silences ONNX Runtime's telemetry in this process."""

import ortserve  # noqa: F401
