"""Which failures exist. What each becomes on the wire is said in ``frontends/status.py`` alone."""

from enum import StrEnum
from typing import Final

_MAX_MESSAGE: Final = 4096
"""Characters. What a message quotes may be as large as the request; over gRPC it travels in a header."""


class ErrorKind(StrEnum):
    """What went wrong, as callers and operators see it; also the ``outcome`` and ``reason`` label of metrics."""

    INVALID_INPUT = "invalid_input"
    """Malformed request, or a wrong name, datatype, shape or size. Sending it again gives the same answer."""
    UNAUTHENTICATED = "unauthenticated"
    """The call needs a key, and none came that is known."""
    FORBIDDEN = "forbidden"
    """The key is known, and opens other calls than this one."""
    NOT_FOUND = "not_found"
    """No such route, model or version."""
    CONFLICT = "conflict"
    """What is asked for is somebody else's, such as a port that the server was to listen on."""
    ALREADY_EXISTS = "already_exists"
    """The name is taken."""
    TOO_LARGE = "too_large"
    """The body is over the configured limit."""
    HEADERS_TOO_LARGE = "headers_too_large"
    """The headers are more, or larger, than is configured."""
    TOO_SLOW = "too_slow"
    """The request did not come in the time that it may take, or nothing of its answer was taken in that."""
    OVERLOADED = "overloaded"
    """A queue is full; nothing was started, and a later try may succeed."""
    CANCELLED = "cancelled"
    """The caller left before the answer was there."""
    UNSUPPORTED = "unsupported"
    """Known to the protocol, not to this server."""
    NOT_READY = "not_ready"
    """The model or the server is loading, draining or failed; or the model rejected a batch in which the request
    that it does not accept was not found. A later try may succeed."""
    DEADLINE = "deadline"
    """Time ran out; the message says in which phase."""
    REJECTED_BY_MODEL = "rejected_by_model"
    """The model ran and rejected the request's values or shapes. Sending it again gives the same answer."""
    INTERNAL = "internal"
    """A run or the server failed."""


class ServeError(Exception):
    """A failure with a kind and a message for the caller: the thing, what was expected, what came.

    Raised by every room; frontends turn it into a status. What a caller can come by never holds file-system paths.
    ``version`` is of the model that was to answer, where that was known by then.
    """

    def __init__(self, kind: ErrorKind, message: str, *, retry_after_s: float | None = None, version: str = "") -> None:
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]}…"
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s
        self.version = version


def invalid_input(message: str) -> ServeError:
    """The most frequent failure, spelled short."""
    return ServeError(ErrorKind.INVALID_INPUT, message)


def out_of_memory(doing: str) -> ServeError:
    """There was too little memory for ``doing`` something; a later try may succeed."""
    return ServeError(ErrorKind.OVERLOADED, f"the server has too little memory for {doing}", retry_after_s=1)


def of_request(error: ServeError, request_id: str, version: str) -> ServeError:
    """A copy whose text begins with the id of the request that it is about; ``version`` is that of its model."""
    message = f"[request id: {request_id or '<id_unknown>'}] {error.message}"
    return ServeError(error.kind, message, retry_after_s=error.retry_after_s, version=version)


class ContentsError(ServeError):
    """A tensor's bytes are not what its request says of it. Whether there is such a model at all comes before that.

    Attributes:
        request_id: Of the request.
        model: That it names.
        model_version: That it names; empty for none.
    """

    def __init__(self, error: ServeError, request_id: str, model: str, model_version: str) -> None:
        super().__init__(error.kind, error.message)
        self.request_id = request_id
        self.model = model
        self.model_version = model_version


class ModelRejectionError(ServeError):
    """The model rejected the values or shapes that it was run on.

    ``message`` may quote elements of tensors and is for the caller alone; ``node`` names the operator and the node
    that rejected them, is empty where ONNX Runtime rejected the inputs before it ran a node, and may be logged.
    """

    def __init__(self, message: str, node: str) -> None:
        super().__init__(ErrorKind.REJECTED_BY_MODEL, message)
        self.node = node


class OutOfMemoryError(ServeError):
    """A run found too little memory: smaller batches may do."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.INTERNAL, message)


class RunTimeoutError(ServeError):
    """A run was over its time limit, and was asked to end."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.DEADLINE, message)


class DeviceLostError(ServeError):
    """A device will run nothing more for this process; running again cannot help."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.NOT_READY, message, retry_after_s=1)
