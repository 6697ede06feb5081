"""Logs the listings of one store: once per change, not at every poll."""

import logging
from collections.abc import Iterable
from typing import Final

from ortserve.registry.stores.objects import StoreError, path_problem
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_MAX_SHOWN: Final = 3


class ListingLog:
    """The state of the log about the listings of a store. The caller makes one listing at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._error = ""
        self._unusable: list[str] = []

    def failed(self, error: StoreError) -> None:
        """Log that the store cannot be listed."""
        if error.message != self._error:
            self._error = error.message
            message = "the store cannot be listed; its loaded models keep serving"
            log_event(logger, logging.ERROR, message, repository=self._url, reason=error.message)

    def listed(self, paths: Iterable[str]) -> None:
        """Log that the store can be listed again, and the paths that ``group_by_entry`` leaves out for their names."""
        if self._error:
            self._error = ""
            log_event(logger, logging.INFO, "the store can be listed again", repository=self._url)
        # An object with an empty path is the mark of a folder, which some programs write.
        unusable = sorted(path for path in paths if path and path_problem(path.partition("/")[0]))
        if unusable and unusable != self._unusable:
            message = "objects are left out: no model can have their name"
            shown = ", ".join(repr(path[:200]) for path in unusable[:_MAX_SHOWN])
            log_event(logger, logging.WARNING, message, repository=self._url, objects=len(unusable), paths=shown)
        self._unusable = unusable
