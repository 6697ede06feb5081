"""Shared by all servers of the process: opens ports, and limits the age of connections."""

import random
import socket
from typing import Final

from ortserve.errors import ErrorKind, ServeError

_AGE_SPREAD: Final = 0.1
"""Maximum deviation of the age of a connection from the configured one, as a share of it."""

_UNSENT_BYTES: Final = 512 * 1024
"""Maximum number of unsent bytes of an answer that the kernel buffers. Without a limit, one write to a connection that
is not read copies 4 MB on the event loop. A lower limit makes large answers slower, because the loop writes them in
more pieces."""


def draw_age_s(max_age_s: float) -> float:
    """Draw the maximum age of a connection, randomly, so that connections of one moment are not closed together."""
    return max_age_s * random.uniform(1 - _AGE_SPREAD, 1 + _AGE_SPREAD)  # noqa: S311 - not a secret


def open_listener(option: str, host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Open a listening socket. Blocks while a host name is looked up.

    Args:
        option: The option of the port, for the error message.
        host: An address, where ``::`` means all addresses of both families; or a name, whose first IPv4 address is
            used, or its first address if it has none.
        port: 0 for any free port.
        reuse_port: Whether other processes may listen on the port, too, if they also set this.

    Raises:
        ServeError: conflict, naming the option, if the host is unknown or the address cannot be listened on.
    """
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = min(known, key=lambda info: info[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # independent of the system's default
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)  # connections inherit it
            listener.bind(address)
            listener.listen()  # also fails if the address is in use; the server may call listen again
        except OSError:
            listener.close()
            raise
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError for a part of no or over 63 characters
        expected = "expected an IP address or host name, without brackets and port"
        reason = getattr(error, "strerror", None) or "not a valid name"
        raise ServeError(ErrorKind.CONFLICT, f"host: {expected}, got '{host}': {reason}") from error
    except OSError as error:
        raise ServeError(ErrorKind.CONFLICT, f"{option}: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
