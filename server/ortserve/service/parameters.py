"""Request parameters that mean something to the server. All others are the model's, and an ONNX model has no use for
them: they are neither an error nor echoed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ortserve.core.request import Parameter
from ortserve.errors import ErrorKind, ServeError, invalid_input


@dataclass(frozen=True, slots=True)
class Scheduling:
    """``priority`` is 1 for the most urgent, 0 for the model's default; ``queue_timeout_us`` 0 for no bound."""

    priority: int = 0
    queue_timeout_us: int = 0


USUAL: Final = Scheduling()


def read_scheduling(parameters: Mapping[str, Parameter]) -> Scheduling:
    """Read what a request says of its place in the queue.

    Raises:
        ServeError: invalid_input for a value of the wrong type, unsupported for a request that is part of a sequence.
    """
    if not parameters:
        return USUAL
    _refuse_sequence(parameters)
    return Scheduling(_unsigned(parameters, "priority"), _unsigned(parameters, "timeout"))


def _refuse_sequence(parameters: Mapping[str, Parameter]) -> None:
    """An id of 0 or ``""`` and flags that are false belong to no sequence; all else would be ignored at a price."""
    for name, types, expected in _SEQUENCE:
        if name in parameters:
            value = parameters[name]
            if type(value) not in types or (type(value) is int and value < 0):
                raise invalid_input(f"parameter '{name}': expected {expected}, got {value!r}")
            if value:
                raise ServeError(
                    ErrorKind.UNSUPPORTED, f"parameter '{name}' is not supported: this server keeps no sequences"
                )


_SEQUENCE: Final = (
    ("sequence_id", (int, str), "an unsigned integer or a string"),
    ("sequence_start", (bool,), "a boolean"),
    ("sequence_end", (bool,), "a boolean"),
)


def _unsigned(parameters: Mapping[str, Parameter], name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or value < 0:
        raise invalid_input(f"parameter '{name}': expected an unsigned integer, got {value!r}")
    return value
