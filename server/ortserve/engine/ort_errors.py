"""The errors of ONNX Runtime, and their texts without paths, hosts and source locations."""

import re
from typing import Final

from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from ortserve.errors import ErrorKind, ModelRejectionError, ServeError

# ONNX Runtime's own classes have no common base but Exception. Bindings and strings raise built-in exceptions.
ORT_ERRORS: Final[tuple[type[Exception], ...]] = (
    *(kind for kind in vars(ort_errors).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    RuntimeError,
    ValueError,
)

OUT_OF_MEMORY: Final = re.compile(
    r"out of memory|cudaErrorMemoryAllocation|Failed to allocate memory for requested buffer|"
    r"smaller than requested bytes|bad_alloc|"
    r"CUBLAS failure 3\b|(?:CUBLAS|CUDNN)_STATUS_\w*ALLOC\w*_FAILED|CUFFT_ALLOC_FAILED",
    re.IGNORECASE,
)

# Kernels reject inputs with INVALID_ARGUMENT, FAIL (failed assertions, such as a Reshape to another number of
# elements), RUNTIME_EXCEPTION (exceptions of libraries) or NOT_IMPLEMENTED (a rank without an implementation).
_REJECTIONS: Final = (
    ort_errors.InvalidArgument,
    ort_errors.Fail,
    ort_errors.RuntimeException,
    ort_errors.NotImplemented,
)
_CODE: Final = re.compile(r"(?:\[ONNXRuntimeError\] : \d+ : \w+ : )?")
_BOUND: Final = "Error in execution: "
"""The beginning of the ``RuntimeError`` of a run on a binding, which has no code."""
_NODE: Final = re.compile(
    r"Non-zero status code returned while running (\S+) node\. Name:'([^']*)'(?: Status Message: ?)?"
)
"""The executor's text about a failed node. Within If, Loop and Scan it repeats for each level, the innermost last."""
_NOT_OF_INPUTS: Final = re.compile(
    r"CUDA (?:failure|error)|cudaError|\b(?:CUDNN|CUBLAS|CUFFT|CURAND|CUSPARSE|NCCL|TensorRT|TRT)|"
    r"Resource temporarily unavailable|terminate flag",
    re.IGNORECASE,
)
"""Texts of failures that the inputs do not cause, but that have the same codes: of libraries, devices and threads, and
terminated runs."""
_MAX_NODE: Final = 128
"""Maximum number of characters of a node's name: exporters build long names from nested modules."""

_PATH: Final = re.compile(r"(?<![\w.])/[^\s:'\",)]+")
_SOURCE: Final = (".cc", ".h", ".cpp", ".cu", ".hpp")
_CUDA_PLACE: Final = re.compile(r"\s*;\s*GPU=-?\d+\s*;\s*hostname=.*?;\s*expr=[^;\n]*;?")
"""The host and the source expression of a failed CUDA call."""
_CUDA_CALL: Final = re.compile(
    r"\S+:\d+ std::conditional_t<[^\[\n]*? onnxruntime::CudaCall\([^\[\n]*?\) \[with [^\]\n]*\]"
)
"""The signature of the function that reports a failed CUDA call."""
_LOCATION: Final = re.compile(r"…:\d+ [^\n]*?(?=Status|\[ONNXRuntimeError\]|\b[A-Z][a-z]+ )")


def without_paths(message: str) -> str:
    """Put ONNX Runtime's text on one line, without hosts and source locations, and shorten paths to their last part."""
    message = _CUDA_CALL.sub("", _CUDA_PLACE.sub("", message))
    return " ".join(_LOCATION.sub("", _PATH.sub(_last_part, message)).split())


def _last_part(path: re.Match[str]) -> str:
    name = path[0].rpartition("/")[2]
    return "…" if name.endswith(_SOURCE) else f"…/{name}"


def run_error(error: Exception) -> ServeError:
    """The error for callers of a failed run: ``ModelRejectionError`` for rejected inputs, otherwise internal."""
    text = without_paths(str(error))
    node = _rejecting_node(error, text)
    if node is not None:
        return ModelRejectionError(f"the model rejected the inputs: {text}", node)
    return ServeError(ErrorKind.INTERNAL, f"ONNX Runtime failed to run the model: {text}")


def _rejecting_node(error: Exception, text: str) -> str | None:
    """The node that rejected the inputs; empty if ONNX Runtime rejected them before any node; None for other errors."""
    is_bound = isinstance(error, RuntimeError) and text.startswith(_BOUND)
    if not (is_bound or isinstance(error, _REJECTIONS)) or OUT_OF_MEMORY.search(text) or _NOT_OF_INPUTS.search(text):
        return None
    found = None
    code = _CODE.match(text)
    end = len(_BOUND) if is_bound else code.end() if code else 0
    while inner := _NODE.match(text, end):  # match only the beginning: a kernel's text may quote a request's values
        found, end = inner, inner.end()
    if found is None:
        return "" if isinstance(error, ort_errors.InvalidArgument) else None
    operator, name = found[1], found[2]
    return f"{operator} '{name[:_MAX_NODE]}'" if name else str(operator)
