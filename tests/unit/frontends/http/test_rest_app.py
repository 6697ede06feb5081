"""The ASGI application as a whole, called without a server."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from interpreted import interpreted_only
from ortserve.frontends.http.control import make_control_app
from ortserve.frontends.http.server import RestApp


class Faulty:
    """Services of which each call is a fault."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> None:
            raise ZeroDivisionError("tensors: 1, 2, 3")

        return fail


async def call(path: str) -> tuple[int, bytes]:
    nothing: Any = SimpleNamespace(statistics=None, repository=None, logs=None, traces=None)
    faulty: Any = Faulty()
    control = make_control_app(faulty, nothing, nothing, nothing, nothing, title="t", version="1", max_body_bytes=1)
    infer: Any = None
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
        "ortserve.connection": SimpleNamespace(is_old=False),
    }
    await RestApp(infer, control, {})(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@interpreted_only
async def test_fault_of_ours_is_answered_in_json_without_its_text_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    status, body = await call("/v2/models/m")
    assert (status, json.loads(body)) == (500, {"error": "internal error"})
    (record,) = [record for record in caplog.records if record.name == "ortserve.frontends.http.server"]
    assert record.message == "a call failed unexpectedly"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)
