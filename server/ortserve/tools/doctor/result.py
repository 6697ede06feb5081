"""The result of ``ortserve doctor``, as ``--json`` writes it. Unknown values are None.

The JSON Schema has the descriptions of the fields. The tables of the report have the names of the fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ortserve.tools.report import Finding

NOT_LOADED: Final = "not loaded"
"""State of a model that the index lists without one: the server waits for a call to load it."""


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors.

    Attributes:
        model: Name of the processor.
        online: Number of logical processors of the machine.
        cores: Number of physical cores.
        allowed: Processors in the affinity mask of this process.
        quota: CPU quota of the cgroup, in processors; None without one.
        budget: Threads that the server keeps busy: the number of allowed processors, or the quota rounded up if lower.
        throttled_periods: Periods in which the quota was used up, since the cgroup was created.
        instruction_sets: Instruction sets with kernels in ONNX Runtime, and whether the processor has them.
        governor: Frequency governor.
        highest_mhz: Highest frequency of the processor.
        numa_nodes: Processors by node, of the nodes with allowed processors.
    """

    model: str | None
    online: int | None
    cores: int | None
    allowed: tuple[int, ...]
    quota: float | None
    budget: int | None
    throttled_periods: int | None
    instruction_sets: Mapping[str, bool]
    governor: str | None
    highest_mhz: int | None
    numa_nodes: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory.

    Attributes:
        total_bytes: Memory of the machine.
        available_bytes: Memory of the machine that is available without swapping.
        limit_bytes: The smallest limit of the cgroups; None without a limit.
        used_bytes: Memory in use by the cgroup with that limit.
        killed_processes: Processes of the cgroup that the kernel killed for lack of memory.
        shared_bytes: Size of ``/dev/shm``.
        huge_pages: Mode of transparent huge pages.
        huge_pages_defrag: When the kernel defragments memory for huge pages.
        allocator: ``glibc``, or the library that replaces its allocator.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    used_bytes: int | None
    killed_processes: int | None
    shared_bytes: int | None
    huge_pages: str | None
    huge_pages_defrag: str | None
    allocator: str | None

    @property
    def free_bytes(self) -> int:
        """The memory that this process may still allocate, by the machine and the limit."""
        left = self.available_bytes if self.limit_bytes is None else self.limit_bytes - (self.used_bytes or 0)
        return max(0, min(self.available_bytes, left))


@dataclass(frozen=True, slots=True)
class System:
    """Kernel, limits and environment.

    Attributes:
        kernel: Version of the kernel.
        open_files: Soft limit of open files; None without a limit.
        open_files_hard: Hard limit of open files; None without a limit.
        environment: Variables that change ONNX Runtime, its libraries or the allocator.
    """

    kernel: str
    open_files: int | None
    open_files_hard: int | None
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Steadiness:
    """Times of a repeated unit of work on several processors at once, and speed of copying memory.

    Attributes:
        processors: Number of processors that took part.
        median_ms: Median time of the unit of work.
        spread: p99 / median of a processor: the median over the processors.
        slowest: Median of the slowest processor divided by the median of the fastest one.
        stolen: Share of processor time that the hypervisor gave to others.
        throttled_periods: Periods in which a quota was used up during the test.
        copy_one_gb_per_s: Bytes read and written by one copying thread.
        copy_all_gb_per_s: Bytes read and written by all threads together.
    """

    processors: int
    median_ms: float
    spread: float
    slowest: float
    stolen: float
    throttled_periods: int
    copy_one_gb_per_s: float | None
    copy_all_gb_per_s: float | None


