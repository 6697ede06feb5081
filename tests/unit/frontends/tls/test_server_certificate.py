"""Renewal: files that change while the server runs. The tests trigger each check."""

import logging
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from certificates import Secret, serial_of
from ortserve.errors import ServeError
from ortserve.frontends.tls import certificate
from ortserve.frontends.tls.certificate import FileContents, Port, ServerCertificate, TlsFiles, read_files


class Counts:
    """The records that operators would see."""

    def __init__(self) -> None:
        self.expires_s = 0.0
        self.reloads: list[bool] = []

    def certificate_serves(self, expires_s: float) -> None:
        self.expires_s = expires_s

    def certificate_reloaded(self, *, is_ok: bool) -> None:
        self.reloads.append(is_ok)


class Served:
    """A certificate, its files and its numbers."""

    def __init__(
        self,
        folder: Path,
        *,
        is_mutual: bool = False,
        min_version: Literal["1.2", "1.3"] = "1.2",
        secret: Secret | None = None,
    ) -> None:
        self.secret = secret or Secret(folder)
        self.counts = Counts()
        files = TlsFiles(self.secret.cert, self.secret.key, self.secret.ca if is_mutual else None)
        self.now_s = datetime.now(UTC).timestamp()
        self.certificate = ServerCertificate(files, min_version, self.counts, lambda: self.now_s)

    def serial(self, port: Port = "http", client: ssl.SSLContext | None = None) -> int:
        """The serial number that a client of a port sees, in a handshake without a network."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = client or self.secret.client_context()
        near = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
        far = self.certificate.context_of(port)().wrap_bio(to_server, to_client, server_side=True)
        waiting = [near, far, near, far]
        for one in waiting:
            try:
                one.do_handshake()
            except ssl.SSLWantReadError:
                continue
        shown = near.getpeercert(binary_form=True)
        assert shown is not None
        return serial_of(ssl.DER_cert_to_PEM_cert(shown).encode())


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path / "secret")


async def test_new_files_are_used_after_two_equal_reads(served: Served) -> None:
    old = served.serial()
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=7)
    new = served.secret.renew(expires=expires)
    await served.certificate.check()
    assert served.serial() == old
    await served.certificate.check()
    ports: tuple[Port, ...] = ("http", "grpc", "metrics")
    assert [served.serial(port) for port in ports] == [new] * 3
    assert served.counts.expires_s == expires.timestamp()
    await served.certificate.check()
    assert served.counts.reloads == [True]


async def test_files_copied_one_by_one_are_not_used_half_way(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    made = served.secret.authority.issue_cert("127.0.0.1")
    cert, key = made.cert_chain_pems[0].bytes(), made.private_key_pem.bytes()
    served.secret.put(cert, served.secret.key.read_bytes())
    await served.certificate.check()
    served.secret.put(cert, key)
    await served.certificate.check()
    await served.certificate.check()
    assert served.serial() == serial_of(cert)
    assert served.counts.reloads == [True]
    assert "cannot be used" not in caplog.text


def test_files_that_change_during_a_read_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checked files are used, even if the files change and change back so that no later check differs."""
    swapped = Secret(tmp_path / "secret")
    judged = serial_of(swapped.cert.read_bytes())

    def read_and_swap(files: TlsFiles) -> FileContents:
        contents = read_files(files)
        swapped.renew()
        return contents

    monkeypatch.setattr(certificate, "read_files", read_and_swap)
    assert Served(tmp_path, secret=swapped).serial() == judged


