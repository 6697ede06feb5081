"""Makes the exporter that sends spans to a collector: OpenTelemetry's library, with a bound on the answers it reads."""

import os
from contextlib import suppress
from typing import Any, Final

from opentelemetry.sdk.trace.export import SpanExporter

_MAX_ANSWER_BYTES: Final = 64 * 1024
"""Bytes of a collector's answer that are read. The answer of the protocol is empty, or a short error."""

_SESSION_VARIABLES: Final = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
)
"""Variables that name a session for the library, which this module leaves unchanged."""


def make_exporter(endpoint: str | None, protocol: str) -> SpanExporter:
    """Make an exporter for ``grpc`` or ``http/protobuf``. If ``endpoint`` is None, the library's variables name it."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint)
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    session = None if any(map(os.environ.get, _SESSION_VARIABLES)) else requests.Session()
    if session is not None:
        session.stream = True
        session.hooks["response"].append(_read_answer)
    # The option does not contain the path, like the library's variable of the same meaning.
    return HttpExporter(None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces", session=session)


def _read_answer(answer: Any, *_: object, **__: object) -> None:
    """Read a short answer, so that its connection is used again, and close the connection of a longer one.

    The exporter uses only status and headers. Without this, it would hold an answer of any length in memory. An error
    of reading, for example because the answer is incomplete, does not fail the export.
    """
    from urllib3.exceptions import HTTPError  # what ``requests`` reads with

    with suppress(HTTPError):
        answer.raw.read(_MAX_ANSWER_BYTES, decode_content=False)
    answer.close()
