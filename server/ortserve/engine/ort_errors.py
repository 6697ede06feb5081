"""What ONNX Runtime raises, and its texts without what is nobody's business."""

import re
from typing import Final

from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from ortserve.errors import ErrorKind, ServeError

# ONNX Runtime's own classes derive straight from Exception, each on its own; bindings and strings raise built-in ones.
ORT_ERRORS: Final[tuple[type[Exception], ...]] = (
    *(kind for kind in vars(ort_errors).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    RuntimeError,
    ValueError,
)

_PATH: Final = re.compile(r"(?<![\w.])/[^\s:'\",)]+")
_SOURCE: Final = (".cc", ".h", ".cpp", ".cu", ".hpp")
_CUDA_PLACE: Final = re.compile(r"\s*;\s*GPU=-?\d+\s*;\s*hostname=.*?;\s*expr=[^;\n]*;?")
"""Where in ONNX Runtime a call of CUDA failed, and on which host."""
_CUDA_CALL: Final = re.compile(
    r"\S+:\d+ std::conditional_t<[^\[\n]*? onnxruntime::CudaCall\([^\[\n]*?\) \[with [^\]\n]*\]"
)
"""The function that saw it, with all of its types."""
_LOCATION: Final = re.compile(r"…:\d+ [^\n]*?(?=Status|\b[A-Z][a-z]+ )")


def without_paths(message: str) -> str:
    """ONNX Runtime's text without hosts and source locations, and of paths with their last part alone, on one line."""
    message = _CUDA_CALL.sub("", _CUDA_PLACE.sub("", message))
    return " ".join(_LOCATION.sub("", _PATH.sub(_last_part, message)).split())


def _last_part(path: re.Match[str]) -> str:
    name = path[0].rpartition("/")[2]
    return "…" if name.endswith(_SOURCE) else f"…/{name}"


def run_error(error: Exception) -> ServeError:
    """What callers of a failed run are told."""
    return ServeError(ErrorKind.INTERNAL, f"ONNX Runtime failed to run the model: {without_paths(str(error))}")
