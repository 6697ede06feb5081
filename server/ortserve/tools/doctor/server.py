"""Reads the state of a running server by calls that change nothing."""

import re
import ssl
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from cryptography import x509

from ortserve.errors import ServeError
from ortserve.tools.address import Address, parse_address
from ortserve.tools.client import Client, another_kind
from ortserve.tools.doctor.options import reach_of
from ortserve.tools.doctor.result import NOT_LOADED, ServerFacts

_METRICS_PORT: Final = 8002
METRICS: Final[Mapping[str, str]] = {
    "open_files": "process_open_fds",
    "most_open_files": "process_max_fds",
    "saturation": r"ortserve_saturation\{.*\}",
    "requests": r"ortserve_request_duration_seconds_count\{.*\}",
    "rejected_requests": r"ortserve_rejected_requests_total\{.*\}",
    "event_loop_stalls": "ortserve_event_loop_stalls_total",
    "run_timeouts": r'ortserve_batching_decisions_total\{.*decision="run_timeouts".*\}',
    "abandoned_runs": r'ortserve_batching_decisions_total\{.*decision="abandoned".*\}',
    "out_of_memory": r'ortserve_batching_decisions_total\{.*decision="out_of_memory".*\}',
    "rows_depend": r'ortserve_checked_requests_total\{.*outcome="differed".*\}',
}
"""Patterns of the lines in Prometheus' text format, by the names of the metrics in the result."""


def look_at(client: Client, metrics_url: str | None, certificate_problem: str) -> ServerFacts:
    """Read the facts of a server. ``metrics_url`` is None for port 8002 of the same host.

    Raises:
        ServeError: No server of the protocol answers, or no server answers at ``metrics_url``.
    """
    sock = client.connect()
    address = str(sock.getpeername()[0])
    certificate = sock.getpeercert(binary_form=True) if isinstance(sock, ssl.SSLSocket) else None
    expires = x509.load_der_x509_certificate(certificate).not_valid_after_utc.timestamp() if certificate else None
    metadata = client.ask("/v2")
    known = metadata.json()
    if metadata.status == 404 or (metadata.status == 200 and not isinstance(known, dict)):
        raise another_kind(client.address, f"got status {metadata.status} for /v2")
    if metadata.status not in (401, 403):
        client.checked(metadata)
    index = client.ask("/v2/repository/index", b"{}").json()
    keyless = {name: value for name, value in client.address.headers.items() if name != "authorization"}
    with closing(Client(replace(client.address, headers=keyless))) as stranger:
        control = stranger.ask("/v2/trace/setting").status
    return ServerFacts(
        name=str((known or {}).get("name", "unknown")),
        version=str((known or {}).get("version", "unknown")),
        live=client.ask("/v2/health/live").status == 200,
        ready=client.ask("/v2/health/ready").status == 200,
        reach=reach_of(address),
        tls=isinstance(sock, ssl.SSLSocket),
        certificate_expires_s=None if expires is None else expires - time.time(),
        certificate_problem=certificate_problem,
        control_is_open=control == 200 if control in (200, 401, 403) else None,
        models=dict(_state(each) for each in index if isinstance(each, dict)) if isinstance(index, list) else None,
        metrics=_read_metrics(client.address, metrics_url, address),
    )


def _state(entry: Mapping[str, Any]) -> tuple[str, str]:
    label = "/".join(str(entry[key]) for key in ("name", "version") if entry.get(key))
    return label, ": ".join(str(entry[key]) for key in ("state", "reason") if entry.get(key)) or NOT_LOADED


def _read_metrics(server: Address, url: str | None, address: str) -> Mapping[str, float] | None:
    usual = f"http://[{address}]:{_METRICS_PORT}" if ":" in address else f"http://{address}:{_METRICS_PORT}"
    given = parse_address((url or usual).removesuffix("/metrics"), ca=server.ca, cert=server.cert)
    # The headers may hold a key. If the server uses TLS, the key is sent in plain text only to a given ``url``.
    headers = server.headers if url or not server.is_tls else {}
    given = replace(given, headers=headers, is_verified=bool(headers) and server.is_verified)
    try:
        with closing(Client(given, 3.0)) as client:
            text = client.ask("/metrics").body.decode(errors="replace")
    except ServeError:
        if url:
            raise
        return None
    return sum_metrics(text) if "ortserve_build_info" in text else None


def sum_metrics(text: str) -> dict[str, float]:
    """The metrics that findings need, added up over models; for the saturation, the maximum. Pure."""
    found: dict[str, float] = {}
    for name, start in METRICS.items():
        values = re.findall(rf"^{start} (\d+(?:\.\d+)?(?:e[+-]?\d+)?)$", text, re.MULTILINE | re.ASCII)
        if values:
            found[name] = max(map(float, values)) if name == "saturation" else sum(map(float, values))
    return found
