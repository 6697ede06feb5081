"""How long requests may wait for a model, and how many of them."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class QueuePolicy(BaseModel):
    """Of one priority level, or of all that have none of their own."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    timeout_s: float | None = Field(default=None, gt=0, le=86400)
    """How long a request may wait in the queue before it runs. Unset: as long as its own ``timeout`` says."""
    timeout_override: bool = True
    """Whether the ``timeout`` of a request counts, where it is shorter. Off: it does not."""
    timeout_action: Literal["reject", "delay"] = "reject"
    """What becomes of one that has waited so long: it is answered with an error, or goes behind everybody of its
    level who has not."""
    max_requests: int | None = Field(default=None, ge=1, le=2**32 - 1)
    """Most requests that may wait; those beyond are refused as ``overloaded``. Unset: bounded by ``max_queue_rows`` and
    ``max_queue_bytes`` only."""
