"""The JSON documents of the protocol as pydantic models, and the parameters of its paths.

They describe the OpenAPI document only. They validate no request or response, except the versions in paths.
"""

from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Path
from pydantic import BaseModel, Field

from ortserve.core.dtypes import DATATYPES
from ortserve.core.version_names import VERSION_PATTERN
from ortserve.telemetry.statistics import BatchSizeStatistics, InferStatistics

ModelName: TypeAlias = Annotated[str, Path(description="Name of the model", examples=["digits"])]
ModelVersion: TypeAlias = Annotated[
    str, Path(description="Version of the model, or a label of one", pattern=VERSION_PATTERN, examples=["1", "stable"])
]
RegionName: TypeAlias = Annotated[str, Path(description="Name that requests use", examples=["input_data"])]

Datatype = Annotated[str, Field(json_schema_extra={"enum": list(DATATYPES)})]
Parameter = str | int | float | bool
Parameters = dict[str, Parameter | None]


class ErrorDocument(BaseModel):
    error: str


class OpenAiError(BaseModel):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: None
    code: str = Field(description="The kind of the error, as in the metrics, or method_not_allowed")


class OpenAiErrorDocument(BaseModel):
    error: OpenAiError


class OpenAiModelDocument(BaseModel):
    id: str = Field(description="Name of the model")
    object: Literal["model"]
    created: int = Field(description="When the serving version became ready, in seconds since 1970")
    owned_by: str = Field(description="Name of the server")


class OpenAiModelsDocument(BaseModel):
    object: Literal["list"]
    data: list[OpenAiModelDocument]


class EmbeddingDocument(BaseModel):
    object: Literal["embedding"]
    index: int = Field(description="Index of the text in the request")
    embedding: list[float] | str = Field(description="In base64 as the request asks: FP32 in little-endian order")


class UsageDocument(BaseModel):
    prompt_tokens: Literal[0]
    total_tokens: Literal[0]


class EmbeddingsDocument(BaseModel):
    object: Literal["list"]
    data: list[EmbeddingDocument]
    model: str
    usage: UsageDocument


class LiveDocument(BaseModel):
    live: Literal[True]


class ReadyDocument(BaseModel):
    ready: bool


class ModelReadyDocument(BaseModel):
    name: str
    ready: Literal[True]


class TensorMetadataDocument(BaseModel):
    name: str
    datatype: Datatype
    shape: list[int] = Field(description="-1 for a free dimension")


class ModelMetadataDocument(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadataDocument]
    outputs: list[TensorMetadataDocument]
    properties: dict[str, str] = Field(description="How the server runs the model, and the reasons")


class InferInputDocument(BaseModel):
    name: str
    shape: list[int]
    datatype: Datatype
    parameters: Parameters | None = Field(
        None,
        description="binary_data_size: number of bytes of this tensor behind the JSON part, instead of data; or "
        "shared_memory_region, shared_memory_byte_size and shared_memory_offset: its location in a registered region",
    )
    data: list[Any] | None = Field(None, description="Nested or flat, in row-major order")


class RequestedOutputDocument(BaseModel):
    name: str
    parameters: Parameters | None = Field(
        None,
        description="binary_data: whether this output is returned behind the JSON part; classification: number of its "
        "largest elements to return, as texts value:index or value:index:label; or shared_memory_region, "
        "shared_memory_byte_size and shared_memory_offset: its location in a registered region",
    )


class InferRequestDocument(BaseModel):
    id: str | None = Field(None, description="Returned in the response")
    parameters: Parameters | None = Field(
        None,
        description="binary_data_output: whether outputs are returned behind the JSON part by default; priority: 1 is "
        "the most urgent; timeout: maximum time in the queue in microseconds",
    )
    inputs: list[InferInputDocument]
    outputs: list[RequestedOutputDocument] | None = Field(None, description="An empty list requests all outputs")


class InferOutputDocument(BaseModel):
    name: str
    datatype: Datatype
    shape: list[int]
    parameters: dict[str, Parameter] | None = Field(None, description="binary_data_size of a binary output")
    data: list[Any] | None = Field(None, description="Flat, in row-major order")


class InferResponseDocument(BaseModel):
    id: str | None = None
    model_name: str
    model_version: str
    outputs: list[InferOutputDocument]


class GenerateResponseDocument(BaseModel, extra="allow"):
    """Beside these, each output by its name: one element, or a flat array of them."""

    id: str | None = None
    model_name: str
    model_version: str


class LearnedClassDocument(BaseModel):
    shape: str = Field(description="Sizes of the dimensions except the batch axis; empty if the model has one shape")
    waiting_rows: int
    observations: int = Field(description="Number of batches behind the prediction")
    a_ms: float | None = Field(description="Time that each row adds to a batch")
    b_ms: float | None = Field(description="Fixed time of a batch")
    error_ms: float = Field(description="95th percentile of how much longer batches take than predicted")
    latency_ms: dict[int, float] = Field(description="Predicted time of a batch, by number of rows")


class BatchingDocument(BaseModel):
    max_rows: int
    queued_rows: int
    arrival_rows_per_s: float = Field(description="Mean over the last seconds, including rejected rows")
    saturation: float | None = Field(
        description="Arrival rate divided by the rate of full batches of the last used shape"
    )
    answer_ms: float = Field(
        description="Time that is reserved before every deadline for encoding and writing a batch of responses"
    )
    off_loop_because: str = Field(description="Why runs never happen on the event loop; empty if short runs may")
    decisions: dict[str, int]
    classes: list[LearnedClassDocument] = Field(description="Shape classes, the last used first")


