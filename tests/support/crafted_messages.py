"""Inference requests with few bytes, or bytes that are cheap to create, that would expand to many objects.

Contract tests check the server's bounds with them; memory tests and ``loadtests/noisy_neighbour.py`` send them
repeatedly. They are built as bytes, because no client would write them.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np

INPUTS_TAG: Final = b"\x2a"
OUTPUTS_TAG: Final = b"\x32"
PARAMETERS_TAG: Final = b"\x22"
RAW_CONTENTS_TAG: Final = b"\x3a"
"""Tag of the repeated field of ModelInferRequest; its elements are bytes."""

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
GZIP: Final[Mapping[str, str]] = MappingProxyType({"Content-Encoding": "gzip"})


def varint(value: int) -> bytes:
    """An unsigned number as a protobuf varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, content: bytes) -> bytes:
    """A field of bytes, text or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def empty_fields(tag: bytes, count: int) -> bytes:
    """``count`` empty messages or bytes of one field, with two bytes each."""
    return (tag + b"\0") * count


def infer_message(model: str, *fields: bytes) -> bytes:
    """A ModelInferRequest with these fields and the model's name."""
    return b"".join((field(1, model.encode()), *fields))


def tensor_message(name: str, datatype: str, shape: Sequence[int], *fields: bytes) -> bytes:
    """The field of one input, with these fields in addition to the usual ones."""
    packed = field(3, b"".join(varint(size & 2**64 - 1) for size in shape))
    return field(5, b"".join((field(1, name.encode()), field(2, datatype.encode()), packed, *fields)))


def typed_message(model: str, datatype: str, contents_field: int, packed: bytes, count: int) -> bytes:
    """One row of ``count`` elements in typed contents; ``packed`` is the content of that field."""
    return infer_message(model, tensor_message("x", datatype, [1, count], field(5, field(contents_field, packed))))


def repeated_json(before: str, entry: str, count: int, after: str) -> bytes:
    """A document that contains one entry ``count`` times, separated by commas."""
    return f"{before}{f'{entry},' * (count - 1)}{entry}{after}".encode()


def empty_inputs_json(count: int) -> bytes:
    """``{"inputs":[[],[],…]}``, with three bytes per input."""
    return repeated_json('{"inputs":[', "[]", count, "]}")


def empty_outputs_json(count: int) -> bytes:
    """Empty objects as outputs, without an input."""
    return repeated_json('{"inputs":[],"outputs":[', "{}", count, "]}")


def empty_parameters_json(count: int) -> bytes:
    """Empty objects as values of one parameter."""
    return repeated_json('{"inputs":[],"parameters":{"a":[', "{}", count, "]}}")


def numbers_json(count: int, number: str = "0", *, datatype: str = "FP32") -> bytes:
    """A valid request with one row of ``count`` equal numbers as the input ``x``."""
    head = f'{{"inputs":[{{"name":"x","shape":[1,{count}],"datatype":"{datatype}","data":['
    return repeated_json(head, number, count, "]}]}")


def gzipped(body: bytes) -> bytes:
    """The body as gzip."""
    return gzip.compress(body, 9, mtime=0)


def texts(text: bytes, count: int) -> bytes:
    """The same text ``count`` times as binary BYTES, each after four bytes of length."""
    return (len(text).to_bytes(4, "little") + text) * count


def binary_request(inputs: Mapping[str, tuple[str, Sequence[int], bytes]]) -> tuple[bytes, dict[str, str]]:
    """The body and headers of a REST request with binary tensors (datatype, shape, bytes)."""
    entries: list[dict[str, Any]] = [
        {"name": name, "datatype": kind, "shape": list(shape), "parameters": {"binary_data_size": len(data)}}
        for name, (kind, shape, data) in inputs.items()
    ]
    head = json.dumps({"inputs": entries}).encode()
    tail = [data for _, _, data in inputs.values()]
    return b"".join((head, *tail)), {"Inference-Header-Content-Length": str(len(head))}


def text_stats_request(text: bytes, count: int) -> tuple[bytes, dict[str, str]]:
    """A valid request of ``count`` texts to the example model ``text_stats``."""
    weights = np.zeros(count, np.float32).tobytes()
    return binary_request({"text": ("BYTES", [count, 1], texts(text, count)), "weight": ("FP32", [count, 1], weights)})


def http_request(model: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> bytes:
    """A complete HTTP/1.1 request of REST inference."""
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "\r\n"]).encode() + body
