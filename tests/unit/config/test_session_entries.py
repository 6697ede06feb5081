"""The list of session entries, held against the installed ONNX Runtime."""

from pathlib import Path

import onnxruntime
import pytest

from ortserve.config.session_entries import FILE_ENTRIES, SESSION_ENTRIES, check_session_entry


def test_installed_onnx_runtime_knows_every_entry() -> None:
    binary = b"".join(path.read_bytes() for path in (Path(onnxruntime.__file__).parent / "capi").glob("*.so*"))
    # The compiler builds the one that is too long for it out of pieces.
    pieces = {"session.model_external_initializers_file_folder_path": "external_initializers_file"}
    assert [entry for entry in SESSION_ENTRIES if pieces.get(entry, entry).encode() not in binary] == []


def test_entries_with_files_are_entries() -> None:
    assert FILE_ENTRIES < SESSION_ENTRIES


def test_misspelt_entry_is_told_with_the_one_that_was_meant() -> None:
    assert check_session_entry("session.disable_prepacking") == "session.disable_prepacking"
    with pytest.raises(ValueError, match=r"did you mean 'session\.disable_prepacking'\?"):
        check_session_entry("session.disable_prepack")
