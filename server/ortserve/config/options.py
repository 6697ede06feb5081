"""The server's options: their declaration, and ``read_options``, which reads flags, environment and file.

The constructor of ``ServerOptions`` reads neither environment nor file: the result depends on the arguments alone.
"""

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from ortserve.config.declaration import InvalidValuesError, describe_problems, did_you_mean, validate
from ortserve.config.model import LoadOptions
from ortserve.config.option_groups import (
    AccessOptions,
    GrpcOptions,
    HttpOptions,
    OptionalPath,
    OtlpOptions,
    StoreOptions,
    TlsOptions,
    TraceFileOptions,
    tls_problems,
)
from ortserve.config.repository_url import Repository
from ortserve.config.yaml_file import read_yaml
from ortserve.paths import is_model_file

ENV_PREFIX: Final = "ORTSERVE_"
CONFIG_VARIABLE: Final = "ORTSERVE_CONFIG"
"""The variable that names the options file if ``--config`` is not given."""
_VARIABLES_OF_OTHERS: Final = re.compile(
    r"ORTSERVE_(COMPILE(_LEVEL)?|TEST_\w+|(\w+_)?SERVICE_(HOST|PORT(_\w+)?)|"
    r"(\w+_)?PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that builds and tests read, or that Kubernetes sets in pods beside a Service whose name begins with
``ortserve``."""


OPTION_GROUPS: Final[Mapping[str, type[BaseModel]]] = {
    "keys": AccessOptions,
    "TLS": TlsOptions,
    "HTTP": HttpOptions,
    "gRPC": GrpcOptions,
    "stores": StoreOptions,
    "trace files": TraceFileOptions,
    "OpenTelemetry": OtlpOptions,
    "defaults of every model; its model.yaml may override them": LoadOptions,
}
"""The inherited groups by title. Help text and reference page show them in this order, after the server's own."""


class ServerOptions(
    AccessOptions, TlsOptions, HttpOptions, GrpcOptions, StoreOptions, TraceFileOptions, OtlpOptions, LoadOptions
):
    """All options of the server. Times are seconds, sizes bytes."""

    repositories: tuple[Repository, ...] = Field(default=(), json_schema_extra={"expects": "list of paths and URLs"})
    """Model repositories: folders that hold ``<model>/<version>/model.onnx`` or ``<model>.onnx``, single files
    ``<model>.onnx``, or URLs of repositories: ``s3://BUCKET/PREFIX``, ``gs://``, ``az://``,
    ``https://HOST/FILE.tar.gz``, ``hf://OWNER/MODEL``."""
    example: bool = False
    """Also serve the bundled example repository."""
    strict_readiness: bool = False
    """Report ready only while every model is ready. Off: only models whose ``model.yaml`` says ``required: true``
    count; other failed models appear in the repository index and in metrics."""

    model_control_mode: Literal["none", "poll", "explicit"] = "none"
    """How the set of served models changes. ``none``: all models of the repositories are loaded at the start and stay.
    ``poll``: the repositories are scanned again every ``repository_poll_s``. ``explicit``: the models of ``load_model``
    are loaded at the start; clients load and unload models."""
    load_model: tuple[str, ...] = ()
    """Models to load at the start in mode ``explicit``; ``*`` for all. May be repeated."""
    state_dir: OptionalPath = None
    """Folder of the file that stores changes made by calls, such as labels, across restarts. Unset: ``.ortserve`` in
    the first repository, created by the first such call."""
    repository_poll_s: float = Field(default=15.0, ge=0.01, le=86400)
    """Interval of scans in mode ``poll``. A scan may find a folder that is still being copied: its load fails, the
    previous version keeps serving, and the next scan retries. Rename complete folders into place to avoid this. Names
    that begin with a dot are ignored."""

    execution_provider_libraries: tuple[Path, ...] = ()
    """Shared libraries of plug-in execution providers that are not installed as packages. An unusable library stops the
    start."""
    global_threads: bool = False
    """Run all models on one thread pool instead of one pool per model. It has a thread for each physical core within
    the CPU quota and affinity. ``intra_op_threads`` and ``inter_op_threads`` are then ignored. For many models on few
    processors. Off by default, because idle threads of that pool always spin."""

    busy_poll_us: int = Field(default=0, ge=0, le=10_000)
    """Microseconds for which the event loop may poll for the next request after an answer instead of sleeping. This can
    lower the latency of a single client that sends one request after another. The loop polls only while nearly all
    recent requests arrived within that time, no request is in flight, no model is being loaded and no CPU quota is
    exhausted; unsuccessful polling takes at most 5 % of a processor. 0: never. 200 is a good value to try; measure with
    ``loadtests/busy_poll.py``, because polling takes time from a client on the same core. No effect with
    ``grpc_transport: grpcio``, whose threads need the interpreter."""

    host: str = Field(default="127.0.0.1", min_length=1, json_schema_extra={"expects": "IP address or host name"})
    """Address that all ports listen on; ``0.0.0.0`` for all network interfaces."""
    http_port: int = Field(default=8000, ge=0, le=65535)
    """Port of the REST protocol. 0: any free port."""
    grpc_port: int = Field(default=8001, ge=0, le=65535)
    """Port of the gRPC protocol. 0: any free port."""
    metrics_port: int = Field(default=8002, ge=0, le=65535)
    """Port that serves ``/metrics`` for Prometheus. 0: any free port."""
    reuse_port: bool = False
    """Share the ports of REST and gRPC with other servers of this machine that set this, too: the kernel gives each new
    connection to one of them. Each server needs a ``metrics_port`` of its own. Off: a port in use is an error."""
    # gRPC keeps message sizes in a signed 32-bit integer; one limit holds for both protocols.
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1, le=2**31 - 1)
    """Maximum size of a request body; larger ones are rejected as ``too_large`` before they are stored."""
    max_inflight_bytes: int | None = Field(default=None, ge=1, le=2**44)
    """Memory for request bodies and the data decoded from them, until they are answered; further requests are rejected
    as ``overloaded``. In addition, up to 128 MiB, or a quarter of this value if that is less, are kept for the next
    large bodies. Messages of gRPC streams that wait for an earlier message may take the sum to twice this value, and
    64 KiB per stream beyond it. Unset: a quarter of the memory available to the process (cgroup, address space limit,
    machine)."""
    max_json_bytes: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Maximum size of the JSON of a request to infer, generate or embeddings, after decompression; larger JSON is
    rejected as ``too_large``. Parsing JSON takes up to 32 times its size in memory; binary tensors take none and may be
    larger. Unset: 32 MiB, or less if ``max_inflight_bytes`` is too small for that."""
    memory_budget_bytes: int | None = Field(default=None, ge=1, le=2**44)
    """Private memory on the host that all models together may hold: weights, ONNX Runtime's arenas and buffers, as
    measured when each model was loaded. Models load one at a time; if a load has no room, the least recently used
    models are evicted. A load briefly takes up to twice the size of the weights. Requests and the server itself take
    further memory, which is not part of the budget. Unset: no budget; nothing is evicted."""
    gpu_memory_budget_bytes: int | None = Field(default=None, ge=1, le=2**44)
    """Memory that all models together may hold on each GPU: sessions, buffers, graphs and states of sequences, as
    ``ortserve_device_ledger_bytes`` shows it. Models without device buffers are not counted. Evictions work as with
    ``memory_budget_bytes``; both options may be set. Unset: no budget."""
    on_demand_wait_s: float = Field(default=30.0, gt=0, le=3600)
    """Maximum time that a request without a shorter deadline waits for its model to be loaded. Afterwards it is
    rejected as ``not_ready``, with the time after which a retry should find the model loaded; the load continues."""
    cache_bytes: int = Field(default=64 * 1024 * 1024, ge=0, le=2**44)
    """Memory for the entries of all models with ``response_cache``; the least recently used ones are evicted. 0: no
    model uses a cache."""
    compression_min_bytes: int = Field(default=16 * 1024, ge=0, le=2**44)
    """Minimum size of a REST inference answer that is compressed. Only answers to callers with a matching
    ``Accept-Encoding`` that shrink by at least a fifth are compressed. Compressing 64 KiB takes about as long as ten
    small requests."""
    # Longer than the 60 s after which common load balancers close idle connections: the balancer should close first.
    idle_timeout_s: float = Field(default=75.0, gt=0, le=86400)
    """Time after which an HTTP connection without a request is closed; closing may take up to two seconds longer."""
    http_max_connection_age_s: float | None = Field(default=None, ge=0.001, le=365 * 86400)
    """Age at which the next answer on an HTTP connection asks the client to open a new one, so that load balancers
    spread connections over new servers. Each connection's limit varies by up to 10 %, so that connections opened
    together do not close together. Unset: no limit."""
    allow_client_shm: bool = False
    """Allow callers on this machine to register shared memory for inputs and outputs. Any caller can then read and
    overwrite every object in ``/dev/shm`` that this process may open."""
    profiling: bool = False
    """Allow callers to profile models while they serve, with ``ortserve profile URL MODEL``: copies of the next batches
    run in a second session, which takes the memory of a second instance and processor time at low priority. Callers
    need a key of ``control_keys_file``, if it is set."""
    record_dir: OptionalPath = None
    """Folder for recorded requests, as ``<model>/<version>/<number>.npz``; created if only its last part is missing. It
    must not be in a repository. ``record`` in a model's ``model.yaml`` turns recording on. Clients can set neither. The
    files contain the inputs that callers sent; only the server's user can read them. Up to 64 MiB of requests wait for
    the disk; more are dropped. Unset: nothing is recorded."""
    server_name: str = Field(default="ortserve", min_length=1, json_schema_extra={"expects": "text, not empty"})
    """Name in the server's metadata."""
    drain_delay_s: float = Field(default=0.0, ge=0, le=3600)
    """Time for which new requests are still accepted after SIGTERM turned readiness off, so that load balancers can
    react."""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """Time limit for admitted requests to finish after the listeners have closed. Requests that take longer are cut
    off, and the exit status is then 1."""

    console: bool = True
    """Serve the console, a page at ``/`` of the HTTP port that shows models and server. It shows data only to callers
    with a key of ``metadata_keys_file``, if it is set. The server keeps the rates of the last 15 minutes for it, which
    takes 11 KB of memory per active version."""
    triton_metrics: bool = True
    """Also expose the metrics under Triton's names (``nv_inference_...``), with its metrics of GPUs and processors
    (``nv_gpu_...``, ``nv_cpu_...``)."""
    load_reports: Literal["never", "asked", "always"] = "asked"
    """The inference answers that carry a load report (ORCA) for load balancers. ``asked``: answers to callers that send
    ``endpoint-load-metrics-format: text``, ``json`` or ``bin``. ``always``: all answers, by default as header or
    trailing metadata ``endpoint-load-metrics-bin``, for the weighted round robin of gRPC clients and of Envoy."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is logged, to standard error."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines. ``text``: for people. ``json``: one object per line with ``time``, ``level``, ``logger``,
    ``message`` and the event's fields, such as ``model`` and ``request_id``."""
    access_log: bool = False
    """Log one line per inference request that reached the inference service. Requests rejected earlier, by keys or
    limits, appear only in the metrics."""


