"""Reads and checks the files of the certificate, its key and the authorities of clients, and follows their changes.

``cryptography`` checks the files, because it reports understandable reasons, and reads the expiry date for the metrics.
OpenSSL (through ``ssl``) and grpc load the same contents after the check. The composition root imports this module only
for TLS, because ``cryptography`` is large.
"""

import asyncio
import logging
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.service.followed_files import FollowedFiles
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Time between checks of the files."""

_MAX_BYTES: Final = 1024 * 1024

_CURVES: Final = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}
"""Curves that both OpenSSL and the BoringSSL in grpc support, with the names for error texts."""

_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Allowed ciphers of TLS 1.2: HTTP/2 forbids others (RFC 9113, section 9.2.2). All ciphers of TLS 1.3 are allowed."""

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}

Port = Literal["http", "grpc", "metrics"]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the files, from the options."""

    cert: Path
    key: Path
    client_ca: Path | None


@dataclass(frozen=True, slots=True)
class FileContents:
    """The contents of the files, in PEM. Comparing them finds changes."""

    cert: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None


@dataclass(frozen=True, slots=True)
class Certificate:
    """A checked certificate.

    Attributes:
        contents: Contents of the files.
        client_ca_der: Certificates of the client authorities, in DER; None if clients need no certificate.
        begins_s: Start of the time in which the whole chain is valid, in seconds since 1970.
        expires_s: End of that time.
    """

    contents: FileContents
    client_ca_der: bytes | None
    begins_s: float
    expires_s: float

    def is_valid(self, now_s: float) -> bool:
        """Whether the whole chain is valid now."""
        return self.begins_s <= now_s <= self.expires_s


class CertificateMetrics(Protocol):
    """Metrics of the certificate: renewals by outcome, and the expiry date."""

    def certificate_serves(self, expires_s: float) -> None: ...
    def certificate_reloaded(self, *, is_ok: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class _Serving:
    certificate: Certificate
    contexts: dict[Port, ssl.SSLContext]


class ServerCertificate:
    """The current certificate. ``watch`` runs on the event loop. Any thread may use the contexts."""

    def __init__(
        self,
        files: TlsFiles,
        min_version: Literal["1.2", "1.3"],
        metrics: CertificateMetrics,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Read the files. The first certificate is used whatever its dates, because there is no other.

        Args:
            files: Paths of the files.
            min_version: Oldest supported version of TLS.
            metrics: Metrics of the certificate.
            now_s: Returns the current time, in seconds since 1970, for comparisons with dates of certificates.

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
            accept=self._accept,
            reject=self._reject,
            recover=lambda: log_event(logger, logging.INFO, "the files again hold the certificate that is in use"),
        )

    @property
    def asks_clients(self) -> bool:
        """Whether clients need a certificate."""
        return self._files.client_ca is not None

    def context_of(self, port: Port) -> Callable[[], ssl.SSLContext]:
        """Return a function that returns the context of the next connection of a port.

        A renewal creates a new context. A changed context would still resume sessions of clients whose certificates
        the new authorities reject.
        """
        return lambda: self._serving.contexts[port]

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for one grpcio server, which calls ``fetch`` before each handshake."""
        current = self._serving.certificate

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal current
            newest = self._serving.certificate
            if newest is current:
                return None
            current = newest
            return _configuration(newest)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(current),
            fetch,  # type: ignore[arg-type]  # its documentation allows None, its declaration does not
            require_client_authentication=self.asks_clients,
        )

    async def watch(self) -> None:
        """Follow the files until cancelled."""
        await self._followed.follow(LOOK_S)

    async def check(self) -> None:
        """Check the files once, and use their certificate if it is new, settled and valid."""
        await self._followed.check()

    async def _accept(self, contents: FileContents) -> None:
        if self._built.certificate.contents != contents:  # otherwise it was built before and was not valid yet
            self._built = await asyncio.to_thread(self._build, contents)
        reason = _reason_to_wait(self._serving.certificate, self._built.certificate, self._now_s())
        if reason is not None:
            raise ServeError(ErrorKind.NOT_READY, reason)
        self._metrics.certificate_reloaded(is_ok=True)
        self._serve(self._built)

    def _reject(self, reason: str) -> None:
        self._metrics.certificate_reloaded(is_ok=False)
        message = "the new certificate cannot be used; the old one stays in use"
        log_event(logger, logging.ERROR, message, reason=reason)

    def _serve(self, serving: _Serving) -> None:
        self._serving = serving
        certificate = serving.certificate
        self._metrics.certificate_serves(certificate.expires_s)
        expires = _date(certificate.expires_s)
        if certificate.is_valid(self._now_s()):
            log_event(logger, logging.INFO, "certificate serves", expires=expires)
        else:
            log_event(
                logger,
                logging.WARNING,
                "certificate is in use, but clients will reject its validity dates",
                expires=expires,
            )

    def _build(self, contents: FileContents) -> _Serving:
        certificate = parse_certificate(contents, self._files)
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
            # ``ssl`` takes only paths. The original files may have changed since they were checked.
            with _path_of(contents.cert) as cert, _path_of(contents.key) as key:
                context.load_cert_chain(cert, key, password="")
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or error.strerror
            raise invalid_input(
                f"tls_cert_file: expected a certificate that OpenSSL accepts, got '{self._files.cert}': {reason}"
            ) from None
        if client_ca_der is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            # As in grpc, every certificate in the file is trusted, including intermediate ones.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(cadata=client_ca_der)
            # A session would be resumed without a check of the client's certificate, and each resumption gives it a new
            # ticket. This is for TLS 1.3; ``TlsTransport`` checks resumed sessions of TLS 1.2.
            context.num_tickets = 0
        return context


