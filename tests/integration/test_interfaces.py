"""Models with unusual interfaces through a real server: optional inputs, non-tensor types, no inputs at all."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from encodings_of_requests import ENCODINGS, Infer, grpc_raw, rest_binary, triton_inputs
from models import builders, interfaces
from ortserve.core.dtypes import DataType
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, serving, triton_clients

IN_EVERY_ENCODING = pytest.mark.parametrize("infer", ENCODINGS, ids=lambda infer: infer.__name__)
IN_BINARY = pytest.mark.parametrize("infer", [rest_binary, grpc_raw], ids=lambda infer: infer.__name__)

X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("interfaces")
    for build in (
        interfaces.any_shape,
        interfaces.bfloat16_and_text,
        interfaces.bfloat16_sum,
        interfaces.constant,
        interfaces.default_scale,
        interfaces.float8_output,
        interfaces.optional_bias,
        interfaces.optional_sequence,
        interfaces.positive,
        interfaces.reversed_of_any_shape,
        interfaces.sequence_input,
    ):
        add_model(repository, build.__name__, build)
    add_model(repository, "default_scale_by_row", interfaces.default_scale, shape=("batch", 1))
    add_model(repository, "empty", builders.identity, datatype=DataType.FP32, shape=(0, None, 3))
    add_model(repository, "scalar", builders.identity, datatype=DataType.INT32, shape=())
    (add_model(repository, "padded_scale", interfaces.default_scale) / "model.yaml").write_text("buckets: [4]\n")
    with serving(repository, *SHORT_WARMUP) as server:
        yield server


def properties(server: ServerProcess, model: str) -> dict[str, str]:
    answer = httpx.get(f"http://{server.http}/v2/models/{model}", timeout=LONG_S).raise_for_status()
    found: dict[str, str] = answer.json()["properties"]
    return found


@IN_BINARY
def test_bfloat16_is_computed_beside_other_types(server: ServerProcess, infer: Infer) -> None:
    answer = infer(server, "bfloat16_sum", {"x": X.astype(ml_dtypes.bfloat16), "n": X})
    np.testing.assert_array_equal(answer["y"], (2 * X).astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(answer["m"], X)
    assert "proven" in properties(server, "bfloat16_sum")["batching"]


def test_concurrent_bfloat16_requests_get_their_own_rows(server: ServerProcess) -> None:
    def ask(value: int) -> bool:
        x = np.full((1 + value % 3, 4), value, ml_dtypes.bfloat16)
        answer = grpc_raw(server, "bfloat16_sum", {"x": x, "n": np.zeros(x.shape, np.float32)})
        return bool(answer["y"].shape == x.shape and (answer["y"] == x).all())

    with ThreadPoolExecutor(16) as callers:
        assert all(callers.map(ask, range(64)))


@IN_BINARY
def test_bfloat16_output_beside_strings_is_not_served(server: ServerProcess, infer: Infer) -> None:
    texts = np.array(["one", "zwei"], object)
    answer = infer(server, "bfloat16_and_text", {"x": np.array([1, 2], ml_dtypes.bfloat16), "s": texts})
    assert sorted(answer) == ["t", "wide"]
    np.testing.assert_array_equal(answer["wide"], np.array([1, 2], np.float32))
    assert answer["t"].tolist() == texts.tolist()
    assert "output 'y'" in properties(server, "bfloat16_and_text")["not_served"]


def test_request_for_an_unserved_output_is_rejected_by_name(server: ServerProcess) -> None:
    texts = {"x": np.array([1], ml_dtypes.bfloat16), "s": np.array(["one"], object)}
    sequence = {"x": X[0], "more": X[0]}
    with triton_clients(server) as (http, rpc):
        for library, client, status in ((triton_http, http, "501"), (triton_grpc, rpc, "StatusCode.UNIMPLEMENTED")):
            asked = [library.InferRequestedOutput("y")]
            with pytest.raises(InferenceServerException, match="'y' of model 'bfloat16_and_text' is not served") as e:
                client.infer("bfloat16_and_text", triton_inputs(library, texts), outputs=asked)
            assert e.value.status() == status
            with pytest.raises(
                InferenceServerException, match="'more' of model 'optional_sequence' is not served"
            ) as e:
                client.infer("optional_sequence", triton_inputs(library, sequence))
            assert e.value.status() == status


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("sequence_input", "input 'x' has type seq(tensor(float)), which is not supported"),
        ("float8_output", "output 'y' has type tensor(float8e4m3fn), which is not supported"),
    ],
)
def test_model_with_unservable_inputs_shows_its_reason(server: ServerProcess, model: str, why: str) -> None:
    answer = httpx.get(f"http://{server.http}/v2/models/{model}", timeout=LONG_S)
    assert answer.status_code == 503
    assert why in answer.json()["error"]


@IN_EVERY_ENCODING
def test_input_of_an_optional_type_may_be_left_out(server: ServerProcess, infer: Infer) -> None:
    np.testing.assert_array_equal(infer(server, "optional_bias", {"x": X})["y"], X)
    np.testing.assert_array_equal(infer(server, "optional_bias", {"x": X, "bias": X + 1})["y"], 2 * X + 1)
    described = properties(server, "optional_bias")
    assert described["optional_inputs"] == "'bias'"
    assert "rows run together, tried on" in described["batching"]


@pytest.mark.parametrize(("model", "scales"), [("default_scale", [[3]]), ("default_scale_by_row", [[[3], [5]]])])
@IN_EVERY_ENCODING
def test_input_with_a_default_may_be_left_out(
    server: ServerProcess, infer: Infer, model: str, scales: list[list[int]]
) -> None:
    np.testing.assert_array_equal(infer(server, model, {"x": X})["y"], X * 2)
    scale = np.array(scales[0], np.float32)
    np.testing.assert_array_equal(infer(server, model, {"x": X, "scale": scale})["y"], X * scale)
    assert properties(server, model)["optional_inputs"] == "'scale'"


@pytest.mark.parametrize("model", ["default_scale", "default_scale_by_row", "optional_bias"])
def test_requests_with_and_without_an_optional_input_get_their_own_answers(server: ServerProcess, model: str) -> None:
    name = "bias" if model == "optional_bias" else "scale"

    def ask(number: int) -> bool:
        x = np.full((1 + number % 5, 4), number, np.float32)
        extra = {"default_scale": x[0, :1], "default_scale_by_row": x[:, :1], "optional_bias": x}[model]
        inputs = {"x": x} if number % 2 else {"x": x, name: extra}
        without = x if model == "optional_bias" else 2 * x
        expected = without if number % 2 else 2 * x if model == "optional_bias" else x * number
        answer = grpc_raw(server, model, inputs)["y"]
        return bool(answer.shape == expected.shape and (answer == expected).all())

    with ThreadPoolExecutor(16) as callers:
        assert all(callers.map(ask, range(96)))


def test_default_without_rows_is_kept_in_padded_batches(server: ServerProcess) -> None:
    assert "input 'scale': it is the same for all rows" in properties(server, "padded_scale")["not_served"]
    np.testing.assert_array_equal(grpc_raw(server, "padded_scale", {"x": X})["y"], X * 2)
    with pytest.raises(InferenceServerException, match="'scale' of model 'padded_scale' is not served"):
        grpc_raw(server, "padded_scale", {"x": X, "scale": np.array([3], np.float32)})


@IN_EVERY_ENCODING
def test_model_without_inputs_answers(server: ServerProcess, infer: Infer) -> None:
    assert infer(server, "constant", {})["y"].tolist() == [1, 2, 3]


@IN_EVERY_ENCODING
def test_optional_sequence_can_be_absent(server: ServerProcess, infer: Infer) -> None:
    answer = infer(server, "optional_sequence", {"x": X[0]})
    np.testing.assert_array_equal(answer["y"], X[0])
    assert not answer["has"]
    assert answer["has"].shape == ()


@IN_EVERY_ENCODING
def test_data_dependent_shape_follows_each_request(server: ServerProcess, infer: Infer) -> None:
    for values in ([1, -1, 2], [-1, -2], [3], []):
        x = np.array(values, np.float32)
        np.testing.assert_array_equal(infer(server, "positive", {"x": x})["y"], x[x > 0])
    assert properties(server, "positive")["batching"].startswith(
        "not batched because rows may depend on each other: node 'Compress #1': "
    )


@IN_EVERY_ENCODING
def test_scalars_and_empty_tensors_are_served(server: ServerProcess, infer: Infer) -> None:
    scalar = np.array(7, np.int32)
    assert infer(server, "scalar", {"x": scalar})["y"] == scalar
    empty = np.empty((0, 5, 3), np.float32)
    assert infer(server, "empty", {"x": empty})["y"].shape == empty.shape


def test_model_that_does_not_survive_another_rank_loads(server: ServerProcess) -> None:
    """Warm-up does not know the shape of the input, and ONNX Runtime would crash on a scalar."""
    inputs = {"x": np.array([[1, 2, 3]], np.float32), "lengths": np.array([2])}
    np.testing.assert_array_equal(ENCODINGS[0](server, "reversed_of_any_shape", inputs)["y"], [[2, 1, 3]])


@IN_EVERY_ENCODING
def test_rank_that_would_end_the_process_is_rejected(server: ServerProcess, infer: Infer) -> None:
    for x in (np.array(1, np.float32), np.ones(3, np.float32)):
        with pytest.raises((InferenceServerException, grpc.RpcError, AssertionError), match="at least 2 axes, got"):
            infer(server, "reversed_of_any_shape", {"x": x, "lengths": np.array([2])})


@IN_EVERY_ENCODING
def test_input_of_undeclared_shape_accepts_any_shape(server: ServerProcess, infer: Infer) -> None:
    one = np.array(1, np.float32)
    for x in (X, X[0], one, np.empty((2, 0), np.float32)):
        answer = infer(server, "any_shape", {"x": x, "s": one})
        np.testing.assert_array_equal(answer["y"], x)
        assert answer["y"].shape == x.shape
    assert properties(server, "any_shape")["any_shape"] == "'x'"
    with pytest.raises(
        (InferenceServerException, grpc.RpcError, AssertionError), match="unexpected shape for input 's'"
    ):
        infer(server, "any_shape", {"x": X, "s": X})
