"""Makes the report of a result."""

from collections.abc import Iterator, Sequence
from typing import Final

from ortserve.tools.doctor.result import DoctorResult, ModelCheck, RequestPath
from ortserve.tools.report import Block, Facts, Findings, Report, Table, facts_of, number_text, table_of

_MAX_ROWS: Final = 50


def present(result: DoctorResult) -> Report:
    """The report, with the findings first."""
    return Report(f"ortserve doctor: {result.subject}", tuple(_blocks(result)))


def _blocks(result: DoctorResult) -> Iterator[Block]:
    yield Findings(result.findings)
    for title in ("processors", "memory", "system", "steadiness", "server"):
        if (record := getattr(result, title)) is not None:
            yield facts_of(title.capitalize(), record, without=("models", "metrics"))
    if (runtime := result.runtime) is not None:
        yield Facts("Versions", {**runtime.versions, **runtime.distributions, "build": runtime.build})
        title = "Execution providers, each tried with a MatMul in a process of its own"
        yield table_of(title, runtime.providers, without=("is_offered", "libraries"))
        libraries = [(trial.name, *each) for trial in runtime.providers for each in trial.libraries.items()]
        if libraries:
            yield Table("Libraries", ("execution provider", "library", "version, or error of the loader"), libraries)
        none = Facts("GPUs", {"none": runtime.gpu_problem or "NVML reports no GPU"})
        yield table_of("GPUs", runtime.gpus, max_rows=_MAX_ROWS) if runtime.gpus else none
    yield from models_table(result.models)
    if result.server is not None:
        yield Table("Models", ("model", "state"), list((result.server.models or {}).items()), max_rows=_MAX_ROWS)
        metrics = result.server.metrics
        hint = {"not found": "give their URL by --metrics, such as http://127.0.0.1:8002"}
        found = {name.replace("_", " "): value for name, value in (metrics or {}).items()}
        yield Facts("Metrics since the start", hint if metrics is None else found)
    if result.request is not None:
        yield _request(result.request)


def models_table(models: Sequence[ModelCheck]) -> Iterator[Block]:
    """The table of the models of a repository; nothing without models."""
    if models:
        hidden, title = ("problem", "skipped", "events", "golden"), "Models, loaded as the server loads them"
        yield table_of(title, models, without=hidden, max_rows=_MAX_ROWS)


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
