"""``ortserve inspect``: what a model contains, how it would run here, and what limits it."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnxruntime as ort

from ortserve.engine.provider_options import CPU, CUDA
from ortserve.engine.providers import full_name
from ortserve.errors import ServeError
from ortserve.model_file.graph import Model
from ortserve.tools.command import FAILED, OK, Outcome, ToolParser, run_tool
from ortserve.tools.console import Step, progress
from ortserve.tools.inputs import read_inputs
from ortserve.tools.inspect.content import count_weights, describe_content, describe_tensors, read_file
from ortserve.tools.inspect.findings import LEVELS, Evidence, find_all
from ortserve.tools.inspect.memory import FIRST_SIZES, describe_memory, measure_memory
from ortserve.tools.inspect.placement import describe_placement, open_optimized, place, providers_here
from ortserve.tools.inspect.presentation import present
from ortserve.tools.inspect.replay import Serving, judge_replay, predict_replay, with_captures
from ortserve.tools.inspect.result import Figure, InspectResult, Memory
from ortserve.tools.inspect.rows import load_and_try
from ortserve.tools.subject import Subject, find_model


def build_parser() -> ToolParser:
    """The arguments."""
    parser = ToolParser("inspect", "Show what a model contains, how it would run here, and what limits it.")
    parser.add_argument("model", metavar="MODEL", help="model.onnx, or REPOSITORY/name[/version]")
    parser.add_argument("--inputs", type=Path, metavar="DATA.npz", help="Samples for the measurement of memory.")
    parser.add_argument(
        "--batch", type=_sizes, default=(1, 8, 32), metavar="1,8,32", help="Batch sizes whose memory is shown."
    )
    parser.add_argument(
        "--provider",
        action="append",
        default=[],
        metavar="NAME",
        help="Prefer this execution provider to the configured ones, such as cuda; may be repeated.",
    )
    parser.add_argument(
        "--no-run", action="store_true", help="Only read and open the model: no trial of rows, no measured memory."
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=30.0, metavar="30", help="Longest time for the runs that measure memory."
    )
    parser.add_argument(
        "--fail-on", choices=LEVELS, metavar="LEVEL", help="Exit with 1 for findings of this level or a worse one: "
        "problem, warning, advice."
    )  # fmt: skip
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    ort.set_default_logger_severity(4)  # what providers say while they start comes with their errors
    logging.getLogger("ortserve").addHandler(
        logging.NullHandler()
    )  # warnings of the load are findings or properties here
    return run_tool("inspect", inspect, build_parser().parse_args(arguments))


def inspect(arguments: argparse.Namespace) -> Outcome:
    """Inspect a model.

    Raises:
        ServeError: The file is no model, is incomplete, or ONNX Runtime refuses it.
    """
    with progress("reading the model") as step:
        result = _inspect(arguments, step)
    limit = LEVELS.index(arguments.fail_on) if arguments.fail_on else -1
    is_bad = any(LEVELS.index(finding.level) <= limit for finding in result.findings)
    return Outcome(result, present(result), FAILED if is_bad else OK)


def _inspect(arguments: argparse.Namespace, step: Step) -> InspectResult:
    subject = _with_providers(find_model(arguments.model), arguments.provider)
    wishes = [full_name(name) for name in subject.options.execution_providers]
    model = read_file(subject.path)
    step(0, "opening the model on the CPU")
    opened, optimized = open_optimized(subject, "cpu")
    signature = opened.signature
    if arguments.inputs is not None:
        read_inputs(arguments.inputs, signature)
    content = describe_content(subject.path, model, opened.session)
    placed = {CPU: (describe_placement(opened, optimized), optimized)}
    alone_because = signature.unbatched_because or opened.rows.known_dependence or ""
    del opened  # its weights take memory
    _, simplified = open_optimized(subject, "cpu", level="basic")
    for name in providers_here(wishes):
        if name != CPU:
            step(0, f"opening the model on {name}")
            placed[name] = place(subject, name)
    rows, memory, loaded = None, None, None
    has_cuda = CUDA in placed and not placed[CUDA][0].problem
    if not arguments.no_run:
        rows, loaded = load_and_try(subject, step, captures=has_cuda)
        alone_because = rows.because if rows.verdict == "alone" else alone_because
        memory = _memory(arguments, subject, optimized.model, signature.is_batched, step)
    serving = Serving(model, signature, subject.options.session, alone_because)
    if has_cuda:
        on_cuda, graph = placed[CUDA]
        replay = judge_replay(serving, on_cuda, graph.model)
        replay = with_captures(replay, loaded) if loaded is not None else replay
    else:
        replay = predict_replay(serving, simplified.model)
    placement = [one for one, _ in placed.values()]
    level = subject.options.session.graph_optimization
    evidence = Evidence(str(subject.path), model, content, optimized, simplified, level, placement, rows, wishes)
    return InspectResult(
        model=subject.name,
        path=str(subject.path),
        runtime=ort.__version__,
        content=content,
        inputs=describe_tensors(signature.inputs),
        outputs=describe_tensors(signature.outputs),
        placement=placement,
        rows=rows,
        replay=replay,
        memory=memory,
        findings=find_all(evidence),
    )


def _with_providers(subject: Subject, names: Sequence[str]) -> Subject:
    """The model with these execution providers before the configured ones."""
    first = {full_name(name): name for name in names}
    others = [wish for wish in subject.options.execution_providers if full_name(wish) not in first]
    options = subject.options.model_copy(update={"execution_providers": (*first.values(), *others)})
    return replace(subject, options=options)


def _memory(arguments: argparse.Namespace, subject: Subject, graph: Model, is_batched: bool, step: Step) -> Memory:
    shown: tuple[int, ...] = arguments.batch if is_batched else (1,)
    sizes = sorted({*shown, *(FIRST_SIZES if is_batched else ())})
    weights = sum(one.nbytes for one in count_weights(graph))
    step(0, "measuring memory in another process")
    try:
        return describe_memory(measure_memory(subject, arguments.inputs, sizes, arguments.seconds), weights, shown)
    except ServeError as error:
        if arguments.inputs is not None:
            raise
        return Memory(Figure(weights, None), [], "", 0, error.message)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1 or sizes[-1] > 1 << 20:
        raise argparse.ArgumentTypeError(f"expected batch sizes such as 1,8,32, got {text!r}")
    return tuple(sizes)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 to 3600, got {text!r}")
    return seconds