class IndexRequestDocument(BaseModel):
    ready: bool | None = Field(False, description="List only versions that are ready")


class IndexEntryDocument(BaseModel):
    name: str
    version: str | None = None
    state: Literal["READY", "UNAVAILABLE", "LOADING", "UNLOADING"] | None = Field(
        None, description="Missing if no version of the model was requested to load"
    )
    reason: str | None = None


class LoadParametersDocument(BaseModel, extra="allow"):
    config: str | None = Field(None, description="A Triton model configuration, as a text of JSON", examples=["{}"])


class LoadRequestDocument(BaseModel):
    parameters: LoadParametersDocument | None = None


class UnloadParametersDocument(BaseModel):
    unload_dependents: bool | None = Field(
        False, description="Also unload the members of an ensemble that no other ensemble uses"
    )


class UnloadRequestDocument(BaseModel):
    parameters: UnloadParametersDocument | None = None


class ProfileRequestDocument(BaseModel):
    requests: int | None = Field(100, description="Number of requests whose batches are profiled")
    timeout_s: float | None = Field(30, description="Time to wait for these requests, in seconds")


class LabelDocument(BaseModel):
    name: str
    version: str
    state: str = Field(
        description="State of the version: READY if the label can be used, otherwise the reason why not",
        examples=["READY"],
    )
    set_by: Literal["call", "configuration"]


class LabelsDocument(BaseModel):
    model: str
    labels: list[LabelDocument]
    previous: str | None = Field(None, description="The version that a rollback would make stable again")


class LabelsRequestDocument(BaseModel):
    labels: dict[str, int | None] = Field(
        description="Versions by label; null removes a label that a call set", examples=[{"stable": 3, "canary": 4}]
    )


class PromoteRequestDocument(BaseModel):
    version: int | None = Field(
        None, description="The version that becomes stable; by default the candidate of the rollout", examples=[4]
    )


class RolloutDocument(BaseModel):
    model: str
    rollout: dict[str, Any] | None = Field(description="Options of the rollout; null without a rollout")
    problem: str = Field(description="Why requests do not reach the candidate; empty if they do")
    figures: dict[str, int | float | None] = Field(description="Requests by outcome, and times")
    worst_errors: dict[str, float | None] = Field(description="Largest errors by measure; null if infinite")
    ended: dict[str, Any] | None = Field(description="How the last rollout ended")


class ModelStatisticsDocument(BaseModel):
    name: str
    version: str
    last_inference: int = Field(description="Milliseconds since the epoch; 0 without requests")
    inference_count: int = Field(description="Rows of successful requests")
    execution_count: int = Field(description="Number of executed batches")
    inference_stats: InferStatistics
    response_stats: dict[str, Any] = Field(description="Empty: for decoupled models only")
    batch_stats: list[BatchSizeStatistics]
    memory_usage: list[Any] = Field(
        description="Empty: ONNX Runtime does not report the memory of weights and computation, and the known size of "
        "the input and output buffers alone would be misleading"
    )


class StatisticsDocument(BaseModel):
    model_stats: list[ModelStatisticsDocument]


class TraceSettingsDocument(BaseModel):
    trace_level: list[Literal["OFF", "TIMESTAMPS"]]
    trace_rate: str = Field(description="One of this many requests is traced")
    trace_count: str = Field(description="Number of requests that are still to be traced; -1 for no limit")
    log_frequency: str = Field(description="Number of traces per numbered file; 0 for one file")
    trace_file: str = Field(description="Name of the trace file that the operator set; empty without one")
    trace_mode: str


class LogSettingsDocument(BaseModel):
    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: int = Field(ge=0)
    log_format: Literal["default", "ISO8601"] = Field(
        description="Both have the same effect: the time of a log line is always in ISO 8601"
    )


class RegistrationDocument(BaseModel):
    key: str = Field(description="Name of the shared memory object, as shm_open takes it", examples=["/input_data"])
    offset: int | None = Field(0, ge=0, description="Offset of the region in the object, in bytes")
    byte_size: int = Field(ge=0, description="Size of the region, in bytes")


class CudaHandleDocument(BaseModel):
    b64: str = Field(description="The 64 bytes of a cudaIpcMemHandle_t, in base64")


class CudaRegistrationDocument(BaseModel):
    raw_handle: CudaHandleDocument
    device_id: int = Field(ge=0, description="Number of the GPU on the server")
    byte_size: int = Field(ge=0, description="Size of the region in bytes, from the beginning of the allocation")


def request_body(document: type[BaseModel], *, is_partial: bool = False) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route that reads its body itself.

    The body may be empty unless the document has required keys. With ``is_partial``, any key may be missing or null.
    """
    schema = document.model_json_schema()
    if is_partial:
        schema.pop("required", None)
        schema["properties"] = {
            name: {"anyOf": [value, {"type": "null"}]} for name, value in schema["properties"].items()
        }
    whole = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": "required" in schema, "content": {"application/json": {"schema": whole}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Replace the references in a schema by their definitions: an operation cannot resolve references."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
        return {key: _inlined(value, definitions) for key, value in schema.items()}
    return [_inlined(item, definitions) for item in schema] if isinstance(schema, list) else schema
