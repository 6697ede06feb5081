"""The frames of a connection that carry no request: WINDOW_UPDATE, SETTINGS, PING, RST_STREAM and others.

``receiving`` handles HEADERS and DATA. ``flood_limits`` limits how many of these frames a peer may send.
"""

from collections.abc import Callable
from typing import Final

from ortserve.config.option_groups import GrpcOptions
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.flood_limits import (
    FLOOD,
    WINDOW_UPDATE_BYTES,
    PingLimit,
    ResetLimit,
    TokenBucket,
)
from ortserve.frontends.grpc.native.frame_writer import FrameWriter
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError
from ortserve.frontends.grpc.native.limits import Lifetime
from ortserve.frontends.grpc.native.receiving import Receiving
from ortserve.frontends.grpc.native.sending import Sending

DRAIN_PING: Final = b"draining"
"""Payload of the PING after the first GOAWAY. The answer shows that the peer has read the GOAWAY."""


class ControlFrames:
    """Handles the frames of one connection that carry no request. Loop thread only.

    The methods that handle frames raise Http2ConnectionError if the connection must end.
    """

    def __init__(
        self,
        receiving: Receiving,
        sending: Sending,
        writer: FrameWriter,
        options: GrpcOptions,
        life: Lifetime,
        on_drain_answer: Callable[[], None],
    ) -> None:
        """``on_drain_answer`` handles the answer to ``DRAIN_PING``."""
        self._receiving = receiving
        self._sending = sending
        self._writer = writer
        self._life = life
        self._on_drain_answer = on_drain_answer
        self._streams: Final = sending.streams
        self._resets = ResetLimit(receiving.flood)
        self._window_updates = TokenBucket(life.heard_ns)
        self._pings = PingLimit(options)

    def on_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE: expected 4 bytes")
        increment = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        sending = self._sending
        credit, sending.window_credit = sending.window_credit, 0
        if not self._window_updates.take(self._life.heard_ns, credit / WINDOW_UPDATE_BYTES):
            text = "too many WINDOW_UPDATEs for the bytes that were sent"
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, text)
        if stream_id == 0:
            if increment == 0:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE: expected at least 1, got 0")
            sending.window += increment
            if sending.window > frames.MAX_WINDOW:
                raise frames.too_large_window(sending.window)
            sending.on_window()
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            self._receiving.check_begun(stream_id, "WINDOW_UPDATE")
        if increment == 0:
            self._receiving.reset(stream_id, ErrorCode.PROTOCOL_ERROR)
        elif stream is not None:
            if not sending.add_window(stream, increment):
                self._receiving.reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            elif stream.unsent:
                sending.on_stream_window(stream)

    def on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle any frame but a WINDOW_UPDATE, the most frequent of them."""
        if kind == frames.PING:
            self._on_ping(stream_id, flags, payload)
        elif kind == frames.SETTINGS:
            _check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
            self._receiving.charge()
            if flags & frames.ACK:
                _check(not payload, ErrorCode.FRAME_SIZE_ERROR, "SETTINGS with ACK: expected no payload")
            else:
                self._sending.apply(frames.read_peer_settings(payload))
        elif kind == frames.RST_STREAM:
            self._on_rst_stream(stream_id, payload)
        elif kind == frames.PUSH_PROMISE:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            if kind == frames.PRIORITY:
                _check(stream_id != 0, ErrorCode.PROTOCOL_ERROR, "PRIORITY of no stream")
                _check(len(payload) == 5, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY: expected 5 bytes")
            elif kind == frames.GOAWAY:
                _check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
                _check(len(payload) >= 8, ErrorCode.FRAME_SIZE_ERROR, "GOAWAY: expected at least 8 bytes")
            self._receiving.charge()  # these frames need no reaction, and unknown types are ignored

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        _check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        _check(len(payload) == 8, ErrorCode.FRAME_SIZE_ERROR, "PING: expected 8 bytes")
        self._receiving.charge()
        if flags & frames.ACK:
            if payload == DRAIN_PING:
                self._on_drain_answer()
            return
        if self._sending.has_answered:
            self._sending.has_answered = False
            self._pings.reset()
        if not self._pings.admit(self._life.heard_ns, has_calls=bool(self._streams)):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._writer.control(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _on_rst_stream(self, stream_id: int, payload: bytes) -> None:
        _check(len(payload) == 4, ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM: expected 4 bytes")
        stream = self._streams.get(stream_id)
        if stream is None:
            self._receiving.check_begun(stream_id, "RST_STREAM")
            self._writer.forget_reset(stream_id)
        begun_ns = None if stream is None else stream.begun_ns
        if not self._resets.admit(begun_ns, self._receiving.begun_calls, len(self._streams), self._life.heard_ns):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, FLOOD)
        if stream is not None:
            self._sending.drop(stream, "reset_by_caller")


def _check(is_valid: bool, code: ErrorCode, text: str) -> None:
    if not is_valid:
        raise Http2ConnectionError(code, text)
