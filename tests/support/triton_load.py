"""A steady load by unmodified Triton clients on both protocols. Every answer is checked."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio

from servers import LONG_S

CALLERS: Final = 6
"""Callers per protocol."""

PAUSE_S: Final = 0.2
"""Pause between a caller's answer and its next request, so that requests meet restarts and not a saturated machine."""

Infer = Callable[[np.ndarray], Awaitable[Any]]


@dataclass(frozen=True)
class Failure:
    protocol: str
    text: str
    is_untaken: bool
    """Whether the connection ended without an answer. HTTP clients repeat such a request on a new connection."""


@dataclass
class Load:
    """The answers and failures of all callers so far."""

    model: str
    rows: np.ndarray
    """Inputs ``x`` [n, …]; each request carries one of them."""
    expected: np.ndarray
    """Outputs ``y`` [n, …] of the same rows."""
    answered: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    _news: dict[str, asyncio.Event] = field(default_factory=lambda: {"http": asyncio.Event(), "grpc": asyncio.Event()})

    async def go_on(self, more: int = 50) -> None:
        """Wait until ``more`` further requests are answered on each protocol.

        The time limit applies to each answer, because a busy machine needs minutes for some hundred requests.
        """
        wanted = {protocol: self.answered[protocol] + more for protocol in self._news}
        for protocol, count in wanted.items():
            while self.answered[protocol] < count:
                self._news[protocol].clear()
                try:
                    await asyncio.wait_for(self._news[protocol].wait(), LONG_S)
                except TimeoutError:
                    missing = count - self.answered[protocol]
                    text = f"no {protocol} answer for {LONG_S:g} s, {missing} of {more} missing: {self.failures[-3:]}"
                    raise AssertionError(text) from None

    async def call_by_http(self, address: str, first: int) -> None:
        """Send one request after the other until cancelled."""
        async with triton_http_aio.InferenceServerClient(address, conn_timeout=LONG_S) as client:

            async def infer(row: np.ndarray) -> Any:
                given = triton_http.InferInput("x", row.shape, "FP32")
                given.set_data_from_numpy(row)
                return await client.infer(self.model, [given])

            await self._call("http", infer, first)

    async def call_by_grpc(self, address: str, first: int) -> None:
        """Send one request after the other until cancelled."""
        apart = [("grpc.use_local_subchannel_pool", 1)]
        async with triton_grpc_aio.InferenceServerClient(address, channel_args=apart) as client:

            async def infer(row: np.ndarray) -> Any:
                given = triton_grpc.InferInput("x", row.shape, "FP32")
                given.set_data_from_numpy(row)
                return await client.infer(self.model, [given], client_timeout=LONG_S)

            await self._call("grpc", infer, first)

    async def _call(self, protocol: str, infer: Infer, first: int) -> None:
        number = first
        while True:
            number = (number + 1) % len(self.rows)
            try:
                result = await infer(self.rows[number : number + 1])
                np.testing.assert_allclose(result.as_numpy("y")[0], self.expected[number], rtol=1e-3, atol=1e-4)
            except Exception as error:
                is_untaken = isinstance(error, aiohttp.ClientConnectionError)
                self.failures.append(Failure(protocol, f"{type(error).__name__}: {error}", is_untaken))
            else:
                self.answered[protocol] += 1
                self._news[protocol].set()
            await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def loading(load: Load, *, rest: str, grpc: str) -> AsyncIterator[None]:
    """Send requests to these addresses while the block runs."""
    async with asyncio.TaskGroup() as callers:
        tasks = [
            callers.create_task(call(address, number))
            for number in range(CALLERS)
            for call, address in ((load.call_by_http, rest), (load.call_by_grpc, grpc))
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