class OptionsError(Exception):
    """Invalid options.

    Attributes:
        problems: One readable line per option.
        file_log_format: ``log_format`` of the options file, which may be of any type; None without one.
    """

    def __init__(self, *problems: str, file_log_format: object = None) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        self.file_log_format = file_log_format


def variable_name(option: str) -> str:
    """The environment variable of an option."""
    return ENV_PREFIX + option.upper()


def flag_name(option: str) -> str:
    """The command-line flag of an option."""
    return "--" + option.replace("_", "-")


def split_list(text: str) -> list[str]:
    """Split a comma-separated list: ``cuda,cpu``."""
    return [item.strip() for item in text.split(",") if item.strip()]


def read_options(flags: Mapping[str, Any], config_path: Path | None = None) -> ServerOptions:
    """Read the options. A flag overrides an environment variable, which overrides the file, which overrides the
    default.

    Reads ``os.environ``. An empty variable counts as unset. Unknown variables are ignored (``unknown_variables``).

    Args:
        flags: Values from the command line, by option, as text or of the option's type.
        config_path: The YAML options file; None for the file that ``ORTSERVE_CONFIG`` names, if any.

    Raises:
        OptionsError: Lists each invalid option with its source, the expected and the actual value.
    """
    return read_options_and_origins(flags, config_path)[0]


