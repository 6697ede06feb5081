"""What callers lose with a connection: the event and the counters that tell an operator of it."""

import logging
from collections.abc import Callable
from typing import Final

from ortserve.clock import Clock
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_LOG_INTERVAL_NS: Final = 1_000_000_000
"""Between two warnings. A peer that opens one connection after the other cannot fill the log."""


class Losses:
    """Those of one port. Loop thread only."""

    def __init__(
        self, clock: Clock, on_cut_answer: Callable[[str], None], on_connection_error: Callable[[str], None]
    ) -> None:
        """Take the two counters; each takes the value of its label."""
        self._clock = clock
        self._on_cut_answer = on_cut_answer
        self._on_connection_error = on_connection_error
        self._logged_ns: int | None = None
        self._unlogged = 0

    def cut_answer(self, cause: str) -> None:
        """Count an answer that ends before all of it was handed to the transport."""
        self._on_cut_answer(cause)

    def connection_error(self, error: Http2ConnectionError, peer: object, open_calls: int) -> None:
        """Count a connection that the server ends with an error. Log floods, whose bounds are this server's own."""
        self._on_connection_error(error.code.name.lower())
        if error.code is not ErrorCode.ENHANCE_YOUR_CALM:
            return
        now_ns = self._clock()
        if self._logged_ns is not None and now_ns - self._logged_ns < _LOG_INTERVAL_NS:
            self._unlogged += 1
            return
        self._logged_ns = now_ns
        unlogged, self._unlogged = self._unlogged, 0
        log_event(
            logger,
            logging.WARNING,
            "a gRPC connection was closed for a flood",
            reason=error.text,
            peer=peer,
            open_calls=open_calls,
            unlogged=unlogged,
        )
