"""Writes the JSON Schema of ``model.yaml``, for editors: ``python -m ortserve.config.schema``."""

import json
from pathlib import Path
from typing import Any, Final

from ortserve.config.model import ModelOptions

FILE: Final = Path(__file__).parents[3] / "docs" / "reference" / "model.schema.json"
"""In the source tree; an installed package has none."""


def make_schema() -> dict[str, Any]:
    """The schema as it should be: it takes what the server takes, and every key brings its description."""
    schema = ModelOptions.model_json_schema()
    schema["title"] = "model.yaml"
    schema["description"] = "How ortserve serves one model."
    tidy = _tidy(schema)
    assert isinstance(tidy, dict)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | tidy


def render() -> str:
    """The file as it should be."""
    return json.dumps(make_schema(), indent=2, ensure_ascii=False) + "\n"


def _tidy(node: object, *, names: bool = False) -> object:
    """Leave out what is for people who read errors, and titles that only repeat names.

    ``names`` says that the keys of the node are names of properties, whatever they are called.
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
    if not names and isinstance(told := tidy.get("description"), str):
        tidy["description"] = " ".join(told.replace("``", "`").split())
    return tidy


if __name__ == "__main__":
    FILE.write_text(render())
