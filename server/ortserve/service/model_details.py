"""Descriptions of a version for the console: its row in the list, its live details, and its configuration.

Loop thread only. Descriptions contain no paths: callers see only the last part of a path.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from ortserve.config.model import LoadOptions, ModelOptions
from ortserve.config.shown_values import show_value
from ortserve.core.signature import TensorSpec
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.catalog import State, VersionRecord
from ortserve.registry.registry import Registry
from ortserve.registry.served_model import ServedModel
from ortserve.registry.served_version import ServedVersion
from ortserve.telemetry.history import Rates

_MAX_LABELS: Final = 1000
"""Maximum number of labels of an output that the console shows."""
_MAX_SIZES: Final = 64
_MAX_CLASSES: Final = 4
_MAX_TEXT: Final = 400

NOT_SET: Final = "default"
NOT_IN_MEMORY: Final = "NOT_IN_MEMORY"
"""The state of a version that the next request for it loads."""


def describe_row(record: VersionRecord, now: Rates, registry: Registry) -> dict[str, Any]:
    """The row of a version in the list."""
    served, source = record.served, record.source
    state, why = _state_of(record)
    reload = registry.successor(record)
    properties: Mapping[str, str] = served.properties if served is not None else {}
    return {
        "name": record.model,
        "version": record.shown_version,
        "labels": sorted(name for name, number in registry.labels(record.model).items() if number == record.version),
        "state": state,
        "why": why[:_MAX_TEXT],
        "reload": reload.explanation[:_MAX_TEXT] if reload is not None else "",
        "platform": served.platform if served is not None else "",
        "provider": properties.get("execution_provider", "").removesuffix("ExecutionProvider"),
        "elsewhere": properties.get("nodes_elsewhere", "")[:_MAX_TEXT],
        "file_bytes": source.file_bytes if source is not None else 0,
        "memory": record.account.nbytes if record.account is not None else 0,
        "load_s": round(record.metrics.load_ns / 1e9, 3),
        "rate": _short(now.requests_per_s),
        "p50": _short(now.p50_ms),
        "p99": _short(now.p99_ms),
        "batch": _short(now.batch_rows),
        "queue": int(now.queue_rows),
        "refused": _short(now.refused_per_s),
        "failed": _short(now.failed_per_s),
        "saturation": _short(now.saturation),
    }


def _state_of(record: VersionRecord) -> tuple[str, str]:
    """The state of a version for viewers, and the reason. A version that requests load again is not a failure."""
    if not record.is_on_demand:
        return record.state.name, record.explanation
    if record.state is State.DRAINING:
        return record.state.name, "evicted: it leaves memory when its requests are answered"
    refused = "" if record.no_room is None else f"; the last load got no room: {record.no_room.message}"
    return NOT_IN_MEMORY, record.explanation + refused


def describe_live(record: VersionRecord) -> dict[str, Any]:
    """The measurements of a version: the sizes and times of its batches, and the learned state of its batcher."""
    served, metrics = record.served, record.metrics
    sizes = sorted(metrics.batches.items(), key=lambda known: -known[1].count)[:_MAX_SIZES]
    document: dict[str, Any] = {
        "name": record.model,
        "version": record.shown_version,
        # The time of a batch as the latency model counts it: staging, computation and the return to the event loop.
        "sizes": sorted(
            (rows, series.count, (series.stage_ns + series.compute_ns + series.return_ns) / 1e6 / max(1, series.count))
            for rows, series in sizes
        ),
        "memory": metrics.memory(),
        "cache": asdict(metrics.cache) if metrics.cache is not None else None,
        "sequences": asdict(metrics.sequences.read()) if metrics.sequences.was_connected else None,
    }
    if isinstance(served, ServedModel):
        learned = served.learned()
        document["learned"] = {
            "max_rows": learned.max_rows,
            "queued_rows": learned.queued_rows,
            "arrival_rows_per_s": learned.arrival_rows_per_s,
            "saturation": learned.saturation,
            "decisions": asdict(learned.decisions),
            "classes": [asdict(known) for known in learned.classes[:_MAX_CLASSES]],
        }
    return document


@dataclass(frozen=True, slots=True)
class Setting:
    """An option, its value in words, and its origin: a file, a flag, a variable, the server's choice or ``NOT_SET``."""

    name: str
    value: str
    origin: str


class ModelDetails:
    """Describes one version for the console."""

    def __init__(self, registry: Registry, server_origins: Mapping[str, str]) -> None:
        """``server_origins`` maps each server option that is set to its origin."""
        self._registry = registry
        self._server_origins = server_origins

    def describe(self, name: str, version: str) -> dict[str, Any]:
        """The inputs, outputs, properties and configuration of a version, also of a failed one.

        Raises:
            ServeError: not_found.
        """
        record = next((one for one in self._registry.records_of(name) if one.shown_version == version), None)
        if record is None:
            raise ServeError(ErrorKind.NOT_FOUND, f"model '{name}' has no version '{version}'")
        served = record.served if record.state in (State.READY, State.DRAINING) else None
        state, why = _state_of(record)
        document: dict[str, Any] = {
            "name": name,
            "version": version,
            "state": state,
            "why": why,
            "settings": [asdict(setting) for setting in self._settings(record, served)],
        }
        if served is not None:
            document |= {
                "inputs": [_tensor(spec) for spec in served.signature.inputs],
                "outputs": [
                    _tensor(spec) | {"labels": list(served.output_labels.get(spec.name, ())[:_MAX_LABELS])}
                    for spec in served.signature.outputs
                ],
                "properties": dict(served.properties),
                "max_rows": served.max_rows if served.signature.is_batched else 0,
                "takes_sequences": served.takes_sequences,
            }
        return document

    def _settings(self, record: VersionRecord, served: ServedVersion | None) -> Iterator[Setting]:
        if isinstance(served, ServedModel):
            yield from _choices(served)
        if record.source is None:
            return
        configuration = record.source.configuration
        options, given = configuration.options, configuration.options.model_fields_set
        for name, value in options:
            if name in given:
                origin = configuration.source
            elif name in LoadOptions.model_fields:
                origin = self._server_origins.get(name, NOT_SET)
            else:
                origin = NOT_SET
            if name == "max_rows" and value is None and isinstance(served, ServedModel):
                continue
            yield Setting(name, show_value(value), origin)


def _choices(served: ServedModel) -> Iterator[Setting]:
    """Values that the server chose or learned because the configuration does not set them."""
    options: ModelOptions = served.options
    yield Setting("execution provider in use", served.execution_provider, "chosen from execution_providers")
    if options.max_rows is None:
        yield Setting("max_rows", str(served.max_rows), "learned in warm-up")
    if options.intra_op_threads is None:
        yield Setting("threads of a run", str(served.intra_op_threads), "chosen from the processors and the run time")


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "datatype": spec.datatype.value,
        "shape": list(spec.shape),
        "dims": list(spec.dim_names),
        "optional": spec.is_optional,
        "batch_axis": spec.batch_axis,
        "any_shape": spec.has_any_shape,
    }


def _short(value: float) -> float:
    """Round to three digits, so that a value that has hardly changed is not sent again."""
    return float(f"{value:.3g}")
