"""Reference pages are made from the declarations, and every declaration has something to say."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

import ortserve.config.reference
import ortserve.config.schema
import ortserve.registry.reference
import ortserve.telemetry.reference
from ortserve.config.model import ModelOptions
from ortserve.config.options import ServerOptions
from ortserve.config.queueing import QueuePolicy
from ortserve.config.session import SessionSettings
from ortserve.config.tensors import InputOptions, OutputOptions, WarmupInput, WarmupSample
from ortserve.telemetry.declarations import DECLARATIONS


@pytest.mark.parametrize(
    ("page", "render", "command"),
    [
        (ortserve.config.reference.PAGE, ortserve.config.reference.render, "ortserve.config.reference"),
        (ortserve.config.schema.FILE, ortserve.config.schema.render, "ortserve.config.schema"),
        (ortserve.registry.reference.PAGE, ortserve.registry.reference.render, "ortserve.registry.reference"),
        (ortserve.telemetry.reference.PAGE, ortserve.telemetry.reference.render, "ortserve.telemetry.reference"),
    ],
)
def test_page_is_current(page: Path, render: Callable[[], str], command: str) -> None:
    assert page.read_text() == render(), f"run: python -m {command}"


@pytest.mark.parametrize(
    "schema",
    [ServerOptions, ModelOptions, SessionSettings, QueuePolicy, InputOptions, OutputOptions, WarmupInput, WarmupSample],
)
def test_every_option_is_described(schema: type[BaseModel]) -> None:
    assert [name for name, field in schema.model_fields.items() if not field.description] == []


def test_every_metric_is_described_and_named_with_its_unit() -> None:
    assert [known.name for known in DECLARATIONS if not known.help.endswith(".")] == []
    assert all(known.name.endswith("_total") == (known.type == "counter") for known in DECLARATIONS)
    assert all(bool(known.buckets) == (known.type == "histogram") for known in DECLARATIONS)
