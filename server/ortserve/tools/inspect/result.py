"""The result of ``ortserve inspect``, as ``--json`` writes it."""

from dataclasses import dataclass

from ortserve.tools.report import Finding


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An input or output.

    Attributes:
        name: Its name.
        datatype: As the protocol names it.
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
class OperatorCount:
    """How often an operator occurs, nested graphs and functions included.

    Attributes:
        domain: ``ai.onnx`` for operators of ONNX.
        operator: Its name.
        nodes: The number of nodes.
    """

    domain: str
    operator: str
    nodes: int


@dataclass(frozen=True, slots=True)
class Weights:
    """The constants of one element type.

    Attributes:
        datatype: The element type, as ONNX names it.
        tensors: The number of tensors.
        parameters: The number of elements.
        nbytes: Their size; 0 for texts.
    """

    datatype: str
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExternalFile:
    """A file with weights beside the model.

    Attributes:
        name: Its path from the model's folder.
        nbytes: Its size.
    """

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Content:
    """The content of the file.

    Attributes:
        nbytes: Size of the model file, without external files.
        ir_version: Version of the file format.
        producer: The program that wrote the file, with its version.
        opsets: Versions of operator sets by domain.
        functions: The number of functions of the model's own.
        nodes: The number of nodes, nested graphs and functions included.
        operators: The same by operator, most frequent first.
        parameters: Elements of constants that are not texts.
        weights: Constants by element type, the most bytes first.
        weights_nbytes: Bytes of all constants.
        external_files: Files with weights.
        free_dimensions: The axes of inputs that have a free size, by its name, as ``input[axis]``.
        initializers_as_inputs: Weights that requests may replace, because they are inputs, too.
    """

    nbytes: int
    ir_version: int
    producer: str
    opsets: dict[str, int]
    functions: int
    nodes: int
    operators: list[OperatorCount]
    parameters: int
    weights: list[Weights]
    weights_nbytes: int
    external_files: list[ExternalFile]
    free_dimensions: dict[str, list[str]]
    initializers_as_inputs: list[str]


@dataclass(frozen=True, slots=True)
class Placement:
    """What a session does that has one execution provider, with the CPU behind it.

    Attributes:
        provider: The full name of the execution provider.
        problem: Why there is no session; then the other fields are empty.
        nodes: Nodes by provider, as the session reports them: after simplification, before fusions.
        operators: The same by provider and operator.
        elsewhere: Nodes that other providers run, at most 50 of each.
        copies: Copies between providers that ONNX Runtime inserted; None if the optimized graph cannot be saved.
        fused: Nodes that run, after fusions, by operator; None as before.
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
        because: The server's description: why, how much was tried, on which axes.
        drift: Largest difference of a float between a row alone and the same row among others, in a trial made here;
            None without a trial.
        tried: The extent of that trial in words, or how rows differed in it.
        max_rows: The largest batch that is worth having.
        event_loop: Why runs never happen on the event loop; empty if short ones do.
    """

    verdict: str
    because: str
    drift: float | None
    tried: str
    max_rows: int
    event_loop: str


@dataclass(frozen=True, slots=True)
class Condition:
    """One of the conditions under which a CUDA graph can be captured and replayed.

    Attributes:
        name: A stable name for programs.
        holds: Whether it holds.
        because: Why not; empty if it holds.
        nodes: The first nodes at which it fails.
    """

    name: str
    holds: bool
    because: str
    nodes: list[str]


@dataclass(frozen=True, slots=True)
class Replay:
    """Whether the runs of a batch size can be replayed as one CUDA graph.

    Attributes:
        provider: The execution provider that would capture.
        source: ``session``: its placement is known. ``graph``: the provider is not here, and the list of its kernels
            stands in for it. ``capture``: graphs were captured here.
        possible: Whether all conditions hold; if captured, whether all replays gave the right outputs.
        captured: Batch sizes that were captured and replayed here.
        because: Why not, in the words of the loader; empty if possible.
        conditions: ONNX Runtime's conditions and ours.
    """

    provider: str
    source: str
    possible: bool
    captured: list[int]
    because: str
    conditions: list[Condition]


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """Memory of batches of one size, in bytes. Measured figures are None for sizes that were only predicted.

    Attributes:
        rows: The size.
        activations: Predicted peak of tensors and scratch space within a run.
        activations_measured: The same from a profile.
        arena: Predicted size of ONNX Runtime's arena after such batches; None for a session without an arena.
        arena_measured: The same from a profile.
        process: Predicted growth of the process by the open model and such batches.
        process_measured: The same from the operating system.
    """

    rows: int
    activations: int | None
    activations_measured: int | None
    arena: int | None
    arena_measured: int | None
    process: int
    process_measured: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a session on the CPU and its runs, measured in another process.

    Attributes:
        weights: Predicted growth of a process that opens the model: the bytes of its constants after optimization.
        weights_measured: The same from the operating system, after freed memory was returned to it.
        opening_peak: The largest growth while the model was opened.
        batches: By batch size.
        inputs: Where the inputs came from.
        threads: Threads of a run.
        problem: Why figures are missing; empty if none is.
    """

    weights: int
    weights_measured: int | None
    opening_peak: int | None
    batches: list[BatchMemory]
    inputs: str
    threads: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectResult:
    """What a model contains, how it would run, and what limits it.

    Attributes:
        model: Its name.
        path: The file.
        runtime: Version of ONNX Runtime.
        content: The content of the file.
        inputs: Served inputs.
        outputs: Served outputs.
        placement: For each execution provider that is here.
        rows: Whether rows are independent. None if the model was not run.
        replay: Whether CUDA graphs can be replayed.
        memory: By batch size. None if the model was not run.
        findings: What limits the model, the worst first.
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
    replay: list[Replay]
    memory: Memory | None
    findings: list[Finding]
