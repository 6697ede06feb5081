"""gRPC calls with the h2 library, for details that grpc's own clients hide, such as load reports."""

import base64
import socket
from collections.abc import Mapping, Sequence
from typing import Final

import h2.config
import h2.connection
import h2.errors
import h2.events
from h2.settings import SettingCodes, Settings

LONG_S: Final = 60.0
"""Upper bound of waits; only failing tests reach it."""

Trailers = Mapping[str, str | bytes]


def trailers_of_call(
    address: str, path: str, messages: Sequence[bytes], metadata: Mapping[str, str] | None = None
) -> Trailers:
    """Make a call that must succeed. Returns its trailing metadata, with values of ``-bin`` names decoded."""
    body = b"".join(b"\x00" + len(message).to_bytes(4, "big") + message for message in messages)
    trailers = end_of_call(address, path, body, metadata)
    assert trailers["grpc-status"] == "0", trailers
    return {
        name: base64.b64decode(value + "=" * (-len(value) % 4), validate=True) if name.endswith("-bin") else value
        for name, value in trailers.items()
    }


def end_of_call(
    address: str, path: str, body: bytes, metadata: Mapping[str, str] | None = None, *, window: int | None = None
) -> Mapping[str, str]:
    """Send as much of ``body`` as fits the initial windows, and return the headers that end the call.

    ``window`` is the client's window for the answer in bytes; None means the default of HTTP/2.
    """
    host, _, port = address.rpartition(":")
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    if window is not None:
        connection.local_settings = Settings(initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window})
    connection.initiate_connection()
    head = {":method": "POST", ":scheme": "http", ":path": path, ":authority": address, "te": "trailers"}
    head |= {"content-type": "application/grpc", **(metadata or {})}
    connection.send_headers(1, list(head.items()))
    step = connection.max_outbound_frame_size
    for begin in range(0, max(1, len(body)), step):
        connection.send_data(1, body[begin : begin + step], end_stream=begin + step >= len(body))
    trailers: dict[str, str] = {}
    with socket.create_connection((host, int(port)), LONG_S) as peer:
        peer.sendall(connection.data_to_send())
        while not trailers:
            data = peer.recv(65536)
            assert data, "the server closed the connection"
            for event in connection.receive_data(data):
                if isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                    headers = {str(name): str(value) for name, value in event.headers}
                    trailers = headers if "grpc-status" in headers else {}
                assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated), event
            peer.sendall(connection.data_to_send())
    return trailers


def cancel_during_answer(address: str, path: str, message: bytes) -> None:
    """Make a call whose answer exceeds the initial windows, and reset it once its first bytes have arrived."""
    host, _, port = address.rpartition(":")
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    connection.initiate_connection()
    head = {":method": "POST", ":scheme": "http", ":path": path, ":authority": address, "te": "trailers"}
    connection.send_headers(1, [*head.items(), ("content-type", "application/grpc")])
    connection.send_data(1, b"\x00" + len(message).to_bytes(4, "big") + message, end_stream=True)
    awaited: type[h2.events.Event] = h2.events.DataReceived
    with socket.create_connection((host, int(port)), LONG_S) as peer:
        while True:
            peer.sendall(connection.data_to_send())
            data = peer.recv(65536)
            assert data, "the server closed the connection"
            if not any(isinstance(event, awaited) for event in connection.receive_data(data)):
                continue
            if awaited is h2.events.PingAckReceived:  # the server has read the reset
                return
            awaited = h2.events.PingAckReceived
            connection.reset_stream(1, h2.errors.ErrorCodes.CANCEL)
            connection.ping(bytes(8))
