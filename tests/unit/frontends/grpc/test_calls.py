"""The end of a call whose client has already disconnected."""

import asyncio
import logging
from typing import Any

import grpc
import pytest

from ortserve._pb import grpc_service_pb2 as pb
from ortserve.errors import invalid_input
from ortserve.frontends.grpc.calls import answering, streaming


class Left:
    """The context of a call just before grpc cancels it, when messages can no longer be sent."""

    async def abort(self, *_: object) -> None:
        raise grpc.aio.InternalError("Failed 'execute_batch'")


@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_disconnect_before_the_rejection_logs_no_error(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_: object) -> Any:
        raise invalid_input("bad")

    async def refuse_stream(context: Any) -> None:
        refuse(context)

    unary, stream = answering(pb.ServerLiveRequest, refuse).unary_unary, streaming(refuse_stream).stream_stream
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        await (unary(b"", Left()) if kind == "unary" else stream(None, Left()))  # type: ignore[misc,arg-type]
    assert caplog.records == []
