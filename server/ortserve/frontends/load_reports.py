"""Load reports beside answers: a header of HTTP, trailing metadata of gRPC.

Names and formats are ORCA's as Envoy and Triton have them over HTTP, and as gRPC has them in its trailing metadata
(github.com/grpc/proposal, A51): there binary alone, which is why that is what everybody gets who does not ask.
"""

import base64
from typing import Final

from ortserve.codecs.load_report import LoadFormat, LoadReport, encode_json, encode_message, encode_text
from ortserve.service.load import LoadMeter

LOAD_FORMAT_HEADER: Final = "endpoint-load-metrics-format"
"""By which a caller asks for a report, and how."""

_TEXT_NAME: Final = "endpoint-load-metrics"
_BINARY_NAME: Final = "endpoint-load-metrics-bin"


class LoadReports:
    """Reports, encoded once for as long as they hold. Loop thread only.

    ``is_always`` says whether callers get one who do not ask: in binary.
    """

    def __init__(self, meter: LoadMeter, *, is_always: bool) -> None:
        self._meter = meter
        self._unasked: Final = LoadFormat.BIN if is_always else None
        self._known: LoadReport | None = None
        self._headers: dict[LoadFormat, tuple[bytes, bytes]] = {}
        self._metadata: dict[LoadFormat, tuple[str, str | bytes]] = {}

    def header(self, asked: LoadFormat | None) -> tuple[bytes, bytes] | None:
        """For an answer over HTTP, in the format that was asked for, if any; None where its caller gets none."""
        chosen = asked or self._unasked
        if chosen is None:
            return None
        report = self._renew()
        header = self._headers.get(chosen)
        if header is None:
            name, value = self._entry(report, chosen)
            spelled = base64.b64encode(value) if isinstance(value, bytes) else value.encode()
            header = self._headers[chosen] = (name.encode(), spelled)
        return header

    def metadata(self, asked: LoadFormat | None) -> tuple[str, str | bytes] | None:
        """The same for the trailing metadata of a call."""
        chosen = asked or self._unasked
        return None if chosen is None else self._entry(self._renew(), chosen)

    def _entry(self, report: LoadReport, chosen: LoadFormat) -> tuple[str, str | bytes]:
        entry = self._metadata.get(chosen)
        if entry is None:
            entry = self._metadata[chosen] = _encoded(report, chosen)
        return entry

    def _renew(self) -> LoadReport:
        report = self._meter.report()
        if report is not self._known:
            self._known = report
            self._headers.clear()
            self._metadata.clear()
        return report


def _encoded(report: LoadReport, chosen: LoadFormat) -> tuple[str, str | bytes]:
    if chosen is LoadFormat.BIN:
        return _BINARY_NAME, encode_message(report)
    encode = encode_text if chosen is LoadFormat.TEXT else encode_json
    return _TEXT_NAME, encode(report).decode()
