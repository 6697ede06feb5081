"""Ends calls for deadlines, stalled requests and unread answers, and many calls in several turns of the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

import grpc

from ortserve.config.option_groups import GrpcOptions
from ortserve.errors import ErrorKind
from ortserve.frontends.grpc.native.frame_writer import FrameWriter
from ortserve.frontends.grpc.native.sending import Sending
from ortserve.frontends.grpc.native.stream import Stream
from ortserve.frontends.read_rate import SLOW_SHARE, ReadRate
from ortserve.frontends.status import STATUSES

_NEVER_NS: Final = 2**63 - 1
_TOO_SLOW: Final = STATUSES[ErrorKind.TOO_SLOW].grpc

_TURN_CALLS: Final = 100
"""Maximum number of calls that end in a turn of the event loop, in about 1 ms."""


class CallEnds:
    """Ends calls of all connections of a port that end together, in several turns of the event loop. Loop thread only.

    A client that exits may leave thousands of calls on any number of connections, and thousands of calls may have the
    same deadline or stall together. Each takes about 10 µs to end, and more if a task runs it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Iterator[None]] = deque()

    def add(self, ends: Iterator[None]) -> None:
        """End the calls that ``ends`` ends, one with each step, from the next turn on and after those added before."""
        self._waiting.append(ends)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._end_some)

    def _end_some(self) -> None:
        left = _TURN_CALLS
        try:
            while left and self._waiting:
                for _ in self._waiting[0]:
                    left -= 1
                    if not left:
                        break
                else:
                    self._waiting.popleft()
        finally:  # an iterator that raised has no further step
            if self._waiting:
                self._loop.call_soon(self._end_some)


