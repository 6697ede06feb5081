"""The result of ``ortserve doctor``, as ``--json`` writes it. None stands for what this machine does not tell.

The descriptions of fields are those of the JSON Schema; names of fields are also those of the tables for people.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ortserve.tools.report import Finding


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors.

    Attributes:
        model: As the processor names itself.
        online: Logical processors of the machine.
        cores: Physical ones.
        allowed: Those of this process's affinity mask.
        quota: CPU quota of the cgroup, in processors; None without one.
        budget: Threads that the server keeps busy: the allowed processors or the quota, rounded up.
        throttled_periods: In which the quota was used up, since the cgroup was made.
        instruction_sets: For which ONNX Runtime has kernels, and whether the processor has them.
        governor: Of the frequency.
        highest_mhz: Frequency that the processor may reach.
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
        total_bytes: Of the machine.
        available_bytes: Of the machine, without swapping.
        limit_bytes: The smallest limit of the cgroups; None without one.
        used_bytes: By the cgroup with that limit.
        killed_processes: Of the cgroup, for lack of memory.
        shared_bytes: Of ``/dev/shm``.
        huge_pages: Mode of transparent huge pages.
        huge_pages_defrag: When the kernel makes room for them.
        allocator: ``glibc``, or the library in its place.
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
        """What this process may still take, by the machine and the limit."""
        left = self.available_bytes if self.limit_bytes is None else self.limit_bytes - (self.used_bytes or 0)
        return max(0, min(self.available_bytes, left))


@dataclass(frozen=True, slots=True)
class System:
    """Kernel, limits and environment.

    Attributes:
        kernel: Its version.
        open_files: Soft limit; None without one.
        open_files_hard: Hard limit; None without one.
        environment: Variables that change ONNX Runtime, its libraries or the allocator.
    """

    kernel: str
    open_files: int | None
    open_files_hard: int | None
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Steadiness:
    """The same unit of work again and again, on several processors at once; then copies of memory.

    Attributes:
        processors: That took part.
        median_ms: Of the unit of work.
        spread: p99 / median, of the processor in the middle.
        slowest: Median of the slowest processor, divided by that of the fastest.
        stolen: Share of processor time that the hypervisor gave to others.
        throttled_periods: In which a quota was used up meanwhile.
        copy_one_gb_per_s: Read and written by one thread.
        copy_all_gb_per_s: By all threads.
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
        name: Of the execution provider.
        is_offered: Whether this ONNX Runtime or a plug-in has it.
        is_usable: Whether the model ran on it.
        problem: Why it did not.
        libraries: Versions, or what the loader says about them.
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
        name: Of the product.
        capability: Compute capability.
        memory_bytes: Of the card.
        used_bytes: By all processes.
        driver: Version.
        cuda: The version that the driver supports.
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
        versions: Of the server, Python and libraries.
        distributions: Of ONNX Runtime that are installed.
        build: ONNX Runtime's description of itself.
        providers: Each one's trial.
        gpus: Those that this process may use.
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
        name: Of the model.
        version: None if there is none.
        problem: Why it cannot be served.
        skipped: Why it was not loaded.
        events: Warnings that the server would log: what, and the reason.
        execution_provider: On which it runs.
        instances: Sessions that run at the same time.
        threads: That a run of one instance may keep busy.
        files_bytes: Of the version.
        memory_bytes: By which the process grew.
        load_s: Time of the load, with warm-up.
        row_ms: Time of a run with one row.
        golden: How its golden samples agree; empty if it has none.
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
        name: As the server names itself.
        version: Of the server.
        live: Whether it works.
        ready: Whether it takes requests.
        reach: Of its address: ``loopback``, ``private`` or ``public``.
        tls: Whether the connection is encrypted.
        certificate_expires_s: Seconds from now.
        certificate_problem: Why it is not trusted here.
        control_is_open: Whether control calls need no key.
        models: State by ``name/version``; None if the index cannot be read.
        metrics: Values of its metrics, added up over models; None if they were not found.
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
        name: A phase of ``Server-Timing``, or what is outside of them.
        median_us: Time in this stage.
        p99_us: 99th percentile of it.
        share: Median divided by that of the whole request.
    """

    name: str
    median_us: float
    p99_us: float
    share: float


@dataclass(frozen=True, slots=True)
class RequestPath:
    """Where the time of one request goes.

    Attributes:
        model: Name on the server.
        requests: Sent one after the other on one connection.
        inputs: Where they come from.
        median_us: Time at the client.
        p99_us: 99th percentile of it.
        stages: In the order of the request.
        dominant: The stage that takes most.
        bare_us: Median of ``session.run`` in this process, between the requests; None without the model's file.
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
    """What was looked at: the machine and perhaps a repository, or a server. The rest is null or empty.

    Attributes:
        subject: ``this machine``, or what was given.
        findings: The worst first.
        processors: Of this machine.
        memory: Of this machine.
        system: Of this machine.
        steadiness: Of the processors, unless it was not measured.
        runtime: ONNX Runtime and GPUs.
        models: Of the repository.
        server: That was asked.
        request: The way of one request to the server.
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
