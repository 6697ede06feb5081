"""Opening a port, the same way for all that listen."""

import socket

from ortserve.errors import ErrorKind, ServeError


def open_listener(option: str, host: str, port: int) -> socket.socket:
    """A socket that listens. Blocks where a name has to be looked up.

    Args:
        option: That the port comes from, for the message.
        host: An address, of which ``::`` stands for all of both families; or a name, of which the first address is
            taken, one of IPv4 before others.
        port: 0 for any free one.

    Raises:
        ServeError: conflict, when the address cannot be listened on.
    """
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = min(known, key=lambda info: info[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # whatever the system's default is
            listener.bind(address)
            listener.listen()  # which may find the address taken, too; whoever serves may do so again
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ServeError(ErrorKind.CONFLICT, f"{option}: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
