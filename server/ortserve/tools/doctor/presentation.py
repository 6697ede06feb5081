"""Makes the report of a result. Names of fields become names of rows; their endings determine the units."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from ortserve.tools.doctor.result import DoctorResult, ModelCheck, RequestPath
from ortserve.tools.report import Block, Cell, Facts, Findings, Report, Table, bytes_text, duration_text, number_text

_UNITS: Final = {
    "_gb_per_s": lambda speed: f"{number_text(speed)} GB/s",
    "_bytes": bytes_text,
    "_ms": lambda ms: duration_text(ms / 1e3),
    "_s": duration_text,
}
"""Formats of values by the endings of the names of fields. The first ending that matches is used."""


def present(result: DoctorResult) -> Report:
    """The report, with the findings first."""
    return Report(f"ortserve doctor: {result.subject}", tuple(_blocks(result)))


def _blocks(result: DoctorResult) -> Iterator[Block]:
    yield Findings(result.findings)
    for title in ("processors", "memory", "system", "steadiness", "server"):
        if (record := getattr(result, title)) is not None:
            yield Facts(title.capitalize(), _entries(record))
    if (runtime := result.runtime) is not None:
        yield Facts("Versions", {**runtime.versions, **runtime.distributions, "build": runtime.build})
        title = "Execution providers, each tried with a MatMul in a process of its own"
        yield _table(title, runtime.providers, "name", "is_usable", "problem")
        libraries = [(trial.name, *each) for trial in runtime.providers for each in trial.libraries.items()]
        if libraries:
            yield Table("Libraries", ("execution provider", "library", "version, or error of the loader"), libraries)
        none = Facts("GPUs", {"none": runtime.gpu_problem or "NVML reports no GPU"})
        yield _table("GPUs", runtime.gpus) if runtime.gpus else none
    yield from models_table(result.models)
    if result.server is not None:
        yield Table("Models", ("model", "state"), list((result.server.models or {}).items()), max_rows=50)
        metrics = result.server.metrics
        hint = {"not found": "give their URL by --metrics, such as http://127.0.0.1:8002"}
        found = {_words(name): value for name, value in (metrics or {}).items()}
        yield Facts("Metrics since the start", hint if metrics is None else found)
    if result.request is not None:
        yield _request(result.request)


def models_table(models: Sequence[ModelCheck]) -> Iterator[Block]:
    """The table of the models of a repository; nothing without models."""
    if models:
        names = ("name", "version", "execution_provider", "instances", "threads")
        sizes = ("files_bytes", "memory_bytes", "load_s", "row_ms")
        yield _table("Models, loaded as the server loads them", tuple(models), *names, *sizes)


def _entries(record: Any) -> dict[str, Cell]:
    """The fields of a dataclass as facts. A mapping becomes one fact per entry. Fields with a table are left out."""
    entries: dict[str, Cell] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name in ("models", "metrics"):
            continue
        if field.name == "instruction_sets":
            entries["has"] = " ".join(name for name, has in value.items() if has) or None
            entries["has not"] = " ".join(name for name, has in value.items() if not has) or None
        elif isinstance(value, Mapping):
            entries |= {f"{_words(field.name)} {name}": _cell("", each) for name, each in value.items()}
        else:
            entries[_words(field.name)] = _cell(field.name, value)
    return entries


def _table(title: str, records: tuple[Any, ...], *chosen: str) -> Table:
    names = chosen or [field.name for field in fields(records[0])]
    rows = [[_cell(name, getattr(record, name)) for name in names] for record in records]
    return Table(title, [_words(name) for name in names], rows, max_rows=50)


def _words(name: str) -> str:
    ending = next((ending for ending in _UNITS if name.endswith(ending)), "")
    return name.removesuffix(ending).removeprefix("is_").replace("_", " ")


def _cell(name: str, value: Any) -> Cell:
    if value is None or value in ("", ()):
        return None
    for ending, text in _UNITS.items():
        if name.endswith(ending):
            return text(value)
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return value if isinstance(value, str | int | float) else str(value)


def _request(found: RequestPath) -> Table:
    compared = ""
    if found.bare_us is not None:
        added = number_text(found.median_us - found.bare_us)
        compared = f" Bare session.run takes {number_text(found.bare_us)} µs here, so serving adds {added} µs."
    rows = [(stage.name, stage.median_us, stage.p99_us, f"{stage.share:.0%}") for stage in found.stages]
    return Table(
        f"One request to {found.model}, one row",
        ("stage", "median µs", "p99 µs", "share"),
        [*rows, ("total, at the client", found.median_us, found.p99_us, "100%")],
        note=f"{found.requests} requests one after the other; inputs: {found.inputs}. Longest stage: {found.dominant}."
        f"{compared} Medians do not add up exactly.",
    )
