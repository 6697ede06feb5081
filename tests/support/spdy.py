"""The server side of SPDY/3.1, as far as ``kubectl port-forward`` uses it; no library for it is maintained any more.

The module converts bytes to events and back; sockets belong to the caller. Frames follow
draft-mbelshe-httpbis-spdy-00, section 2.6. There is no flow control, because ``kubectl`` and Kubernetes' own servers
have none either.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_SYN_STREAM: Final = 1
_SYN_REPLY: Final = 2
_RST_STREAM: Final = 3
_PING: Final = 6
_CONTROL_VERSION_3: Final = 0x8003
_FIN: Final = 1

_NAMES: Final = (
    "options,head,post,put,delete,trace,accept,accept-charset,accept-encoding,accept-language,accept-ranges,age,allow,"
    "authorization,cache-control,connection,content-base,content-encoding,content-language,content-length,"
    "content-location,content-md5,content-range,content-type,date,etag,expect,expires,from,host,if-match,"
    "if-modified-since,if-none-match,if-range,if-unmodified-since,last-modified,location,max-forwards,pragma,"
    "proxy-authenticate,proxy-authorization,range,referer,retry-after,server,te,trailer,transfer-encoding,upgrade,"
    "user-agent,vary,via,warning,www-authenticate,method,get,status,200 OK,version,HTTP/1.1,url,public,set-cookie,"
    "keep-alive,origin"
)
_VALUES: Final = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden"
    "404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable"
    "Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT"
    "chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,text/javascript,"
    "publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
_SIZED_NAMES: Final = b"".join(struct.pack(">I", len(name)) + name.encode() for name in _NAMES.split(","))
_DICTIONARY: Final = _SIZED_NAMES + _VALUES.encode()
"""The dictionary for header compression (section 2.6.10.1); zlib compares its checksum with the client's."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The client opened a stream."""

    stream: int
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Received:
    """The client sent bytes on a stream; empty bytes end it."""

    stream: int
    data: bytes


class Connection:
    """A connection from its first byte on. Bytes to send accumulate until ``take_outgoing``."""

    def __init__(self) -> None:
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._inflate = zlib.decompressobj(zdict=_DICTIONARY)
        self._deflate = zlib.compressobj(zdict=_DICTIONARY)

    def receive(self, data: bytes) -> Iterator[Opened | Received]:
        """Process received bytes in pieces of any size, and enqueue the answers that the protocol requires."""
        self._incoming += data
        while len(self._incoming) >= 8:
            head, sized = struct.unpack_from(">II", self._incoming)
            end = 8 + (sized & 0xFF_FFFF)
            if len(self._incoming) < end:
                return
            body = bytes(self._incoming[8:end])
            del self._incoming[:end]
            is_last = bool(sized >> 24 & _FIN)
            yield from self._take_control(head & 0xFFFF, body, is_last) if head >> 31 else _events(head, body, is_last)

    def send(self, stream: int, data: bytes, *, is_last: bool = False) -> None:
        self._outgoing += struct.pack(">II", stream, is_last << 24 | len(data)) + data

    def take_outgoing(self) -> bytes:
        """The bytes to send since the last call."""
        taken = bytes(self._outgoing)
        self._outgoing.clear()
        return taken

    def _take_control(self, kind: int, body: bytes, is_last: bool) -> Iterator[Opened | Received]:
        if kind == _PING:
            self._send_control(_PING, body)
        elif kind == _RST_STREAM:
            yield Received(int.from_bytes(body[:4]), b"")
        elif kind == _SYN_STREAM:
            stream = int.from_bytes(body[:4])
            yield Opened(stream, _headers(self._inflate.decompress(body[10:])))
            yield from _events(stream, b"", is_last)
            none = self._deflate.compress(bytes(4)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
            self._send_control(_SYN_REPLY, body[:4] + none)

    def _send_control(self, kind: int, body: bytes) -> None:
        self._outgoing += struct.pack(">HHI", _CONTROL_VERSION_3, kind, len(body)) + body


def _events(stream: int, data: bytes, is_last: bool) -> Iterator[Received]:
    if data:
        yield Received(stream, data)
    if is_last:
        yield Received(stream, b"")


def _headers(block: bytes) -> dict[str, str]:
    """Parse the number of headers, then names and values, each preceded by its length."""
    texts, at = [], 4
    while at < len(block):
        end = at + 4 + int.from_bytes(block[at : at + 4])
        texts.append(block[at + 4 : end].decode())
        at = end
    return dict(zip(texts[::2], texts[1::2], strict=True))
