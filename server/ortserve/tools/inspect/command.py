"""``ortserve inspect``: what a model contains, how it would run here, and what limits it."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import onnxruntime as ort

from ortserve.core.signature import ModelSignature
from ortserve.engine.bounded_time import why_unbounded
from ortserve.engine.provider_options import CPU, CUDA
from ortserve.engine.providers import check_names, full_name
from ortserve.errors import ServeError
from ortserve.model_file.graph import Model
from ortserve.registry.load.row_axes import Grounds, RowAxes
from ortserve.tools.command import Outcome, status_of
from ortserve.tools.console import ShowProgress, progress
from ortserve.tools.inputs import read_inputs
from ortserve.tools.inspect.content import count_weights, describe_content, describe_tensors
from ortserve.tools.inspect.findings import Evidence, find_all
from ortserve.tools.inspect.memory import measure_memory
from ortserve.tools.inspect.placement import describe_placement, open_optimized, place, providers_here
from ortserve.tools.inspect.replay import judge_replay, predict_replay, with_captures
from ortserve.tools.inspect.result import InspectResult, Memory, Rows
from ortserve.tools.inspect.rows import load_and_try
from ortserve.tools.report import Block, Findings, Report, Table, facts_of, table_of
from ortserve.tools.subject import Subject, find_model

_MAX_ROWS: Final = 20
_ABOUT_NODES: Final = "Nodes as sessions report them: after simplification, before fusions."
_ABOUT_MEMORY: Final = (
    "Memory on the CPU. Predictions come from batches of 2 and 4 rows: activations and process grow linearly, and "
    "the arena doubles its extensions. The process includes the weights. Another process measures: ONNX Runtime's "
    "profile shows activations (peak of the memory that nodes request) and arena, the operating system shows the "
    "private memory of the process."
)


def run(given: argparse.Namespace) -> Outcome:
    """Inspect a model.

    Raises:
        ServeError: The file is no model, is incomplete, or is refused by ONNX Runtime.
    """
    ort.set_default_logger_severity(4)  # the errors of providers contain what they log at start
    with progress("reading the model") as step:
        result = _inspect(given, step)
    report = Report(f"{result.model}: {result.path}", tuple(_blocks(result)))
    return Outcome(result, report, status_of(result.findings, given.fail_on))


def _inspect(given: argparse.Namespace, step: ShowProgress) -> InspectResult:
    subject = _with_providers(find_model(given.model), given.provider)
    settings = subject.options.session
    step(0, "opening the model on the CPU")
    opened, optimized = open_optimized(subject, "cpu")
    signature = opened.signature
    if given.inputs is not None:
        read_inputs(given.inputs, signature)
    content = describe_content(opened)
    placed = {CPU: (describe_placement(opened, optimized), optimized)}
    axes, unbounded = opened.rows, why_unbounded(opened.graph, signature)
    del opened  # frees the memory of its weights
    _, simplified = open_optimized(subject, "cpu", level="basic")
    for name in providers_here(subject):
        if name != CPU:
            step(0, f"opening the model on {name}")
            placed[name] = place(subject, name)
    on_cuda, cuda_graph = placed.get(CUDA, (None, simplified))
    has_cuda = on_cuda is not None and not on_cuda.problem
    rows, seen, memory, loaded = None, "", None, None
    if not given.no_run:
        rows, seen, loaded = load_and_try(subject, step, captures=has_cuda)
        memory = _memory(given, subject, optimized.model, step)
    alone_because = _why_alone(signature, axes, rows)
    alone = f"requests run one at a time, and only batches have buffers: {alone_because}" if alone_because else ""
    shapes_vary = alone or unbounded
    if on_cuda is not None and has_cuda:
        replay = judge_replay(cuda_graph.model, settings, shapes_vary, on_cuda)
        replay = with_captures(replay, loaded) if loaded is not None else replay
    else:
        replay = predict_replay(simplified.model, settings, shapes_vary)
    placement = [one for one, _ in placed.values()]
    inputs, outputs = describe_tensors(signature.inputs), describe_tensors(signature.outputs)
    doubt = axes.doubt if axes.grounds is Grounds.CONFIGURED and axes.is_mixed else ""
    evidence = Evidence(
        subject,
        content,
        inputs,
        optimized,
        simplified,
        placement,
        alone_because="" if axes.is_disabled else alone_because,
        lacks_rows=_lacks_rows(signature),
        # Only the model itself can keep joined requests apart.
        overruled="" if subject.options.is_ragged else "; ".join(filter(None, (doubt, seen))),
    )
    return InspectResult(
        model=subject.name,
        path=str(subject.path),
        runtime=ort.__version__,
        content=content,
        inputs=inputs,
        outputs=outputs,
        placement=placement,
        rows=rows,
        replay=replay,
        memory=memory,
        findings=find_all(evidence),
    )


def _with_providers(subject: Subject, names: Sequence[str]) -> Subject:
    """Put execution providers before the configured ones.

    Raises:
        ServeError: invalid_input, for an unknown name.
    """
    check_names(names, "--provider")
    first = {full_name(name): name for name in names}
    others = [wish for wish in subject.options.execution_providers if full_name(wish) not in first]
    options = subject.options.model_copy(update={"execution_providers": (*first.values(), *others)})
    return replace(subject, options=options)


def _why_alone(signature: ModelSignature, axes: RowAxes, rows: Rows | None) -> str:
    """Why requests run one at a time, as far as possible in the words of a load; empty if they share batches."""
    if rows is not None and rows.verdict == "alone":
        return rows.because
    reason = signature.unbatched_because or axes.known_dependence
    return f"not batched because {reason}" if reason else ""


def _lacks_rows(signature: ModelSignature) -> bool:
    """Whether requests run one at a time because the first dimension of an input or output is missing or fixed."""
    tensors = [replace(spec, batch_axis=0) for spec in (*signature.inputs, *signature.outputs)]
    return not signature.is_batched and (not signature.inputs or any(spec.why_no_rows("") for spec in tensors))


def _memory(given: argparse.Namespace, subject: Subject, graph: Model, step: ShowProgress) -> Memory:
    weights = sum(one.nbytes for one in count_weights(graph))
    step(0, "measuring memory in another process")
    try:
        return measure_memory(subject, given.inputs, sorted({*given.batch}), weights, given.seconds)
    except ServeError as error:
        if given.inputs is not None:
            raise
        return Memory(weights, None, [], inputs="", threads=None, problem=error.message)


def _blocks(result: InspectResult) -> Iterator[Block]:
    """The report, with the findings first."""
    yield Findings(result.findings)
    yield facts_of("Content", result.content, without=("operators", "weights"))
    yield table_of("Inputs", result.inputs, max_rows=_MAX_ROWS)
    yield table_of("Outputs", result.outputs, max_rows=_MAX_ROWS)
    yield _counts("Operators", result.content.operators)
    yield table_of("Weights", result.content.weights)
    title = f"Execution providers of ONNX Runtime {result.runtime}"
    yield table_of(title, result.placement, without=("operators", "fused"), note=_ABOUT_NODES)
    for one in result.placement:
        if one.fused:
            yield _counts(f"Operators after fusions, {one.provider}", one.fused)
    if result.rows is not None:
        yield facts_of("Rows of a batch", result.rows)
    yield facts_of("CUDA graphs", result.replay, without=("conditions",))
    yield table_of("Conditions of CUDA graphs", result.replay.conditions)
    if result.memory is not None:
        yield facts_of("Memory", result.memory, without=("batches",))
        yield table_of("Memory by batch size", result.memory.batches, note=_ABOUT_MEMORY)


def _counts(title: str, operators: dict[str, int]) -> Table:
    return Table(title, ["operator", "nodes"], list(operators.items()), max_rows=_MAX_ROWS)