def read_files(files: TlsFiles) -> FileContents:
    """Read all files. Any thread.

    Raises:
        ServeError: invalid_input, naming the option of a file that cannot be read.
    """
    client_ca = None if files.client_ca is None else _read("tls_client_ca_file", files.client_ca)
    return FileContents(_read("tls_cert_file", files.cert), _read("tls_key_file", files.key), client_ca)


def parse_certificate(contents: FileContents, files: TlsFiles) -> Certificate:
    """Parse and check the contents of the files.

    Raises:
        ServeError: invalid_input, naming the option of a file that cannot be used, and the expected contents.
    """
    chain = _certificates("tls_cert_file", files.cert, contents.cert)
    expected = f"tls_key_file: expected the private key of the first certificate of '{files.cert}' in PEM"
    try:
        key = load_pem_private_key(contents.key, password=None)
    except TypeError:
        raise invalid_input(f"{expected}, without a passphrase, got '{files.key}', which has one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise invalid_input(f"{expected}, got '{files.key}', which holds no such key") from None
    is_on_known_curve = isinstance(key, EllipticCurvePrivateKey) and key.curve.name in _CURVES
    if not (is_on_known_curve or isinstance(key, RSAPrivateKey | Ed25519PrivateKey)):
        kinds = f"for RSA, Ed25519 or ECDSA on {', '.join(_CURVES.values())}"
        raise invalid_input(f"{expected}, {kinds}, got '{files.key}', which is for another algorithm")
    if key.public_key() != chain[0].public_key():
        raise invalid_input(f"{expected}, got '{files.key}', which holds the key of another certificate")
    client_ca = None
    if files.client_ca is not None:
        assert contents.client_ca is not None
        authorities = _certificates("tls_client_ca_file", files.client_ca, contents.client_ca)
        client_ca = b"".join(one.public_bytes(Encoding.DER) for one in authorities)
    expires_s = min(one.not_valid_after_utc.timestamp() for one in chain)
    begins_s = max(one.not_valid_before_utc.timestamp() for one in chain)
    return Certificate(contents, client_ca, begins_s, expires_s)


def _read(option: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise invalid_input(f"{option}: expected a file that can be read, got '{path}': {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise invalid_input(f"{option}: expected a file of at most {_MAX_BYTES} bytes, got '{path}', which is longer")
    return content


def _certificates(option: str, path: Path, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise invalid_input(
            f"{option}: expected certificates in PEM, got '{path}', which holds no certificate or a damaged one"
        ) from None


@contextmanager
def _path_of(content: bytes) -> Iterator[str]:
    """Yield a path at which only this process can read the content: an anonymous file, in memory if possible."""
    in_memory = hasattr(os, "memfd_create")
    with os.fdopen(os.memfd_create("tls"), "w+b") if in_memory else tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield f"/dev/fd/{file.fileno()}"


def _reason_to_wait(old: Certificate, new: Certificate, now_s: float) -> str | None:
    """Return the reason to keep the old certificate in use: it is valid, and the new one is not; otherwise None."""
    if new.is_valid(now_s) or not old.is_valid(now_s):
        return None
    dates = f"{_date(new.begins_s)} to {_date(new.expires_s)}"
    return f"tls_cert_file: expected a certificate that is valid now, got one from {dates}"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    contents = certificate.contents
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.cert)], contents.client_ca)
