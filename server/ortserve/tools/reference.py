"""Write the JSON Schemas of what the commands print with ``--json``: ``python -m ortserve.tools.reference``."""

import json
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import Any, Final

from ortserve.tools.command import json_schema

FOLDER: Final = Path(__file__).parents[3] / "docs" / "reference" / "tools"
"""Exists only in the source tree."""

COMMANDS: Final = (
    *("inspect", "profile", "bench", "doctor", "check", "compare", "publish", "golden", "quantize", "optimize"),
    *("tune", "models"),
)
"""The commands with ``--json``. The module ``inspect.command`` has the dataclass of its result, ``InspectResult``."""

_ATTRIBUTE: Final = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def file_of(command: str) -> Path:
    """The file with the schema of a command's result."""
    return FOLDER / f"{command}.schema.json"


def render(command: str) -> str:
    """The content of the file."""
    result = getattr(import_module(f"ortserve.tools.{command}.command"), f"{command.capitalize()}Result")
    module = sys.modules[result.__module__]
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **json_schema(result)}
    schema["title"] = f"ortserve {command} --json"
    for name, record in (("", schema), *schema.get("$defs", {}).items()):
        _describe(record, getattr(module, name, object).__mro__[1:-1])
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _describe(record: dict[str, Any], bases: Sequence[type]) -> None:
    """Move the descriptions of attributes from the texts of the dataclass and its bases to the properties."""
    text, _, attributes = record.get("description", "").partition("\nAttributes:\n")
    inherited = [getdoc(base) or "" for base in bases]
    described = dict(_ATTRIBUTE.findall("\n".join((*inherited, attributes))))
    for name, field in record.get("properties", {}).items():
        field.pop("title", None)
        if name in described:
            field["description"] = _line(described[name])
    if text:
        record["description"] = _line(text)


def _line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for known in COMMANDS:
        file_of(known).write_text(render(known), encoding="utf-8")
