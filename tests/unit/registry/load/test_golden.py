"""Golden samples: read within bounds, run alone and in batches on real instances, and compared."""

import struct
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from models import builders, empty_inputs, interfaces, sequences
from ortserve.config.model import ModelOptions
from ortserve.core.dtypes import DataType, narrow
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.load import golden_samples
from ortserve.registry.load.golden_check import check_samples
from ortserve.registry.load.golden_samples import GoldenSample, GoldenSamples
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.registry.load.pipeline import load_model

X = np.linspace(-1, 1, 5 * 64, dtype=np.float32).reshape(5, 64)


def make(folder: Path, build: Callable[..., Path], arrays: Mapping[str, Any] | None, **traits: Any) -> Path:
    """Write a version with golden samples. Returns the model's folder."""
    version = folder / "m" / "1"
    version.mkdir(parents=True)
    build(version / "model.onnx", **traits)
    if arrays is not None:
        (version / "golden").mkdir()
        np.savez(version / "golden" / "a.npz", **dict(arrays))
    return version.parent


def load(folder: Path, **options: Any) -> LoadedModel:
    chosen = ModelOptions.model_validate({"warmup_s": 0.2} | options)
    loaded = load_model(folder / "1" / "model.onnx", "m/1", chosen, folder)
    loaded.close()
    return loaded


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ServeError) as caught:
        load(folder, **options)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert str(folder) not in caught.value.message
    return caught.value.message


def mlp_outputs(tmp_path: Path, seed: int = 0) -> np.ndarray:
    """The network's result for ``X``, without the server."""
    builders.mlp(tmp_path / "reference.onnx", seed=seed)
    (y,) = ReferenceEvaluator(onnx.load(tmp_path / "reference.onnx")).run(None, {"x": X})
    return np.asarray(y)


PADDED = {"pad": {"ids": {"axis": 1, "multiple": 4, "value": 0}, "mask": {"axis": 1, "multiple": 4, "value": 0}}}
TEXTS = np.array([["Grüße".encode(), b"", b"c", b"d"]] * 2)
IDS = np.array([[1, 2, 3]])
SEQUENCE = {
    "controls": {
        **{name: {"kind": name.lower()} for name in ("START", "READY", "END")},
        "CORRID": {"kind": "id"},
    },
    "states": [{"input": "STATE", "output": "NEXT"}],
}
ONES = np.ones((2, 1), np.int32)


