"""Opening a port, the same way for all that listen."""

import socket

from ortserve.errors import ErrorKind, ServeError


def open_listener(option: str, host: str, port: int) -> socket.socket:
    """A bound socket, that does not listen yet. Blocks where a name has to be looked up.

    Args:
        option: That the port comes from, for the message.
        host: A name, of which the first address is taken, or an address; ``::`` stands for all of both families.
        port: 0 for any free one.

    Raises:
        ServeError: conflict, when the address cannot be listened on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # whatever the system's default is
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ServeError(ErrorKind.CONFLICT, f"{option}: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
