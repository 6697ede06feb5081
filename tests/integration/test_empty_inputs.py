"""Requests with empty tensors: 0 rows, batched or not, and inputs that would crash ONNX Runtime."""

from collections.abc import Iterator

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from encodings_of_requests import ENCODINGS, Arrays, Infer, grpc_raw, rest_json, triton_inputs
from models import builders, empty_inputs, interfaces
from ortserve.core.dtypes import DataType
from ortserve.engine.corrections.empty_checks import computes_empty
from ortserve.engine.provider_options import CPU
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, json_input, rest_url, serving, triton_clients

COMPUTES_EMPTY = computes_empty(CPU)
IN_EVERY_ENCODING = pytest.mark.parametrize("infer", ENCODINGS, ids=lambda infer: infer.__name__)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Models whose rows run together, and for each ``<name>_alone``, whose requests run one at a time."""
    repository = tmp_path_factory.mktemp("empty")
    for suffix, options in (("", ""), ("_alone", "batched: false\n")):
        folders = [
            add_model(repository, f"mlp{suffix}", builders.mlp),
            add_model(repository, f"positive{suffix}", builders.refuses_synthetic),
            add_model(repository, f"words{suffix}", builders.identity, datatype=DataType.BYTES),
            add_model(repository, f"half{suffix}", builders.identity, datatype=DataType.BF16),
            add_model(repository, f"free{suffix}", builders.identity, shape=("batch", "length")),
            add_model(repository, f"scale{suffix}", interfaces.default_scale),
            add_model(repository, f"recurrent{suffix}", builders.recurrent),
            add_model(repository, f"gated{suffix}", builders.recurrent, operator="GRU"),
            add_model(repository, f"einsum{suffix}", builders.diagonal_products),
            add_model(repository, f"scores{suffix}", empty_inputs.attention_scores),
            add_model(repository, f"joined{suffix}", interfaces.joined),
            add_model(repository, f"product{suffix}", interfaces.quantized_product),
            add_model(repository, f"multiple{suffix}", interfaces.quantized_multiple),
            add_model(repository, f"vector{suffix}", interfaces.product_with_vector),
            add_model(repository, f"turned{suffix}", interfaces.product_of_transposed),
            add_model(repository, f"heads{suffix}", interfaces.free_heads),
            add_model(repository, f"window{suffix}", interfaces.free_window),
            add_model(repository, f"scan{suffix}", interfaces.running_sum),
            add_model(repository, f"volume{suffix}", interfaces.upsampled_volume),
            add_model(repository, f"transposed{suffix}", interfaces.transposed_product),
            add_model(repository, f"skip{suffix}", interfaces.skip_normalized),
            add_model(repository, f"features{suffix}", interfaces.joined_features),
            add_model(repository, f"continued{suffix}", empty_inputs.continued),
            add_model(repository, f"image{suffix}", empty_inputs.normalized_image),
            add_model(repository, f"cached{suffix}", empty_inputs.normalized_beside_a_cache),
            add_model(repository, f"continued_cached{suffix}", empty_inputs.continued_beside_a_cache),
            add_model(repository, f"past{suffix}", empty_inputs.attention_to_a_past),
        ]
        for folder in folders:
            (folder / "model.yaml").write_text(f"{options}intra_op_threads: 2\n")
    with serving(repository, *SHORT_WARMUP) as running:
        yield running
        # The process still runs after all of the above.
        np.testing.assert_array_equal(
            rest_json(running, "free", {"x": np.ones((1, 2), np.float32)})["y"], np.ones((1, 2), np.float32)
        )


@IN_EVERY_ENCODING
@pytest.mark.parametrize("suffix", ["", "_alone"], ids=["batched", "alone"])
def test_request_of_no_rows_gets_an_answer_of_no_rows(server: ServerProcess, infer: Infer, suffix: str) -> None:
    def ask(model: str, **inputs: np.ndarray) -> np.ndarray:
        (answer,) = infer(server, model + suffix, inputs).values()
        return answer

    for model, inputs, item in (
        ("mlp", {"x": np.empty((0, 64), np.float32)}, (10,)),
        ("words", {"x": np.empty((0, 4), object)}, (4,)),
        ("free", {"x": np.empty((0, 7), np.float32)}, (7,)),
        ("scale", {"x": np.empty((0, 4), np.float32), "scale": np.array([3], np.float32)}, (4,)),
    ):
        answer = ask(model, **inputs)
        assert answer.shape == (0, *item), model
        assert answer.dtype == inputs["x"].dtype


@pytest.mark.parametrize("model", ["recurrent", "gated"])
def test_only_batched_recurrence_answers_requests_without_rows(server: ServerProcess, model: str) -> None:
    no_rows, no_steps = np.empty((0, 5, 2), np.float32), np.empty((2, 0, 2), np.float32)
    assert rest_json(server, model, {"x": no_rows})["y"].shape == (0, 3)
    for name, empty in ((f"{model}_alone", no_rows), (f"{model}_alone", no_steps), (model, no_steps)):
        check_rejected(server, name, {"x": empty}, f"'x' is empty for model '{name}'")


def test_einsum_of_no_rows_is_answered_batched_and_rejected_alone(server: ServerProcess) -> None:
    empty = {"x": np.empty((0, 2, 3), np.float32), "z": np.empty((0, 3, 2), np.float32)}
    assert rest_json(server, "einsum", empty)["y"].shape == (0, 2, 2)
    check_rejected(server, "einsum_alone", empty, "Einsum")


@pytest.mark.parametrize("model", ["scores", "scores_alone"])
def test_einsum_of_features_of_no_size_is_rejected(server: ServerProcess, model: str) -> None:
    """ONNX Runtime would divide by 0 and crash the process."""
    whole = np.ones((1, 3, 2), np.float32)
    np.testing.assert_array_equal(rest_json(server, model, {"x": whole})["y"], np.full((1, 3, 3), 2))
    check_rejected(server, model, {"x": whole[..., :0]}, f"'x' is empty for model '{model}'")


@pytest.mark.parametrize("model", ["joined", "joined_alone"])
def test_empty_input_that_is_joined_along_another_axis_is_rejected(server: ServerProcess, model: str) -> None:
    """ONNX Runtime would not write half of the output, which then contains values of other requests."""

    def inputs(steps: int, past_rows: int, past: int) -> Arrays:
        shapes = {"x": (3, 5, 4), "f": (3, steps, 4), "past": (past_rows, past, 4)}
        return {name: np.full(shape, 7, np.float32) for name, shape in shapes.items()}

    answer = rest_json(server, model, inputs(5, 3, 0))
    np.testing.assert_array_equal(answer["y"], np.full((3, 5, 8), 7))
    np.testing.assert_array_equal(answer["present"], np.full((3, 5, 4), 7))
    check_rejected(server, model, inputs(0, 3, 2), f"'f' is empty for model '{model}'")
    if model == "joined_alone":
        check_rejected(server, model, inputs(5, 0, 2), f"'past' is empty for model '{model}'")


def test_quantized_product_over_an_empty_axis_is_rejected(server: ServerProcess) -> None:
    empty = {"a": np.empty((2, 0), np.float32), "b": np.empty((0, 3), np.float32)}
    check_rejected(server, "product_alone", empty, "'a' is empty for model 'product_alone'")


@pytest.mark.parametrize("model", ["multiple", "multiple_alone"])
def test_quantized_multiple_of_an_empty_tensor_is_rejected(server: ServerProcess, model: str) -> None:
    """ONNX Runtime would crash the process if it has several threads."""
    whole = np.array([[1, 2]], np.float32)
    np.testing.assert_array_equal(rest_json(server, model, {"x": whole})["y"], 3 * whole)
    check_rejected(server, model, {"x": np.empty((2, 0), np.float32)}, f"'x' is empty for model '{model}'")


def test_product_with_an_empty_vector_is_computed_or_rejected(server: ServerProcess) -> None:
    """Before 1.32, ONNX Runtime would not write the output."""
    whole = {"a": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
    np.testing.assert_array_equal(rest_json(server, "vector_alone", whole)["y"], [3, 3])
    empty = {"a": np.empty((2, 0), np.float32), "b": np.empty(0, np.float32)}
    if COMPUTES_EMPTY:
        np.testing.assert_array_equal(rest_json(server, "vector_alone", empty)["y"], [0, 0])
    else:
        check_rejected(server, "vector_alone", empty, "'a' is empty for model 'vector_alone'")


@pytest.mark.parametrize("shapes", [((0, 2, 3), (0, 4, 3)), ((1, 2, 0), (1, 4, 0))], ids=["matrices", "sums"])
def test_empty_product_with_a_transposed_matrix_is_computed_or_rejected(
    server: ServerProcess, shapes: tuple[tuple[int, ...], ...]
) -> None:
    """Before 1.32, ONNX Runtime would divide by 0, or not write the output."""
    empty = dict(zip("ab", (np.empty(shape, np.float32) for shape in shapes), strict=True))
    if COMPUTES_EMPTY:
        answer = rest_json(server, "turned_alone", empty)["y"]
        np.testing.assert_array_equal(answer, np.zeros((shapes[0][0], 2, 4), np.float32))
    else:
        check_rejected(server, "turned_alone", empty, "is empty for model 'turned_alone'")


@pytest.mark.parametrize("model", ["heads", "heads_alone"])
def test_attention_without_heads_is_rejected(server: ServerProcess, model: str) -> None:
    """ONNX Runtime would divide by 0 and crash the process."""
    whole, no_steps = np.ones((1, 3, 4), np.float32), np.ones((1, 0, 4), np.float32)
    np.testing.assert_allclose(rest_json(server, model, {"x": whole})["y"], whole, rtol=1e-6)
    assert rest_json(server, model, {"x": no_steps})["y"].shape == (1, 0, 4)
    check_rejected(server, model, {"x": np.ones((1, 3, 0), np.float32)}, f"'x' is empty for model '{model}'")
    # The error names the axis instead of the shape, which may be that of the placeholder row for a request without
    # rows.
    check_rejected(server, "heads", {"x": np.ones((0, 3, 0), np.float32)}, "got none along axis 2")


def test_spectrum_with_an_empty_window_is_rejected(server: ServerProcess) -> None:
    """ONNX Runtime would divide by 0 and crash the process."""
    empty = {"x": np.ones((1, 16, 1), np.float32), "window": np.ones(0, np.float32)}
    assert rest_json(server, "window_alone", empty | {"window": np.ones(8, np.float32)})["y"].shape == (1, 3, 5, 2)
    check_rejected(server, "window_alone", empty, "operators STFT may crash")


@pytest.mark.parametrize("suffix", ["", "_alone"], ids=["batched", "alone"])
def test_scan_of_no_steps_is_rejected(server: ServerProcess, suffix: str) -> None:
    """ONNX Runtime would divide by 0 and crash the process."""
    answer = rest_json(server, f"scan{suffix}", {"x": np.ones((2, 3, 2), np.float32)})
    np.testing.assert_array_equal(answer["last"], np.full((2, 2), 3))
    check_rejected(server, f"scan{suffix}", {"x": np.ones((2, 0, 2), np.float32)}, "operators Scan may crash")


@pytest.mark.parametrize("suffix", ["", "_alone"], ids=["batched", "alone"])
def test_transposed_convolution_of_an_empty_volume_is_rejected(server: ServerProcess, suffix: str) -> None:
    """ONNX Runtime would read unmapped memory."""
    model = f"volume{suffix}"
    answer = rest_json(server, model, {"x": np.ones((1, 1, 2, 2, 4), np.float32)})
    assert answer["y"].shape == (1, 1, 4, 4, 6)
    for shape in ((1, 1, 0, 2, 4), (1, 1, 2, 0, 4)):
        check_rejected(server, model, {"x": np.ones(shape, np.float32)}, f"'x' is empty for model '{model}'")


@pytest.mark.parametrize("model", ["image", "image_alone"])
def test_normalization_of_an_image_without_pixels_is_rejected(server: ServerProcess, model: str) -> None:
    """ONNX Runtime would write to unmapped memory."""
    whole = np.full((1, 2, 3, 4), 5, np.float16)
    np.testing.assert_array_equal(rest_json(server, model, {"x": whole})["y"], np.ones_like(whole))
    check_rejected(server, model, {"x": whole[:, :, :0]}, f"'x' is empty for model '{model}'")
    assert rest_json(server, model, {"x": whole[:0]})["y"].shape == (0, 2, 3, 4)


@pytest.mark.parametrize("suffix", ["", "_alone"], ids=["batched", "alone"])
def test_inputs_that_reach_no_crashing_operator_may_be_empty(server: ServerProcess, suffix: str) -> None:
    cache, x = np.empty((1, 0, 4), np.float32), np.full((1, 2, 3), 5, np.float32)
    for empty in (x, x[:, :, :0]):
        answer = rest_json(server, f"cached{suffix}", {"x": empty, "cache": cache})
        assert {name: array.shape for name, array in answer.items()} == {"y": empty.shape, "kept": cache.shape}
    prompt = np.array([[1, 2]], np.int32)
    answer = rest_json(server, f"continued_cached{suffix}", {"x": prompt, "cache": cache})
    assert {name: array.shape for name, array in answer.items()} == {"y": (1, 6), "kept": cache.shape}


@pytest.mark.parametrize("model", ["past", "past_alone"])
def test_only_a_past_of_no_steps_may_be_empty(server: ServerProcess, model: str) -> None:
    """ONNX Runtime joins a past by a Concat, of which it would not write a part."""
    x = np.full((1, 1, 2, 4), 3, np.float32)
    for steps in (0, 2):
        past = np.full((1, 1, steps, 4), 3, np.float32)
        np.testing.assert_allclose(rest_json(server, model, {"x": x, "past": past})["y"], x, rtol=1e-6)
    empty = {"x": x, "past": np.empty((1, 1, 2, 0), np.float32)}
    check_rejected(server, model, empty, f"'past' is empty for model '{model}'")


@pytest.mark.parametrize("model", ["continued", "continued_alone"])
def test_prompt_of_no_words_is_rejected(server: ServerProcess, model: str) -> None:
    """ONNX Runtime would read the word before it, and crash the process."""
    answer = rest_json(server, model, {"x": np.array([[1, 2]], np.int32)})
    np.testing.assert_array_equal(answer["y"], [[1, 2, 0, 1, 2, 0]])
    check_rejected(server, model, {"x": np.empty((1, 0), np.int32)}, f"'x' is empty for model '{model}'")


@pytest.mark.parametrize(
    ("model", "shapes", "empty"),
    [
        ("transposed_alone", {"x": (2, 5), "z": (3, 5)}, {"x": (2, 0), "z": (3, 0)}),
        ("skip_alone", {"x": (3, 2, 4), "skip": (1, 2, 4)}, {"skip": (0, 2, 4)}),
        ("features_alone", {"x": (3, 2), "z": (3, 2)}, {"x": (0, 2), "z": (0, 2)}),
    ],
)
def test_other_empty_tensors_that_crash_are_rejected(
    server: ServerProcess, model: str, shapes: dict[str, tuple[int, ...]], empty: dict[str, tuple[int, ...]]
) -> None:
    whole = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    rest_json(server, model, whole)
    inputs = whole | {name: np.ones(shape, np.float32) for name, shape in empty.items()}
    check_rejected(server, model, inputs, f"is empty for model '{model}'")


def test_error_for_rejected_zeros_names_the_synthetic_row(server: ServerProcess) -> None:
    document = {"inputs": [json_input("x", np.empty((0, 4), np.int64))]}
    answer = httpx.post(rest_url(server, "positive"), json=document, timeout=LONG_S)
    assert answer.status_code == 400
    assert "for the placeholder row of zeros in their place the model rejected the inputs" in answer.json()["error"]


def test_synthetic_row_is_bounded(server: ServerProcess) -> None:
    check_rejected(server, "free", {"x": np.empty((0, 2**40), np.float32)}, "at most 8388608 elements a row")


def test_answer_of_no_rows_is_counted_without_rows(server: ServerProcess) -> None:
    def counted() -> tuple[int, int]:
        url = f"http://{server.http}/v2/models/half/stats"
        (stats,) = httpx.get(url, timeout=LONG_S).json()["model_stats"]
        return stats["inference_count"], stats["inference_stats"]["success"]["count"]

    rows, requests = counted()
    assert grpc_raw(server, "half", {"x": np.empty((0, 4), ml_dtypes.bfloat16)})["y"].shape == (0, 4)
    assert counted() == (rows, requests + 1)


def check_rejected(server: ServerProcess, model: str, inputs: Arrays, text: str) -> None:
    document = {"inputs": [json_input(name, array) for name, array in inputs.items()]}
    answer = httpx.post(rest_url(server, model), json=document, timeout=LONG_S)
    assert (answer.status_code, text in answer.json()["error"]) == (400, True), answer.text
    with triton_clients(server) as (http, grpc):
        for client, module in ((http, triton_http), (grpc, triton_grpc)):
            with pytest.raises(InferenceServerException) as caught:
                client.infer(model, triton_inputs(module, inputs))
            assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
            assert text in caught.value.message()
