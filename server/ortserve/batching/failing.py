"""Settles the requests of a failed run: each gets an error about itself, and nothing of the others."""

import logging
from typing import Final

from ortserve.batching.isolation import Group
from ortserve.batching.riders import settle
from ortserve.errors import (
    DeviceLostError,
    ErrorKind,
    ModelRejectionError,
    OutOfMemoryError,
    RunTimeoutError,
    ServeError,
)

logger: Final = logging.getLogger(__name__)

_NOT_TOLD_APART: Final = (
    "the run failed, and whether because of this request or of others that it ran with was not found out"
)


def fail(group: Group, taken_ns: int, error: Exception) -> None:
    """Settle all riders of a group that is not run again, with what its run raised."""
    told = _told(error, is_lone=len(group.riders) == 1)
    for rider in group.riders:
        rider.timing.taken_ns = taken_ns  # work was done for it, which tells it from a refusal
        settle(rider.promise, error=told)


def _told(error: Exception, *, is_lone: bool) -> ServeError:
    if not isinstance(error, ServeError):
        logger.error("a run failed unexpectedly", exc_info=error)
        error = ServeError(ErrorKind.INTERNAL, "the run failed")
    if is_lone or isinstance(error, OutOfMemoryError | DeviceLostError | RunTimeoutError):  # these quote no request
        return error
    # The error's own text may quote any of the requests.
    if isinstance(error, ModelRejectionError):  # of another request, perhaps: sent again, this one may succeed
        return ServeError(ErrorKind.NOT_READY, _NOT_TOLD_APART, retry_after_s=1)
    return ServeError(ErrorKind.INTERNAL, _NOT_TOLD_APART)
