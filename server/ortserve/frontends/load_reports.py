"""Load reports in responses: a header in HTTP, trailing metadata in gRPC.

Names and formats are those of ORCA. Envoy and Triton use them over HTTP, and gRPC in its trailing metadata
(github.com/grpc/proposal, A51). gRPC knows the binary format only, so it is the default format.
"""

import base64
from typing import Final

from ortserve.codecs.load_report import (
    LoadFormat,
    LoadReport,
    encode_json,
    encode_message,
    encode_text,
)
from ortserve.service.load_meter import LoadMeter

LOAD_FORMAT_HEADER: Final = "endpoint-load-metrics-format"
"""Header that requests a report. The value names the format."""

_TEXT_NAME: Final = "endpoint-load-metrics"
_BINARY_NAME: Final = "endpoint-load-metrics-bin"


class LoadReports:
    """Encodes each report once for all responses that carry it. Loop thread only."""

    def __init__(self, meter: LoadMeter, *, is_always: bool) -> None:
        """``is_always``: whether all responses carry a report, in binary unless the caller requests another format."""
        self._meter = meter
        self.default: Final = LoadFormat.BIN if is_always else None
        """Format of reports that callers did not request; None if only requested reports are sent."""
        self._report: LoadReport | None = None
        self._entries: dict[LoadFormat, tuple[str, str | bytes]] = {}
        """The entry with ``_report``, by format."""
        self._headers: dict[LoadFormat, tuple[bytes, bytes]] = {}
        """The same entries as headers of HTTP."""

    def header(self, chosen: LoadFormat) -> tuple[bytes, bytes]:
        """Return the header with the report for an HTTP response."""
        name, value = self.metadata(chosen)  # first, because it clears the headers of an earlier report
        header = self._headers.get(chosen)
        if header is None:
            text = base64.b64encode(value) if isinstance(value, bytes) else value.encode()
            header = self._headers[chosen] = name.encode(), text
        return header

    def metadata(self, chosen: LoadFormat) -> tuple[str, str | bytes]:
        """Return the report as an entry of the trailing metadata of a gRPC call."""
        report = self._meter.report()
        if report is not self._report:
            self._report = report
            self._entries.clear()
            self._headers.clear()
        entry = self._entries.get(chosen)
        if entry is None:
            entry = self._entries[chosen] = _encode(report, chosen)
        return entry


def _encode(report: LoadReport, chosen: LoadFormat) -> tuple[str, str | bytes]:
    if chosen is LoadFormat.BIN:
        return _BINARY_NAME, encode_message(report)
    encode = encode_text if chosen is LoadFormat.TEXT else encode_json
    return _TEXT_NAME, encode(report).decode()
