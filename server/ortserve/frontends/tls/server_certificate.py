"""The server's certificate in the form that each port takes it, and its renewal while the server runs."""

import asyncio
import logging
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final, Literal, Protocol

import grpc

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.tls.certificate import Certificate, FileContents, TlsFiles, judge, read_files
from ortserve.service.followed_files import FollowedFiles
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Between looks at the files."""

_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2; those of 1.3 are all good. HTTP/2 forbids any other (RFC 9113, section 9.2.2)."""

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}

Port = Literal["http", "grpc", "metrics"]


class CertificateMetrics(Protocol):
    """Where it is counted what becomes of the certificate."""

    def certificate_serves(self, expires_s: float) -> None: ...
    def certificate_reloaded(self, *, is_ok: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class _Serving:
    certificate: Certificate
    contexts: dict[Port, ssl.SSLContext]


class ServerCertificate:
    """Usable from construction on. ``watch`` runs on the loop; contexts may be asked for in any thread."""

    def __init__(
        self,
        files: TlsFiles,
        min_version: Literal["1.2", "1.3"],
        metrics: CertificateMetrics,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Read the files. Whatever its dates, what they hold serves: there is nothing better.

        Args:
            files: Where they are.
            min_version: Oldest version of TLS that is spoken.
            metrics: Told what becomes of the certificate.
            now_s: Seconds since 1970, which the dates of certificates are compared with.

        Raises:
            ServeError: invalid_input, naming the option of a file that cannot be used.
        """
        self._files = files
        self._min_version = min_version
        self._metrics = metrics
        self._now_s = now_s
        self._serve(self._build(read_files(files)))
        self._built = self._serving
        self._followed = FollowedFiles(
            self._serving.certificate.contents,
            read=partial(read_files, files),
            take=self._take,
            refuse=self._refuse,
            recover=lambda: log_event(logger, logging.INFO, "the files hold the certificate again that serves"),
        )

    @property
    def asks_clients(self) -> bool:
        """Whether clients must bring a certificate."""
        return self._files.client_ca is not None

    def context_of(self, port: Port) -> Callable[[], ssl.SSLContext]:
        """What gives the context of a port's next connection: after a renewal it is another one.

        Not one context that is changed: what a client was allowed by the old one (a session that it resumes without
        showing its certificate again) would go on.
        """
        return lambda: self._serving.contexts[port]

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For one server of grpcio, which asks before each handshake whether there is something new."""
        told = self._serving.certificate

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal told
            now = self._serving.certificate
            if now is told:
                return None
            told = now
            return _configuration(now)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(told),
            fetch,  # type: ignore[arg-type]  # declared as if it could not return None, which it is documented to
            require_client_authentication=self.asks_clients,
        )

    async def watch(self) -> None:
        """Follow the files until cancelled."""
        await self._followed.follow(LOOK_S)

    async def look(self) -> None:
        """Look at the files once, and serve with what they hold where that is new, settled and usable."""
        await self._followed.look()

    async def _take(self, contents: FileContents) -> None:
        if self._built.certificate.contents != contents:  # else it waits for its time, and is asked for at each look
            self._built = await asyncio.to_thread(self._build, contents)
        reason = _reason_to_wait(self._serving.certificate, self._built.certificate, self._now_s())
        if reason is not None:
            raise ServeError(ErrorKind.NOT_READY, reason)
        self._metrics.certificate_reloaded(is_ok=True)
        self._serve(self._built)

    def _refuse(self, reason: str) -> None:
        self._metrics.certificate_reloaded(is_ok=False)
        message = "the new certificate cannot be used, the old one serves on"
        log_event(logger, logging.ERROR, message, reason=reason)

    def _serve(self, serving: _Serving) -> None:
        self._serving = serving
        certificate = serving.certificate
        self._metrics.certificate_serves(certificate.expires_s)
        expires = _date(certificate.expires_s)
        if certificate.is_valid(self._now_s()):
            log_event(logger, logging.INFO, "certificate serves", expires=expires)
        else:
            log_event(logger, logging.WARNING, "certificate serves, but clients will refuse its dates", expires=expires)

    def _build(self, contents: FileContents) -> _Serving:
        certificate = judge(contents, self._files)
        return _Serving(
            certificate,
            {
                "http": self._context(certificate, "http/1.1", certificate.client_ca_der),
                "grpc": self._context(certificate, "h2", certificate.client_ca_der),
                "metrics": self._context(certificate, "http/1.1", None),
            },
        )

    def _context(self, certificate: Certificate, alpn: str, client_ca_der: bytes | None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[self._min_version]
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_ciphers(_CIPHERS)
        context.set_alpn_protocols([alpn])
        contents = certificate.contents
        try:
            # By path, since it takes nothing else; not by that of the files, which may hold others by now.
            with _path_of(contents.cert) as cert, _path_of(contents.key) as key:
                context.load_cert_chain(cert, key, password="")
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or error.strerror
            raise invalid_input(
                f"tls_cert_file: expected a certificate that OpenSSL accepts, got '{self._files.cert}': {reason}"
            ) from None
        if client_ca_der is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            # As grpc does: what is in the file is trusted, also where it is no root.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(cadata=client_ca_der)
        return context


@contextmanager
def _path_of(content: bytes) -> Iterator[str]:
    """A path by which this process alone reads the content: from memory, where the system has files there."""
    in_memory = hasattr(os, "memfd_create")
    with os.fdopen(os.memfd_create("tls"), "w+b") if in_memory else tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield f"/dev/fd/{file.fileno()}"


def _reason_to_wait(old: Certificate, new: Certificate, now_s: float) -> str | None:
    """Why the old certificate serves on for the time being: clients take it, and would not take the new one."""
    if new.is_valid(now_s) or not old.is_valid(now_s):
        return None
    dates = f"{_date(new.begins_s)} to {_date(new.expires_s)}"
    return f"tls_cert_file: expected a certificate that is valid now, got one from {dates}"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    contents = certificate.contents
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.cert)], contents.client_ca)
