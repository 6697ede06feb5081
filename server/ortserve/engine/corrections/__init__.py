"""Changes to a model before ONNX Runtime opens it, where ONNX Runtime would compute wrongly or end the process.

``session`` applies them to the serialized model or to the options of the session; the model file stays as it is.
"""

__all__ = ["empty_checks", "harmful_optimizers", "least_axes", "operator_checks", "replaced_nodes"]
