"""Which requests are traced into files, and what is written of them, after they were answered."""

import asyncio
from itertools import count

from ortserve.clock import Clock
from ortserve.core.timing import Timing
from ortserve.service.trace_settings import TraceSettings
from ortserve.telemetry.trace_files import Sampling, encode_record


class TraceWriter:
    """Makes the traces of the requests that the settings choose. Loop thread only."""

    def __init__(self, settings: TraceSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._numbers = count(1)

    def observe(
        self,
        protocol: str,
        timing: Timing,
        request_id: str,
        model: str,
        version: str,
        *,
        ended_ns: int,
        is_answered: bool = True,
    ) -> None:
        """Count a request of a model, answered or failed, and trace it if it is one of those that are.

        Args:
            protocol: ``http`` or ``grpc``.
            timing: With the points that it reached; it is read in the next turn of the loop, and stamped no more.
            request_id: What its caller named it.
            model: That it was for.
            version: That was found for it.
            ended_ns: When its answer or error was made.
            is_answered: Whether its caller is still there.
        """
        sampling = self._settings.of(model)
        if sampling.take():
            named = (next(self._numbers), model, version, request_id, protocol)
            # In the next turn of the loop: the answer is sent in this one, unless a thread compresses it first.
            asyncio.get_running_loop().call_soon(self._collect, sampling, named, timing, ended_ns, is_answered)

    def _collect(
        self,
        sampling: Sampling,
        named: tuple[int, str, str, str, str],
        timing: Timing,
        ended_ns: int,
        is_answered: bool,
    ) -> None:
        sent_ns = self._clock() if is_answered else None
        sampling.collect(encode_record(*named, timing, ended_ns=ended_ns, sent_ns=sent_ns))
