"""Load reports with responses: a header in HTTP, trailing metadata in gRPC.

Names and formats are those of ORCA, as Envoy and Triton use them over HTTP, and gRPC in its trailing metadata
(github.com/grpc/proposal, A51). gRPC has the binary format only, so this is the default without a request.
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
from ortserve.service.load import LoadMeter

LOAD_FORMAT_HEADER: Final = "endpoint-load-metrics-format"
"""With this header a caller requests a report, in the format that is its value."""

_TEXT_NAME: Final = "endpoint-load-metrics"
_BINARY_NAME: Final = "endpoint-load-metrics-bin"


class LoadReports:
    """Encodes each report once for all responses while it is valid. Loop thread only."""

    def __init__(self, meter: LoadMeter, *, is_always: bool) -> None:
        """``is_always`` says whether responses carry a report, in binary, without a request for it."""
        self._meter = meter
        self.default: Final = LoadFormat.BIN if is_always else None
        """The format of a report without a request for it; None if there is none then."""
        self._encoded_report: LoadReport | None = None
        self._headers: dict[LoadFormat, tuple[bytes, bytes]] = {}
        self._metadata: dict[LoadFormat, tuple[str, str | bytes]] = {}

    def header(self, chosen: LoadFormat) -> tuple[bytes, bytes]:
        """The header of an HTTP response."""
        report = self._renew()
        header = self._headers.get(chosen)
        if header is None:
            name, value = self._entry(report, chosen)
            text = base64.b64encode(value) if isinstance(value, bytes) else value.encode()
            header = self._headers[chosen] = (name.encode(), text)
        return header

    def metadata(self, chosen: LoadFormat) -> tuple[str, str | bytes]:
        """The same for the trailing metadata of a gRPC call."""
        return self._entry(self._renew(), chosen)

    def _entry(self, report: LoadReport, chosen: LoadFormat) -> tuple[str, str | bytes]:
        entry = self._metadata.get(chosen)
        if entry is None:
            entry = self._metadata[chosen] = _encoded(report, chosen)
        return entry

    def _renew(self) -> LoadReport:
        report = self._meter.report()
        if report is not self._encoded_report:
            self._encoded_report = report
            self._headers.clear()
            self._metadata.clear()
        return report


def _encoded(report: LoadReport, chosen: LoadFormat) -> tuple[str, str | bytes]:
    if chosen is LoadFormat.BIN:
        return _BINARY_NAME, encode_message(report)
    encode = encode_text if chosen is LoadFormat.TEXT else encode_json
    return _TEXT_NAME, encode(report).decode()
