"""grpc.health.v1: whether the server wants traffic, for load balancers and Kubernetes."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from google.protobuf.message import Message

from ortserve._pb import health_v1_pb2 as pb
from ortserve.codecs.grpc_infer import parse_message
from ortserve.frontends.grpc.calls import Context, Handlers, answering, read_one, streaming, write
from ortserve.frontends.grpc.streams import Streams


class Readiness(Protocol):
    """What these calls need of the model service."""

    def is_ready(self) -> bool: ...

    def readiness_news(self) -> asyncio.Event:
        """An event that is set when readiness may have changed since this call."""
        ...


class HealthCalls:
    """Answers with the server's readiness, whatever service is asked for: a server is ready as a whole."""

    service = "grpc.health.v1.Health"

    def __init__(self, readiness: Readiness, streams: Streams, services: Iterable[str]) -> None:
        """Take what is asked, where watchers are counted, and the names that ``List`` lists."""
        self._readiness = readiness
        self._streams = streams
        self._services = ("", *services)

    def handlers(self) -> Handlers:
        return {"Check": answering(self._check), "List": answering(self._list), "Watch": streaming(self._watch)}

    def _check(self, data: bytes) -> Message:
        parse_message(pb.HealthCheckRequest, data)
        return self._status()

    def _list(self, data: bytes) -> Message:
        parse_message(pb.HealthListRequest, data)
        return pb.HealthListResponse(statuses=dict.fromkeys(self._services, self._status()))

    async def _watch(self, context: Context) -> None:
        with self._streams.open():
            parse_message(pb.HealthCheckRequest, await self._streams.until_drain(read_one(context)))
            told: pb.HealthCheckResponse | None = None
            while True:
                news = self._readiness.readiness_news()
                status = self._status()
                if status != told:
                    await write(context, status.SerializeToString())
                    told = status
                await self._streams.until_drain(news.wait())

    def _status(self) -> pb.HealthCheckResponse:
        serving = pb.HealthCheckResponse.SERVING if self._readiness.is_ready() else pb.HealthCheckResponse.NOT_SERVING
        return pb.HealthCheckResponse(status=serving)
