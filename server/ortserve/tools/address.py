"""Addresses of servers, and the flags for keys, headers and certificates."""

import argparse
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from ortserve.errors import invalid_input

_HEADER: Final = re.compile(r"\s*([\w!#$%&'*+.^`|~-]+)\s*:([ \t!-~]*)", re.ASCII)
"""A name and a value (RFC 9110, section 5), with spaces around them, in the characters that gRPC permits, too."""
_IS_KEY: Final = re.compile(r"[!-~]+").fullmatch


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server, and the headers and certificates for requests to it.

    Attributes:
        url: The URL as given.
        host: Name or address, IPv6 without brackets.
        port: TCP port.
        is_tls: Whether connections are encrypted.
        is_grpc: Whether the port speaks gRPC.
        headers: Headers of each request, with names in lower case.
        ca: Certificates to trust instead of the system's; None for the system's.
        cert: The client's certificate and its private key; None for a client without one.
        prefix: Prefix of each HTTP path, such as ``/models-of-a-proxy``; usually empty.
        is_verified: Whether the certificate of the server is verified.
    """

    url: str
    host: str
    port: int
    is_tls: bool
    is_grpc: bool
    headers: Mapping[str, str]
    ca: Path | None = None
    cert: Path | None = None
    prefix: str = ""
    is_verified: bool = True

    @property
    def authority(self) -> str:
        """Host and port, as in the header ``host``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def tls(self) -> ssl.SSLContext | None:
        """The TLS settings; None without TLS. Raises OSError, if the certificates cannot be read."""
        context = ssl.create_default_context(cafile=self.ca) if self.is_tls else None
        if context and self.cert:
            context.load_cert_chain(self.cert, password="")  # otherwise OpenSSL asks the terminal for a passphrase
        if context and self.is_grpc:
            context.set_alpn_protocols(["h2"])
        if context and not self.is_verified:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


def is_url(text: str) -> bool:
    """Whether an argument names a server instead of a model."""
    return text.lower().startswith(("http://", "https://", "grpc://", "grpcs://"))


ACCESS_FLAGS: Final = ("--key-file", "--header", "--ca", "--cert")
"""The flags of ``add_access``."""


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``address_of`` reads."""
    add = parser.add_argument_group("access to a server").add_argument
    add("--key-file", type=Path, metavar="FILE", help="File with the key for the server in its first line.")
    text = "Header to send with each request; may be repeated."
    add("--header", action="append", default=[], metavar="NAME:VALUE", help=text)
    add("--ca", type=Path, metavar="FILE", help="Certificates to trust instead of the system's.")
    text = "The client's certificate and its private key, in PEM, for servers that expect one."
    add("--cert", type=Path, metavar="FILE", help=text)


def address_of(url: str, given: argparse.Namespace, *, needs_http: bool = False) -> Address:
    """As ``parse_address``, with the flags of ``add_access``. ``needs_http`` rejects gRPC ports."""
    address = parse_address(url, headers=given.header, ca=given.ca, key_file=given.key_file, cert=given.cert)
    if address.is_grpc and needs_http:
        raise invalid_input(f"{url}: expected the server's HTTP port, such as http://{address.host}:8000, got gRPC")
    return address


def parse_address(
    url: str,
    *,
    headers: Sequence[str] = (),
    ca: Path | None = None,
    key_file: Path | None = None,
    cert: Path | None = None,
) -> Address:
    """Read ``http://host:port``, ``https:``, ``grpc:`` or ``grpcs:``. A path of HTTP becomes the prefix.

    Raises:
        ServeError: invalid_input, for another URL or one with a password, headers that are not ``NAME: VALUE``, and
            unreadable files.
    """
    if "@" in url:  # the message does not show the URL, which may contain a password
        raise invalid_input("expected a URL without user and password, such as http://HOST:8000, got one with them")
    expected = "expected a URL such as http://HOST:8000 or grpc://HOST:8001"
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
        (host or "").encode("idna")  # as lookups do
    except UnicodeError:
        raise invalid_input(f"'{url}': {expected}: the host is not a valid name") from None
    except ValueError as error:
        raise invalid_input(f"'{url}': {expected}: {error}") from None
    is_tls, is_grpc = parts.scheme in ("https", "grpcs"), parts.scheme in ("grpc", "grpcs")
    prefix = parts.path.rstrip("/").removesuffix("/v2")
    is_known = is_grpc or parts.scheme in ("http", "https")
    if not host or not is_known or (prefix and is_grpc) or parts.query or parts.fragment:
        raise invalid_input(f"'{url}': {expected}")
    sent = {"authorization": f"Bearer {_read_key(key_file)}"} if key_file else {}
    for header in headers:
        parsed = _HEADER.fullmatch(header)
        if parsed is None:
            raise invalid_input(f"--header: expected NAME: VALUE in printable ASCII, got '{header}'")
        sent[parsed[1].lower()] = parsed[2].strip()
    usual = 8001 if is_grpc else 443 if is_tls else 80
    address = Address(
        url=url,
        host=host,
        port=usual if port is None else port,
        is_tls=is_tls,
        is_grpc=is_grpc,
        headers=sent,
        ca=ca,
        cert=cert,
        prefix=prefix,
    )
    flag, expected = f"--ca {ca}", "certificates in PEM"
    try:
        replace(address, cert=None).tls()
        flag, expected = f"--cert {cert}", "a certificate and its private key in PEM, without a passphrase"
        address.tls()
    except OSError as error:
        raise invalid_input(f"{flag}: expected {expected}, got: {error.strerror or error}") from None
    return address


def _read_key(file: Path) -> str:
    """The first line of a key file that is neither empty nor a comment."""
    try:
        lines = map(str.strip, file.read_text().splitlines())
        key = next(line for line in lines if line and not line.startswith("#"))
    except (OSError, ValueError, StopIteration) as error:
        reason = "a folder" if file.is_dir() else getattr(error, "strerror", None) or "no line with a key"
        raise invalid_input(f"--key-file: expected a file with a key, got '{file}': {reason}") from None
    if not _IS_KEY(key):
        raise invalid_input("--key-file: expected a key in printable ASCII without spaces, got other characters")
    return key
