"""Reads the origin of a version for the model's metadata: the summary in the file that ``ortserve publish`` writes.

``tools/provenance`` declares the other fields of the file; the server needs only the summary.
"""

import json
from pathlib import Path
from typing import Final

from ortserve.paths import open_file

PROVENANCE_FILE: Final = "provenance.json"
"""Name of the file in the folder of a version."""
_MAX_BYTES: Final = 1 << 20
_MAX_LENGTH: Final = 2000
"""Maximum number of characters of a summary that are shown."""


def provenance_beside(model: Path) -> Path:
    """The provenance file of a model that is a single file: ``digits.provenance.json`` for ``digits.onnx``."""
    return model.with_name(f"{model.stem}.{PROVENANCE_FILE}")


def read_provenance(path: Path, folder: Path | None) -> str:
    """Read the summary of a version. Blocks.

    Returns:
        The summary; a description of the problem if the file is malformed; empty if there is no file.
    """
    if folder is None or not path.is_relative_to(folder):
        file = provenance_beside(path)
    else:
        file = folder / path.relative_to(folder).parts[0] / PROVENANCE_FILE
    try:
        with open_file(file) as stream:
            data = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    if len(data) > _MAX_BYTES:
        return f"{file.name}: expected at most {_MAX_BYTES} bytes, got more"
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return f"{file.name}: expected JSON, got something else"
    summary = content.get("summary") if isinstance(content, dict) else None
    if not isinstance(summary, str) or not summary:
        return f"{file.name}: expected a text 'summary', got none"
    shown = summary.encode(errors="replace").decode()
    return shown if len(shown) <= _MAX_LENGTH else f"{shown[: _MAX_LENGTH - 1]}…"
