"""The trials of ``advice.py``: for each piece of advice the compared arms, the models, and the expected result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import yaml

from advice_arms import Arm
from advice_report import Finding, Result

ALL: Final = ("digits", "encoder", "network")
LARGE: Final = ("encoder", "network")
SIZES: Final = (1, 6, 3, 8, 2)
"""Rows of consecutive runs, for trials with changing shapes."""
MIMALLOC: Final = "libmimalloc.so.2"
"""Library of the Debian package libmimalloc2.0."""
BLOCK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Trial:
    """One piece of advice.

    Attributes:
        advice: The advice, in a sentence.
        expected: The expected result, stated before measuring.
        models: Names of the measured models.
        without: The arm that ignores the advice.
        advised: The arm that follows the advice.
        shows: The reported measures: any of ``speed``, ``cpu``, ``p95``, ``memory``, ``open``, ``threads``.
        least_cosine: Minimum cosine similarity between the outputs of both arms.
        block_s: Duration of a block of runs in seconds.
    """

    advice: str
    expected: str
    models: Sequence[str]
    without: Arm
    advised: Arm
    shows: Sequence[str] = ("speed",)
    least_cosine: float = 0.9999
    block_s: float = BLOCK_S


@dataclass(frozen=True, slots=True)
class CallersTrial:
    """One piece of advice about concurrent requests: two configurations under 16 callers in a closed loop."""

    advice: str
    expected: str
    models: Sequence[str]
    without: Mapping[str, Any]
    advised: Mapping[str, Any]
    shows: Sequence[str] = ("rate",)


def session(**settings: Any) -> dict[str, Any]:
    return {"session": settings}


def entry(name: str, value: str | int) -> dict[str, Any]:
    return session(entries={name: value})


def two_threads(**settings: Any) -> dict[str, Any]:
    return {"intra_op_threads": 2, "session": settings}


DEFAULT: Final = Arm()
OPENS: Final = 4
THREE: Final = Arm(copies=3)

TRIALS: Final[Mapping[str, Trial | CallersTrial]] = {
    "noise": Trial("Nothing: both arms are the same.", "1.0", ALL, DEFAULT, DEFAULT, ("speed", "memory")),
    # Graph
    "graph-all": Trial(
        "Optimize the graph fully, the default, instead of not at all.",
        "1.1 for the encoder, 1.3 for the network",
        ALL,
        Arm(session(graph_optimization="none")),
        DEFAULT,
    ),
    "graph-extended": Trial(
        "Optimize fully instead of at the level `extended`, which changes no layouts.",
        "1.0 for the encoder, 1.1 for the network",
        ALL,
        Arm(session(graph_optimization="extended")),
        DEFAULT,
    ),
    "optimized-file": Trial(
        "Save the optimized model, and open that without optimizing.",
        "opening in half the time; the same speed",
        ALL,
        Arm(opens=OPENS),
        Arm(session(graph_optimization="none"), variant="optimized", opens=OPENS),
        ("open", "speed"),
    ),
    "constant-weights": Trial(
        "Remove weights from the inputs of the graph, so that they are constants.",
        "1.2, as weights that are inputs cannot be folded, fused or packed",
        ALL,
        Arm(variant="weights are inputs"),
        Arm(variant="weights are constants"),
    ),
    "fused-attention": Trial(
        "Fuse attention by a tool before ONNX Runtime opens the model.",
        "1.02 to 1.09",
        ["encoder"],
        DEFAULT,
        Arm(variant="fused attention"),
    ),
    "gelu-approximation": Trial(
        "Approximate GELU.",
        "1.0 on CPUs",
        ["encoder"],
        DEFAULT,
        Arm(entry("optimization.enable_gelu_approximation", 1)),
        least_cosine=0.999,
    ),
    "fixed-dimensions": Trial(
        "Fix the sizes of free dimensions.",
        "1.0; fewer nodes are fused where all sizes are known",
        ["digits", "bert", "network"],
        DEFAULT,
        Arm(session(free_dimensions={"batch": 1})),
    ),
    # Precision
    "int8-dynamic": Trial(
        "Quantize weights to int8 and activations as they come, per channel.",
        "2.5 with VNNI, 1.5 without",
        ["encoder"],
        DEFAULT,
        Arm(variant="dynamic int8"),
        ("speed", "memory"),
        0.9,
    ),
    "int8-static": Trial(
        "Quantize weights to QInt8 and activations to QUInt8 with ranges from 16 samples, per channel.",
        "2.6 for the network with VNNI, 1.5 without",
        LARGE,
        DEFAULT,
        Arm(variant="static int8"),
        ("speed", "memory"),
        0.3,
    ),
    "int8-activations": Trial(
        "QInt8 activations, the default of the library, instead of QUInt8.",
        "0.4 to 0.6 on x86",
        ["network"],
        Arm(variant="static int8"),
        Arm(variant="static int8 with int8 activations"),
        least_cosine=0.5,
    ),
    "int4-weights": Trial(
        "Quantize only weights, to 4 bits.",
        "memory 0.6; 1.0 for 32 tokens at a time",
        ["encoder"],
        DEFAULT,
        Arm(variant="int4 weights"),
        ("speed", "memory"),
        0.9,
    ),
    "half": Trial(
        "Convert to FP16 on a CPU.",
        "below 1: nodes run in FP32 between casts; half of the file",
        LARGE,
        DEFAULT,
        Arm(variant="FP16"),
        ("speed", "memory"),
        0.999,
    ),
    # Threads
    "two-threads": Trial(
        "Two threads for a run instead of one, on two processors.",
        "0.7 to 2 by model; never for digits",
        ALL,
        DEFAULT,
        Arm(two_threads()),
        ("speed", "cpu"),
    ),
    "two-threads-batch": Trial(
        "Two threads for a run of 8 rows.",
        "1.6 to 1.9",
        LARGE,
        Arm(rows=(8,)),
        Arm(two_threads(), rows=(8,)),
        ("speed", "cpu"),
    ),
    "no-spinning": Trial(
        "Let the two threads block instead of spin, in runs one after another.",
        "0.9 of the speed for 0.7 of the CPU time",
        ALL,
        Arm(two_threads(spinning=True)),
        Arm(two_threads()),
        ("speed", "cpu"),
    ),
    "no-spinning-with-pauses": Trial(
        "The same with a pause of 20 ms before each run.",
        "CPU time a fifth or less",
        ALL,
        Arm(two_threads(spinning=True), pause_ms=20),
        Arm(two_threads(), pause_ms=20),
        ("speed", "cpu"),
        block_s=0.2,
    ),
    "bounded-spinning": Trial(
        "Spin for at most 200 µs instead of without a bound, with a pause of 20 ms before each run.",
        "CPU time near that of no spinning, at the speed of spinning",
        ALL,
        Arm(two_threads(spinning=True), pause_ms=20),
        Arm(two_threads(spinning=True, entries={"session.intra_op.spin_duration_us": 200}), pause_ms=20),
        ("speed", "cpu"),
        block_s=0.2,
    ),
    "affinity": Trial(
        "Pin the second thread to the second processor.",
        "1.0 on an idle machine with one NUMA node",
        LARGE,
        Arm(two_threads()),
        Arm(two_threads(thread_affinities="2")),
    ),
    "parallel-mode": Trial(
        "Run branches of the graph in parallel, on two threads.",
        "0.5 for the encoder, 1.0 for the network",
        LARGE,
        DEFAULT,
        Arm(session(execution_mode="parallel", inter_op_threads=2)),
        ("speed", "cpu"),
    ),
    "block-base": Trial(
        "Divide work into blocks of decreasing size, beside another busy process, with two threads.",
        "a lower 95th percentile, within the noise on two processors",
        LARGE,
        Arm(two_threads(), beside_busy=True),
        Arm(two_threads(dynamic_block_base=4), beside_busy=True),
        ("speed", "p95"),
        block_s=0.5,
    ),
    "global-threads": Trial(
        "One thread pool for three models (`--global-threads`), with two threads.",
        "2 threads less; slower, as the shared pool always spins",
        ["digits", "encoder"],
        Arm(two_threads(), copies=3),
        Arm(two_threads(), copies=3, has_global_threads=True),
        ("threads", "speed", "cpu"),
    ),
    "instances": CallersTrial(
        "Two instances of one thread instead of one of two threads, under 16 callers.",
        "1.0 to 1.2",
        ("digits", "encoder"),
        {"intra_op_threads": 2},
        {"instances": 2, "intra_op_threads": 1},
    ),
    # Memory
    "shared-arena": Trial(
        "One memory arena for three sessions that run in turns, of 1 to 8 rows.",
        "memory 0.7",
        LARGE,
        replace(THREE, rows=SIZES),
        replace(THREE, options=session(shared_arena=True), rows=SIZES),
        ("memory", "speed"),
    ),
    "arena-growth": Trial(
        "Have that arena grow by what is requested (`kSameAsRequested`) instead of by powers of two.",
        "less memory, according to the guides",
        LARGE,
        replace(THREE, options=session(shared_arena=True), rows=SIZES),
        replace(THREE, options=session(shared_arena=True), rows=SIZES, same_as_requested=True),
        ("memory", "speed"),
    ),
    "arena-off": Trial(
        "No memory arena, in runs of 1 to 8 rows.",
        "less memory, 0.95 of the speed",
        LARGE,
        Arm(rows=SIZES),
        Arm(session(memory_arena=False), rows=SIZES),
        ("memory", "speed"),
    ),
    "arena-shrinking": Trial(
        "Return the arena's unused memory after each run of 1 to 8 rows.",
        "less memory, 0.9 of the speed",
        LARGE,
        Arm(rows=SIZES),
        Arm(session(shrink_arenas=["cpu:0"]), rows=SIZES),
        ("memory", "speed"),
    ),
    "memory-pattern": Trial(
        "Plan the memory of a run, in runs of 1 to 8 rows.",
        "1.0; more memory by number of shapes",
        LARGE,
        Arm(session(memory_pattern=False), rows=SIZES),
        Arm(session(memory_pattern=True), rows=SIZES),
        ("memory", "speed"),
    ),
    "mimalloc": Trial(
        "mimalloc instead of glibc's allocator, by LD_PRELOAD, in runs of 1 to 8 rows.",
        "1.0 with the arena",
        LARGE,
        Arm(rows=SIZES),
        Arm(rows=SIZES, environment={"LD_PRELOAD": MIMALLOC}),
        ("memory", "speed"),
    ),
    "mimalloc-without-arena": Trial(
        "The same without ONNX Runtime's arena.",
        "1.1",
        LARGE,
        Arm(session(memory_arena=False), rows=SIZES),
        Arm(session(memory_arena=False), rows=SIZES, environment={"LD_PRELOAD": MIMALLOC}),
        ("memory", "speed"),
    ),
    "malloc-arenas": Trial(
        "At most two arenas of glibc's allocator, four threads calling, without ONNX Runtime's arena.",
        "less memory",
        LARGE,
        Arm(session(memory_arena=False), callers=4, rows=SIZES),
        Arm(session(memory_arena=False), callers=4, rows=SIZES, environment={"MALLOC_ARENA_MAX": "2"}),
        ("memory", "speed"),
    ),
    "external-weights": Trial(
        "Weights in a file beside the model.",
        "less memory while opening; opening in 0.8 of the time",
        LARGE,
        Arm(opens=OPENS),
        Arm(variant="external weights", opens=OPENS),
        ("open", "memory"),
    ),
    "shared-weights": Trial(
        "Three sessions that map external weights as they are, without prepacking.",
        "a third of the memory; slower, as weights are packed in each run",
        LARGE,
        replace(THREE, variant="external weights"),
        replace(THREE, options=entry("session.disable_prepacking", 1), variant="external weights"),
        ("memory", "speed"),
    ),
    "no-prepacking": Trial(
        "No prepacking of a model in int8.",
        "0.4",
        ["encoder"],
        Arm(variant="dynamic int8"),
        Arm(entry("session.disable_prepacking", 1), variant="dynamic int8"),
        ("speed", "memory"),
    ),
    "denormals": Trial(
        "Treat denormal numbers as 0, with inputs that make them.",
        "2 or more",
        ["dense"],
        Arm(scale=1e-39),
        Arm(session(denormal_as_zero=True), scale=1e-39),
    ),
    # Batching and IO
    "bound": Trial(
        "Bind inputs and outputs to memory, as the server does where shapes allow.",
        "1.1 for digits, 1.0 for long runs",
        ALL,
        DEFAULT,
        Arm(is_bound=True),
    ),
    "batching": CallersTrial(
        "Let requests share batches, the default, under 16 callers.",
        "4 for digits, 1.0 to 1.5 for models that keep a processor busy with one row",
        ("digits", "encoder"),
        {"batched": False, "intra_op_threads": 1},
        {"intra_op_threads": 1},
    ),
    "fixed-delay": CallersTrial(
        "Wait 5 ms for more requests before each batch, under 16 callers.",
        "0.9 to 1.0; much less for digits",
        ("digits", "encoder"),
        {"intra_op_threads": 1},
        {"intra_op_threads": 1, "queue_delay_s": 0.005},
    ),
}


def described(arm: Arm, other: Arm) -> str:
    """Describe the difference between an arm and another one."""
    parts = []
    if arm.options != other.options and arm.options:
        parts.append(f"`{flow(arm.options)}`")
    if arm.variant != other.variant:
        parts.append("the source file" if arm.variant == "source" else arm.variant)
    if arm.environment != other.environment:
        parts += [f"`{name}={value}`" for name, value in arm.environment.items()]
    for field in fields(Arm):
        if field.type == "bool" or isinstance(field.default, bool):
            parts += [field.name.replace("_", " ")] if getattr(arm, field.name) > getattr(other, field.name) else []
    return ", ".join(parts) or "defaults"


def flow(options: Mapping[str, Any]) -> str:
    """Options as YAML on one line."""
    text = yaml.safe_dump(dict(options), default_flow_style=True, sort_keys=False, width=10_000)
    return text.strip().removeprefix("{").removesuffix("}").replace(", session: {}", "")


def finding(key: str, trial: Trial | CallersTrial, results: Mapping[str, Result]) -> Finding:
    if isinstance(trial, Trial):
        texts = described(trial.without, trial.advised), described(trial.advised, trial.without)
    else:
        texts = f"`{flow(trial.without)}`", f"`{flow(trial.advised)}`"
    return Finding(trial.advice, key.replace("-", " "), *texts, trial.expected, tuple(trial.shows), results)
