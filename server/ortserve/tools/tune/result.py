"""The result of ``ortserve tune``: what ``--json`` prints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ortserve.tools.bench.statistics import Estimate

State: TypeAlias = Literal["measured", "pruned", "failed"]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a configuration does under the load of its trial: medians of its rounds.

    Attributes:
        throughput_per_s: Requests per second within the bound, as a ramp finds it; null for other objectives.
        p50_ms: Of the latency at the rate of the search: of ramps in their first half.
        tail_ms: The percentile of the latency, likewise.
        cpu_ms: Processor time of the process for an answer.
        memory_nbytes: Of the process, with the load generator in it.
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
        number: In the order of trials; 0 for the current configuration.
        changes: Of keys of model.yaml, against the current configuration.
        state: ``measured``; ``pruned``, stopped early because a gain was no longer possible; ``failed``, with wrong
            outputs, above the bound, or without a run.
        why: Of failed ones.
        ratio: How much better than the current configuration by the objective, from rounds in turn; null if it failed.
        pairs: Of rounds.
        figures: Null if it failed.
        is_on_front: No other trial is better by the objective and has a lower latency, too.
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
    """What one decision of the best configuration gains.

    Attributes:
        parameter: In words.
        changes: Its keys and their values.
        ratio: With it against without it, all others being set; null if there was no time to measure it.
        is_kept: Whether it is part of the result.
    """

    parameter: str
    changes: Mapping[str, Any]
    ratio: Estimate | None
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A run of new processes: the best configuration against the current one, in turn.

    Attributes:
        ratio: How much better by the objective.
        pairs: Of rounds.
        current: Figures of the current configuration.
        best: Figures of the best one.
        current_per_s: Highest constant rate with the percentile within the bound; null for other objectives.
        best_per_s: Likewise.
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
        version: Of the model.
        commands: That made it.
        ratio: Against the version that was tuned, with the same configuration; null if it cannot run.
        error: The largest error of an output, relative to its largest element, against the version that was tuned.
        why: It cannot be compared.
    """

    version: int
    commands: tuple[str, ...]
    ratio: Estimate | None
    error: float | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The best configuration that was found.

    Attributes:
        schema: Of this form.
        version: Of ortserve.
        model: As given.
        model_version: Of the model; null for a single file.
        objective: What is made better.
        slo_ms: Bound of the latency; null for none.
        percentile: That the bound is for.
        rate_per_s: Offered to each configuration; null for the objective throughput, which searches it.
        machine: Where it ran.
        inputs: Origin of the inputs.
        seconds: That it took.
        noise: The current configuration against itself, in two processes: what a difference must exceed; null if
            it answers nothing within the bound.
        is_too_noisy: Whether the figures varied so much that the search can have missed small gains.
        conclusion: In a sentence.
        has_gain: Whether a configuration was confirmed to be better.
        confirmation: Of the best configuration; null if nothing was better in the search.
        gains: Of its decisions.
        yaml: The keys for model.yaml; empty without a gain.
        written: The file that has them now; empty for none.
        why_not_written: In words; empty if it was.
        trials: All, with those of the search that this one continued.
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
