"""The pool of connections of the load."""

import asyncio
import socket

import pytest

from ortserve.tools.address import parse_address
from ortserve.tools.bench.connections import Connections, HttpConnection
from ortserve.tools.bench.outcomes import Recorder, Ticket
from ortserve.tools.bench.target import ServerPlan


class Resending(Recorder):
    """Sends the next of ``count`` requests as soon as one has failed."""

    def __init__(self, target: Connections, count: int) -> None:
        super().__init__(0)
        self.target, self.left = target, count
        self.kinds: list[str] = []
        self.done = asyncio.Event()

    def send(self) -> None:
        if self.left:
            self.left -= 1
            self.target.send(Ticket(0, 0, 0))

    def failed(self, ticket: Ticket, done_ns: int, kind: str, example: str) -> None:
        self.kinds.append(kind)
        self.send()
        if len(self.kinds) == 6:
            self.done.set()


@pytest.mark.parametrize("at_once", [1, 6])
def test_each_request_to_a_server_that_is_gone_fails_at_once(at_once: int) -> None:
    """With two connections at most, four of six requests wait for those that others open."""

    async def run(port: int) -> list[str]:
        target = Connections(ServerPlan(parse_address(f"http://127.0.0.1:{port}"), (b"",), False, 2), HttpConnection)
        target.sink = sink = Resending(target, 6)
        for _ in range(at_once):
            sink.send()
        await asyncio.wait_for(sink.done.wait(), 20)
        await target.close()
        return sink.kinds

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # without listening
        assert asyncio.run(run(bound.getsockname()[1])) == ["connection_refused"] * 6