@pytest.mark.parametrize(
    ("build", "arrays", "options"),
    [
        (builders.identity, {"input.x": np.eye(4), "output.y": np.eye(4)}, {}),
        (builders.identity, {"input.x": np.eye(4), "output.y": np.eye(4)}, {"instances": 2, "buckets": [3, 8]}),
        (builders.identity, {"input.x": np.eye(4), "output.y": np.eye(4)}, {"batched": False}),
        (partial(builders.identity, datatype=DataType.BYTES), {"input.x": TEXTS, "output.y": TEXTS}, {}),
        (builders.masked_tokens, {"input.ids": IDS, "input.mask": IDS * 0, "output.y": IDS * 1.0}, PADDED),
        (interfaces.optional_bias, {"input.x": np.eye(4), "output.y": np.eye(4)}, {}),
        (interfaces.positive, {"input.x": [[1.0, -1.0]], "output.y": [[1.0]]}, {}),
        (
            sequences.accumulate,
            {"input.INPUT": ONES, "output.OUTPUT": ONES, "output.FLAGS_SEEN": [[1.0, 1.0, 0.0]] * 2},
            {"sequences": SEQUENCE},
        ),
    ],
)
def test_samples_that_agree_are_reported(
    tmp_path: Path, build: Callable[..., Path], arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    loaded = load(make(tmp_path, build, arrays), **options)

    count = len(next(iter(arrays.values())))
    assert loaded.golden.startswith(f"{count} samples agree: alone '" if count > 1 else "1 sample agrees: alone '")
    assert ("in batches" in loaded.golden) == (count > 1 and loaded.signature.is_batched)


def test_bfloat16_is_compared_as_numbers(tmp_path: Path) -> None:
    """Bit patterns of nearly equal numbers can differ by large integers."""
    spec = TensorSpec("y", DataType.BF16, (-1, 2))
    expected, found = (narrow(np.array([[1.0, value]], np.float32)) for value in (0.0, -1e-6))
    golden = GoldenSamples(1, (GoldenSample("a.npz sample 0", (), (expected,)),), {})

    text = check_samples(golden, ModelSignature((), (spec,)), [], lambda samples: [(found,)])

    assert text == "1 sample agrees: alone 'y' relative 1e-06 of 0.05"


def test_wrong_weights_fail_with_the_figures(tmp_path: Path) -> None:
    folder = make(tmp_path, builders.mlp, {"input.x": X, "output.y": mlp_outputs(tmp_path)}, seed=1)

    message = refused(folder)

    assert message.startswith("golden samples: output 'y': relative error at most 0.001 expected, got 0.")
    assert "(a.npz sample " in message
    assert message.endswith(" alone)")


def test_the_same_weights_pass_and_configured_tolerances_count(tmp_path: Path) -> None:
    folder = make(tmp_path, builders.mlp, {"input.x": X, "output.y": mlp_outputs(tmp_path)})
    settings = folder / "1" / "golden" / "golden.yaml"
    settings.write_text("tolerances: {y: {max: 0.01, cosine: 1.0e-6, top1: 0}}\n")

    assert "max " in load(folder).golden
    shifted = np.roll(mlp_outputs(tmp_path), 1, axis=1)
    given: dict[str, Any] = {"input.x": X, "output.y": shifted}
    np.savez(folder / "1" / "golden" / "a.npz", **given)
    message = refused(folder)
    assert all(f"{measure} error at most" in message for measure in ("max", "cosine", "top1"))
    settings.write_text("tolerances: {y: {}}\n")
    assert "relative error at most 0.001 expected" in refused(folder)


def test_a_row_that_depends_on_its_batch_fails(tmp_path: Path) -> None:
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    folder = make(tmp_path, builders.row_mixer, {"input.x": rows, "output.y": rows * 0})

    assert "batches" not in load(folder).golden, "requests of this model run alone"
    assert "in a batch of 2" in refused(folder, batched=True)


def test_a_sample_that_the_model_rejects_fails(tmp_path: Path) -> None:
    x = np.array([[1, 2, 3, 4], [1, 2, 3, builders.POISON]])
    message = refused(make(tmp_path, builders.poison, {"input.x": x, "output.y": x / 2}))

    assert message.startswith("golden samples: a.npz sample 1 alone fails: ")


def test_an_empty_sample_that_would_end_the_process_fails(tmp_path: Path) -> None:
    arrays = {"input.x": np.zeros((1, 0, 2), np.float32), "output.y": np.zeros((1, 3), np.float32)}

    assert "input 'x' is empty" in refused(make(tmp_path, builders.recurrent, arrays))


def test_an_empty_sample_along_an_axis_that_would_end_the_process_fails(tmp_path: Path) -> None:
    image = np.zeros((1, 2, 0, 4), np.float16)

    assert "none along axis 2" in refused(
        make(tmp_path, empty_inputs.normalized_image, {"input.x": image, "output.y": image})
    )


def test_output_of_another_shape_fails_the_samples(tmp_path: Path) -> None:
    arrays = {"input.x": [[1.0, -1.0]], "output.y": [[1.0, 1.0]]}
    assert "got shape or elements that are not finite differ" in refused(make(tmp_path, interfaces.positive, arrays))


def test_required_samples_that_are_missing_fail(tmp_path: Path) -> None:
    folder = make(tmp_path, builders.identity, None)

    assert load(folder).golden == ""
    assert "golden_required: expected a folder 'golden'" in refused(folder, golden_required=True)


EYE = {"input.x": np.eye(4), "output.y": np.eye(4)}


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"input.x": np.eye(4)}, "a.npz: expected an array out of output.y, got none"),
        ({"output.y": np.eye(4)}, "a.npz: expected an array 'input.x', got output.y"),
        (EYE | {"x": np.eye(4)}, "a.npz: expected arrays out of input.x, output.y, got 'x'"),
        (EYE | {"input.x": np.eye(3)}, "a.npz: array 'input.x': expected shape ['samples', 4], got [3, 3]"),
        (EYE | {"input.x": np.full((4, 4), b"a")}, "a.npz: array 'input.x': expected float32 (FP32), got |S1"),
        (
            EYE | {"output.y": np.eye(4) * -1e39},
            "a.npz: array 'output.y': expected values of float32 (FP32), got -1e+39",
        ),
        (EYE | {"output.y": np.eye(4)[:2]}, "a.npz: expected arrays with one first length of at least 1"),
        ({name: array[:0] for name, array in EYE.items()}, "a.npz: expected arrays with one first length"),
        ({name: np.repeat(array, 300, 0) for name, array in EYE.items()}, "expected at most 1024 samples, got more"),
        (EYE | {"output.y": np.array([{}] * 4)}, "a.npz: expected a file written by numpy.savez, got: Object arrays"),
    ],
)
def test_files_that_do_not_fit_the_model_are_refused(tmp_path: Path, arrays: Mapping[str, Any], problem: str) -> None:
    message = refused(make(tmp_path, builders.identity, arrays))

    assert message.startswith("golden: ")
    assert problem in message


