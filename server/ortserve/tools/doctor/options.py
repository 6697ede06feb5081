"""Reads the options as ``ortserve serve`` does, and checks their combinations, keys, TLS files and address."""

import os
import ssl
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509

from ortserve.config.options import OptionsError, ServerOptions, combination_problems, read_options, unknown_variables
from ortserve.errors import ServeError, invalid_input
from ortserve.service.key_files import read_keys
from ortserve.tools.doctor.catalog import finding
from ortserve.tools.doctor.findings import find_in_expiry, find_in_exposure
from ortserve.tools.report import Finding

_KEYS: Final = ("infer_keys_file", "metadata_keys_file", "control_keys_file", "metrics_keys_file")


def check_options(config: Path | None) -> tuple[ServerOptions, list[Finding]]:
    """Read and check the options of a file, or of the environment. Returns the defaults if they are invalid.

    Raises:
        ServeError: invalid_input: the file does not exist.
    """
    if config is not None and not config.is_file():
        raise invalid_input(f"--config: expected a file, got '{config}'")
    found = [finding("unknown_variable", problem) for problem in unknown_variables(os.environ)]
    try:
        options = read_options({}, config)
    except OptionsError as error:
        return ServerOptions(), found + [finding("invalid_option", each) for each in error.problems]
    found += [finding("invalid_option", problem) for problem in combination_problems(options)]
    for name in _KEYS:
        path: Path | None = getattr(options, name)
        if path is not None:
            found += _find_in_keys(name, path)
    if options.tls_cert_file is not None and options.tls_key_file is not None:
        found += _find_in_tls(options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file)
    if reach_of(options.host) != "loopback":
        seen, has_control_keys = f"host is {options.host}", options.control_keys_file is not None
        has_keys, has_tls = any(getattr(options, name) for name in _KEYS), options.tls_cert_file is not None
        found += find_in_exposure(seen, has_tls=has_tls, has_control_keys=has_control_keys, has_keys=has_keys)
        if options.allow_client_shm and not has_control_keys:
            found.append(finding("open_shared_memory", f"{seen}, and callers may register shared memory"))
    return options, found


def reach_of(host: str) -> str:
    """The reach of an address: ``loopback``, ``private`` or ``public``. Names other than localhost are private."""
    try:
        address = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return "loopback" if host == "localhost" else "private"
    return "loopback" if address.is_loopback else "public" if address.is_global else "private"


def _find_in_keys(name: str, path: Path) -> Iterator[Finding]:
    try:
        read_keys(path)
    except ServeError as error:
        yield finding("invalid_option", f"{name}: {error.message}", name)
    else:
        yield from _find_in_mode(name, path)


def _find_in_tls(cert: Path, key: Path, client_ca: Path | None) -> Iterator[Finding]:
    try:
        # The server refuses keys with a passphrase; OpenSSL would ask for it on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=str)
        chain = x509.load_pem_x509_certificates(cert.read_bytes())
        if client_ca is not None:
            x509.load_pem_x509_certificates(client_ca.read_bytes())
    except (OSError, ValueError) as error:
        yield finding("invalid_option", f"TLS files: {getattr(error, 'strerror', None) or error}", "tls_cert_file")
        return
    yield from find_in_expiry(min(each.not_valid_after_utc.timestamp() for each in chain) - time.time())
    yield from _find_in_mode("tls_key_file", key)


def _find_in_mode(name: str, path: Path) -> Iterator[Finding]:
    mode = path.stat().st_mode & 0o777
    if path.is_file() and mode & 0o004:
        yield finding("readable_secret", f"{name} is readable by every user of this machine (mode {mode:o})", name)
