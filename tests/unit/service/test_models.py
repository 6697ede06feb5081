"""Health and metadata, over a registry with real models."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from models import builders
from ortserve import __version__
from ortserve.config.model import LoadOptions
from ortserve.core.dtypes import DataType
from ortserve.core.signature import TensorSpec
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.registry import Registry
from ortserve.service.models import EXTENSIONS, ModelService
from ortserve.telemetry.metrics import Metrics


@pytest_asyncio.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    """``m`` in versions 2 and 3, both configured to serve and not loaded yet."""
    for version in ("2", "3"):
        (tmp_path / "m" / version).mkdir(parents=True)
        builders.identity(tmp_path / "m" / version / "model.onnx")
    (tmp_path / "m" / "model.yaml").write_text("version_policy: {all: true}")
    registry = Registry([tmp_path], LoadOptions(warmup_s=0), Metrics(CollectorRegistry()), time.monotonic_ns)
    yield registry
    await registry.close()


def service(registry: Registry, *, strict: bool = False) -> ModelService:
    return ModelService(registry, server_name="my server", strict_readiness=strict)


async def test_server_is_live_from_the_start_and_ready_when_loading_is_over(registry: Registry) -> None:
    models = service(registry)
    assert (models.is_live(), models.is_ready(), models.is_exiting) == (True, False, False)
    assert not models.is_model_ready("m", "")
    await registry.load_all()
    assert (models.is_live(), models.is_ready()) == (True, True)
    models.begin_exit()
    assert (models.is_live(), models.is_ready(), models.is_exiting) == (False, False, True)
    assert models.is_model_ready("m", ""), "requests are answered for a while"


async def test_readiness_news_report_loading_and_the_end(registry: Registry) -> None:
    models = service(registry)
    before = models.readiness_change()
    assert not before.is_set()
    await registry.load_all()
    assert before.is_set()
    after = models.readiness_change()
    assert not after.is_set()
    models.begin_exit()
    assert after.is_set()


async def test_probes_between_two_changes_look_at_the_versions_once(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = service(registry)
    await registry.load_all()
    known, looks = registry.models(), 0

    def count_looks() -> Any:
        nonlocal looks
        looks += 1
        return known

    monkeypatch.setattr(registry, "models", count_looks)
    assert [models.is_ready() for _ in range(5)] == [True] * 5
    assert looks == 1
    await registry.unload("m")
    assert [models.is_ready() for _ in range(5)] == [True] * 5
    assert looks == 2


@pytest.mark.parametrize(
    ("files", "is_ready"),
    [
        ({"1/model.onnx": "", "model.yaml": "required: true"}, False),
        ({"model.yaml": "required: true"}, False),
        ({"1/model.onnx": "", "model.yaml": "required: true\nversion_policy: {specific: [7]}"}, False),
        ({"1/model.onnx": "", "model.yaml": "max_rows: lots\nrequired: true"}, False),
        ({"1/model.onnx": "", "model.yaml": "\tmax_rows: lots\nrequired : true # always"}, False),
        ({"1/model.onnx": "", "model.yaml": "required: true", "config.pbtxt": ""}, False),
        ({"1/model.onnx": "", "model.yaml": "required: true", "../bad.onnx": ""}, False),
        ({"1/model.onnx": "", "model.yaml": "max_rows: lots\nrequired: false"}, True),
        ({"1/model.onnx": "", "model.yaml": "\tmax_rows: lots\n# required: true"}, True),
    ],
)
async def test_required_model_with_any_problem_prevents_readiness(
    registry: Registry, tmp_path: Path, files: dict[str, str], is_ready: bool
) -> None:
    for name, text in files.items():
        file = tmp_path / "bad" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    await registry.load_all()
    assert service(registry).is_ready() == is_ready


@pytest.mark.parametrize(
    ("options", "strict", "is_ready"), [("", False, True), ("", True, False), ("required: true", False, False)]
)
async def test_failed_model_prevents_readiness_only_if_it_is_required(
    registry: Registry, tmp_path: Path, options: str, strict: bool, is_ready: bool
) -> None:
    (tmp_path / "bad" / "1").mkdir(parents=True)
    builders.not_onnx(tmp_path / "bad" / "1" / "model.onnx")
    (tmp_path / "bad" / "model.yaml").write_text(options)
    await registry.load_all()
    models = service(registry, strict=strict)
    assert models.is_ready() is is_ready
    assert models.is_known("bad")
    assert not models.is_model_ready("bad", "1")
    assert models.count_models() == (1, 1, 0)


@pytest.mark.parametrize("strict", [False, True])
async def test_server_stays_ready_after_a_failed_reload_and_after_an_unload(
    registry: Registry, tmp_path: Path, strict: bool
) -> None:
    (tmp_path / "m" / "model.yaml").write_text("required: true")
    await registry.load_all()
    models = service(registry, strict=strict)
    with pytest.raises(ServeError):
        await registry.load("m", config="{}", files={"file:4/model.onnx": b"no model"})
    assert models.is_ready(), "the version before stays that of the model"
    builders.not_onnx(tmp_path / "m" / "3" / "model.onnx")
    with pytest.raises(ServeError):
        await registry.load("m")
    assert models.is_ready(), "the old load serves on"
    await registry.unload("m")
    assert models.is_ready()
    assert not models.is_model_ready("m", "")
    with pytest.raises(ServeError):
        await registry.load("m")
    assert not models.is_ready()


async def test_only_loaded_versions_are_ready(registry: Registry) -> None:
    await registry.load_all()
    models = service(registry)
    ready = {version: models.is_model_ready("m", version) for version in ("", "1", "2", "3", "x")}
    assert ready == {"": True, "1": False, "2": True, "3": True, "x": False}
    assert models.is_known("m")
    assert not models.is_known("none")
    assert not models.is_model_ready("none", "")


async def test_server_metadata_lists_only_served_extensions(registry: Registry) -> None:
    metadata = service(registry).server_metadata()
    assert (metadata.name, metadata.version) == ("my server", __version__)
    assert metadata.extensions == EXTENSIONS
    assert "trace" not in metadata.extensions, "settings are kept, but no traces written"


async def test_metadata_describe_the_model(registry: Registry) -> None:
    await registry.load_all()
    models = service(registry)
    metadata = models.model_metadata("m", "")
    assert (metadata.name, metadata.versions, metadata.platform) == ("m", ("2", "3"), "onnxruntime_onnx")
    assert metadata.inputs == (TensorSpec("x", DataType.FP32, (-1, 4)),)
    assert metadata.outputs == (TensorSpec("y", DataType.FP32, (-1, 4)),)
    assert metadata.properties["batching"].startswith("up to 64 rows run together, proven")
    assert models.model_metadata("m", "2").versions == ("2",)
    with pytest.raises(ServeError) as caught:
        models.model_metadata("m", "9")
    assert caught.value.kind is ErrorKind.NOT_FOUND
