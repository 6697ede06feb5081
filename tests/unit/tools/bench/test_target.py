"""The order of the requests that a caller sends."""

from ortserve.tools.address import Address
from ortserve.tools.bench.target import ServerPlan


def plan(sequence_length: int = 0) -> ServerPlan:
    address = Address("http://127.0.0.1:1", "127.0.0.1", 1, is_tls=False, is_grpc=False, headers={})
    requests = tuple(bytes([number]) for number in range(6))
    return ServerPlan(address, requests, is_stream=False, max_connections=1, sequence_length=sequence_length)


def sent(length: int, callers: int, caller: int, failing: tuple[int, ...] = ()) -> list[int]:
    """The first nine requests of a caller; those at the places ``failing`` fail."""
    held, number, requests = plan(length), caller, []
    for place in range(9):
        requests.append(held.request_of(number, callers))
        number = held.next_number(number, callers, is_failed=place in failing)
    return requests


def test_callers_send_their_own_sequences() -> None:
    assert sent(3, 2, 0) == [0, 1, 2] * 3
    assert sent(3, 2, 1) == [3, 4, 5] * 3
    assert sent(2, 2, 1) == [3, 5] * 4 + [3]
    assert sent(4, 1, 0) == [0, 1, 1, 2] * 2 + [0]


def test_sequence_of_one_request_begins_and_ends() -> None:
    assert sent(1, 2, 1) == [5] * 9


def test_a_failure_ends_a_sequence() -> None:
    assert sent(4, 2, 0, failing=(1,)) == [0, 1, 0, 1, 1, 2, 0, 1, 1]
    assert sent(3, 2, 1, failing=(2, 5)) == [3, 4, 5] * 3


def test_requests_without_sequences_take_turns() -> None:
    assert sent(0, 1, 0) == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert sent(0, 4, 3, failing=(0,)) == [3, 1, 5, 3, 1, 5, 3, 1, 5]
    assert [plan(3).request_of(number, None) for number in range(7)] == [0, 1, 2, 3, 4, 5, 0]
