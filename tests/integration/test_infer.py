"""Inference through a real server: every datatype, every encoding, every kind of model."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio

from encodings_of_requests import (
    ENCODINGS,
    Infer,
    grpc_raw,
    grpc_typed,
    json_array,
    rest_binary,
    triton_inputs,
)
from ortserve._pb import grpc_service_pb2 as pb
from ortserve.core.dtypes import DataType
from servers import LONG_S, ServerProcess, rest_url, triton_clients

IN_EVERY_ENCODING = pytest.mark.parametrize("infer", ENCODINGS, ids=lambda infer: infer.__name__)


def extremes(datatype: DataType) -> np.ndarray:
    """Values [2, 4] of a datatype that an encoding is most likely to corrupt."""
    if datatype is DataType.BYTES:
        return np.array(
            [["", "a", "ünïcode ✓", 'quote " and \\'], ["nul \0 inside", "line\nbreak", "null", "🦆" * 50]], object
        )
    if datatype is DataType.BOOL:
        return np.array([[True, False, True, True], [False, False, True, False]])
    if datatype is DataType.BF16 or datatype.numpy.kind == "f":
        dtype = ml_dtypes.bfloat16 if datatype is DataType.BF16 else datatype.numpy
        limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        values = [0.1, -0.0, limits.max, limits.min, limits.tiny, limits.smallest_subnormal, 1 / 3, -1e-3]
        return np.array(values, dtype).reshape(2, 4)
    bounds = np.iinfo(datatype.numpy)
    return np.array([[bounds.min, bounds.max, 0, 1], [2, 3, 100, bounds.max - 1]], datatype.numpy)


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    """The arrays have the same datatype, shape and bits (for text: characters)."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if expected.dtype.kind == "O":
        assert got.tolist() == expected.tolist()
    else:
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("datatype", "infer"),
    [
        pytest.param(datatype, infer, id=f"{datatype.value}-{infer.__name__}")
        for datatype in DataType
        for infer in ENCODINGS
        # FP16 and BF16 have no typed contents.
        if infer is not grpc_typed or datatype not in (DataType.FP16, DataType.BF16)
    ],
)
def test_every_datatype_passes_unchanged_in_every_encoding(
    zoo_server: ServerProcess, datatype: DataType, infer: Infer
) -> None:
    sent = extremes(datatype)
    answer = infer(zoo_server, f"identity_{datatype.value.lower()}", {"x": sent})
    assert list(answer) == ["y"]
    assert_same(answer["y"], sent)


@pytest.mark.parametrize(
    ("width", "infer"),
    [
        *[(width, infer) for width in ("fp16", "bf16", "fp32", "fp64") for infer in (rest_binary, grpc_raw)],
        ("fp32", grpc_typed),
        ("fp64", grpc_typed),
    ],
)
def test_nan_and_infinities_pass_in_binary_encodings(zoo_server: ServerProcess, width: str, infer: Infer) -> None:
    sent = np.array([[np.nan, np.inf, -np.inf, 1.0]], ml_dtypes.bfloat16 if width == "bf16" else f"float{width[2:]}")
    answer = infer(zoo_server, f"identity_{width}", {"x": sent})
    assert_same(answer["y"], sent)


def test_rest_json_uses_the_bare_tokens_of_triton_clients(zoo_server: ServerProcess) -> None:
    body = '{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[NaN,Infinity,-Infinity,0.1]}]}'
    answer = httpx.post(rest_url(zoo_server, "identity_fp32"), content=body, timeout=LONG_S)
    assert answer.status_code == 200, answer.text
    output = json_array(answer.json()["outputs"][0])
    np.testing.assert_array_equal(output, np.array([[np.nan, np.inf, -np.inf, 0.1]], np.float32))


def test_mixed_strings_and_numbers_are_the_same_in_every_encoding(example_server: ServerProcess) -> None:
    inputs = {
        "text": np.array([["two words"], ["-1.5"], [""], ["drei  Wörter hier"]], object),
        "weight": np.array([[2.0], [0.5], [1.0], [-1.0]], np.float32),
    }
    expected = {
        "word_count": np.array([[2], [1], [0], [3]]),
        "is_number": np.array([[False], [True], [False], [False]]),
        "score": np.array([[4.0], [0.5], [0.0], [-3.0]], np.float32),
        "quoted": np.array([['"two words"'], ['"-1.5"'], ['""'], ['"drei  Wörter hier"']], object),
    }
    for infer in ENCODINGS:
        answer = infer(example_server, "text_stats", inputs)
        assert list(answer) == list(expected)
        for name, array in expected.items():
            assert_same(answer[name], array)


