"""Reference pages are generated from the declarations, and every declaration has a description."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from pydantic import BaseModel

import ortserve.config.reference
import ortserve.registry.repository.triton_fields
import ortserve.telemetry.reference
from ortserve.config.model import ModelOptions, QueuePolicy
from ortserve.config.options import ServerOptions
from ortserve.config.session import SessionSettings
from ortserve.config.tensors import InputOptions, OutputOptions, WarmupInput, WarmupSample
from ortserve.telemetry.declarations import DECLARATIONS
from ortserve.tools import reference

SCHEMAS: Final = (
    ServerOptions,
    ModelOptions,
    SessionSettings,
    QueuePolicy,
    InputOptions,
    OutputOptions,
    WarmupInput,
    WarmupSample,
)
NARROWING: Final = ("pattern", "patternProperties", "minLength", "minItems", "minProperties")
"""Keywords of JSON Schema that restrict a value."""

IN_SOURCE_TREE: Final = pytest.mark.skipif(
    not ortserve.config.reference.PAGE.exists(), reason="an installed package has no pages"
)


@IN_SOURCE_TREE
@pytest.mark.parametrize(
    ("page", "render", "command"),
    [
        (ortserve.config.reference.PAGE, ortserve.config.reference.render, "ortserve.config.reference"),
        (ortserve.config.reference.SCHEMA, ortserve.config.reference.render_schema, "ortserve.config.reference"),
        (
            ortserve.registry.repository.triton_fields.PAGE,
            ortserve.registry.repository.triton_fields.render,
            "ortserve.registry.repository.triton_fields",
        ),
        (ortserve.telemetry.reference.PAGE, ortserve.telemetry.reference.render, "ortserve.telemetry.reference"),
    ],
)
def test_page_is_current(page: Path, render: Callable[[], str], command: str) -> None:
    assert page.read_text() == render(), f"run: python -m {command}"


def test_keys_without_a_default_are_shown_as_required() -> None:
    page = ortserve.config.reference.render()
    assert "- `candidate`: integer, 1 to 9223372036854775807 · required. The version" in page
    assert "Undefined" not in page


@IN_SOURCE_TREE
@pytest.mark.parametrize("command", reference.COMMANDS)
def test_schema_of_a_tool_is_current_and_describes_every_field(command: str) -> None:
    text = reference.render(command)
    assert reference.file_of(command).read_text() == text, "run: python -m ortserve.tools.reference"
    schema = json.loads(text)
    assert schema["properties"]["schema"]["default"].startswith(f"ortserve.{command}/")
    records = {"": schema, **schema.get("$defs", {})}
    missing = [
        f"{record}.{name}"
        for record, document in records.items()
        for name, field in document.get("properties", {}).items()
        if "description" not in field and name != "schema"
    ]
    assert missing == []


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_option_is_described(schema: type[BaseModel]) -> None:
    assert [name for name, field in schema.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_restricted_option_states_its_expectation(schema: type[BaseModel]) -> None:
    """Errors of numbers state their bounds, but ``expected text, got 'foo'`` would not help."""
    properties = schema.model_json_schema()["properties"]
    assert [name for name, declared in properties.items() if is_narrowed(declared) and "expects" not in declared] == []


def is_narrowed(schema: object) -> bool:
    """Whether a JSON Schema or a nested one sets a pattern or a minimum length."""
    if isinstance(schema, list):
        return any(map(is_narrowed, schema))
    if not isinstance(schema, dict):
        return False
    return not schema.keys().isdisjoint(NARROWING) or any(map(is_narrowed, schema.values()))


def test_every_metric_is_described_and_named_with_its_unit() -> None:
    assert [known.name for known in DECLARATIONS if not known.help.endswith(".")] == []
    assert all(known.name.endswith("_total") == (known.type == "counter") for known in DECLARATIONS)
    assert all(bool(known.buckets) == (known.type == "histogram") for known in DECLARATIONS)
