"""Request parameters that the server itself understands."""

import pytest

from ortserve.core.request import Parameter
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.validation import Scheduling, read_scheduling


def refusal(**parameters: Parameter) -> ServeError:
    with pytest.raises(ServeError) as caught:
        read_scheduling(parameters)
    return caught.value


def test_scheduling_parameters_are_read_and_others_ignored() -> None:
    assert read_scheduling({}) == Scheduling(0, 0)
    assert read_scheduling({"priority": 2, "timeout": 1000, "own": "x", "headers": 1.5}) == Scheduling(2, 1000)
    assert read_scheduling({"binary_data_output": True}) == Scheduling()


@pytest.mark.parametrize("name", ["priority", "timeout"])
@pytest.mark.parametrize("odd", [-1, 1.0, True, "1"])
def test_scheduling_parameter_that_is_not_an_unsigned_integer_is_rejected(name: str, odd: Parameter) -> None:
    error = refusal(**{name: odd})
    assert error.kind is ErrorKind.INVALID_INPUT
    assert error.message == f"parameter '{name}': expected an unsigned integer, got {odd!r}"


@pytest.mark.parametrize(
    "parameters", [{"sequence_id": 7}, {"sequence_id": "a"}, {"sequence_start": True}, {"sequence_end": True}]
)
def test_request_of_a_sequence_is_rejected_with_the_parameters_name(parameters: dict[str, Parameter]) -> None:
    error = refusal(**parameters)
    assert error.kind is ErrorKind.UNSUPPORTED
    assert error.message.startswith(f"parameter '{next(iter(parameters))}' is not supported")


def test_request_with_empty_sequence_parameters_is_accepted() -> None:
    for none in (0, ""):
        assert read_scheduling({"sequence_id": none, "sequence_start": False, "sequence_end": False}) == Scheduling()


@pytest.mark.parametrize(
    ("name", "odd"), [("sequence_id", True), ("sequence_id", 1.5), ("sequence_id", -1), ("sequence_start", 1)]
)
def test_sequence_parameter_of_the_wrong_type_is_rejected(name: str, odd: Parameter) -> None:
    assert refusal(**{name: odd}).kind is ErrorKind.INVALID_INPUT
