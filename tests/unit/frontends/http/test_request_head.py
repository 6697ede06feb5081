"""The path of inference, Content-Encoding and Accept-Encoding, value by value."""

import pytest

from ortserve.codecs.compression import Encoding
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.request_head import (
    InferHeaders,
    UnknownEncodingError,
    body_encoding,
    infer_target,
    read_infer_headers,
    response_encoding,
)
from ortserve.frontends.http.responses import failure

GZIP, DEFLATE = Encoding.GZIP, Encoding.DEFLATE


@pytest.mark.parametrize(
    ("value", "encoding"),
    [
        (b"gzip", GZIP),
        (b"GZip ", GZIP),
        (b"x-gzip", GZIP),
        (b"deflate", DEFLATE),
        (b"identity", None),
        (b"", None),
    ],
)
def test_compression_of_a_body_is_known_by_its_name(value: bytes, encoding: Encoding | None) -> None:
    assert body_encoding(value) is encoding


@pytest.mark.parametrize("value", [b"br", b"gzip, deflate", b"gzip;q=1", b"\xff"])
def test_unknown_compression_is_unsupported_and_names_the_known_ones(value: bytes) -> None:
    with pytest.raises(UnknownEncodingError) as caught:
        body_encoding(value)
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    answer = failure(caught.value)
    assert answer.status == 501
    assert (b"accept-encoding", b"gzip, deflate") in answer.headers


@pytest.mark.parametrize(
    ("value", "encoding"),
    [
        (b"gzip, deflate, br", GZIP),  # what Python's asyncio client always sends
        (b"deflate, gzip", DEFLATE),
        (b"gzip;q=0.5, deflate;q=0.8", DEFLATE),
        (b"gzip;q=0.5, deflate;q=0.5", GZIP),
        (b"identity, gzip", None),
        (b"gzip, identity", GZIP),
        (b"identity;q=0.5, gzip;q=0.1", None),
        (b"identity;q=0, gzip;q=0.1", GZIP),
        (b"gzip;q=0", None),
        (b"GZIP ; Q=1", GZIP),
        (b"x-gzip", GZIP),
        (b"br, zstd", None),
        (b"*", None),
        (b"", None),
        (b"gzip;q=high", None),
        (b"gzip;q=nan", None),
        (b"gzip;q=2, deflate;q=0.1", DEFLATE),
        (b";;;,,=", None),
        (b"br;q=1.0, gzip;q=0.8, *;q=0.1", GZIP),
        (b"gzip," * 50, None),
    ],
)
def test_answer_uses_the_preferred_compression(value: bytes, encoding: Encoding | None) -> None:
    assert response_encoding(value) is encoding


@pytest.mark.parametrize(
    ("url", "target"),
    [
        (b"/v2/models/m/infer", ("m", "")),
        (b"/v2/models/%6D/versions/%31/infer", ("m", "1")),
        (b"/v2/models/a%2Fb/versions/v1%2E2/infer?x", ("a/b", "v1.2")),
        (b"/v2/models/m/versions/1%0A/infer", None),
        (b"/v2/models/m/versions/1%2F2/infer", None),
        (b"/v2/models/m/versions/%FF/infer", None),
    ],
)
def test_model_and_version_of_a_path_may_be_percent_encoded(url: bytes, target: tuple[str, str] | None) -> None:
    assert infer_target(url) == target


def test_headers_are_read_together() -> None:
    headers = [
        (b"host", b"x"),
        (b"content-length", b"10"),
        (b"content-encoding", b"deflate"),
        (b"accept-encoding", b"gzip"),
        (b"inference-header-content-length", b"0"),
        (b"x-request-timeout-ms", b"5"),
    ]
    assert read_infer_headers(headers) == InferHeaders(10, 0, 5_000_000, DEFLATE, GZIP)
    assert read_infer_headers([]) == InferHeaders()


def test_white_space_around_a_value_is_removed() -> None:
    headers = [
        (b"inference-header-content-length", b"8 "),
        (b"x-request-timeout-ms", b"5 \t"),
        (b"content-encoding", b"gzip "),
    ]
    assert read_infer_headers(headers) == InferHeaders(0, 8, 5_000_000, GZIP)


def test_header_lines_of_one_name_form_one_list() -> None:
    accepted = [(b"accept-encoding", b"br"), (b"accept-encoding", b"gzip"), (b"accept-encoding", b"zstd")]
    assert read_infer_headers(accepted) == InferHeaders(accepted=GZIP)
    with pytest.raises(UnknownEncodingError, match="'gzip, gzip' is not supported"):
        read_infer_headers([(b"content-encoding", b"gzip"), (b"content-encoding", b"gzip")])


def test_contradictory_lengths_are_rejected() -> None:
    name = b"inference-header-content-length"
    assert read_infer_headers([(name, b"8"), (name, b"8")]) == InferHeaders(json_bytes=8)
    with pytest.raises(ServeError, match="expected one number of bytes, got: 8, 9"):
        read_infer_headers([(name, b"8"), (name, b"9")])