def read_options_and_origins(
    flags: Mapping[str, Any], config_path: Path | None = None
) -> tuple[ServerOptions, dict[str, str]]:
    """As ``read_options``. Also returns the flag, variable or file that sets each option, for the console.

    Options with their default have no origin. The file is read once, because it may be a pipe.
    """
    config_path = config_path or (Path(named) if (named := os.environ.get(CONFIG_VARIABLE)) else None)
    in_file = _read_file(config_path) if config_path else {}
    options = _combine(flags, in_file)
    origins: dict[str, str] = {}
    for name in ServerOptions.model_fields:
        if name in flags:
            origins[name] = flag_name(name) if name != "repositories" else "command line"
        elif os.environ.get(variable_name(name)):
            origins[name] = variable_name(name)
        elif config_path is not None and name in in_file:
            origins[name] = config_path.name
    return options, origins


class _Environment(EnvSettingsSource):
    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[str | None, str, bool]:
        """Read the variable with the documented name. The method of the base class also reads it in lower case."""
        return os.environ.get(variable_name(field_name)) or None, field_name, False

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        return split_list(value)  # instead of JSON, which is hard to quote in a manifest


@cache
def _variables() -> type[BaseSettings]:
    """The options as environment variables. Made once, because that takes 40 ms."""

    class Variables(ServerOptions, BaseSettings):
        model_config = SettingsConfigDict()

    return Variables


