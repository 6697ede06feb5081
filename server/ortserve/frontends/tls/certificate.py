"""The certificate, its key and the authorities of clients: read from files, and judged before anything uses them.

``cryptography`` judges, because its reasons can be told to people, and reads the date that operators want to know;
OpenSSL by ``ssl``, and grpc, take the same files after it. Imported only where TLS is on, since it is large.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from ortserve.errors import invalid_input

_MAX_BYTES: Final = 1024 * 1024

_CURVES: Final = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}
"""Those that the BoringSSL in grpc has beside OpenSSL."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the options say that the files are."""

    cert: Path
    key: Path
    client_ca: Path | None


@dataclass(frozen=True, slots=True)
class FileContents:
    """What the files hold, in PEM; compared with what they held before."""

    cert: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None


@dataclass(frozen=True, slots=True)
class Certificate:
    """What can be served with.

    Attributes:
        contents: The files that it came from.
        client_ca_der: The authorities of clients; None where clients need no certificate.
        begins_s: When the last certificate of the chain begins to be valid, in seconds since 1970.
        expires_s: When the first one expires.
    """

    contents: FileContents
    client_ca_der: bytes | None
    begins_s: float
    expires_s: float

    def is_valid(self, now_s: float) -> bool:
        """Whether it is neither expired nor for later."""
        return self.begins_s <= now_s <= self.expires_s


def read_files(files: TlsFiles) -> FileContents:
    """Read all files, in any thread.

    Raises:
        ServeError: invalid_input, naming the option of a file that cannot be read.
    """
    client_ca = None if files.client_ca is None else _read("tls_client_ca_file", files.client_ca)
    return FileContents(_read("tls_cert_file", files.cert), _read("tls_key_file", files.key), client_ca)


def judge(contents: FileContents, files: TlsFiles) -> Certificate:
    """Take the contents apart.

    Raises:
        ServeError: invalid_input, naming the option of a file that cannot be used, and what was expected of it.
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
        raise invalid_input(f"{expected}, got '{files.key}', which holds the key of another")
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
            f"{option}: expected certificates in PEM, got '{path}', which holds none, or a broken one"
        ) from None
