"""Errors of the object store client, in one line that clients and logs may contain."""

import pytest
from obstore.exceptions import GenericError

from ortserve.registry.stores.object_store import explain

DENIED = """Generic S3 error: Error performing GET http://127.0.0.1:1/b?sig=abc - Server returned non-2xx status \
code: 403 Forbidden: <?xml version="1.0"?>
<Error><Code>ExpiredToken</Code><Message>The token top-secret-token has expired</Message></Error>

Debug source:
Generic { store: "S3" }"""
SILENT = """Generic S3 error: Error performing GET http://127.0.0.1:1/b in 1ms - HTTP error: error sending request

Debug source:
Generic { source: Http(HttpError { kind: Timeout, source: reqwest::Error }) }"""


def test_answer_of_a_store_is_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "top-secret-token")
    assert explain(GenericError(DENIED)).message == "403 Forbidden: ExpiredToken: The token … has expired"


def test_time_limits_are_named_and_addresses_are_not() -> None:
    assert explain(GenericError(SILENT)).message == "HTTP error: error sending request: Timeout"
    assert explain(GenericError("no route to https://key:secret@host/b")).message == "no route to …"