@IN_EVERY_ENCODING
def test_inputs_are_matched_by_name_in_any_order(example_server: ServerProcess, infer: Infer) -> None:
    minuend = np.arange(32, dtype=np.int32).reshape(2, 16)
    subtrahend = np.full((2, 16), 100, np.int32)
    answer = infer(example_server, "simple", {"INPUT1": subtrahend, "INPUT0": minuend})
    assert_same(answer["OUTPUT0"], minuend + subtrahend)
    assert_same(answer["OUTPUT1"], minuend - subtrahend)


@pytest.mark.parametrize("version", ["", "1"])
def test_version_may_be_named_or_left_to_the_server(example_server: ServerProcess, version: str) -> None:
    ones = {"INPUT0": np.ones((1, 16), np.int32), "INPUT1": np.ones((1, 16), np.int32)}
    with triton_clients(example_server) as (http, grpc):
        by_http = http.infer("simple", triton_inputs(triton_http, ones), model_version=version)
        by_grpc = grpc.infer("simple", triton_inputs(triton_grpc, ones), model_version=version)
    assert by_http.get_response()["model_name"] == by_grpc.get_response().model_name == "simple"
    assert by_http.get_response()["model_version"] == by_grpc.get_response().model_version == "1"


@pytest.mark.parametrize("request_id", ["", "a-1", "ünï ✓"])
def test_request_id_is_returned(example_server: ServerProcess, request_id: str) -> None:
    ones = {"INPUT0": np.ones((1, 16), np.int32), "INPUT1": np.ones((1, 16), np.int32)}
    with triton_clients(example_server) as (http, grpc):
        by_http = http.infer("simple", triton_inputs(triton_http, ones), request_id=request_id).get_response()
        by_grpc = grpc.infer("simple", triton_inputs(triton_grpc, ones), request_id=request_id).get_response()
    assert by_http.get("id", "") == request_id
    assert by_grpc.id == request_id


@pytest.mark.parametrize("names", [["OUTPUT1"], ["OUTPUT1", "OUTPUT0"], ["OUTPUT0", "OUTPUT1"]], ids=", ".join)
def test_only_requested_outputs_are_returned_in_request_order(example_server: ServerProcess, names: list[str]) -> None:
    ones = {"INPUT0": np.full((1, 16), 3, np.int32), "INPUT1": np.ones((1, 16), np.int32)}
    expected = {"OUTPUT0": 4, "OUTPUT1": 2}
    with triton_clients(example_server) as (http, grpc):
        by_http = http.infer(
            "simple",
            triton_inputs(triton_http, ones),
            # one in JSON and one in binary, so that one answer contains both kinds
            outputs=[triton_http.InferRequestedOutput(name, binary_data=name == "OUTPUT1") for name in names],
        )
        by_grpc = grpc.infer(
            "simple",
            triton_inputs(triton_grpc, ones),
            outputs=[triton_grpc.InferRequestedOutput(name) for name in names],
        )
    assert [output["name"] for output in by_http.get_response()["outputs"]] == names
    assert [output.name for output in by_grpc.get_response().outputs] == names
    for name in names:
        np.testing.assert_array_equal(by_http.as_numpy(name), np.full((1, 16), expected[name], np.int32))
        np.testing.assert_array_equal(by_grpc.as_numpy(name), np.full((1, 16), expected[name], np.int32))


async def test_both_asyncio_clients_get_answers_during_many_calls(example_server: ServerProcess) -> None:
    async with (
        triton_http_aio.InferenceServerClient(example_server.http) as http,
        triton_grpc_aio.InferenceServerClient(example_server.grpc) as grpc,
    ):

        async def call(library: object, client: object, number: int) -> None:
            inputs = {"INPUT0": np.full((1, 16), number, np.int32), "INPUT1": np.ones((1, 16), np.int32)}
            answer = await client.infer(  # type: ignore[attr-defined]  # tritonclient has no types
                "simple", triton_inputs(library, inputs), request_id=str(number)
            )
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), inputs["INPUT0"] + 1)
            response = answer.get_response()
            assert (response["id"] if isinstance(response, dict) else response.id) == str(number)

        await asyncio.gather(
            *(call(triton_http_aio, http, number) for number in range(50)),
            *(call(triton_grpc_aio, grpc, number) for number in range(50, 100)),
        )


