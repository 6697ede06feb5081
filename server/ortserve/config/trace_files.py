"""What can be set for traces of single requests, which clients turn on and off by the protocol's trace settings."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TraceFileOptions(BaseModel):
    """Whether and where traces are written, and the trace settings that the server starts with."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    trace_file: Path | None = None
    """File that traces of requests are written to; numbered ones beside it have its name and ``.0``, ``.1``, … behind.
    What lies there under these names is replaced. Clients say which requests are traced, never where to. Unset: who
    asks for traces is refused as ``unsupported``."""
    trace_level: Literal["OFF", "TIMESTAMPS"] = "OFF"
    """Trace level at the start: ``TIMESTAMPS`` writes when a traced request passed each point of its way."""
    trace_rate: int = Field(default=1000, ge=1, le=2**31 - 1)
    """Trace rate at the start: one of so many requests is traced."""
    trace_count: int = Field(default=-1, ge=-1, le=2**31 - 1)
    """Trace count at the start: how many requests are traced before it ends; -1 for any number."""
    trace_log_frequency: int = Field(default=0, ge=0, le=2**31 - 1)
    """Log frequency at the start: how many traces make a numbered file; at 0 all go into one file."""
    trace_max_bytes: int = Field(default=256 * 1024 * 1024, ge=4096, le=2**44)
    """Most bytes of traces that are written before the server is started anew, since clients say how many there are;
    later ones are dropped. A numbered file counts as 4096 at least."""
