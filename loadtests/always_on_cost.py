"""How much does each permanent feature cost a REST JSON request?

Level: the HTTP protocol in process, with everything below it as in the server. Expected: of about 35 µs per request,
metrics and ``Server-Timing`` cost about 1 µs each and limits less; known heads save about 10.

    python loadtests/always_on_cost.py [--rounds 15]

The script passes the requests of 32 connections to the HTTP protocol as a transport would, and receives answers in the
place of the socket, so that the figures exclude the kernel and a load generator. A patch disables one feature at a
time; the arms with and without it take turns. The status of every answer is checked, and the outputs of some. Writes
``loadtests/results/always_on_cost.md``.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import uvloop  # noqa: E402

from fakes.socket import FakeSocket  # noqa: E402
from harness import spread, table, write_report  # noqa: E402
from infer_requests import json_request, numbers_of_json  # noqa: E402
from ortserve.app.server import Server  # noqa: E402
from ortserve.config.options import ServerOptions  # noqa: E402
from ortserve.core.timing import Timing  # noqa: E402
from ortserve.frontends.http import protocol  # noqa: E402
from ortserve.service.gate import Reservation  # noqa: E402
from ortserve.telemetry.logs import configure_logging  # noqa: E402
from ortserve.telemetry.series import ModelMetrics  # noqa: E402
from tiny_mlp import write_tiny_mlp  # noqa: E402

CONNECTIONS: Final = 32
TURNS: Final = 125


def _nothing(*_: object) -> None: ...


def _without_limits() -> AbstractContextManager[Any]:
    patches = ExitStack()
    for name in ("grow", "shrink", "release"):
        patches.enter_context(patch.object(Reservation, name, _nothing))
    return patches


ARMS: Final[dict[str, Callable[[], AbstractContextManager[Any]]]] = {
    "whole": nullcontext,
    "metrics": lambda: patch.object(ModelMetrics, "observe_success", _nothing),
    "Server-Timing": lambda: patch.object(Timing, "server_timing", lambda _: b""),
    "limit on bytes held": _without_limits,
    "known heads": lambda: patch.object(protocol, "_MAX_UNKNOWN_HEADS", -1),
}
"""Patches that disable a feature, by its name."""


class Callers:
    """Connections to a server in this process, each of which repeats the same request."""

    def __init__(self, server: Server, request: bytes) -> None:
        inside: Any = server._parts.http._server
        loop = asyncio.get_running_loop()
        self._request = request
        self._waiting = 0
        self._answer = b""
        self._are_answered = asyncio.Event()
        self._connections: list[Any] = []
        for _ in range(CONNECTIONS):
            connection = inside.config.http_protocol_class(
                config=inside.config, server_state=inside.server_state, _loop=loop
            )
            connection.connection_made(FakeSocket(self._on_answer))
            self._connections.append(connection)

    async def turn(self) -> bytes:
        """Send a request on each connection and wait for all answers. Returns the last one."""
        self._waiting = CONNECTIONS
        self._are_answered.clear()
        for connection in self._connections:
            connection.data_received(self._request)
        await self._are_answered.wait()
        return self._answer

    def leave(self) -> None:
        for connection in self._connections:
            connection.connection_lost(None)

    def _on_answer(self, answer: bytes) -> None:
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        self._answer = answer
        self._waiting -= 1
        if not self._waiting:
            self._are_answered.set()


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """CPU µs per request in each round, by the disabled feature."""
    model = write_tiny_mlp(folder, decimals=6)
    body = json_request(model.row, decimals=6)
    head = b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    server = Server(
        ServerOptions(repositories=(folder,), http_port=0, grpc_port=0, metrics_port=0), configure_logging("warning")
    )
    await server.start()
    costs: dict[str, list[float]] = {name: [] for name in ARMS}
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        await server.load()
        callers = Callers(server, b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
        stack.callback(callers.leave)
        for taken_out in ARMS.values():  # warm-up, not counted
            with taken_out():
                answer = await callers.turn()
                model.check(numbers_of_json(answer.partition(b"\r\n\r\n")[2]))
                for _ in range(TURNS):
                    await callers.turn()
        for number in range(options.rounds):
            for name in ARMS if number % 2 else reversed(ARMS):
                with ARMS[name]():
                    began_s = time.process_time()
                    for _ in range(TURNS):
                        await callers.turn()
                    costs[name].append((time.process_time() - began_s) / (TURNS * CONNECTIONS) * 1e6)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        costs = runner.run(measure(Path(folder), options))
    report(costs, options)


def report(costs: dict[str, list[float]], options: argparse.Namespace) -> None:
    whole = costs.pop("whole")
    rows = [
        [name, spread(each), spread([one - other for one, other in zip(whole, each, strict=True)])]
        for name, each in costs.items()
    ]
    setting = (
        f"Tiny MLP, {CONNECTIONS} connections in the process, medians (lowest to highest) of {options.rounds} rounds "
        f"in which the arms took turns, CPU µs a request; with all features: {spread(whole)}. The cost of a "
        "feature is the difference within a round; it is negative if the feature saves more than it costs."
    )
    write_report(
        options.results / "always_on_cost.md",
        "What features that are always on cost a REST JSON request",
        setting,
        table(["feature", "without it", "its cost"], rows),
    )


if __name__ == "__main__":
    main()
