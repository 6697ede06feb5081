"""Ending calls whose callers keep the server waiting: what came of them, or waits for them, takes room from others."""

from collections.abc import Iterable, Mapping

import grpc

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.calls import status_of
from ortserve.frontends.grpc.native.limits import Limits
from ortserve.frontends.grpc.native.sending import Sending
from ortserve.frontends.grpc.native.stream import Stream


class LateCalls:
    """Those of one connection, which is by this a ``Holder`` of the room for answers. Loop thread only."""

    def __init__(self, streams: Mapping[int, Stream], sending: Sending, limits: Limits) -> None:
        """``streams`` are those that are open, oldest first, by their ids."""
        self._streams = streams
        self._sending = sending
        self._limits = limits

    def end_stalled(self, now_ns: int) -> None:
        """End calls whose message has begun and does not come on; what came of it takes room from others."""
        limits = self._limits
        for stream in list(self._streams.values()):
            if not stream.waits_for_caller:
                continue
            kept = stream.reader.kept_bytes
            waited_s = (now_ns - stream.since_ns) / 1e9
            if stream.messages:  # whole ones wait for their reader, and its caller perhaps for room
                stream.since_ns, stream.since_bytes = now_ns, kept
            elif waited_s < limits.message_timeout_s:
                continue
            elif kept - stream.since_bytes < waited_s * limits.min_message_bytes_per_s:
                text = (
                    f"grpc_message_timeout_s: less than {limits.min_message_bytes_per_s} bytes a second came of a "
                    f"message for {limits.message_timeout_s:g} s"
                )
                self._sending.end(stream, *status_of(ServeError(ErrorKind.TOO_SLOW, text)), is_prompt=True)
            else:
                stream.since_ns, stream.since_bytes = now_ns, kept

    def end_untaken(self, stream_ids: Iterable[int]) -> None:
        """End calls of whose answers the caller takes nothing."""
        for stream_id in stream_ids:
            text = f"grpc_send_timeout_s: nothing of an answer was taken for {self._limits.send_timeout_s:g} s"
            error = ServeError(ErrorKind.TOO_SLOW, text)
            self._sending.end(self._streams[stream_id], *status_of(error), is_prompt=True)

    def end_unsendable(self) -> None:
        """End calls whose answers do not fit into the windows of a caller who sends nothing more."""
        text = "the caller has closed its side of the connection, and its window has no room for the rest of the answer"
        for stream in list(self._streams.values()):
            if self._sending.waits_for_window(stream):
                self._sending.end(stream, grpc.StatusCode.UNAVAILABLE, text, is_prompt=True)

    @property
    def unsent_bytes(self) -> int:
        return self._sending.unsent_bytes

    def end_oldest_unsent(self, text: str, *, is_alone: bool) -> bool:
        """As ``Holder``."""
        unsent = (stream for stream in self._streams.values() if stream.unsent)
        oldest = next(unsent, None)
        if oldest is None or (is_alone and next(unsent, None) is None):
            return False
        self._sending.end(oldest, *status_of(ServeError(ErrorKind.OVERLOADED, text)), is_prompt=True)
        return True

    def end_at_deadline(self, stream: Stream) -> None:
        self._sending.end(stream, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", is_prompt=True)
