"""The search space: keys of ``model.yaml`` and the values that may help on this machine. Pure.

A parameter is one decision, with the keys that must change together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ortserve.config.model import LoadOptions, ModelOptions, make_model_options

Value: TypeAlias = Any
"""A value of ``model.yaml``, of a JSON type."""
Changes: TypeAlias = Mapping[str, Value]
"""Values by key. ``.`` separates the names in the path of a key."""

_ENTRIES: Final = "session.entries."
_SPIN_DURATION: Final = f"{_ENTRIES}session.intra_op.spin_duration_us"
_NO_DURATION: Final = -1
"""ONNX Runtime's default: spin for a number of turns instead of a time."""
_SPINNING: Final[Sequence[Changes]] = (
    {"session.spinning": False, _SPIN_DURATION: _NO_DURATION},
    {"session.spinning": True, _SPIN_DURATION: _NO_DURATION},
    {"session.spinning": True, _SPIN_DURATION: 200},
)
_ROWS: Final = (1, 4, 8, 16, 32, 64, 128)
_BUCKETS: Final = (1, 2, 4, 8, 16, 32)
_DELAYS_S: Final = (0.001, 0.002, 0.005)
_MAX_INSTANCES: Final = 8
_ORDERS: Final[Mapping[str, tuple[str, ...]]] = {
    "memory": ("arena", "pattern", "providers", "instances", "max_rows", "threads"),
    "cost": ("providers", "threads", "spinning", "max_rows", "delay"),
    "": ("providers", "replay", "threads", "spinning", "instances", "max_rows", "delay", "execution", "graph"),
}
"""The order of parameters, by objective: those that usually matter most first. Parameters that are not named follow."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Properties of the machine and the model that the choices depend on.

    Attributes:
        processors: The number of processors that the process may keep busy.
        nodes: For each NUMA node, the numbers of the processors that the process may use.
        is_batched: Whether requests share batches.
        has_convolutions: Whether the model has convolutions.
        offered: Short names of the execution providers that can be used here, without the CPU's.
        slo_s: The latency bound; None without one.
    """

    processors: int
    nodes: tuple[tuple[int, ...], ...]
    is_batched: bool
    has_convolutions: bool = False
    offered: tuple[str, ...] = ()
    slo_s: float | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One decision.

    Attributes:
        name: Name of the parameter.
        choices: The changes of each choice. The first choice changes nothing.
    """

    name: str
    choices: tuple[Changes, ...]


Point: TypeAlias = Mapping[str, int]
"""Indexes of choices, by the names of their parameters. Parameters that are not named have choice 0."""


def make_space(options: ModelOptions, conditions: Conditions, objective: str) -> tuple[Parameter, ...]:
    """The parameters with more than one choice, those that usually matter most first."""
    bound_s = math.inf if conditions.slo_s is None else conditions.slo_s
    found: dict[str, Sequence[Changes]] = {
        "providers": _providers(conditions),
        "replay": [{"graph_replay": value} for value in (True, False) if conditions.offered],
        "threads": _threads(conditions),
        "spinning": _SPINNING if conditions.processors > 1 else _SPINNING[:1],
        "instances": [{"instances": n} for n in dict.fromkeys((1, 2, min(conditions.processors, _MAX_INSTANCES)))],
        "max_rows": [{"max_rows": rows} for rows in (None, *_ROWS) if conditions.is_batched],
        "delay": [{"queue_delay_s": s} for s in (0.0, *_DELAYS_S) if conditions.is_batched and 4 * s <= bound_s],
        "execution": [
            {"session.execution_mode": "sequential", "session.inter_op_threads": 1},
            *[
                {"session.execution_mode": "parallel", "session.inter_op_threads": n}
                for n in ([2, 4] if conditions.processors >= 4 else [2] if conditions.processors > 1 else [])
            ],
        ],
        "graph": [{"session.graph_optimization": level} for level in ("all", "extended", "basic")],
        "buckets": [{"buckets": list(sizes)} for sizes in ((), _BUCKETS) if conditions.is_batched],
        "arena": [
            {"session.memory_arena": True, "session.shrink_arenas": []},
            {"session.memory_arena": True, "session.shrink_arenas": ["cpu:0"]},
            {"session.memory_arena": False, "session.shrink_arenas": []},
        ],
        "pattern": [{"session.memory_pattern": value} for value in (None, True, False)],
    }
    first = [*_ORDERS.get(objective, ()), *_ORDERS[""]]
    parameters = (
        Parameter(name, _choices(options, found[name])) for name in dict.fromkeys((*first, *found)) if found[name]
    )
    return tuple(parameter for parameter in parameters if len(parameter.choices) > 1)


def default_point(space: Sequence[Parameter]) -> Point:
    """The point with the default of each parameter; empty if all have it. Bad values are often explicit ones."""
    defaults = ModelOptions()
    return {
        parameter.name: number
        for parameter in space
        for number, choice in enumerate(parameter.choices)
        if choice and all(value == value_of(defaults, key) for key, value in choice.items())
    }


def joint_points(space: Sequence[Parameter]) -> list[Point]:
    """Points with two changes that help together and not alone: several instances with one thread each."""
    numbers: dict[str, int] = {}
    for parameter in space:
        for number, choice in enumerate(parameter.choices):
            if parameter.name == "threads" and choice.get("intra_op_threads") == 1 and len(choice) == 1:
                numbers["threads"] = number
            if parameter.name == "instances" and choice.get("instances", 1) > 1:
                numbers["instances"] = number
    return [numbers] if len(numbers) == 2 else []


def changes_of(space: Sequence[Parameter], point: Point) -> dict[str, Value]:
    """The keys that a point changes, with their values."""
    changes: dict[str, Value] = {}
    for parameter in space:
        changes |= parameter.choices[point.get(parameter.name, 0)]
    return changes


def apply_changes(options: ModelOptions, changes: Changes) -> ModelOptions:
    """The options with the changes.

    Raises:
        ServeError: invalid_input: the values contradict each other.
    """
    given: dict[str, Any] = options.model_dump(mode="json", exclude_unset=True)
    for key, value in changes.items():
        _set(given, key_path(key), value)
    return make_model_options(given, LoadOptions(), "these options")


def key_path(key: str) -> tuple[str, ...]:
    """The names in the path of a key, the outermost first. Names of session entries contain dots."""
    if key.startswith(_ENTRIES):
        return "session", "entries", key.removeprefix(_ENTRIES)
    return tuple(key.split("."))


def value_of(options: ModelOptions, key: str) -> Value:
    """The value of a key, of a JSON type."""
    value: Any = options.model_dump(mode="json", include={key_path(key)[0]})
    for name in key_path(key):
        value = value.get(name)
    return _NO_DURATION if key == _SPIN_DURATION and value is None else value


def _set(given: dict[str, Any], path: Sequence[str], value: Value) -> None:
    *outer, last = path
    for name in outer:
        given = given.setdefault(name, {})
    given[last] = value


def _choices(options: ModelOptions, candidates: Sequence[Changes]) -> tuple[Changes, ...]:
    """An empty choice, and the candidates that change something, without keys that have their value already."""
    changed = ({key: value for key, value in one.items() if value != value_of(options, key)} for one in candidates)
    return {}, *(one for one in changed if one)


def _threads(conditions: Conditions) -> list[Changes]:
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < conditions.processors]
    free: dict[str, Value] = {"session.thread_affinities": None}
    found: list[Changes] = [{"intra_op_threads": n, **free} for n in (None, *counts, conditions.processors)]
    places = [node for node in conditions.nodes if len(node) > 1] if len(conditions.nodes) > 1 else []
    if conditions.processors >= 4:
        places.append(tuple(sorted(number for node in conditions.nodes for number in node)))
    for place in places:
        count = min(len(place), conditions.processors)
        # The list has no entry for the calling thread, which is not pinned. Its numbers begin with 1.
        groups = ";".join(str(number + 1) for number in place[1:count])
        found.append({"intra_op_threads": count, "session.thread_affinities": groups})
    return found


def _providers(conditions: Conditions) -> list[Changes]:
    lists: list[list[Value]] = [["cpu"]] if conditions.offered else []
    for name in conditions.offered:
        lists.append([name, "cpu"])
        if name == "cuda" and conditions.has_convolutions:
            lists += [[{name: {"cudnn_conv_algo_search": "EXHAUSTIVE"}}, "cpu"], [{name: {"prefer_nhwc": 1}}, "cpu"]]
        if name == "tensorrt":
            lists.append([{name: {"trt_fp16_enable": 1}}, "cuda", "cpu"])
    return [{"execution_providers": one} for one in lists]
