"""Limits on frames that cost the server time and carry little or no part of a request: resets, pings, small DATA.

A connection that exceeds a limit is closed with ENHANCE_YOUR_CALM.
"""

import logging
from collections.abc import Callable
from typing import Final

from ortserve.clock import Clock
from ortserve.config.option_groups import GrpcOptions
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_BURST: Final = 2_000
_PER_S: Final = 1_000
"""Tokens of a full bucket, and tokens gained per second. A client that measures its bandwidth sends some hundreds of
such frames in a second, an attack (CVE-2023-44487 and similar ones) a hundred thousand. A frame costs up to about
50 µs, so a connection can use 5 % of a processor for them."""

WINDOW_UPDATE_BYTES: Final = 1024
"""Bytes of sent DATA that earn a token for one WINDOW_UPDATE. Smaller updates cost more time than the data is worth.

The bytes of DATA that the peer receives limit its WINDOW_UPDATEs; their own number or size does not. Uneven updates are
common: HAProxy returns 16,320 bytes, then the 64 that did not fit into its buffer.
"""

PART_CREDIT: Final = 2 * WINDOW_UPDATE_BYTES
"""Credit for each part of a message that is sent whole, of any size: some peers answer every DATA frame with two
WINDOW_UPDATEs, for the stream and for the connection. A frame that the window cuts counts only its bytes."""

SMALL_FRAME_BYTES: Final = 256
"""A smaller DATA frame that does not complete its message costs a token: one read of the socket may hold 25,000 frames
of one byte, which take 80 ms. Larger frames earn a token per this number of bytes, because proxies divide messages
unevenly."""

_RAPID_NS: Final = 1_000_000
"""Minimum age of a call whose reset costs no token. An earlier reset is a rapid reset (CVE-2023-44487): both frames are
mostly in one read of the socket, and no answer can be ready. The number of open streams limits older calls."""

_IDLE_PING_INTERVAL_S: Final = 7200.0
"""Minimum time between pings on a connection without calls, where clients should not send pings."""

_LOG_INTERVAL_NS: Final = 1_000_000_000
"""Minimum time between two warnings, so that a peer that opens many connections cannot fill the log."""


FLOOD: Final = "too many frames without a request"
"""Text of the error that closes a connection with an empty bucket."""


class TokenBucket:
    """Holds up to 2,000 tokens and gains 1,000 per second. Loop thread only."""

    def __init__(self, now_ns: int) -> None:
        self._tokens = float(_BURST)
        self._filled_ns = now_ns

    def take(self, now_ns: int, earned: float = 0.0) -> bool:
        """Add ``earned`` tokens, then take one. Returns False if the bucket is empty."""
        self._tokens = min(_BURST, self._tokens + earned + (now_ns - self._filled_ns) * _PER_S / 1e9)
        self._filled_ns = now_ns
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class ResetLimit:
    """Decides which RST_STREAM frames of a connection cost a token. Loop thread only."""

    def __init__(self, bucket: TokenBucket) -> None:
        self._bucket = bucket
        self._of_ended = 0
        self._paid_back = 0

    def admit(self, begun_ns: int | None, begun_calls: int, open_calls: int, now_ns: int) -> bool:
        """Count a reset. Returns False if the limit is exceeded.

        Args:
            begun_ns: Start of the reset call; None if the call has ended.
            begun_calls: Number of calls so far.
            open_calls: Number of open calls, including the reset one.
            now_ns: Time of the frame.
        """
        if begun_ns is None:
            # The answer crossed the reset on the wire, or a deadline passed on both sides: at most one per call.
            self._of_ended += 1
            return self._of_ended <= begun_calls or self._bucket.take(now_ns)
        if now_ns - begun_ns >= _RAPID_NS:
            return True
        # While the server is late, resets of calls that waited long look rapid, too. Each call that ended without a
        # rapid reset earns a token.
        ended = begun_calls - open_calls
        earned = ended - self._paid_back
        self._paid_back = ended + 1
        return self._bucket.take(now_ns, earned)


class PingLimit:
    """Limits the pings of a peer as grpc does. Loop thread only.

    https://github.com/grpc/grpc/blob/master/doc/keepalive.md, and grpc's ``ping_abuse_policy.cc``.
    """

    def __init__(self, options: GrpcOptions) -> None:
        self._options = options
        self._heard_ns: int | None = None
        self._strikes = 0

    def admit(self, now_ns: int, *, has_calls: bool) -> bool:
        """Count a ping. Returns False if the limit is exceeded."""
        options = self._options
        is_idle = not has_calls and not options.grpc_keepalive_permit_without_calls
        interval_s = _IDLE_PING_INTERVAL_S if is_idle else options.grpc_http2_min_recv_ping_interval_without_data_s
        heard_ns, self._heard_ns = self._heard_ns, now_ns
        if heard_ns is None or now_ns - heard_ns >= interval_s * 1e9:
            return True
        self._strikes += 1
        most = options.grpc_http2_max_ping_strikes
        return self._strikes <= most or most == 0

    def reset(self) -> None:
        """Clear all strikes, because part of an answer was sent: clients ping while they read answers."""
        self._heard_ns = None
        self._strikes = 0


class ConnectionErrors:
    """Counts the connections of one port that the server closes with an error, and logs floods. Loop thread only."""

    def __init__(self, clock: Clock, on_error: Callable[[str], None]) -> None:
        """``on_error`` counts an error by the name of its code in lower case."""
        self._clock = clock
        self._on_error = on_error
        self._logged_ns: int | None = None
        self._unlogged = 0

    def report(self, error: Http2ConnectionError, peer: object, open_calls: int) -> None:
        self._on_error(error.code.name.lower())
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
            "a gRPC connection was closed because of a flood of frames",
            reason=error.text,
            peer=peer,
            open_calls=open_calls,
            unlogged=unlogged,
        )