class CallTimeouts:
    """Ends the calls of one connection that exceed a time limit. Loop thread only.

    One timer covers all deadlines of the connection and is set for the earliest. Most calls end long before their
    deadline, so a call with a deadline seldom costs a timer.

    Attributes:
        next_deadline_ns: Time at which the timer is due. A call with an earlier deadline needs ``wake_at``.
        slow_ns: Time of the last check, if it found that only slow callers hold the connection; otherwise 0.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sending: Sending,
        writer: FrameWriter,
        options: GrpcOptions,
        ends: CallEnds,
    ) -> None:
        self._loop = loop
        self._ends = ends
        self._sending = sending
        self._writer = writer
        self._streams: Final = sending.streams
        self._options = options
        self._progress = SendProgress(options.grpc_send_timeout_s)
        self._reading = ReadRate(options.grpc_min_message_bytes_per_s, options.grpc_send_timeout_s)
        self._unsent_since_ns: dict[int, int] = {}
        """When a check first saw the unsent bytes of a stream, by stream id."""
        self._timer: asyncio.TimerHandle | None = None
        self.next_deadline_ns = _NEVER_NS
        self.slow_ns = 0

    def wake_at(self, by_ns: int) -> None:
        """Set the timer for a deadline that is earlier than ``next_deadline_ns``."""
        self.close()
        self.next_deadline_ns = by_ns
        in_s = max(0, by_ns - self._sending.clock()) / 1e9
        self._timer = self._loop.call_later(in_s, self._on_deadline)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.next_deadline_ns = _NEVER_NS

    def _on_deadline(self) -> None:
        self._timer = None
        self.next_deadline_ns = _NEVER_NS
        self._ends.add(self._end_past_deadline(self._sending.clock()))

    def _end_past_deadline(self, now_ns: int) -> Iterator[None]:
        """End the calls whose deadline has passed, one with each step, then set the timer for the next one."""
        next_ns = _NEVER_NS
        for stream in list(self._streams.values()):
            by_ns = stream.deadline_ns
            if by_ns is None:
                continue
            if by_ns <= now_ns:
                code = grpc.StatusCode.DEADLINE_EXCEEDED
                self._sending.end(stream, code, "Deadline Exceeded", is_prompt=True)
                yield
            elif not stream.is_over:
                next_ns = min(next_ns, by_ns)
        if next_ns < self.next_deadline_ns:
            self.wake_at(next_ns)

    def end_late(self, now_ns: int) -> bool:
        """End the calls whose request or answer stalls.

        Returns:
            Whether the peer reads nothing from the whole connection, so that the connection must be aborted.
        """
        options = self._options
        requests = [stream for stream in self._streams.values() if self._is_stalled(stream, now_ns)]
        if requests:
            text = (
                f"grpc_message_timeout_s: a message arrived at less than {options.grpc_min_message_bytes_per_s} bytes "
                f"per second for {options.grpc_message_timeout_s:g} s"
            )
            self._ends.add(self._end_each(requests, _TOO_SLOW, text, self._is_stalled_now))
        sent = self._sending.sent_by_stream()
        self._reading.note(now_ns, None, self._writer.count_sent() if sent else 0, has_unsent=bool(sent))
        self._unsent_since_ns = {stream_id: self._unsent_since_ns.get(stream_id, now_ns) for stream_id in sent}
        is_slow = not sent or self._reading.is_slow(now_ns)
        is_slow = is_slow and all(self._is_slow(stream, now_ns) for stream in self._streams.values())
        self.slow_ns = now_ns if is_slow else 0
        answers = self._progress.stalled(now_ns, sent)
        if 0 in answers:
            return True
        if answers:
            text = f"grpc_send_timeout_s: the caller read nothing of the answer for {options.grpc_send_timeout_s:g} s"
            streams = [self._streams[stream_id] for stream_id in answers]
            self._ends.add(self._end_each(streams, _TOO_SLOW, text, partial(self._has_sent_only, sent)))
        return False

    def end_unsendable(self) -> None:
        """End the calls whose answers wait for window: the peer has closed its side, so no WINDOW_UPDATE can arrive."""
        text = "the caller closed its side of the connection, and its flow-control window is too small for the answer"
        unsendable = [stream for stream in self._streams.values() if self._sending.waits_for_window(stream)]
        if unsendable:
            self._ends.add(
                self._end_each(unsendable, grpc.StatusCode.UNAVAILABLE, text, self._sending.waits_for_window)
            )

    def _end_each(
        self, streams: list[Stream], code: grpc.StatusCode, text: str, is_due: Callable[[Stream], bool]
    ) -> Iterator[None]:
        """End a call with each step, unless it has ended or is no longer due since the step before."""
        for stream in streams:
            if not stream.is_over and is_due(stream):
                self._sending.end(stream, code, text, is_prompt=True)
                yield

    def _has_sent_only(self, sent: Mapping[int, int], stream: Stream) -> bool:
        # Another counter applies once the stream no longer waits for the connection: any difference means progress.
        return bool(stream.unsent) and self._sending.sent_of(stream) == sent[stream.id]

    def _is_stalled_now(self, stream: Stream) -> bool:
        return self._is_stalled(stream, self._sending.clock())

    def _is_stalled(self, stream: Stream, now_ns: int) -> bool:
        """Whether a message arrives too slowly: the call keeps its connection open, and a part of it uses memory."""
        timeout_s = self._options.grpc_message_timeout_s
        if self._arrives_slowly(stream, now_ns, timeout_s):
            return True
        # With complete messages, the handler is behind, so the caller may wait for window.
        if stream.waits_for_caller and (stream.messages or now_ns - stream.since_ns >= timeout_s * 1e9):
            stream.since_ns, stream.since_bytes = now_ns, stream.reader.kept_bytes
        return False

    def _arrives_slowly(self, stream: Stream, now_ns: int, for_s: float) -> bool:
        """Whether a message has arrived below the minimum rate for ``for_s``."""
        if stream.messages or not stream.waits_for_caller:
            return False
        waited_s = (now_ns - stream.since_ns) / 1e9
        received = stream.reader.kept_bytes - stream.since_bytes
        return waited_s >= for_s and received < waited_s * self._options.grpc_min_message_bytes_per_s

    def _is_slow(self, stream: Stream, now_ns: int) -> bool:
        """Whether a call waits for a slow caller. The rate of answers is that of the connection, for answers that have
        waited for some time: behind a proxy, other calls share the connection with those of slow callers.
        """
        if stream.unsent:
            return now_ns - self._unsent_since_ns[stream.id] >= SLOW_SHARE * self._options.grpc_send_timeout_s * 1e9
        return self._arrives_slowly(stream, now_ns, SLOW_SHARE * self._options.grpc_message_timeout_s)


class SendProgress:
    """Tracks how long each stream of a connection has sent nothing, by stream id; 0 is the connection. Pure."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_ns = int(timeout_s * 1e9)
        self._last: dict[int, tuple[int, int]] = {}

    def stalled(self, now_ns: int, sent: Mapping[int, int]) -> list[int]:
        """Return the ids that have sent nothing for the whole timeout.

        Args:
            now_ns: Monotonic time.
            sent: A number for each id with unsent bytes, which grows when bytes are sent. A smaller number than before
                counts as no progress, and becomes the new base.
        """
        before, self._last = self._last, {}
        stalled: list[int] = []
        for key, sent_bytes in sent.items():
            was, since_ns = before.get(key, (-1, now_ns))
            if sent_bytes > was:
                since_ns = now_ns
            self._last[key] = sent_bytes, since_ns
            if now_ns - since_ns >= self._timeout_ns:
                stalled.append(key)
        return stalled
