"""The result of ``ortserve inspect``, as ``--json`` writes it."""

from dataclasses import dataclass

from ortserve.tools.report import Finding


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An input or output.

    Attributes:
        name: Name of the tensor.
        datatype: Datatype in the protocol.
        shape: Sizes; names of free sizes, ``-1`` for free sizes without a name. None if any shape is accepted.
        batch_axis: The axis with the rows; None if it has no rows.
        is_optional: Whether requests may leave it out.
    """

    name: str
    datatype: str
    shape: list[int | str] | None
    batch_axis: int | None
    is_optional: bool


@dataclass(frozen=True, slots=True)
class Weights:
    """The constants of one element type.

    Attributes:
        datatype: The element type, as ONNX names it.
        tensors: The number of tensors.
        parameters: The number of elements.
        nbytes: Their size in bytes; 0 for strings.
    """

    datatype: str
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Content:
    """The content of the file.

    Attributes:
        file_nbytes: Size of the model file, without external files.
        external_nbytes: Sizes of files with weights, by their paths from the model's folder.
        producer: The program that wrote the file.
        opsets: Versions of operator sets by domain.
        operators: Nodes by operator, nested graphs and functions included, most frequent first. Names begin with the
            domain, unless it is ONNX's.
        weights: Constants by element type, the most bytes first.
        initializers_as_inputs: Weights that requests may replace, because they are inputs, too.
    """

    file_nbytes: int
    external_nbytes: dict[str, int]
    producer: str
    opsets: dict[str, int]
    operators: dict[str, int]
    weights: list[Weights]
    initializers_as_inputs: list[str]


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of nodes by a session that has one execution provider, and the CPU for the other nodes.

    Attributes:
        provider: The full name of the execution provider.
        problem: Why there is no session; the other fields are then empty.
        nodes: Number of nodes by provider, as the session reports them: after simplification, before fusions.
        operators: Number of nodes by provider and operator.
        elsewhere: Nodes that other providers run, at most 50 of each.
        copies: Copies between providers that ONNX Runtime inserted; None if the optimized graph cannot be saved.
        fused: Number of nodes that run, after fusions, by operator; None if the optimized graph cannot be saved.
    """

    provider: str
    problem: str
    nodes: dict[str, int]
    operators: dict[str, dict[str, int]]
    elsewhere: str
    copies: list[str] | None
    fused: dict[str, int] | None


@dataclass(frozen=True, slots=True)
class Rows:
    """Whether the rows of a batch are independent.

    Attributes:
        verdict: ``proven`` by the graph, ``tried``, ``configured``, or ``alone``: each request runs alone.
        because: The server's description: the reason, the extent of its trial, and the axes.
        trial: The extent of a trial that inspect made, or how rows differed in it; empty if it made none.
        drift: Largest difference of a float between a row that ran alone and the same row in a batch, in that trial.
        max_rows: The largest useful batch size.
    """

    verdict: str
    because: str
    trial: str
    drift: float | None
    max_rows: int


@dataclass(frozen=True, slots=True)
class Condition:
    """One of the conditions under which a CUDA graph can be captured and replayed.

    Attributes:
        name: A stable name for programs.
        fails_because: Why the condition does not hold; empty if it holds.
        nodes: The first nodes that violate it.
    """

    name: str
    fails_because: str
    nodes: list[str]


@dataclass(frozen=True, slots=True)
class Replay:
    """Whether the runs of a batch size can be replayed as one CUDA graph.

    Attributes:
        source: ``predicted`` from the list of CUDA's kernels, because this machine has no CUDA; ``placed``: from the
            placement of a session on CUDA; ``captured``: from captures of graphs on this machine.
        possible: Whether all conditions hold; if captured, whether replays gave correct outputs.
        captured: Batch sizes that were captured and replayed on this machine.
        conditions: Conditions of ONNX Runtime and of the server, and ``captured`` if a capture was tried.
    """

    source: str
    possible: bool
    captured: list[int]
    conditions: list[Condition]


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """Memory for batches of one size: predicted from batches of 2 and 4 rows, and measured if this size was run.

    Attributes:
        rows: The batch size.
        activations_nbytes: Peak of the memory that nodes request within a run; None for a session without an arena.
        activations_measured_nbytes: This peak, measured by a profile.
        arena_nbytes: Size of ONNX Runtime's arena after such batches and those of all smaller powers of two; None for a
            session without one.
        arena_measured_nbytes: This size, measured by a profile.
        process_nbytes: Growth of the process by the open model and such batches.
        process_measured_nbytes: This growth, measured by the operating system.
    """

    rows: int
    activations_nbytes: int | None
    activations_measured_nbytes: int | None
    arena_nbytes: int | None
    arena_measured_nbytes: int | None
    process_nbytes: int | None
    process_measured_nbytes: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a session on the CPU and its runs, measured in another process.

    Attributes:
        weights_nbytes: Predicted growth of a process that opens the model: its constants after optimization.
        weights_measured_nbytes: This growth, measured after freed memory was returned to the operating system.
        batches: Memory by batch size.
        inputs: A description of the inputs.
        threads: Threads of a run.
        problem: Why figures are missing; empty if none are missing.
    """

    weights_nbytes: int
    weights_measured_nbytes: int | None
    batches: list[BatchMemory]
    inputs: str
    threads: int | None
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectResult:
    """The content of a model, its placement and memory, and its limits.

    Attributes:
        model: Name of the model.
        path: Path of the model file.
        runtime: Version of ONNX Runtime.
        content: The content of the file.
        inputs: Served inputs.
        outputs: Served outputs.
        placement: Placement by each available execution provider.
        rows: Whether rows are independent; None if the model was not run.
        replay: Whether CUDA graphs can be replayed.
        memory: Memory by batch size; None if the model was not run.
        findings: Limits of the model, the worst first.
    """

    schema: str = "ortserve.inspect/1"
    model: str
    path: str
    runtime: str
    content: Content
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    placement: list[Placement]
    rows: Rows | None
    replay: Replay
    memory: Memory | None
    findings: list[Finding]
