"""The parameters by which an input or output names its place in shared memory, the same for both protocols."""

from collections.abc import Mapping
from typing import Final

from ortserve.core.region import RegionSpan
from ortserve.core.request import Parameter
from ortserve.errors import invalid_input

REGION: Final = "shared_memory_region"
OFFSET: Final = "shared_memory_offset"
BYTE_SIZE: Final = "shared_memory_byte_size"


def read_span(parameters: Mapping[str, Parameter], what: str) -> RegionSpan:
    """Read them; ``what``, such as ``input 'x'``, is for the messages.

    Raises:
        ServeError: invalid_input, for a value of another type than the protocol's, and for a missing size.
    """
    region = parameters.get(REGION)
    if type(region) is not str:
        raise _error(REGION, "a string", what, region)
    if BYTE_SIZE not in parameters:
        raise invalid_input(f"{what}: '{REGION}' needs '{BYTE_SIZE}' beside it")
    return RegionSpan(region, _unsigned(parameters, OFFSET, what), _unsigned(parameters, BYTE_SIZE, what))


def _unsigned(parameters: Mapping[str, Parameter], key: str, what: str) -> int:
    value = parameters.get(key, 0)
    if type(value) is not int or value < 0:
        raise _error(key, "an unsigned integer", what, value)
    return value


def _error(key: str, expected: str, what: str, got: object) -> Exception:
    return invalid_input(f"Unable to parse '{key}': expected {expected} for {what}, got {got!r}")
