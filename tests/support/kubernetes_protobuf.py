"""Kubernetes' protobuf, as far as ``kubectl create`` writes it (since 1.32; all other commands send JSON).

Field numbers are those of ``k8s.io/apimachinery/pkg/runtime/generated.proto`` (``Unknown``), of
``k8s.io/apimachinery/pkg/apis/meta/v1/generated.proto`` and of ``k8s.io/api/core/v1/generated.proto``.
"""

import base64
from collections.abc import Iterator
from typing import Any, Final

MEDIA_TYPE: Final = "application/vnd.kubernetes.protobuf"
_METADATA: Final = {1: "name", 3: "namespace"}


def read_protobuf(body: bytes) -> dict[str, Any]:
    """Parse a ConfigMap, Namespace or Secret with the fields that the command line can set."""
    envelope = dict(_fields(body.removeprefix(b"k8s\0")))
    api_version, kind = (text.decode() for _, text in _fields(envelope[1]))
    document: dict[str, Any] = {"apiVersion": api_version, "kind": kind}
    for number, content in _fields(envelope[2]):
        match kind, number:
            case _, 1:
                texts = ((_METADATA[number], text) for number, text in _fields(content) if number in _METADATA)
                document["metadata"] = {name: text.decode() for name, text in texts if text}
            case "ConfigMap" | "Secret", 2:
                key, value = (part for _, part in _fields(content))
                text = base64.b64encode(value) if kind == "Secret" else value
                document.setdefault("data", {})[key.decode()] = text.decode()
            case "Secret", 3 if content:
                document["type"] = content.decode()
    return document


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each field in order; fields with plain numbers are skipped."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        value, at = _varint(message, at)
        if tag & 7 == 2:
            yield tag >> 3, message[at : at + value]
            at += value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if message[at - 1] < 0x80:
            return value, at
