"""The server's options: the declaration, and the one place that reads flags, environment and file into it.

``ServerOptions`` itself reads nothing, so that constructing one in a test or a notebook depends on its arguments alone.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from ortserve.config.access import AccessOptions
from ortserve.config.expectation import describe_problems
from ortserve.config.grpc import GrpcOptions
from ortserve.config.http import HttpOptions
from ortserve.config.model import LoadOptions
from ortserve.config.otlp import OtlpOptions
from ortserve.config.tls import TlsOptions
from ortserve.config.trace_files import TraceFileOptions
from ortserve.config.yaml_file import read_yaml

ENV_PREFIX: Final = "ORTSERVE_"
CONFIG_VARIABLE: Final = "ORTSERVE_CONFIG"
"""Names the file of options where ``--config`` does not."""


OPTION_GROUPS: Final[Mapping[str, type[BaseModel]]] = {
    "keys": AccessOptions,
    "TLS": TlsOptions,
    "HTTP": HttpOptions,
    "gRPC": GrpcOptions,
    "trace files": TraceFileOptions,
    "OpenTelemetry": OtlpOptions,
    "every model, where its model.yaml does not say otherwise": LoadOptions,
}
"""Titles of what the server's options inherit, in the order in which users read them, behind the server's own."""


class ServerOptions(AccessOptions, TlsOptions, HttpOptions, GrpcOptions, TraceFileOptions, OtlpOptions, LoadOptions):
    """Everything that can be set for the server. Times are seconds, sizes bytes."""

    repositories: tuple[Path, ...] = ()
    """Model repositories: folders that hold ``<model>/<version>/model.onnx`` or ``<model>.onnx``."""
    example: bool = False
    """Serve the bundled example repository too."""
    strict_readiness: bool = False
    """Be ready only while every model is ready. Off: a failed model shows in the repository index and in metrics, and
    holds readiness back only where its ``model.yaml`` says ``required: true``."""

    model_control_mode: Literal["none", "poll", "explicit"] = "none"
    """How the set of served models changes: ``none``, all models of the repositories are loaded at the start and stay;
    ``poll``, and the repositories are looked at again every ``repository_poll_s``; ``explicit``, only ``load_model`` at
    the start and then whatever clients load and unload."""
    load_model: tuple[str, ...] = ()
    """Models to load at the start in the mode ``explicit``; ``*`` for all. May be given more than once."""
    repository_poll_s: float = Field(default=15.0, gt=0, le=86400)
    """How often the repositories are looked at in the mode ``poll``. What is being copied there may be seen half done:
    it fails to load, what served before goes on, and the next look tries again; put folders in place by renaming.
    Names that begin with a dot are passed over."""

    execution_provider_libraries: tuple[Path, ...] = ()
    """Shared libraries of plug-in execution providers that are not installed as packages. One that cannot be used stops
    the start."""
    global_threads: bool = False
    """Let all models run on one pool of threads, of as many as the CPU quota and affinity allow, instead of threads of
    their own; ``intra_op_threads`` and ``inter_op_threads`` do not count then. For very many models on few processors.
    Off, because idle threads of that pool cannot be told not to spin."""

    busy_poll_us: int = Field(default=0, ge=0, le=10_000)
    """How many microseconds the event loop may poll for the next request after an answer, instead of sleeping: a single
    client that sends one request after the other may be served sooner. It polls only while nearly all of the last
    requests came within that time, nothing is in flight or being loaded and no CPU quota is exhausted; at most 5 % of
    a processor is spent on polling in vain. 0 never polls; 200 is worth trying. Measure it on your machine with
    ``loadtests/busy_poll.py``: polling takes time from a client on the same core. Never with ``grpc_transport:
    grpcio``, whose threads need the interpreter."""

    host: str = Field(default="127.0.0.1", min_length=1, json_schema_extra={"expects": "IP address or host name"})
    """Address that all ports listen on; ``0.0.0.0`` for every network interface."""
    http_port: int = Field(default=8000, ge=0, le=65535)
    """Port of the REST protocol; 0 takes any free one."""
    grpc_port: int = Field(default=8001, ge=0, le=65535)
    """Port of the gRPC protocol; 0 takes any free one."""
    metrics_port: int = Field(default=8002, ge=0, le=65535)
    """Port that Prometheus reads ``/metrics`` from; 0 takes any free one."""
    # gRPC keeps message sizes in a signed 32-bit integer; one limit holds for both protocols.
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1, le=2**31 - 1)
    """Largest request body that is taken; larger ones are refused as ``too_large`` before they are kept."""
    max_inflight_bytes: int | None = Field(default=None, ge=1, le=2**44)
    """Memory that request bodies, and what is made of them until they are answered, may take together; more is
    rejected as ``overloaded``. Beside it up to 128 MiB, or a quarter of it where that is less, stay with the process
    for the next large bodies. Unset: a quarter of the memory that the process may use, by its cgroup, its address space
    limit and the machine."""
    max_json_bytes: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Largest JSON of a request to infer or generate, also after decompression; more is rejected as ``too_large``.
    Reading JSON takes up to 32 times its size in memory, so binary tensors, which take none, may be larger. Unset: 32
    MiB, or less where ``max_inflight_bytes`` has no room for reading that."""
    compression_min_bytes: int = Field(default=16 * 1024, ge=0, le=2**44)
    """Smallest answer of REST inference that is compressed for callers whose ``Accept-Encoding`` asks for it, and then
    only if it shrinks by a fifth at least. Many clients always ask, and compressing 64 KiB takes about as long as ten
    small requests."""
    # Longer than the 60 s after which common load balancers drop idle connections, so that they do it and not we.
    idle_timeout_s: float = Field(default=75.0, gt=0, le=86400)
    """How long an HTTP connection may stay open without a request. It is closed up to two seconds later, not before."""
    http_max_connection_age_s: float | None = Field(default=None, ge=0.001, le=365 * 86400)
    """Age from which on the next answer on an HTTP connection asks its client to open another, so that balancers of
    connections spread load over new servers. Each connection's own is up to 10 % shorter or longer, so that those that
    came together do not go together. Unset: it lives as long as its client wants."""
    allow_client_shm: bool = False
    """Let callers on this machine register their shared memory and have inputs read from it and outputs written to
    it. It lets any of them read and overwrite every object in ``/dev/shm`` that this process may open."""
    server_name: str = Field(default="ortserve", min_length=1, json_schema_extra={"expects": "text, not empty"})
    """Name in the server's metadata."""
    drain_delay_s: float = Field(default=0.0, ge=0, le=3600)
    """How long requests are still accepted after SIGTERM has turned readiness off, for load balancers to notice."""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """How long admitted requests may take to finish after the listeners have closed."""

    triton_metrics: bool = True
    """Show the numbers under Triton's metric names (``nv_inference_…``) too, and those of GPUs and processors that it
    shows (``nv_gpu_…``, ``nv_cpu_…``)."""
    load_reports: Literal["never", "asked", "always"] = "asked"
    """Which answers to inference say how busy the server is, as balancers read it (ORCA): ``asked``, those to callers
    who send ``endpoint-load-metrics-format: text``, ``json`` or ``bin``; ``always``, the others too, in the header or
    trailing metadata ``endpoint-load-metrics-bin``, for the weighted round robin of gRPC clients and of Envoy."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged, to standard error."""
    log_format: Literal["text", "json"] = "text"
    """How a line is written: ``text`` for people, ``json`` for what collects lines, one object each with ``time``,
    ``level``, ``logger``, ``message`` and the event's fields, such as ``model`` and ``request_id``."""
    access_log: bool = False
    """Log one line for each inference request that reached the server's models; refusals of keys and limits before that
    are counted in the metrics."""


