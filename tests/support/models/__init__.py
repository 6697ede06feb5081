"""Tiny ONNX models that tests build when they need them."""
