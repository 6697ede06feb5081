"""What a generator's process needs to make a target. Plans travel to it as pickles."""

from dataclasses import dataclass
from typing import Final, TypeAlias

from ortserve.core.batch import Arrays

WAYS: Final = ("run", "bound", "batcher")


@dataclass(frozen=True, slots=True)
class HttpPlan:
    """Whole HTTP requests, sent in turns.

    Attributes:
        host: Of the server.
        port: Of the server.
        is_tls: Whether it speaks TLS.
        ca: File of certificates to trust; None for the system's.
        requests: With their heads.
        most_connections: At a time.
    """

    host: str
    port: int
    is_tls: bool
    ca: str | None
    requests: tuple[bytes, ...]
    most_connections: int


@dataclass(frozen=True, slots=True)
class GrpcPlan:
    """Serialized messages ``ModelInferRequest``, sent in turns.

    Attributes:
        authority: Host and port.
        is_tls: Whether the server speaks TLS.
        ca: File of certificates to trust; None for the system's.
        metadata: Of each call.
        requests: Messages.
        is_stream: Whether they go over ``ModelStreamInfer``.
        timeout_s: Of a call.
        most_streams: At a time.
    """

    authority: str
    is_tls: bool
    ca: str | None
    metadata: tuple[tuple[str, str], ...]
    requests: tuple[bytes, ...]
    is_stream: bool
    timeout_s: float
    most_streams: int


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model, and the inputs of its runs, which are used in turns.

    Attributes:
        model: As ``find_model`` takes it.
        way: One of ``WAYS``.
        provider: The only execution provider to use; None for the configured ones.
        threads: Of a run; None for the configured ones.
        inputs: Of each run, in the order of the signature, with their rows on axis 0.
        rows: Of each run.
    """

    model: str
    way: str
    provider: str | None
    threads: int | None
    inputs: tuple[Arrays, ...]
    rows: int


Plan: TypeAlias = HttpPlan | GrpcPlan | ModelPlan
