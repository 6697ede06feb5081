"""The result of ``ortserve tune``: what ``--json`` prints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ortserve.tools.statistics import Estimate

State: TypeAlias = Literal["measured", "pruned", "failed"]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a configuration under the load of its trial: medians of its rounds.

    Beside a ratio, the figure that the ratio compares is that of the current configuration, times the ratio.

    Attributes:
        throughput_per_s: Requests per second within the bound, from ramps; null for other objectives.
        p50_ms: Median latency; in ramps, of the requests in their first half.
        tail_ms: The percentile of the search, of the same latencies.
        cpu_ms: Processor time of the process per answer.
        memory_nbytes: Resident memory of the process, with the load generator in it.
        error: The largest error of an output, relative to its largest element.
    """

    throughput_per_s: float | None
    p50_ms: float
    tail_ms: float
    cpu_ms: float
    memory_nbytes: int
    error: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A configuration that was tried.

    Attributes:
        number: Position in the order of trials; 0 for the current configuration.
        changes: Keys of model.yaml that differ from the current configuration, with their values.
        state: ``measured``; ``pruned``, ended early because a gain was no longer possible or the time was over;
            ``failed``, because of wrong outputs, a missed bound, or a model that does not run.
        why: Why it failed, or that it was pruned because the time was over; else empty.
        ratio: How many times as good as the current configuration it is by the objective, from alternate rounds; null
            if it failed.
        pairs: The number of pairs of rounds.
        figures: Figures of the configuration; null if it was not measured to the end.
        is_on_front: Whether no other trial beats it in both latency and objective.
    """

    number: int
    changes: Mapping[str, Any]
    state: State
    why: str
    ratio: Estimate | None
    pairs: int
    figures: Figures | None
    is_on_front: bool = False


@dataclass(frozen=True, slots=True)
class KeyGain:
    """The gain of one decision of the best configuration.

    Attributes:
        parameter: Name of the parameter.
        changes: Its keys and their values.
        ratio: How many times as good the configuration is with the decision as without it; null if not measured.
        is_kept: Whether the decision is part of the result.
    """

    parameter: str
    changes: Mapping[str, Any]
    ratio: Estimate | None
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The comparison of the best configuration with the current one, in new processes and alternate rounds.

    Attributes:
        ratio: How many times as good the best configuration is by the objective.
        pairs: The number of pairs of rounds.
        current: Figures of the current configuration.
        best: Figures of the best configuration.
        current_per_s: Highest constant rate of the current configuration with the percentile within the bound; null if
            not found, and for other objectives than throughput.
        best_per_s: The same rate of the best configuration.
    """

    ratio: Estimate
    pairs: int
    current: Figures
    best: Figures
    current_per_s: float | None = None
    best_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """Another version of the model, measured with the same configuration. ``model.yaml`` cannot choose it for trials.

    Attributes:
        version: Number of the version.
        commands: The commands that made it.
        ratio: How many times as good as the tuned version it is, with the same configuration; null if not compared.
        error: The largest error of an output, relative to its largest element, against the tuned version.
        why: Why it was not compared or misses the bound; else empty.
    """

    version: int
    commands: tuple[str, ...]
    ratio: Estimate | None
    error: float | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The result of a search for the best configuration.

    Attributes:
        schema: Name and number of this schema.
        version: Version of ortserve.
        model: The model as given.
        model_version: Version of the model; null for a single file.
        objective: The objective: throughput, latency, cost or memory.
        slo_ms: The latency bound; null without one.
        percentile: The percentile of the latency that the bound is for.
        rate_per_s: Rate that each configuration was offered; null for the objective throughput, whose ramps search it.
        machine: The processors of the machine and its load.
        inputs: A description of the inputs.
        seconds: Duration of the search.
        noise: The current configuration compared with itself, in two processes; real differences exceed this. Null if
            it answers nothing within the bound.
        is_too_noisy: Whether the figures varied so much that the search can have missed small gains.
        conclusion: The result in a sentence.
        has_gain: Whether a configuration was confirmed to be better.
        confirmation: Comparison of the best configuration with the current one; null if no trial was better.
        gains: Gains of the decisions of the best configuration.
        yaml: The keys for model.yaml; empty without a gain.
        written: The file that the keys were written to; empty if none was.
        why_not_written: Why the keys were not written; empty if they were.
        trials: All trials, with those of the search that this one continued.
        variants: Other versions, with ``--variants``.
    """

    schema: Literal["ortserve.tune/1"] = "ortserve.tune/1"
    version: str
    model: str
    model_version: int | None
    objective: str
    slo_ms: float | None
    percentile: float
    rate_per_s: float | None
    machine: str
    inputs: str
    seconds: float
    noise: Estimate | None
    is_too_noisy: bool
    conclusion: str
    has_gain: bool
    confirmation: Confirmation | None
    gains: tuple[KeyGain, ...]
    yaml: str
    written: str
    why_not_written: str
    trials: tuple[Trial, ...]
    variants: tuple[Variant, ...]
