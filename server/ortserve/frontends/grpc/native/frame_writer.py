"""Writes the frames of one connection to its transport, and joins the frames of one turn of the event loop."""

import asyncio
from collections.abc import Callable
from typing import Final

from ortserve.frontends.grpc.native import frames
from ortserve.frontends.long_reads import resume_reads
from ortserve.frontends.unsent_answers import unacknowledged_bytes

_MAX_PIECES: Final = 256
"""Number of pending pieces above which they are passed to the transport within the turn."""

_MAX_PAUSED_BYTES: Final = 256 * 1024
"""Bytes of frames outside flow control that may be queued while the peer reads nothing. Above this, reading pauses."""

_RESET_DELAY_S: Final = 0.25
"""Time between the end of an answer and the reset that follows it. HAProxy 2.6 replaces the answer by CANCELLED if it
reads both at once. Most peers end or reset the request meanwhile. What they send until then is discarded."""


class FrameWriter:
    """The write queue of one connection. Loop thread only.

    Attributes:
        is_paused: Whether the transport accepts no more, because the peer reads too slowly.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, on_resets_ended: Callable[[], object]
    ) -> None:
        """``on_resets_ended`` is called soon after the last pending reset was sent or forgotten."""
        self._loop = loop
        self._transport = transport
        self._on_resets_ended = on_resets_ended
        self._pending: list[bytes | memoryview] = []
        self._is_flush_due = False
        self.is_paused = False
        self._paused_bytes = 0
        self._written_bytes = 0
        self._unacknowledged_bytes = 0
        self._resets: dict[int, asyncio.TimerHandle] = {}

    @property
    def has_resets(self) -> bool:
        """Whether resets of answered streams are pending."""
        return bool(self._resets)

    def control(self, frame: bytes) -> None:
        """Write a frame at the end of this turn of the loop. No window limits the frame."""
        self._pending.append(frame)
        self.flush_soon()
        if self.is_paused:
            self._paused_bytes += len(frame)
            if not self.may_read():
                self._transport.pause_reading()  # a peer that does not read must not cause more answers

    def reset_later(self, stream_id: int) -> None:
        """End the request of an answered stream: the peer need not send the rest (RFC 9113, section 8.1)."""
        self._resets[stream_id] = self._loop.call_later(_RESET_DELAY_S, self._reset, stream_id)

    def forget_reset(self, stream_id: int) -> bool:
        """Send no reset, because the stream has closed (RFC 9113, section 5.1). Returns False if none was due."""
        timer = self._resets.pop(stream_id, None)
        if timer is None:
            return False
        timer.cancel()
        self._end_reset()
        return True

    def put(self, part: bytes | memoryview) -> None:
        """Add bytes that the next flush writes. The caller must flush."""
        self._pending.append(part)

    def flush_soon(self) -> None:
        """Flush at the end of this turn of the loop."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)
        elif len(self._pending) > _MAX_PIECES:
            self.flush()  # so that the transport can pause the writing

    def flush(self) -> None:
        """Pass all pending bytes to the transport."""
        self._is_flush_due = False
        pending, self._pending = self._pending, []
        if pending and not self._transport.is_closing():
            if len(pending) == 1:
                self._written_bytes += len(pending[0])
                self._transport.write(pending[0])
            else:
                self._written_bytes += sum(map(len, pending))
                self._transport.writelines(pending)

    def may_read(self) -> bool:
        """Whether the connection may be read: the peer has not left too many answers to its frames unread."""
        return self._paused_bytes <= _MAX_PAUSED_BYTES

    def pause(self) -> None:
        """Note that the transport accepts no more."""
        self.is_paused = True

    def resume(self) -> None:
        """Note that the transport accepts more, and resume reading."""
        self.is_paused = False
        has_paused_reading = not self.may_read()
        self._paused_bytes = 0
        if has_paused_reading:
            resume_reads(self._transport)

    def _reset(self, stream_id: int) -> None:
        del self._resets[stream_id]
        self.control(frames.rst_stream(stream_id, frames.ErrorCode.NO_ERROR))
        self._end_reset()

    def _end_reset(self) -> None:
        if not self._resets:
            self._loop.call_soon(self._on_resets_ended)

    @property
    def buffered_bytes(self) -> int:
        """Bytes that the transport has not sent yet."""
        return self._transport.get_write_buffer_size()

    def count_sent(self) -> int:
        """Count the sent bytes that the peer has not acknowledged. Returns ``sent_bytes``."""
        self._unacknowledged_bytes = unacknowledged_bytes(self._transport.get_extra_info("socket"))
        return self.sent_bytes

    @property
    def sent_bytes(self) -> int:
        """Total of the bytes that the peer had acknowledged at the last count, plus those sent since then."""
        return self._written_bytes - self.buffered_bytes - self._unacknowledged_bytes