def _combine(flags: Mapping[str, Any], in_file: Mapping[str, object]) -> ServerOptions:
    """Validate the options from flags, environment and file, in this order. Raises OptionsError."""
    try:
        return ServerOptions(**{**in_file, **_Environment(_variables())(), **flags})
    except ValidationError as error:
        in_environment = {name: os.environ.get(variable_name(name)) for name in ServerOptions.model_fields}
        problems = describe_problems(error, ServerOptions.model_fields, in_environment | dict(flags))
        raise OptionsError(
            *(
                f"{flag_name(name)}: {problem}"
                if name in flags
                else f"{variable_name(name)}: {problem}{_hint_of_kubernetes(name)}"
                for name, problem in problems.items()
            ),
            file_log_format=in_file.get("log_format"),
        ) from None


def _hint_of_kubernetes(option: str) -> str:
    """The end of a message about a variable with an address, which Kubernetes sets in all pods beside a Service."""
    is_address = option.endswith("_port") and "://" in os.environ.get(variable_name(option), "")
    return "; Kubernetes sets it for a Service, unless the pod has enableServiceLinks: false" if is_address else ""


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """One line per variable that has the prefix of options but no effect. The lines do not contain values.

    Variables of builds and tests, and those that Kubernetes sets beside a Service named ``ortserve``, are left out.
    """
    known = {name.upper() for name in ServerOptions.model_fields} | {CONFIG_VARIABLE.removeprefix(ENV_PREFIX)}
    problems = []
    for name, value in sorted(environment.items()):
        upper = name.upper()  # a name in lower case has no effect, either
        is_own = upper.startswith(ENV_PREFIX) and not _VARIABLES_OF_OTHERS.fullmatch(upper)
        is_address = upper.endswith("_PORT") and "://" in value  # set by Kubernetes, too
        option = upper.removeprefix(ENV_PREFIX)
        if is_own and not is_address and (option not in known or name != upper):
            problems.append(f"{name}: unknown variable{did_you_mean(option, sorted(known), prefix=ENV_PREFIX)}")
    return problems


def state_folder(options: ServerOptions) -> Path | None:
    """The folder of the state that calls change; None if the server has no folder for it."""
    if options.state_dir is not None:
        return options.state_dir
    on_disk = (repository for repository in options.repositories if isinstance(repository, Path))
    first = next((folder for folder in on_disk if not is_model_file(folder)), None)
    return None if first is None else first / ".ortserve"  # a repository has no models with such names


def combination_problems(options: ServerOptions) -> list[str]:
    """One line per combination of options that is not allowed, and with which the server does not start."""
    problems = []
    if options.load_model and options.model_control_mode != "explicit":
        got = options.model_control_mode
        problems.append(f"load_model: expected model_control_mode to be 'explicit', got '{got}'")
    if options.trace_level != "OFF" and options.trace_file is None:
        problems.append(f"trace_level: '{options.trace_level}' also needs trace_file, got none")
    folder = options.record_dir
    if folder is not None and any(
        isinstance(root, Path) and folder.resolve().is_relative_to(root.resolve()) for root in options.repositories
    ):
        problems.append(f"record_dir: expected a folder outside of the repositories, got '{folder}'")
    if shared := _shared_port(options):
        problems.append(shared)
    return [*problems, *tls_problems(options, grpc_transport=options.grpc_transport)]


def _shared_port(options: ServerOptions) -> str:
    """The error if two options have the same port; otherwise empty."""
    taken: dict[int, str] = {}
    for name in ("http_port", "grpc_port", "metrics_port"):
        port: int = getattr(options, name)
        if port and port in taken:
            return f"{name}: expected a different port than {taken[port]}, got {port} for both"
        taken[port] = name
    return ""


def _read_file(path: Path) -> dict[str, object]:
    """Read the file and validate it strictly and separately, so that errors are found even if a flag overrides them."""
    try:
        given = read_yaml(path, Path.read_bytes)  # which may be a pipe, as of `--config <(generate)`
    except ValueError as error:
        raise OptionsError(f"{path}: {error}") from None
    try:
        validate(ServerOptions, given)
    except InvalidValuesError as error:
        problems = [f"{path}: {name}: {problem}" for name, problem in error.problems.items()]
        raise OptionsError(*problems, file_log_format=given.get("log_format")) from None
    return given
