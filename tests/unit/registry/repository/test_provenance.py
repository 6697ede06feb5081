import json
from pathlib import Path

import pytest

from ortserve.registry.repository.provenance import read_provenance


@pytest.fixture
def version(tmp_path: Path) -> Path:
    folder = tmp_path / "m" / "3"
    folder.mkdir(parents=True)
    return folder


def read(version: Path, file: str = "model.onnx") -> str:
    return read_provenance(version / file, version.parent)


def test_the_summary_is_read_from_the_folder_of_the_version(version: Path) -> None:
    (version / "provenance.json").write_text(json.dumps({"summary": "from a, by b", "more": 1}))
    assert read(version) == "from a, by b"
    assert read(version, "model.onnx/model.onnx") == "from a, by b"


def test_a_single_file_has_its_provenance_beside_it(tmp_path: Path) -> None:
    (tmp_path / "m.provenance.json").write_text('{"summary": "from a"}')
    assert read_provenance(tmp_path / "m.onnx", None) == "from a"


def test_version_without_a_file_has_no_provenance(version: Path) -> None:
    assert read(version) == ""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "expected JSON"),
        (b"{", "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b"[]", "expected a text 'summary'"),
        (b"{}", "expected a text 'summary'"),
        (b'{"summary": 3}', "expected a text 'summary'"),
        (b'{"summary": ""}', "expected a text 'summary'"),
        (b" " * (1 << 20) + b"{}", "expected at most 1048576 bytes"),
    ],
)
def test_a_malformed_file_is_said_and_never_an_error(version: Path, content: bytes, said: str) -> None:
    (version / "provenance.json").write_bytes(content)
    assert read(version).startswith(f"provenance.json: {said}")


def test_a_folder_in_its_place_is_said(version: Path) -> None:
    (version / "provenance.json").mkdir()
    assert read(version) == "provenance.json cannot be read: Is a directory"


def test_long_and_odd_texts_can_be_sent(version: Path) -> None:
    (version / "provenance.json").write_text('{"summary": "\\ud800' + "a" * 5000 + '"}')
    text = read(version)
    assert len(text) == 2000
    assert text.startswith("?aaa")
    assert text.endswith("…")
    (version / "provenance.json").write_text('{"summary": "' + "a" * 2001 + '"}')
    assert read(version) == "a" * 1999 + "…"
