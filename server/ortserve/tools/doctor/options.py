"""The server's options, read as ``ortserve serve`` reads them: combinations, keys, TLS, and its address."""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509

from ortserve.config.options import OptionsError, ServerOptions, combination_problems, read_options
from ortserve.errors import ServeError
from ortserve.service.key_files import read_keys
from ortserve.tools.doctor.catalog import finding
from ortserve.tools.doctor.findings import find_in_expiry, find_in_exposure
from ortserve.tools.report import Finding

_KEYS: Final = ("infer_keys_file", "metadata_keys_file", "control_keys_file", "metrics_keys_file")


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """The options, or the defaults where they are invalid, and what was found."""

    options: ServerOptions
    findings: tuple[Finding, ...]


def check_options(config: Path | None, now_s: float) -> CheckedOptions:
    """Read and check the options.

    Args:
        config: The options file; None for that of the environment, if any.
        now_s: Seconds since 1970.
    """
    try:
        options = read_options({}, config)
    except OptionsError as error:
        return CheckedOptions(ServerOptions(), tuple(finding("invalid_option", each) for each in error.problems))
    refused = [finding("invalid_option", problem) for problem in combination_problems(options)]
    found = [*refused, *_find_in_keys(options), *_find_in_tls(options, now_s)]
    if reach_of(options.host) != "loopback":
        found += find_in_exposure(
            f"host is {options.host}",
            has_tls=options.tls_cert_file is not None,
            has_control_keys=options.control_keys_file is not None,
            has_keys=any(getattr(options, name) for name in _KEYS),
            allows_shared_memory=options.allow_client_shm,
        )
    return CheckedOptions(options, tuple(found))


def reach_of(host: str) -> str:
    """Who can reach an address: ``loopback``, ``private`` or ``public``. Names other than localhost are private."""
    try:
        address = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return "loopback" if host == "localhost" else "private"
    return "loopback" if address.is_loopback else "public" if address.is_global else "private"


def _find_in_keys(options: ServerOptions) -> Iterator[Finding]:
    for name in _KEYS:
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        try:
            read_keys(path)
        except ServeError as error:
            yield finding("invalid_option", f"{name}: {error.message}", name)
        else:
            yield from _find_in_mode(name, path)


def _find_in_tls(options: ServerOptions, now_s: float) -> Iterator[Finding]:
    cert, key = options.tls_cert_file, options.tls_key_file
    if cert is None or key is None:
        return
    try:
        # The server refuses keys with a passphrase; OpenSSL would ask for it on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=str)
        chain = x509.load_pem_x509_certificates(cert.read_bytes())
        if options.tls_client_ca_file is not None:
            x509.load_pem_x509_certificates(options.tls_client_ca_file.read_bytes())
    except (OSError, ValueError) as error:
        yield finding("invalid_option", f"TLS files: {getattr(error, 'strerror', None) or error}", "tls_cert_file")
        return
    yield from find_in_expiry(min(each.not_valid_after_utc.timestamp() for each in chain), now_s)
    yield from _find_in_mode("tls_key_file", key)


def _find_in_mode(name: str, path: Path) -> Iterator[Finding]:
    mode = path.stat().st_mode & 0o777
    if path.is_file() and mode & 0o004:
        yield finding("readable_secret", f"{name} is readable by every user of this machine (mode {mode:o})", name)
