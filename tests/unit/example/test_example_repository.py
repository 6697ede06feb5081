"""The bundled models load, behave as documented, and are reproducible from their scripts."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortserve.example import repository_path
from ortserve.example.make_tiny_models import write_models

import onnxruntime as ort  # isort: skip  (after ortserve, which silences its telemetry)

MODELS = ["digits", "simple", "text_stats"]


def open_session(name: str) -> Any:
    return ort.InferenceSession(repository_path() / name / "1" / "model.onnx", providers=["CPUExecutionProvider"])


def test_repository_contains_exactly_the_listed_models() -> None:
    assert sorted(entry.name for entry in repository_path().iterdir()) == MODELS


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_has_a_free_leading_axis_named_batch(name: str) -> None:
    session = open_session(name)
    for tensor in [*session.get_inputs(), *session.get_outputs()]:
        assert tensor.shape[0] == "batch", tensor.name
        assert all(isinstance(size, int) for size in tensor.shape[1:]), tensor.name


def test_tiny_models_are_reproducible_byte_for_byte(tmp_path: Path) -> None:
    write_models(tmp_path)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.onnx"))
    assert [path.parts[0] for path in made] == ["simple", "text_stats"]
    for path in made:
        assert (tmp_path / path).read_bytes() == (repository_path() / path).read_bytes(), path


def test_simple_has_the_signature_that_triton_client_examples_expect() -> None:
    session = open_session("simple")
    assert [(i.name, i.type, i.shape[1:]) for i in session.get_inputs()] == [
        ("INPUT0", "tensor(int32)", [16]),
        ("INPUT1", "tensor(int32)", [16]),
    ]
    a = np.arange(32, dtype=np.int32).reshape(2, 16)
    b = np.full((2, 16), 7, np.int32)
    total, difference = session.run(["OUTPUT0", "OUTPUT1"], {"INPUT0": a, "INPUT1": b})
    np.testing.assert_array_equal(total, a + b)
    np.testing.assert_array_equal(difference, a - b)


def test_text_stats_counts_recognises_weighs_and_quotes() -> None:
    session = open_session("text_stats")
    texts = ["two  words ", "-1.5", "", "größer als 日本", "1.2.3"]
    weight = np.array([[0.5], [1], [2], [3], [4]], np.float32)
    feeds = {"text": np.array(texts, object)[:, np.newaxis], "weight": weight}
    names = ["word_count", "is_number", "score", "quoted"]
    word_count, is_number, score, quoted = session.run(names, feeds)
    np.testing.assert_array_equal(word_count, [[2], [1], [0], [3], [1]])
    assert word_count.dtype == np.int64
    np.testing.assert_array_equal(is_number, [[False], [True], [False], [False], [False]])
    np.testing.assert_array_equal(score, word_count * weight)
    assert score.dtype == np.float32
    assert quoted[:, 0].tolist() == [f'"{text}"' for text in texts]


def test_text_stats_rows_are_independent() -> None:
    session = open_session("text_stats")
    text = np.array([["a b c d e"], [""], ["7"]], object)
    weight = np.array([[1.5], [2.5], [-1]], np.float32)
    together = session.run(None, {"text": text, "weight": weight})
    for row in range(3):
        alone = session.run(None, {"text": text[row : row + 1], "weight": weight[row : row + 1]})
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_array_equal(a, b[row : row + 1])


def test_digits_reaches_the_accuracy_its_readme_states() -> None:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    # The split is repeated here to check the stated number without the script that produced it.
    data = load_digits()
    images = data.images.astype(np.float32)[:, np.newaxis]
    _, images, _, labels = train_test_split(images, data.target, test_size=0.25, random_state=0, stratify=data.target)
    readme = (repository_path() / "digits" / "README.md").read_text(encoding="utf-8")
    stated = re.search(r"Held-out accuracy: (0\.\d+) \((\d+) of (\d+) images", readme)
    assert stated is not None
    correct, total = int(stated[2]), int(stated[3])

    probabilities, predicted = open_session("digits").run(["probabilities", "label"], {"image": images})

    assert total == len(labels)
    assert stated[1] == f"{correct / total:.4f}"
    assert int((predicted == labels).sum()) >= correct
    assert correct / total >= 0.97
    assert predicted.dtype == np.int64
    np.testing.assert_array_equal(predicted, probabilities.argmax(axis=1))
    np.testing.assert_allclose(probabilities.sum(axis=1), np.ones(total), atol=1e-5)


def test_digits_stays_small() -> None:
    assert (repository_path() / "digits" / "1" / "model.onnx").stat().st_size < 100_000
