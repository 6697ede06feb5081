"""The server: the order in which its parts start, drain and stop."""

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

from ortserve.app.composition import compose
from ortserve.config.options import ServerOptions
from ortserve.engine.providers import unused_gpu_providers
from ortserve.frontends.access import is_loopback, unguarded_groups
from ortserve.frontends.grpc.native.server import NativeGrpcServer
from ortserve.frontends.http.model_routes import HealthFromThreads
from ortserve.frontends.http.responses import key_rejection
from ortserve.frontends.metrics_server import MetricsServer
from ortserve.service.access import Group
from ortserve.telemetry.families import TextFormat
from ortserve.telemetry.logs import LogSwitches, log_event

logger: Final = logging.getLogger(__name__)

_MIN_CLOSING_S: Final = 1.0
"""Minimum time for closing models, whose last runs may outlast their callers."""

_SEQUENCES_SHARE: Final = 0.75
"""Share of the drain timeout in which sequences may end. Admitted requests have at least the rest."""

FLUSH_S: Final = 5.0
"""Time limit for writing the recorded requests that are still queued, and another one for trace files."""


class Server:
    """All ports, models and tasks of one server process. Loop thread only."""

    def __init__(self, options: ServerOptions, switches: LogSwitches, origins: Mapping[str, str] | None = None) -> None:
        """Create all parts without opening a port. ``origins`` says where each option that is set was set.

        Raises:
            ServeError: invalid_input, as ``compose``.
        """
        self._options = options
        self._parts = compose(options, switches, origins or {})
        self._metrics: MetricsServer | None = None
        self._following: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listen on all ports. Health answers from now on; models answer when they are loaded.

        Raises:
            ServeError: conflict, with the option of an address that cannot be listened on; overloaded, if the system
                permits no thread.
        """
        parts, options = self._parts, self._options
        parts.watchdog.start()
        certificate = parts.certificate
        self._metrics = MetricsServer(
            TextFormat(parts.prometheus).write,
            options.host,
            options.metrics_port,
            health=HealthFromThreads(parts.models, asyncio.get_running_loop()).answer,
            refuse=partial(key_rejection, parts.access.guards.get(Group.METRICS)),
            tls=certificate.context_of("metrics") if certificate and options.tls_metrics else None,
            handshake_timeout_s=options.tls_handshake_timeout_s,
        )
        if certificate is not None:
            self._following.append(asyncio.create_task(certificate.watch(), name="certificate"))
        keys = parts.key_files.follow(parts.access, options.keys_poll_s)
        self._following.append(asyncio.create_task(keys, name="keys"))
        ports = {"http": await parts.http.start(), "grpc": await parts.grpc.start(), "metrics": self._metrics.port}
        self._announce(ports)
        if parts.console is not None:
            parts.console.server.listens(ports, self._connections)
            self._following.append(asyncio.create_task(parts.console.observation.run(), name="console"))

    def _connections(self) -> dict[str, int]:
        """Open connections by protocol. grpcio does not report its own."""
        http, grpc = self._parts.http, self._parts.grpc
        of_grpc = {"gRPC": grpc.connection_count} if isinstance(grpc, NativeGrpcServer) else {}
        return {"HTTP": http.connection_count, **of_grpc}

    def _announce(self, ports: Mapping[str, int]) -> None:
        """Log the ports and unused GPUs, and warn about calls that need no key and about keys in plain text."""
        parts, options = self._parts, self._options
        host, certificate = options.host, parts.certificate
        for protocol, port in ports.items():
            security: dict[str, object] = {}
            if certificate is not None and (protocol != "metrics" or options.tls_metrics):
                is_mutual = certificate.asks_clients and protocol != "metrics"
                security["tls"] = "mutual" if is_mutual else "server"
            log_event(logger, logging.INFO, "listening", protocol=protocol, host=host, port=port, **security)
        if unused := unused_gpu_providers(options.execution_providers):
            message = "execution_providers names only the CPU, although ONNX Runtime offers providers for GPUs"
            log_event(logger, logging.INFO, message, offered=", ".join(unused))
        if is_open := unguarded_groups(
            host,
            parts.access.guards,
            loads_models=options.model_control_mode == "explicit",
            shares_memory=options.allow_client_shm,
            profiles=options.profiling,
        ):
            message = "calls of these groups need no key: any client that reaches this address can make them"
            log_event(logger, logging.WARNING, message, host=host, open=", ".join(is_open))
        if parts.access.guards and certificate is None and not is_loopback(host):
            message = "keys are sent in plain text unless a proxy in front of the server encrypts"
            log_event(logger, logging.WARNING, message, host=host)

    async def load(self) -> None:
        """Load all models.

        Raises:
            ServeError: invalid_input, if a repository cannot be read.
        """
        await self._parts.repository.start()
        # Objects of the start live as long as the process; freeze them so that the garbage collector skips them. Its
        # full runs are due when new objects are a quarter of those of the last full run. The second run here finds few,
        # so that the frozen ones do not count; otherwise the cycles of many unloaded models would stay in memory.
        gc.collect()
        gc.freeze()
        gc.collect()
        models = self._parts.models
        served, failed, others = models.count_models()
        level = logging.WARNING if failed else logging.INFO
        fields = {"ready": models.is_ready(), "models": served, "failed": failed}
        if others:
            fields["not_in_memory"] = others
        log_event(logger, level, "initial loading has ended", **fields)
        if not served and not failed and not others and self._options.model_control_mode != "explicit":
            expected = "<repository>/<model>/<version>/model.onnx or <repository>/<name>.onnx"
            log_event(logger, logging.WARNING, "found no models in the repositories", expected=expected)

    async def watch(self) -> None:
        """Follow the repositories while the server runs, if its mode is ``poll``."""
        await self._parts.repository.watch(self._options.repository_poll_s)

    async def drain(self) -> bool:
        """Turn readiness off, wait for load balancers to react, then finish the admitted requests.

        Returns:
            False if requests were cut off at the end of the drain timeout, or if runs are still active after it.
        """
        parts, options = self._parts, self._options
        ends_s = time.monotonic() + options.drain_delay_s + options.drain_timeout_s
        parts.models.begin_exit()
        log_event(logger, logging.INFO, "draining", delay_s=options.drain_delay_s, timeout_s=options.drain_timeout_s)
        parts.http.begin_drain()
        parts.registry.begin_drain()
        await asyncio.sleep(options.drain_delay_s)
        parts.profiling.close()
        with contextlib.suppress(TimeoutError):
            # Requests of sequences that have begun are accepted until they end.
            async with asyncio.timeout(options.drain_timeout_s * _SEQUENCES_SHARE):
                await parts.registry.wait_for_sequences()
        if parts.console is not None:
            parts.console.observation.close()
        left_s = max(0.0, ends_s - time.monotonic())
        is_whole = all(await asyncio.gather(parts.http.stop(left_s), parts.grpc.stop(left_s)))
        try:
            async with asyncio.timeout(max(_MIN_CLOSING_S, ends_s - time.monotonic())):
                await parts.registry.close()
        except TimeoutError:
            is_whole = False
            message = "drain timed out; active runs are abandoned"
            log_event(logger, logging.WARNING, message, timeout_s=options.drain_timeout_s)
        if parts.recordings is not None:
            await asyncio.to_thread(parts.recordings.close, FLUSH_S)
        if parts.tracing is not None:
            await asyncio.to_thread(parts.tracing.close, options.otlp_flush_timeout_s)
        if is_whole:
            log_event(logger, logging.INFO, "drained")
        return is_whole

    async def stop(self) -> None:
        """Close everything that is still open. After ``drain`` that is the metrics port, which is open until then."""
        await asyncio.gather(self._parts.http.stop(0), self._parts.grpc.stop(0))
        self._parts.watchdog.stop()  # before the loop waits for the disk
        self._parts.traces.close(FLUSH_S)
        for following in self._following:
            following.cancel()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
