"""Requests whose body consists of the bytes of a tensor."""

import httpx
import numpy as np
import tritonclient.http as triton_http

from servers import LONG_S, ServerProcess, rest_url

RAW = {"Inference-Header-Content-Length": "0"}


def post(server: ServerProcess, model: str, body: bytes) -> httpx.Response:
    return httpx.post(rest_url(server, model), content=body, headers=RAW, timeout=LONG_S)


def read(answer: httpx.Response) -> triton_http.InferResult:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    size = int(answer.headers["inference-header-content-length"])
    return triton_http.InferenceServerClient.parse_response_body(answer.content, header_length=size)


def test_body_is_one_row_whose_free_dimension_it_fills(server: ServerProcess) -> None:
    row = np.arange(7, dtype=np.float32)
    assert read(post(server, "echo", row.tobytes())).as_numpy("y").tolist() == [row.tolist()]


def test_row_of_fixed_shape_is_answered_with_all_outputs_binary(server: ServerProcess) -> None:
    result = read(post(server, "digits", bytes(4 * 64)))
    assert len(result.get_response()["outputs"]) > 0
    assert all("binary_data_size" in output["parameters"] for output in result.get_response()["outputs"])
    assert "id" not in result.get_response()


def test_string_output_has_no_length_prefix(server: ServerProcess) -> None:
    assert read(post(server, "echo_text", "añb".encode())).as_numpy("y").tolist() == [["añb".encode()]]


def test_body_that_fits_no_shape_is_400(server: ServerProcess) -> None:
    for model, body, text in (
        (
            "simple",
            bytes(64),
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'simple'",
        ),
        ("digits", bytes(5), "input byte size mismatch for input"),
        ("echo", bytes(5), "Expected a multiple of 4"),
        ("echo_text", b"\xff", "is not valid UTF-8"),
    ):
        answer = post(server, model, body)
        assert answer.status_code == 400
        assert text in answer.json()["error"]
    assert post(server, "absent", b"").status_code == 404