@IN_EVERY_ENCODING
def test_output_without_axes_is_one_number(zoo_server: ServerProcess, infer: Infer) -> None:
    answer = infer(zoo_server, "scalar_sum", {"x": np.array([1.5, 2.5, -1.0], np.float32)})
    assert_same(answer["y"], np.array(3.0, np.float32))


@IN_EVERY_ENCODING
def test_model_with_a_fixed_first_dimension_is_served_one_request_at_a_time(
    zoo_server: ServerProcess, infer: Infer
) -> None:
    sent = np.array([[1, 2, 3, 4]], np.float32)
    assert_same(infer(zoo_server, "fixed_batch", {"x": sent})["y"], 2 * sent)
    assert "fixed at 1" in unbatched_reason(zoo_server, "fixed_batch")


@IN_EVERY_ENCODING
def test_inputs_with_different_leading_axes_keep_them(zoo_server: ServerProcess, infer: Infer) -> None:
    queries, documents = np.ones((2, 4), np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
    answer = infer(zoo_server, "two_batch_names", {"a": queries, "b": documents})
    assert_same(answer["y"], queries @ documents.T)
    reason = unbatched_reason(zoo_server, "two_batch_names")
    assert "'queries'" in reason
    assert "'documents'" in reason


@pytest.mark.parametrize("infer", [rest_binary, grpc_raw], ids=lambda infer: infer.__name__)
def test_dependent_rows_never_share_a_batch(zoo_server: ServerProcess, infer: Infer) -> None:
    def ask(number: int) -> None:
        sent = np.random.default_rng(number).standard_normal((1 + number % 3, 4)).astype(np.float32)
        answer = infer(zoo_server, "row_mixer", {"x": sent})
        np.testing.assert_allclose(answer["y"], sent - sent.mean(axis=0), atol=1e-6)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(64)))
    assert "ReduceMean reduces along the axis of the rows" in unbatched_reason(zoo_server, "row_mixer")


@IN_EVERY_ENCODING
def test_concurrent_requests_of_different_lengths_each_get_their_own_sum(
    zoo_server: ServerProcess, infer: Infer
) -> None:
    def ask(number: int) -> None:
        sent = np.full((1 + number % 2, 1 + number % 7), number, np.int64)
        assert_same(infer(zoo_server, "variable_length", {"x": sent})["y"], sent.sum(axis=1).astype(np.float32))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(64)))


@IN_EVERY_ENCODING
def test_free_dimensions_without_names_take_any_size(zoo_server: ServerProcess, infer: Infer) -> None:
    for shape in ((1, 1), (3, 2), (2, 9)):
        sent = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        assert_same(infer(zoo_server, "unnamed_dims", {"x": sent})["y"], 2 * sent)


@IN_EVERY_ENCODING
def test_request_larger_than_a_batch_is_split_and_joined(zoo_server: ServerProcess, infer: Infer) -> None:
    batching = re.match(r"up to (\d+) rows run together", properties(zoo_server, "identity_fp32")["batching"])
    assert batching is not None
    max_rows = int(batching[1])
    sent = np.arange((3 * max_rows + 1) * 4, dtype=np.float32).reshape(-1, 4)
    assert_same(infer(zoo_server, "identity_fp32", {"x": sent})["y"], sent)


@IN_EVERY_ENCODING
def test_model_that_rejects_synthetic_inputs_answers_real_ones(zoo_server: ServerProcess, infer: Infer) -> None:
    answer = infer(zoo_server, "refuses_synthetic", {"x": np.array([[2, 3, 10, 33]], np.int64)})
    assert_same(answer["y"], np.array([[0.0, 0.5, 4.0, 15.5]], np.float32))


def properties(server: ServerProcess, model: str) -> dict[str, str]:
    """The model's properties in the metadata, on which both protocols must agree."""
    with triton_clients(server) as (http, grpc):
        by_http: dict[str, str] = http.get_model_metadata(model)["properties"]
        # tritonclient's own message does not declare this field, but preserves unknown fields.
        message = grpc.get_model_metadata(model).SerializeToString()
    by_grpc = dict(pb.ModelMetadataResponse.FromString(message).properties)
    assert by_http == by_grpc
    return by_http


def unbatched_reason(server: ServerProcess, model: str) -> str:
    """The reason why the model's requests run alone; fails if they do not."""
    batching = properties(server, model)["batching"]
    assert batching.startswith("not batched because ")
    return batching