def test_texts_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    texts = {"input.x": np.array([[b"\xff"] * 4]), "output.y": np.array([[b"a"] * 4])}
    folder = make(tmp_path, partial(builders.identity, datatype=DataType.BYTES), texts)

    assert "a.npz: array 'input.x': expected texts in UTF-8" in refused(folder)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tolerances: {z: {max: 1}}", "golden.yaml: tolerances: expected one of the outputs y, got 'z'"),
        ("tolerances: {y: {maximum: 1}}", "golden.yaml: tolerances.y.maximum: unknown key"),
        ("tolerances: {y: {max: -1}}", "golden.yaml: tolerances.y.max: expected number"),
        ("tolerance: {}", "golden.yaml: tolerance: unknown key; did you mean 'tolerances'?"),
        ("tolerances: [", "golden.yaml: is not YAML"),
    ],
)
def test_settings_that_are_wrong_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    folder = make(tmp_path, builders.identity, EYE)
    (folder / "1" / "golden" / "golden.yaml").write_text(text)

    assert problem in refused(folder)


def test_files_are_bounded_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path, builders.identity, EYE)
    file = folder / "1" / "golden" / "a.npz"

    monkeypatch.setattr(golden_samples, "MAX_BYTES", 100)
    assert "expected at most 1024 arrays and 100 bytes, got 2 arrays" in refused(folder)
    monkeypatch.undo()
    monkeypatch.setattr(golden_samples, "MAX_FILES", 0)
    assert "expected 1 to 0 files *.npz, got 1" in refused(folder)
    monkeypatch.undo()
    for datatype, problem in (
        ("<f4", "an array of 16000000000000 bytes with 0 bytes of data"),
        ("<U0", "an array of 4000000000000 elements of 0 bytes"),
    ):
        header = b"{'descr': '%s', 'fortran_order': False, 'shape': (4, 1000000000000)}\n" % datatype.encode()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("input.x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
        assert problem in refused(folder)
    for header in (b"{'descr': '<f4'", b" 1\n 2\n1", b"{1: 2, 'shape': 3}"):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("input.x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
        assert "a.npz: expected a file written by numpy.savez, got: " in refused(folder)
    file.write_bytes(b"no archive")
    assert "a.npz: expected a file written by numpy.savez, got: " in refused(folder)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("input.x.npy", b"\x93NUMPY\x01\x00\x0a\x00{'descr': (")
    assert "a.npz: expected a file written by numpy.savez, got: " in refused(folder)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("input.x.npy", bytes(1000))
    assert "got: an archive with a compression that numpy does not use" in refused(folder)
    file.unlink()
    assert "expected 1 to 256 files *.npz, got 0" in refused(folder)
