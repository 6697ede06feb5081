"""Certificates for tests, issued by a small authority (trustme) and stored in files as Kubernetes mounts a secret."""

import itertools
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import trustme
from cryptography import x509

HOST: Final = "127.0.0.1"


class Secret:
    """A certificate for 127.0.0.1 with its key and authority, in a folder that is replaced as a whole.

    ``tls.crt``, ``tls.key`` and ``ca.crt`` are links through ``..data``, which is replaced in one step, as the kubelet
    does with mounted secrets.
    """

    def __init__(self, folder: Path, authority: trustme.CA | None = None) -> None:
        self.authority = authority or trustme.CA()
        self.folder = folder
        self._numbers = itertools.count()
        folder.mkdir(parents=True, exist_ok=True)
        self.renew()
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (folder / name).symlink_to(Path("..data") / name)

    @property
    def cert(self) -> Path:
        return self.folder / "tls.crt"

    @property
    def key(self) -> Path:
        return self.folder / "tls.key"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def flags(self) -> tuple[str, ...]:
        """Options of a server that uses this certificate."""
        return ("--tls-cert-file", str(self.cert), "--tls-key-file", str(self.key))

    @property
    def mutual_flags(self) -> tuple[str, ...]:
        """The same options, with client certificates of this authority required."""
        return (*self.flags, "--tls-client-ca-file", str(self.ca))

    def renew(self, *, begins: datetime | None = None, expires: datetime | None = None) -> int:
        """Replace the certificate by a new one. Returns its serial number."""
        expires = expires or datetime.now(UTC) + timedelta(days=30)
        made = self.authority.issue_cert(HOST, not_before=begins, not_after=expires)
        chain = b"".join(part.bytes() for part in made.cert_chain_pems)
        self.put(chain, made.private_key_pem.bytes())
        return serial_of(chain)

    def put(self, cert: bytes, key: bytes) -> None:
        """Replace the certificate and the key in one step."""
        data = self.folder / f"..{next(self._numbers)}"
        data.mkdir()
        (data / "tls.crt").write_bytes(cert)
        (data / "tls.key").write_bytes(key)
        (data / "ca.crt").write_bytes(self.authority.cert_pem.bytes())
        link = self.folder / "..data_tmp"
        link.symlink_to(data.name)
        link.rename(self.folder / "..data")

    def client_files(self) -> tuple[Path, Path]:
        """The certificate and the key of a client."""
        made = self.authority.issue_cert("client.example", common_name="client")
        cert, key = self.folder / "client.crt", self.folder / "client.key"
        cert.write_bytes(made.cert_chain_pems[0].bytes())
        key.write_bytes(made.private_key_pem.bytes())
        return cert, key

    def client_context(self, *, has_certificate: bool = False, alpn: str | None = None) -> ssl.SSLContext:
        """The context of a client that trusts the authority, optionally with a certificate of it."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if has_certificate:
            context.load_cert_chain(*self.client_files())
        if alpn is not None:
            context.set_alpn_protocols([alpn])
        return context


def serial_of(cert: bytes) -> int:
    """The serial number of the first certificate of a PEM."""
    return x509.load_pem_x509_certificates(cert)[0].serial_number
