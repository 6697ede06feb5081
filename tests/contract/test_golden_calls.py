"""Frozen calls over real sockets are answered with the frozen bytes, by every frontend."""

import json
from typing import Any

import pytest

import golden_calls
from servers import ServerProcess
from transports import ON_BOTH_TRANSPORTS

CALLS = golden_calls.calls()
PAGE: dict[str, dict[str, dict[str, Any]]] = json.loads(golden_calls.PAGE.read_text())


def test_every_call_is_recorded_as_clients_encode_it() -> None:
    assert {name: frozen["call"] for name, frozen in PAGE.items()} == {
        name: golden_calls.spell_call(call) for name, call in CALLS.items()
    }


@ON_BOTH_TRANSPORTS
@pytest.mark.parametrize("name", CALLS)
def test_answer_over_a_socket_equals_the_recorded_bytes(server: ServerProcess, name: str) -> None:
    assert golden_calls.answer(server, CALLS[name]) == PAGE[name]["answer"]
