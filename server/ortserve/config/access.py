"""Who may come in: the options that name files of keys. No option holds a key; ``service/key_files`` says why."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class AccessOptions(BaseModel):
    """Keys for groups of calls. A group without a file is open to everybody who reaches the port."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    infer_keys_file: Path | None = None
    """File of keys, one a line, of which callers of inference need one; or a folder of such files, such as a mounted
    Kubernetes Secret. Empty lines and lines that begin with ``#`` do not count. Callers send ``Authorization: Bearer
    KEY``, over gRPC as the metadata ``authorization``. Health stays open. Unset: open to everybody."""
    metadata_keys_file: Path | None = None
    """The same for what tells of the server and its models: metadata, configurations, statistics, what batchers
    learned, the repository index, the documentation and gRPC reflection. Unset: open to everybody."""
    control_keys_file: Path | None = None
    """The same for calls that change the server, or read what they change: loading and unloading, shared memory, trace
    and log settings. Unset: open to everybody."""
    metrics_keys_file: Path | None = None
    """The same for the metrics port. Unset: open to everybody."""
    keys_poll_s: float = Field(default=5.0, ge=0.01, le=3600)
    """How often the files of keys are read again. New keys count when the next reading, a second later at most, finds
    the same. Put a changed file in place by renaming all the same: one whose writing takes longer would be taken half
    written. Where it is gone, empty or malformed, the keys that were read before stay valid."""