@pytest.mark.parametrize("fault", ["malformed", "missing", "mismatched"])
async def test_bad_certificate_keeps_the_old_one_and_is_logged_once(
    served: Served, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    old = served.serial()
    match fault:
        case "malformed":
            served.secret.put(b"no PEM", served.secret.key.read_bytes())
        case "missing":
            served.secret.cert.unlink()
        case "mismatched":
            other = served.secret.authority.issue_cert("127.0.0.1")
            served.secret.put(served.secret.cert.read_bytes(), other.private_key_pem.bytes())
    for _ in range(5):
        await served.certificate.check()
    assert served.serial() == old
    (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert logged.getMessage() == "the new certificate cannot be used; the old one stays in use"
    option = "tls_key_file" if fault == "mismatched" else "tls_cert_file"
    assert logged.__dict__["fields"]["reason"].startswith(f"{option}: expected ")
    assert served.counts.reloads == [False]

    if fault != "missing":
        new = served.secret.renew()
        await served.certificate.check()
        await served.certificate.check()
        assert served.serial() == new
        assert served.counts.reloads == [False, True]


@pytest.mark.parametrize("fault", ["expired", "not yet valid"])
async def test_certificate_outside_its_dates_keeps_the_valid_old_one(
    served: Served, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    old, old_expires_s = served.serial(), served.counts.expires_s
    if fault == "expired":
        new = served.secret.renew(expires=datetime.now(UTC) - timedelta(hours=1))
    else:
        new = served.secret.renew(begins=datetime.now(UTC) + timedelta(hours=1))
    for _ in range(5):
        await served.certificate.check()
    assert (served.serial(), served.counts.expires_s) == (old, old_expires_s)
    (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert logged.getMessage() == "the new certificate cannot be used; the old one stays in use"
    reason = logged.__dict__["fields"]["reason"]
    assert reason.startswith("tls_cert_file: expected a certificate that is valid now, got one from 20")
    assert served.counts.reloads == [False]

    served.now_s += 2 * 3600 if fault == "not yet valid" else 31 * 86400  # when the one is valid, or the other not
    await served.certificate.check()
    blind = served.secret.client_context()
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    assert served.serial(client=blind) == new
    assert served.counts.reloads == [False, True]


async def test_renewed_authority_rejects_clients_of_the_old_one(tmp_path: Path) -> None:
    served = Served(tmp_path / "secret", is_mutual=True)
    of_old = served.secret.client_context(has_certificate=True)
    assert served.serial(client=of_old)
    served.secret.authority = Secret(tmp_path / "other").authority
    served.secret.renew()
    await served.certificate.check()
    await served.certificate.check()
    served.secret.authority.configure_trust(of_old)
    with pytest.raises(ssl.SSLCertVerificationError):
        served.serial(client=of_old)
    assert served.serial(client=served.secret.client_context(has_certificate=True))


def test_intermediate_authority_accepts_its_own_clients(tmp_path: Path) -> None:
    """The behaviour equals grpcio's."""
    root = trustme.CA()
    between = root.create_child_ca()
    served = Served(tmp_path / "secret")
    (tmp_path / "between.pem").write_bytes(between.cert_pem.bytes())
    files = TlsFiles(served.secret.cert, served.secret.key, tmp_path / "between.pem")
    served.certificate = ServerCertificate(files, "1.2", served.counts)
    own, of_root = served.secret.client_context(), served.secret.client_context()
    between.issue_cert("client.example").configure_cert(own)
    root.issue_cert("client.example").configure_cert(of_root)
    assert served.serial(client=own)
    with pytest.raises(ssl.SSLCertVerificationError):
        served.serial(client=of_root)


async def test_metrics_port_requires_no_client_certificate(tmp_path: Path) -> None:
    served = Served(tmp_path / "secret", is_mutual=True)
    assert served.serial("metrics")
    ports: tuple[Port, ...] = ("http", "grpc")
    for port in ports:
        with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
            served.serial(port)


@pytest.mark.parametrize("port", ["http", "grpc", "metrics"])
def test_clients_of_older_tls_versions_are_rejected(tmp_path: Path, port: Port) -> None:
    served = Served(tmp_path / "secret", min_version="1.3")
    old = served.secret.client_context()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        served.serial(port, client=old)
    assert served.serial(port)


def test_expired_certificate_is_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = Secret(tmp_path / "secret")
    secret.renew(expires=datetime.now(UTC) - timedelta(days=1))
    ServerCertificate(TlsFiles(secret.cert, secret.key, None), "1.2", Counts())
    (logged,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert logged.getMessage() == "certificate is in use, but clients will reject its validity dates"


def test_error_for_weak_files_names_their_option(tmp_path: Path) -> None:
    """Errors that only the library can detect when it uses a certificate."""
    secret = Secret(tmp_path / "secret")
    key = rsa.generate_private_key(65537, 1024)
    weak = _self_signed(key)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    secret.put(weak, pem)
    with pytest.raises(ServeError) as caught:
        ServerCertificate(TlsFiles(secret.cert, secret.key, None), "1.2", Counts())
    assert caught.value.message == (
        f"tls_cert_file: expected a certificate that OpenSSL accepts, got '{secret.cert}': EE_KEY_TOO_SMALL"
    )


def _self_signed(key: rsa.RSAPrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "weak")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
