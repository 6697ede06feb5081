"""The kinds of errors. ``frontends/status.py`` maps them to status codes."""

from enum import StrEnum
from typing import Any, Final

_MAX_MESSAGE: Final = 4096
"""Maximum number of characters. A message may quote large values of the request; gRPC sends it in a header."""

_MAX_SHOWN_ID: Final = 200
"""Maximum number of characters of a request's id in a message: a longer one would leave no room for the error."""

STOPPING: Final = "Server is stopping, scheduler for model has stopped accepting new inference requests"
"""Triton's text for a request to a version that is being closed; its kind is NOT_READY."""


class ErrorKind(StrEnum):
    """The kind of an error, for callers and operators; also the labels ``outcome`` and ``reason`` of metrics."""

    INVALID_INPUT = "invalid_input"
    """The request is malformed, or has a wrong name, datatype, shape or size. A retry gives the same answer."""
    UNAUTHENTICATED = "unauthenticated"
    """The call needs a key, and the request has no valid one."""
    FORBIDDEN = "forbidden"
    """The key is valid, but not for this call."""
    NOT_FOUND = "not_found"
    """The route, model or version does not exist."""
    CONFLICT = "conflict"
    """A resource is in use, for example a port that the server should listen on, or the one profile at a time."""
    ALREADY_EXISTS = "already_exists"
    """The name is already in use."""
    TOO_LARGE = "too_large"
    """The body exceeds the configured limit."""
    HEADERS_TOO_LARGE = "headers_too_large"
    """The headers exceed the configured number or size."""
    TOO_SLOW = "too_slow"
    """The request was not received in time, or the caller did not receive its answer in time."""
    OVERLOADED = "overloaded"
    """A queue or limit is full. Nothing was started; a later retry may succeed."""
    CANCELLED = "cancelled"
    """The caller cancelled the request or disconnected."""
    UNSUPPORTED = "unsupported"
    """The protocol defines it, but this server does not support it."""
    NOT_READY = "not_ready"
    """The model or the server is loading, draining or failed, or its device is lost. A later retry may succeed."""
    DEADLINE = "deadline"
    """The deadline passed or cannot be met; the message names the phase."""
    REJECTED_BY_MODEL = "rejected_by_model"
    """The model rejected the request's values or shapes during a run. A retry gives the same answer."""
    INTERNAL = "internal"
    """A run or the server failed."""


class ServeError(Exception):
    """An error with a kind and a message for the caller, which names the object, the expected and the actual value.

    Every room raises it; frontends map it to a status. Messages for callers never contain file-system paths.
    ``version`` is the version of the requested model, if known.
    """

    def __init__(self, kind: ErrorKind, message: str, *, retry_after_s: float | None = None, version: str = "") -> None:
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]}…"
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s
        self.version = version

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error with its attributes: the constructors of its classes differ."""
        return Exception.__new__, (type(self), *self.args), self.__dict__


def invalid_input(message: str) -> ServeError:
    """An error of the most frequent kind."""
    return ServeError(ErrorKind.INVALID_INPUT, message)


def out_of_memory(doing: str) -> ServeError:
    """The error for too little memory for ``doing``; a later retry may succeed."""
    return ServeError(ErrorKind.OVERLOADED, f"the server has too little memory for {doing}", retry_after_s=1)


def of_request(error: ServeError, request_id: str, version: str) -> ServeError:
    """A copy whose message begins with the id of its request; ``version`` is the version of the model."""
    shown = request_id if len(request_id) <= _MAX_SHOWN_ID else f"{request_id[:_MAX_SHOWN_ID]}…"
    message = f"[request id: {shown or '<id_unknown>'}] {error.message}"
    return ServeError(error.kind, message, retry_after_s=error.retry_after_s, version=version)


class ContentsError(ServeError):
    """A tensor's bytes do not match its declaration. An unknown model is reported in preference to this error.

    Attributes:
        request_id: Id of the request.
        model: Model that the request names.
        model_version: Version that the request names; may be empty.
    """

    def __init__(self, error: ServeError, request_id: str, model: str, model_version: str) -> None:
        super().__init__(error.kind, error.message)
        self.request_id = request_id
        self.model = model
        self.model_version = model_version


class NotInMemoryError(ServeError):
    """No version serves now, but the request may wait until one is loaded."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.NOT_READY, message, retry_after_s=1)


class ModelRejectionError(ServeError):
    """The model rejected the values or shapes of its inputs.

    ``message`` may quote elements of tensors and is only for the caller. ``node`` may be logged: it names the operator
    and the node that rejected the inputs, and is empty if ONNX Runtime rejected them before it ran a node.
    """

    def __init__(self, message: str, node: str) -> None:
        super().__init__(ErrorKind.REJECTED_BY_MODEL, message)
        self.node = node


class SequenceError(ServeError):
    """A request does not fit its sequence. Its text is Triton's, without the id of the request, as clients know it."""


class OutOfMemoryError(ServeError):
    """A run failed for lack of memory; smaller batches may succeed."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.INTERNAL, message)


class RunTimeoutError(ServeError):
    """A run exceeded its time limit and was terminated."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.DEADLINE, message)


class DeviceLostError(ServeError):
    """A device can no longer run anything for this process; a retry on it cannot succeed."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.NOT_READY, message, retry_after_s=1)
