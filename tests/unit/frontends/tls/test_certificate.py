"""Error messages for unusable certificate files, and the values read from usable ones."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from certificates import Secret
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.tls.certificate import Certificate, TlsFiles, parse_certificate, read_files


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    return Secret(tmp_path / "secret")


def read(secret: Secret, *, client_ca: Path | None = None) -> Certificate:
    files = TlsFiles(secret.cert, secret.key, client_ca)
    return parse_certificate(read_files(files), files)


def complaint(secret: Secret, *, client_ca: Path | None = None) -> str:
    with pytest.raises(ServeError) as caught:
        read(secret, client_ca=client_ca)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    return caught.value.message


def test_expiration_is_that_of_the_first_certificate_to_expire(secret: Secret) -> None:
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    secret.renew(expires=expires)
    authority = secret.authority.cert_pem.bytes()
    secret.put(authority_behind := secret.cert.read_bytes() + authority, secret.key.read_bytes())
    certificate = read(secret)
    assert certificate.expires_s == expires.timestamp()
    assert certificate.is_valid(expires.timestamp())
    assert certificate.contents.cert == authority_behind
    assert certificate.client_ca_der is None


def test_certificate_is_valid_between_its_dates_alone(secret: Secret) -> None:
    certificate = read(secret)
    assert certificate.begins_s < certificate.expires_s
    assert certificate.is_valid(certificate.begins_s)
    assert not certificate.is_valid(certificate.begins_s - 1)
    assert not certificate.is_valid(certificate.expires_s + 1)


def test_all_client_authorities_are_loaded(secret: Secret, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(b"# two of them\n" + secret.ca.read_bytes() + trustme.CA().cert_pem.bytes())
    one, two = read(secret, client_ca=secret.ca).client_ca_der, read(secret, client_ca=bundle).client_ca_der
    assert one is not None
    assert two is not None
    assert two.startswith(one)
    assert len(two) > len(one)


def test_key_of_another_certificate_is_rejected(secret: Secret) -> None:
    other = secret.authority.issue_cert("other.example").private_key_pem.bytes()
    secret.put(secret.cert.read_bytes(), other)
    assert complaint(secret) == (
        f"tls_key_file: expected the private key of the first certificate of '{secret.cert}' in PEM, "
        f"got '{secret.key}', which holds the key of another certificate"
    )


def test_key_with_a_passphrase_is_rejected(secret: Secret) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    secret.put(secret.cert.read_bytes(), locked)
    assert f"without a passphrase, got '{secret.key}', which has one" in complaint(secret)


def test_key_algorithm_unknown_to_a_transport_is_rejected(secret: Secret) -> None:
    key = ec.generate_private_key(ec.SECP256K1())
    secret.put(secret.cert.read_bytes(), key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    error = f"for RSA, Ed25519 or ECDSA on P-256, P-384, P-521, got '{secret.key}', which is for another algorithm"
    assert complaint(secret).endswith(error)


def test_repr_omits_the_private_key(secret: Secret) -> None:
    assert "PRIVATE" not in repr(read(secret))


@pytest.mark.parametrize("content", [b"", b"no PEM", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_malformed_key_is_rejected(secret: Secret, content: bytes) -> None:
    secret.put(secret.cert.read_bytes(), content)
    assert complaint(secret).endswith(f"got '{secret.key}', which holds no such key")


@pytest.mark.parametrize("content", [b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_malformed_certificate_is_rejected(secret: Secret, tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_bytes(content)
    error = f"tls_client_ca_file: expected certificates in PEM, got '{bad}', which holds no certificate or a damaged "
    error += "one"
    assert complaint(secret, client_ca=bad) == error
    secret.put(content, secret.key.read_bytes())
    assert complaint(secret) == error.replace("client_ca", "cert").replace(str(bad), str(secret.cert))


@pytest.mark.parametrize(
    ("name", "reason"), [("nowhere.pem", "No such file or directory"), ("folder", "Is a directory")]
)
def test_file_that_cannot_be_read_is_named_with_its_option(
    secret: Secret, tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / name
    files = TlsFiles(secret.cert, path, None)
    with pytest.raises(ServeError) as caught:
        read_files(files)
    assert caught.value.message == f"tls_key_file: expected a file that can be read, got '{path}': {reason}"


def test_endless_file_is_not_read_to_its_end(secret: Secret) -> None:
    with pytest.raises(ServeError, match="tls_cert_file: expected a file of at most 1048576 bytes, got '/dev/zero'"):
        read_files(TlsFiles(Path("/dev/zero"), secret.key, None))
