"""What can be set for the HTTP port alone: what one connection may cost, and how many there may be."""

from pydantic import BaseModel, ConfigDict, Field


class HttpOptions(BaseModel):
    """Bounds on what callers may do to the HTTP port before their request is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    http_max_connections: int = Field(default=4096, ge=1, le=1_048_576)
    """Most HTTP connections that are open at one time; further ones are answered with 429 and closed. The process must
    be allowed as many open files."""
    http_max_headers: int = Field(default=100, ge=1, le=10_000)
    """Most headers of one HTTP request; one with more is refused as ``headers_too_large`` (431)."""
    http_max_header_bytes: int = Field(default=32 * 1024, ge=256, le=1024 * 1024)
    """Most bytes of the request line and headers of one HTTP request; one with more is refused as
    ``headers_too_large`` (431)."""
    http_header_timeout_s: float = Field(default=20.0, ge=0.01, le=3600)
    """How long the headers of an HTTP request may take to come, from the first byte to the last; else 408."""
    http_body_timeout_s: float = Field(default=30.0, ge=0.01, le=3600)
    """A body must be complete within this time; it gets the same time again while it averages at least
    ``http_min_body_bytes_per_s``; else 408. Time in which the server does not read does not count."""
    http_min_body_bytes_per_s: int = Field(default=4096, ge=1, le=2**31 - 1)
    """How fast a body must come that takes longer than ``http_body_timeout_s``, in bytes per second."""
    http_answer_half_closed: bool = True
    """Whether requests that came whole before a FIN are answered. Callers that only end their sending side then get
    their answers, and requests of callers that gave up keep their places in the queue, because ``close()`` sends the
    same FIN. Off, a FIN cancels the requests of its connection."""
    http_send_timeout_s: float = Field(default=60.0, ge=0.01, le=3600)
    """How long a caller may take nothing of its answer before its connection is closed."""
