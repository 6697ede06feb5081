"""The log line about requests that a model rejected: at most one a minute, with the number of them."""

import logging
from typing import Final

from ortserve.errors import ModelRejectionError
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_PERIOD_NS: Final = 60_000_000_000


class RejectionLog:
    """Of one model version. Loop thread only."""

    def __init__(self, model: str, version: str) -> None:
        """The first rejection is logged at once."""
        self._model = model
        self._version = version
        self._due_ns: int | None = None
        self._unlogged = 0

    def note(self, error: ModelRejectionError, now_ns: int) -> None:
        """Count a rejected request, and log it together with those before it if the last line is a minute old.

        The line names the node and leaves out ONNX Runtime's text, which may quote elements of the request's tensors.
        """
        self._unlogged += 1
        if self._due_ns is not None and now_ns < self._due_ns:
            return
        requests, self._unlogged = self._unlogged, 0
        self._due_ns = now_ns + _PERIOD_NS
        log_event(
            logger,
            logging.INFO,
            "model rejected requests",
            model=self._model,
            version=self._version,
            requests=requests,
            by=error.node or "the check of the inputs",
        )
