"""The metrics port: answers Prometheus on a thread of its own, so that a busy event loop can still be looked at."""

from prometheus_client import CollectorRegistry, start_http_server

from ortserve.errors import ErrorKind, ServeError


class MetricsServer:
    """Serves ``/metrics`` from construction until ``close``.

    Args:
        registry: What is exposed.
        host: Address to listen on.
        port: 0 takes any free one; ``port`` says which.

    Raises:
        ServeError: ``CONFLICT``, when the address cannot be listened on, naming the option.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            message = f"metrics_port: cannot listen on {host}:{port}: {error.strerror}"
            raise ServeError(ErrorKind.CONFLICT, message) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop listening and end the thread. Returns within half a second, scrapes under way are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
