"""Request parameters that the server itself interprets."""

import pytest

from ortserve.core.inflight import Scheduling
from ortserve.core.request import Parameter
from ortserve.errors import ErrorKind, SequenceError, ServeError
from ortserve.service.validation import read_scheduling, read_sequence_part


def refusal(**parameters: Parameter) -> ServeError:
    with pytest.raises(ServeError) as caught:
        read_scheduling(parameters)
    return caught.value


def test_scheduling_parameters_are_read_and_others_ignored() -> None:
    assert read_scheduling({}) == Scheduling(0, None)
    assert read_scheduling({"priority": 2, "timeout": 1000, "own": "x", "headers": 1.5}) == Scheduling(2, 1_000_000)
    assert read_scheduling({"binary_data_output": True}) == Scheduling()


@pytest.mark.parametrize("name", ["priority", "timeout"])
@pytest.mark.parametrize("odd", [-1, 1.0, True, "1"])
def test_scheduling_parameter_that_is_not_an_unsigned_integer_is_rejected(name: str, odd: Parameter) -> None:
    error = refusal(**{name: odd})
    assert error.kind is ErrorKind.INVALID_INPUT
    assert error.message == f"parameter '{name}': expected an unsigned integer, got {odd!r}"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_part_of_a_sequence_is_read(protocol: str) -> None:
    part = read_sequence_part({"sequence_id": 7, "sequence_start": True, "sequence_end": False}, protocol)
    assert (part.id, part.is_start, part.is_end) == (7, True, False)
    assert read_sequence_part({}, protocol).id == 0
    assert read_sequence_part({"sequence_id": "a\0b"}, protocol).id == "a"
    assert read_sequence_part({"sequence_id": "x" * 128}, protocol).id == "x" * 128
    assert read_sequence_part({"sequence_id": 2**64 - 1}, protocol).id == 2**64 - 1


def test_a_negative_id_over_grpc_has_the_bits_of_a_large_one() -> None:
    assert read_sequence_part({"sequence_id": -5}, "grpc").id == 2**64 - 5


@pytest.mark.parametrize(
    ("name", "odd", "kind"),
    [
        ("sequence_id", True, ErrorKind.INVALID_INPUT),
        ("sequence_id", 1.5, ErrorKind.INVALID_INPUT),
        ("sequence_id", -1, ErrorKind.INVALID_INPUT),
        ("sequence_id", 2**64, ErrorKind.INVALID_INPUT),
        ("sequence_id", "x" * 129, ErrorKind.UNSUPPORTED),
        ("sequence_id", "ä" * 65, ErrorKind.UNSUPPORTED),
        ("sequence_start", 1, ErrorKind.INVALID_INPUT),
        ("sequence_end", "true", ErrorKind.INVALID_INPUT),
    ],
)
def test_sequence_parameter_of_the_wrong_type_is_rejected(name: str, odd: Parameter, kind: ErrorKind) -> None:
    with pytest.raises(SequenceError) as caught:
        read_sequence_part({name: odd}, "http")
    assert caught.value.kind is kind
