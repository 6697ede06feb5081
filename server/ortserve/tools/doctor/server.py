"""A running server: its health, models, address, certificate and metrics, by calls that change nothing."""

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cryptography import x509

from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.doctor.client import Client
from ortserve.tools.doctor.options import reach_of
from ortserve.tools.doctor.result import ServerFacts

_METRICS_PORT: Final = 8002
_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_SUMMED: Final = frozenset(
    {
        "process_cpu_seconds_total",
        "process_max_fds",
        "process_open_fds",
        "process_resident_memory_bytes",
        "ortserve_dropped_spans_total",
        "ortserve_event_loop_stall_seconds_total",
        "ortserve_event_loop_stalls_total",
        "ortserve_rejected_requests_total",
        "ortserve_request_duration_seconds_count",
    }
)
_BY_LABEL: Final = {
    "ortserve_batching_decisions_total": ("batching", "decision"),
    "ortserve_checked_requests_total": ("checked", "outcome"),
}


def look_at(client: Client, metrics_url: str | None, certificate: bytes) -> tuple[ServerFacts, str]:
    """Ask the server. Returns the facts, and the text of its metrics, which is empty if they are not found.

    Args:
        client: Connected.
        metrics_url: Of the metrics; None to try the usual port of the same host.
        certificate: Of the server, in DER; empty without TLS.

    Raises:
        ServeError: No server of the protocol answers, or not at ``metrics_url``.
    """
    metadata = client.ask("/v2")
    known = metadata.json()
    if metadata.status not in (200, 401, 403) or (metadata.status == 200 and not isinstance(known, dict)):
        raise ServeError(
            ErrorKind.UNSUPPORTED,
            f"{client.url}: expected a server of the Open Inference Protocol v2, got status {metadata.status} for /v2",
        )
    known = known or {}
    index = client.ask("/v2/repository/index", b"{}").json()
    control = client.ask("/v2/trace/setting").status
    text = _read_metrics(client, metrics_url)
    expires_s = None
    if certificate:
        expires_s = x509.load_der_x509_certificate(certificate).not_valid_after_utc.timestamp() - time.time()
    return ServerFacts(
        name=str(known.get("name", "unknown")),
        version=str(known.get("version", "unknown")),
        live=client.ask("/v2/health/live").status == 200,
        ready=client.ask("/v2/health/ready").status == 200,
        reach=reach_of(client.address),
        tls=client.has_tls,
        certificate_expires_s=expires_s,
        certificate_problem="",
        control_is_open=control == 200 if control in (200, 401, 403) else None,
        extensions=tuple(map(str, known.get("extensions") or ())),
        models=dict(_state(each) for each in index if isinstance(each, dict)) if isinstance(index, list) else None,
        metrics=sum_metrics(text) if text else None,
    ), text


def _state(entry: Mapping[str, Any]) -> tuple[str, str]:
    label = "/".join(str(entry[key]) for key in ("name", "version") if entry.get(key))
    return label, ": ".join(str(entry[key]) for key in ("state", "reason") if entry.get(key))


def _read_metrics(server: Client, url: str | None) -> str:
    address = f"[{server.address}]" if ":" in server.address else server.address
    client = Client((url or f"http://{address}:{_METRICS_PORT}").removesuffix("/metrics"), timeout_s=3.0, verify=False)
    try:
        answer = client.ask("/metrics")
    except ServeError:
        if url:
            raise
        return ""
    finally:
        client.close()
    text = answer.body.decode(errors="replace") if answer.status == 200 else ""
    return text if "ortserve_build_info" in text else ""


def samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Name, labels and value of each sample of Prometheus' text format; lines that are none are left out. Pure."""
    for name, labels, value in _SAMPLE.findall(text):
        try:
            yield name, dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)), float(value)
        except ValueError:
            continue


def sum_metrics(text: str) -> dict[str, float]:
    """The metrics that findings need, added up over models; of the saturation the largest. Pure."""
    totals: dict[str, float] = {}
    for name, labels, value in samples(text):
        if name == "ortserve_saturation":
            totals["saturation"] = max(value, totals.get("saturation", 0.0))
            continue
        prefix, label = _BY_LABEL.get(name, ("", ""))
        key = f"{prefix}_{labels.get(label, '')}" if prefix else name.removeprefix("ortserve_")
        if prefix or name in _SUMMED:
            totals[key] = totals.get(key, 0.0) + value
    return totals
