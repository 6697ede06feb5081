"""Errors of the object store client, in one line that clients and logs may contain."""

import socket
import threading
from contextlib import suppress

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import S3Store

from ortserve.registry.stores.object_store import explain

DENIED = """Generic S3 error: Error performing GET http://127.0.0.1:1/b?sig=abc - Server returned non-2xx status \
code: 403 Forbidden: <?xml version="1.0"?>
<Error><Code>ExpiredToken</Code><Message>The token top-secret-token has expired</Message></Error>

Debug source:
Generic { store: "S3" }"""
SILENT = """Generic S3 error: Error performing GET http://127.0.0.1:1/b in 1ms - HTTP error: error sending request

Debug source:
Generic { source: Http(HttpError { kind: Timeout, source: reqwest::Error }) }"""

UNKNOWN_HOST = """Generic S3 error: Error performing GET http://store.invalid/b - HTTP error: error sending request

Debug source:
Generic { source: Http(HttpError { kind: Connect, source: reqwest::Error { source: ConnectError("dns error",
    Custom { error: "failed to lookup address information: Name or service not known" }) } }) }"""


def test_answer_of_a_store_is_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "top-secret-token")
    assert explain(GenericError(DENIED)).message == "403 Forbidden: ExpiredToken: The token … has expired"


def test_time_limits_are_named_and_addresses_are_not() -> None:
    assert explain(GenericError(SILENT)).message == "HTTP error: error sending request: Timeout"
    assert explain(GenericError("no route to https://key:secret@host/b")).message == "no route to …"
    assert explain(GenericError('Generic S3 error { kind: Connect, message: "" }')).message.endswith("Connect")


def _answer(server: socket.socket) -> None:
    """Answer a TLS client with something else."""
    with suppress(OSError):
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"no TLS")
            connection.recv(1024)


@pytest.mark.parametrize(
    ("scheme", "cause"), [("http", r"Connection refused"), ("https", r"InvalidMessage: InvalidContentType")]
)
def test_connection_that_fails_is_explained(scheme: str, cause: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if scheme == "http":
            server.close()
        answering = threading.Thread(target=_answer, args=(server,), daemon=True)
        answering.start()
        store = S3Store(
            "b",
            endpoint=f"{scheme}://127.0.0.1:{port}",
            region="r",
            access_key_id="a",
            secret_access_key="b",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        with pytest.raises(GenericError) as caught:
            obstore.head(store, "file")
        answering.join()
    assert explain(caught.value).message == f"HTTP error: error sending request: Connect: {cause}"


def test_host_without_an_address_is_named_as_the_cause() -> None:
    reason = "failed to lookup address information: Name or service not known"
    assert explain(GenericError(UNKNOWN_HOST)).message == f"HTTP error: error sending request: Connect: {reason}"
