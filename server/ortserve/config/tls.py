"""What can be set for TLS: one certificate for all ports, and who may connect with which.

The words are those of Kubernetes' and etcd's servers (``--tls-cert-file``, ``--client-ca-file``).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TlsOptions(BaseModel):
    """How connections are encrypted, and which clients may open one."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    tls_cert_file: Path | None = None
    """The server's certificate in PEM, followed by those that lead to its authority: the HTTP and the gRPC port speak
    TLS with it, and nothing else. The files of TLS are looked at every second; new ones are used for the next
    connections when two looks found the same, and ones that cannot be used, or not yet or no more while the old ones
    can, are logged and change nothing. Unset: no TLS."""
    tls_key_file: Path | None = None
    """The private key of ``tls_cert_file`` in PEM, without a passphrase."""
    tls_client_ca_file: Path | None = None
    """Certificates in PEM of the authorities that sign those of clients: a client of the HTTP or gRPC port must bring
    one of theirs then (mutual TLS). Unset: anybody may connect."""
    tls_min_version: Literal["1.2", "1.3"] = "1.2"
    """Oldest version of TLS that is spoken. ``1.3`` needs ``grpc_transport`` to be ``native``, since grpcio
    cannot be told."""
    tls_handshake_timeout_s: float = Field(default=10.0, ge=0.1, le=600)
    """How long a client may take for its TLS handshake before its connection is closed."""
    tls_metrics: bool = False
    """Speak TLS on the metrics port, too. It never asks for a client's certificate, because it is where Kubernetes'
    probes, which have none, ask for health. Off, so that turning TLS on breaks no scrape."""


def tls_problems(options: TlsOptions, *, grpc_transport: str) -> Iterator[str]:
    """Say which options of TLS do not go together, a line for each."""
    if options.tls_cert_file is not None and options.tls_key_file is None:
        yield f"tls_key_file: expected the private key of tls_cert_file '{options.tls_cert_file}', got none"
    if options.tls_cert_file is None:
        for name in ("tls_key_file", "tls_client_ca_file", "tls_metrics"):
            if getattr(options, name):
                yield f"{name}: expected tls_cert_file beside it, got none"
    elif options.tls_min_version == "1.3" and grpc_transport == "grpcio":
        yield "tls_min_version: expected grpc_transport 'native' with '1.3', got 'grpcio'"
