"""TLS 1.3 records that no Python library sends, built from a session's secrets (RFC 8446, sections 5 and 7)."""

import ssl
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

CIPHER: Final = "TLS_AES_256_GCM_SHA384"
_HANDSHAKE, _APPLICATION_DATA = 22, 23
_KEY_UPDATE: Final = b"\x18\x00\x00\x01"


class ClientRecords:
    """Encrypts records of a client after its handshake; its own session must not have sent any before."""

    def __init__(self, session: ssl.SSLObject | ssl.SSLSocket, key_log: Path) -> None:
        """Read the session's secret from the ``keylog_filename`` of its context."""
        cipher = session.cipher()
        assert cipher is not None
        assert cipher[0] == CIPHER
        secrets = {line.split()[0]: line.split()[-1] for line in key_log.read_text().splitlines()}
        self._renew(bytes.fromhex(secrets["CLIENT_TRAFFIC_SECRET_0"]))

    def data(self, plaintext: bytes, *, padding: int = 0) -> bytes:
        """A record of application data."""
        return self._seal(plaintext, _APPLICATION_DATA, padding)

    def key_update(self, *, is_answer_wanted: bool = False) -> bytes:
        """A record that announces new keys; later records use them."""
        record = self._seal(_KEY_UPDATE + bytes([is_answer_wanted]), _HANDSHAKE, 0)
        self._renew(_expand(self._secret, b"traffic upd", 48))
        return record

    def _renew(self, secret: bytes) -> None:
        self._secret = secret
        self._key, self._iv = AESGCM(_expand(secret, b"key", 32)), _expand(secret, b"iv", 12)
        self._number = 0

    def _seal(self, content: bytes, content_type: int, padding: int) -> bytes:
        inner = content + bytes([content_type]) + bytes(padding)
        header = b"\x17\x03\x03" + (len(inner) + 16).to_bytes(2, "big")
        nonce = (int.from_bytes(self._iv, "big") ^ self._number).to_bytes(12, "big")
        self._number += 1
        return header + self._key.encrypt(nonce, inner, header)


def _expand(secret: bytes, label: bytes, length: int) -> bytes:
    """HKDF-Expand-Label with an empty context."""
    name = b"tls13 " + label
    info = length.to_bytes(2, "big") + bytes([len(name)]) + name + b"\x00"
    return HKDFExpand(SHA384(), length, info).derive(secret)
