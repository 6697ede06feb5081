"""The JSON documents of the repository, statistics and settings calls: for the OpenAPI document only."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class IndexRequestDocument(BaseModel):
    ready: bool = Field(False, description="List only versions that are ready")


class IndexEntryDocument(BaseModel):
    name: str
    version: str | None = None
    state: Literal["READY", "UNAVAILABLE", "LOADING", "UNLOADING"] | None = Field(
        None, description="Missing for a model that was never asked to load"
    )
    reason: str | None = None


class UnloadParametersDocument(BaseModel):
    unload_dependents: bool = Field(False, description="Of no effect: no model here depends on another")


class UnloadRequestDocument(BaseModel):
    parameters: UnloadParametersDocument | None = None


class StatisticDurationDocument(BaseModel):
    count: int
    ns: int


class InferStatisticsDocument(BaseModel):
    success: StatisticDurationDocument
    fail: StatisticDurationDocument
    queue: StatisticDurationDocument
    compute_input: StatisticDurationDocument
    compute_infer: StatisticDurationDocument
    compute_output: StatisticDurationDocument
    cache_hit: StatisticDurationDocument
    cache_miss: StatisticDurationDocument


class BatchStatisticsDocument(BaseModel):
    batch_size: int
    compute_input: StatisticDurationDocument
    compute_infer: StatisticDurationDocument
    compute_output: StatisticDurationDocument


class ModelStatisticsDocument(BaseModel):
    name: str
    version: str
    last_inference: int = Field(description="Milliseconds since the epoch; 0 if there was none")
    inference_count: int = Field(description="Rows of successful requests")
    execution_count: int = Field(description="Batches that ran")
    inference_stats: InferStatisticsDocument
    response_stats: dict[str, Any] = Field(description="Empty: of decoupled models only")
    batch_stats: list[BatchStatisticsDocument]
    memory_usage: list[Any] = Field(
        description="Empty: ONNX Runtime does not tell what a session takes for weights and work, and the buffers of "
        "inputs and outputs, which are known, would be taken for all of it"
    )


class StatisticsDocument(BaseModel):
    model_stats: list[ModelStatisticsDocument]


class TraceSettingsDocument(BaseModel):
    trace_level: list[Literal["OFF", "TIMESTAMPS"]]
    trace_rate: str = Field(description="One of so many requests is traced")
    trace_count: str = Field(description="How many requests are still traced; -1 for any number")
    log_frequency: str = Field(description="How many traces make a numbered file; 0 for one file")
    trace_file: str = Field(description="Name of the file that the operator chose; empty where there is none")
    trace_mode: str


class LogSettingsDocument(BaseModel):
    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: int = Field(ge=0)
    log_format: Literal["default", "ISO8601"] = Field(
        description="Both are the same here: the time of a line is of ISO 8601 by default"
    )


def request_body(document: type[BaseModel], *, is_partial: bool = False) -> dict[str, Any]:
    """What ``openapi_extra`` of a route needs to show the body that it reads by itself.

    ``is_partial`` says that any of the document's keys may be left out, or null.
    """
    schema = document.model_json_schema()
    if is_partial:
        schema.pop("required", None)
        schema["properties"] = {
            name: {"anyOf": [value, {"type": "null"}]} for name, value in schema["properties"].items()
        }
    whole = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"content": {"application/json": {"schema": whole}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with definitions in the place of references, which would point to nothing where it is put."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
        return {key: _inlined(value, definitions) for key, value in schema.items()}
    return [_inlined(item, definitions) for item in schema] if isinstance(schema, list) else schema