class OptionsError(Exception):
    """Options that cannot be used. ``problems`` holds one readable line for each."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def variable_name(option: str) -> str:
    """The environment variable of an option."""
    return ENV_PREFIX + option.upper()


def flag_name(option: str) -> str:
    """The command-line flag of an option."""
    return "--" + option.replace("_", "-")


def split_list(text: str) -> list[str]:
    """Take a list apart that was spelled in one text: ``cuda,cpu``."""
    return [item.strip() for item in text.split(",") if item.strip()]


def read_options(flags: Mapping[str, Any], config_path: Path | None = None) -> ServerOptions:
    """Put the options together: flag, else environment variable, else file, else default. Reads ``os.environ``.

    An environment variable that is empty counts as unset. Unknown ones are left alone, because Kubernetes sets
    ``ORTSERVE_PORT`` and the like in every pod beside a Service named ``ortserve``.

    Args:
        flags: What the command line gave, by option, as text or already of the option's type.
        config_path: The YAML file of options; else the one that ``ORTSERVE_CONFIG`` names; else none.

    Raises:
        OptionsError: With each bad option's name and source, what was expected and what came.
    """
    config_path = config_path or (Path(named) if (named := os.environ.get(CONFIG_VARIABLE)) else None)
    in_file = _read_file(config_path) if config_path else {}

    class Environment(EnvSettingsSource):
        def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
            return split_list(value)  # rather than JSON, which is no pleasure to quote in a manifest

    class LayeredOptions(ServerOptions, BaseSettings):
        model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, Environment(settings_cls), InitSettingsSource(settings_cls, in_file)

    try:
        return ServerOptions(**dict(LayeredOptions(**flags)))
    except ValidationError as error:
        in_environment = {name: os.environ.get(variable_name(name)) for name in ServerOptions.model_fields}
        problems = describe_problems(error, ServerOptions.model_fields, in_environment | dict(flags))
        raise OptionsError(
            *(
                f"{flag_name(name) if name in flags else variable_name(name)}: {problem}"
                for name, problem in problems.items()
            )
        ) from None


def _read_file(path: Path) -> dict[str, object]:
    """Read and check the file by itself, strictly: it has types, and is wrong even where a flag overrides it."""
    try:
        given = read_yaml(path)
    except ValueError as error:
        raise OptionsError(f"{path}: {error}") from None
    try:
        ServerOptions.model_validate_json(json.dumps(given, default=str), strict=True)
    except ValidationError as error:
        problems = describe_problems(error, ServerOptions.model_fields, given)
        raise OptionsError(*(f"{path}: {name}: {problem}" for name, problem in problems.items())) from None
    return given
