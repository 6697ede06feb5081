"""Tiny ONNX models that tests build on demand."""
