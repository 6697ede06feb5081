"""The protocol's JSON documents as pydantic models: for the OpenAPI document only, no request passes through them."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from ortserve.core.dtypes import DATATYPES

Datatype = Annotated[str, Field(json_schema_extra={"enum": list(DATATYPES)})]
Parameter = str | int | float | bool


class ErrorDocument(BaseModel):
    error: str


class ServerMetadataDocument(BaseModel):
    name: str
    version: str
    extensions: list[str]


class TensorMetadataDocument(BaseModel):
    name: str
    datatype: Datatype
    shape: list[int] = Field(description="-1 for a dimension that is free")


class ModelMetadataDocument(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadataDocument]
    outputs: list[TensorMetadataDocument]
    properties: dict[str, str] = Field(description="How the model is run, and why")


class InferInputDocument(BaseModel):
    name: str
    shape: list[int]
    datatype: Datatype
    parameters: dict[str, Parameter] | None = Field(
        None,
        description="binary_data_size: bytes of this tensor behind the JSON part, instead of data; or "
        "shared_memory_region, shared_memory_byte_size and shared_memory_offset: its bytes in a registered region",
    )
    data: list[Any] | None = Field(None, description="Nested or flat, in row-major order")


class RequestedOutputDocument(BaseModel):
    name: str
    parameters: dict[str, Parameter] | None = Field(
        None,
        description="binary_data: whether this output is answered behind the JSON part; classification: answer so many "
        "of its largest elements, as texts value:index or value:index:label; or shared_memory_region, "
        "shared_memory_byte_size and shared_memory_offset: where in a registered region it is written instead",
    )


class InferRequestDocument(BaseModel):
    id: str | None = Field(None, description="Echoed in the answer")
    parameters: dict[str, Parameter] | None = Field(
        None,
        description="binary_data_output: whether outputs are answered behind the JSON part by default; priority: 1 for "
        "the most urgent; timeout: microseconds that the request may wait in the queue",
    )
    inputs: list[InferInputDocument]
    outputs: list[RequestedOutputDocument] | None = Field(None, description="All outputs, where none is listed")


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


class LearnedClassDocument(BaseModel):
    shape: str = Field(description="Sizes of the dimensions but the batch axis; empty where the model has one shape")
    waiting_rows: int
    observations: int = Field(description="Batches that the prediction rests on")
    a_ms: float | None = Field(description="Time a row adds to a batch")
    b_ms: float | None = Field(description="Time a batch takes besides its rows")
    error_ms: float = Field(description="By how much batches take longer than predicted: the 95th percentile")
    latency_ms: dict[int, float] = Field(description="Predicted time of a batch, by rows")


class BatchingDocument(BaseModel):
    max_rows: int
    queued_rows: int
    arrival_rows_per_s: float = Field(description="Mean over the last seconds, of refused rows too")
    saturation: float | None = Field(description="That by what full batches of the shape used last compute a second")
    answer_ms: float = Field(description="Taken off every deadline, for encoding and writing the answers of a batch")
    off_loop_because: str = Field(description="Why no run happens on the event loop; empty where short ones do")
    decisions: dict[str, int]
    classes: list[LearnedClassDocument] = Field(description="Shape classes, used last first")
