"""Image files end to end: an ensemble decodes a file and classifies its digit; files that are not images."""

import io
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton_grpc
import yaml
from onnx import TensorProto, helper
from PIL import Image
from tritonclient.utils import InferenceServerException

from encodings_of_requests import Infer, grpc_raw, rest_binary, rest_json, triton_inputs
from models.builders import OPSET, write
from models.images import decoder
from ortserve.config.model import ModelOptions
from ortserve.registry.repository.model_files import operator_libraries
from pages import DOCS, blocks
from servers import LONG_S, SHORT_WARMUP, ServerProcess, rest_url, serving

DIGITS = Path(__file__).parents[2] / "server" / "ortserve" / "example" / "repository" / "digits" / "1" / "model.onnx"

EXTENSIONS = {"session": {"operator_libraries": ["onnxruntime-extensions"]}}
SCRIPT = """
import sys
from pathlib import Path
from onnxruntime_extensions.tools.add_pre_post_processing_to_model import ModelSource, mobilenet
mobilenet(Path(sys.argv[1]), Path(sys.argv[2]), ModelSource.PYTORCH, onnx_opset=int(sys.argv[3]))
"""
PAGE = (DOCS / "ensembles.md").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("images")
    for name in ("pixels", "digits", "digit_photos"):
        (folder / name / "1").mkdir(parents=True)
    subprocess.run([sys.executable, "-c", example("python", "ImageDecoder")], cwd=folder, check=True, timeout=LONG_S)
    decoder(folder / "pixels" / "1" / "model.onnx", "DecodeImage")
    (folder / "digits" / "1" / "model.onnx").write_bytes(DIGITS.read_bytes())
    (folder / "digit_photos" / "model.yaml").write_text(example("yaml", "digit_photos"))
    with serving(folder, *SHORT_WARMUP) as server:
        yield server


@pytest.fixture(scope="module")
def digits() -> Any:
    """Images of 8 by 8 numbers from 0 to 16, and the digits that they show."""
    from sklearn.datasets import load_digits

    return load_digits()


def example(language: str, mark: str) -> str:
    """The only block of the page with this text."""
    (found,) = (block for block in blocks(language, PAGE) if mark in block)
    return found


def photo(image: np.ndarray, form: str = "JPEG") -> np.ndarray:
    """A digit of 8 by 8 numbers from 0 to 16 as an image file of 160 by 160 pixels."""
    grey = Image.fromarray((image * 255 / 16).astype(np.uint8))
    file = io.BytesIO()
    grey.resize((160, 160), Image.Resampling.NEAREST).save(file, form)
    return np.frombuffer(file.getvalue(), np.uint8)


@pytest.mark.parametrize("infer", [rest_json, rest_binary, grpc_raw])
def test_digits_in_image_files_are_classified(server: ServerProcess, digits: Any, infer: Infer) -> None:
    files = [photo(image, form) for image, form in zip(digits.images[:60], ["JPEG", "PNG", "WEBP"] * 20, strict=True)]
    with ThreadPoolExecutor(4) as threads:  # callers share batches of the classifier
        labels = [*threads.map(lambda file: infer(server, "digit_photos", {"FILE": file})["LABEL"][0], files)]
    assert np.mean(np.array(labels) == digits.target[:60]) >= 0.95


def test_client_of_the_page_classifies_a_file(server: ServerProcess, digits: Any, tmp_path: Path) -> None:
    (tmp_path / "seven.jpg").write_bytes(photo(digits.images[digits.target == 7][0]).tobytes())
    script = example("python", "seven.jpg").replace("127.0.0.1:8000", server.http)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=LONG_S, stdout=subprocess.PIPE, text=True
    )
    assert done.stdout == "[7]\n"


def test_metadata_name_the_file_as_the_input(server: ServerProcess) -> None:
    metadata = httpx.get(f"{server.url}/v2/models/pixels", timeout=LONG_S).json()
    assert metadata["inputs"] == [{"name": "file", "datatype": "UINT8", "shape": [-1]}]
    assert metadata["properties"]["batching"] == "not batched because input 'file' is one image file"


def test_malformed_files_harm_no_other_caller(server: ServerProcess, digits: Any) -> None:
    whole = photo(digits.images[0])
    broken = [whole[: len(whole) * part // 40] for part in range(39)] + [np.arange(99, dtype=np.uint8)]

    def ask(file: np.ndarray) -> tuple[int, str]:
        inputs = [{"name": "FILE", "datatype": "UINT8", "shape": [len(file)], "data": file.tolist()}]
        answer = httpx.post(rest_url(server, "digit_photos"), json={"inputs": inputs}, timeout=LONG_S)
        return answer.status_code, answer.text

    with ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(ask, [file for pair in zip(broken, [whole] * 40, strict=True) for file in pair])]
    assert [status for status, _ in answers] == [400, 200] * 40
    assert "in ensemble 'digit_photos', the model rejected" in answers[2][1]
    assert "(model 'reader')" in answers[2][1]
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="expected an image file") as caught:
            client.infer("pixels", triton_inputs(triton_grpc, {"file": whole[:100]}))
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_an_image_beyond_the_limit_is_rejected(server: ServerProcess) -> None:
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    inputs = {"file": np.frombuffer(file.getvalue(), np.uint8)}
    with triton_grpc.InferenceServerClient(server.grpc) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("pixels", triton_inputs(triton_grpc, inputs))
    assert "expected an image of at most 67108864 pixels" in str(caught.value)


@pytest.mark.skipif(not find_spec("onnxruntime_extensions"), reason="needs onnxruntime-extensions")
def test_model_with_the_preprocessing_of_microsofts_script_is_served(tmp_path: Path) -> None:
    """Decode, resize, crop and normalize as the script does for MobileNet; the network averages each channel."""
    network, whole = tmp_path / "network.onnx", tmp_path / "models" / "photos" / "1" / "model.onnx"
    whole.parent.mkdir(parents=True)
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 224, 224])
    means = helper.make_tensor_value_info("means", TensorProto.FLOAT, [1, 3, 1, 1])
    write(network, [helper.make_node("GlobalAveragePool", ["image"], ["means"])], [image], [means])
    # In another process, because the import selects another protobuf implementation for later processes.
    subprocess.run([sys.executable, "-c", SCRIPT, network, whole, str(OPSET)], check=True, timeout=LONG_S)
    (whole.parents[1] / "model.yaml").write_text(yaml.safe_dump({"batched": False, **EXTENSIONS}))
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    expected = run_on_pixels(whole, pixels[:, :, ::-1])
    with serving(whole.parents[2], *SHORT_WARMUP) as server:
        for infer in (rest_binary, grpc_raw):
            outputs = infer(server, "photos", {"image": np.frombuffer(file.getvalue(), np.uint8)})
            assert outputs.keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_allclose(outputs[name], array, rtol=1e-5)


def run_on_pixels(path: Path, pixels: np.ndarray) -> dict[str, np.ndarray]:
    """The outputs of a model of the script for a decoded image, from ONNX Runtime alone."""
    model = onnx.load(path)
    (decoding,) = [node for node in model.graph.node if node.op_type == "DecodeImage"]
    decoding.CopyFrom(helper.make_node("Identity", list(decoding.input), list(decoding.output)))
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("image", TensorProto.UINT8, [None, None, 3]))
    options = ort.SessionOptions()
    (library,) = operator_libraries(ModelOptions.model_validate(EXTENSIONS), None)
    options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"image": np.ascontiguousarray(pixels)}), strict=True))