@dataclass(frozen=True, slots=True)
class ProviderTrial:
    """An execution provider, tried with a model of one operator in a process of its own.

    Attributes:
        name: Name of the execution provider.
        is_offered: Whether this ONNX Runtime or a plug-in has the provider.
        is_usable: Whether the model ran on it.
        problem: Why the model did not run.
        libraries: Versions of its libraries, or the message of the loader.
    """

    name: str
    is_offered: bool
    is_usable: bool
    problem: str = ""
    libraries: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU as NVML describes it.

    Attributes:
        name: Name of the product.
        capability: Compute capability.
        memory_bytes: Memory of the card.
        used_bytes: Memory in use by all processes.
        driver: Version of the driver.
        cuda: Version of CUDA that the driver supports.
    """

    name: str
    capability: str | None
    memory_bytes: int | None
    used_bytes: int | None
    driver: str | None
    cuda: str | None


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """Versions, ONNX Runtime's execution providers, and GPUs.

    Attributes:
        versions: Versions of the server, Python and libraries.
        distributions: Versions of the installed distributions of ONNX Runtime.
        build: Build description of ONNX Runtime.
        providers: Trials of the execution providers.
        gpus: GPUs that this process may use.
        gpu_problem: Why NVML shows no GPU.
    """

    versions: Mapping[str, str]
    distributions: Mapping[str, str]
    build: str
    providers: tuple[ProviderTrial, ...]
    gpus: tuple[GpuFacts, ...] = ()
    gpu_problem: str = ""


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """A version of a model, loaded as the server would load it.

    Attributes:
        name: Name of the model.
        version: Number of the version; None if the model has none.
        problem: Why the version cannot be served.
        skipped: Why the version was not loaded.
        events: Warnings that the server would log, with their reasons.
        execution_provider: The execution provider that runs it.
        instances: Sessions that run concurrently.
        threads: Threads that a run of one instance may keep busy.
        files_bytes: Size of the files of the version.
        memory_bytes: Growth of the process during the load.
        load_s: Duration of the load, with warm-up.
        row_ms: Duration of a run with one row.
        golden: How well its golden samples agree; empty if it has none.
    """

    name: str
    version: int | None = None
    problem: str = ""
    skipped: str = ""
    events: tuple[str, ...] = ()
    execution_provider: str | None = None
    instances: int = 1
    threads: int | None = None
    files_bytes: int = 0
    memory_bytes: int | None = None
    load_s: float | None = None
    row_ms: float | None = None
    golden: str = ""

    @property
    def label(self) -> str:
        """Name and version."""
        return self.name if self.version is None else f"{self.name}/{self.version}"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A running server.

    Attributes:
        name: Name that the server gives.
        version: Version of the server.
        live: Whether the server is live.
        ready: Whether the server is ready for requests.
        reach: Reach of its address: ``loopback``, ``private`` or ``public``.
        tls: Whether the connection is encrypted.
        certificate_expires_s: Seconds until the certificate expires.
        certificate_problem: Why this machine does not trust the certificate.
        control_is_open: Whether control calls need no key.
        models: State by ``name/version``, or ``not loaded`` by name; None if the index cannot be read.
        metrics: Values of metrics, added up over models; None if they were not found.
    """

    name: str
    version: str
    live: bool
    ready: bool
    reach: str
    tls: bool
    certificate_expires_s: float | None
    certificate_problem: str
    control_is_open: bool | None
    models: Mapping[str, str] | None
    metrics: Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a request.

    Attributes:
        name: A phase of ``Server-Timing``, or the part outside of all phases.
        median_us: Median time in this stage.
        p99_us: 99th percentile of this time.
        share: Median divided by the median of the whole request.
    """

    name: str
    median_us: float
    p99_us: float
    share: float


@dataclass(frozen=True, slots=True)
class RequestPath:
    """The times of the stages of one request.

    Attributes:
        model: Name of the model on the server.
        requests: Number of requests, sent one after the other on one connection.
        inputs: A description of the inputs.
        median_us: Median time at the client.
        p99_us: 99th percentile of this time.
        stages: The stages in their order.
        dominant: The stage with the largest median.
        bare_us: Median of ``session.run`` in this process, between the requests, of an ensemble of all its steps; None
            without the model's file.
    """

    model: str
    requests: int
    inputs: str
    median_us: float
    p99_us: float
    stages: tuple[Stage, ...]
    dominant: str
    bare_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorResult:
    """The result for this machine and optionally a repository, or for a server. Other fields are null or empty.

    Attributes:
        subject: ``this machine``, or the repository or URL as given.
        findings: Findings, the worst first.
        processors: Processors of this machine.
        memory: Memory of this machine.
        system: Kernel, limits and environment of this machine.
        steadiness: Steadiness of the processors; null if it was not measured.
        runtime: ONNX Runtime and GPUs.
        models: Versions of the models of the repository.
        server: The running server.
        request: The times of the stages of one request to the server.
    """

    schema: str = "ortserve.doctor/1"
    subject: str = ""
    findings: tuple[Finding, ...] = ()
    processors: Processors | None = None
    memory: Memory | None = None
    system: System | None = None
    steadiness: Steadiness | None = None
    runtime: RuntimeFacts | None = None
    models: tuple[ModelCheck, ...] = ()
    server: ServerFacts | None = None
    request: RequestPath | None = None
