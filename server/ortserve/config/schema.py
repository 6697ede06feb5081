"""Writes the JSON Schema of ``model.yaml``, for editors: ``python -m ortserve.config.schema``."""

import json
from pathlib import Path
from typing import Any, Final

from ortserve.config.model import ModelOptions

FILE: Final = Path(__file__).parents[3] / "docs" / "reference" / "model.schema.json"
"""The file to write, which exists only in the source tree."""


def make_schema() -> dict[str, Any]:
    """Make the schema. It accepts the same values as the server, and describes every key."""
    schema = ModelOptions.model_json_schema()
    schema["title"] = "model.yaml"
    schema["description"] = "Options of one model for ortserve."
    tidy = _tidy(schema)
    assert isinstance(tidy, dict)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | tidy


def render() -> str:
    """The content of the file."""
    return json.dumps(make_schema(), indent=2, ensure_ascii=False) + "\n"


def _tidy(node: object, *, names: bool = False) -> object:
    """Remove ``expects``, which is for error messages, and titles that repeat names.

    With ``names``, the keys of the node are names of properties, which stay.
    """
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy = {
        key: _tidy(value, names=key in ("properties", "$defs") and not names)
        for key, value in node.items()
        if names or key not in ("expects", "title") or (key == "title" and value == "model.yaml")
    }
    if not names and isinstance(text := tidy.get("description"), str):
        tidy["description"] = " ".join(text.replace("``", "`").split())
    return tidy


if __name__ == "__main__":
    FILE.write_text(render())
