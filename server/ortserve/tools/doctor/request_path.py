"""The way of one request, stage by stage: from ``Server-Timing`` and the clock of this client, beside bare runs."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.timing import PHASES
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.tools.doctor.client import Client
from ortserve.tools.doctor.result import RequestPath, Stage
from ortserve.tools.doctor.server import samples
from ortserve.tools.inputs import choose_inputs, make_inputs
from ortserve.tools.opening import OpenModel

_BLOCK: Final = 20
"""Requests and bare runs alternate in blocks of this length, so that both see the same machine. The first blocks do not
count."""
_OUTSIDE: Final = "network and HTTP"


def follow_requests(
    client: Client,
    model: str,
    bare: OpenModel | None,
    metrics: str,
    *,
    requests: int,
    seconds: float,
    step: Callable[[int], None],
) -> RequestPath:
    """Send requests one after the other, each with one row.

    Args:
        client: Connected.
        model: Name on the server.
        bare: The same model in this process, to compare with; None without its file.
        metrics: Text of the server's metrics; empty if unknown.
        requests: How many, unless ``seconds`` are over earlier.
        seconds: Time limit.
        step: Called with the number of requests so far.

    Raises:
        ServeError: The server or the model rejects the requests, or tells no times.
    """

    def encode(arrays: Sequence[np.ndarray]) -> bytes:
        return client.prepare(model, signature.inputs, arrays)

    signature = bare.signature if bare else _read_signature(client, model)
    inputs = choose_inputs(bare) if bare else make_inputs(signature, None, lambda each: client.exchange(encode(each)))
    arrays = bare.for_model(inputs.take(1, 0)) if bare else list(inputs.take(1, 0))
    runner, request = bare.runner() if bare else None, encode(arrays)
    total_ns: list[int] = []
    bare_ns: list[int] = []
    phases: list[list[float]] = []
    end = time.monotonic() + seconds
    for number in range(-_BLOCK, requests):
        began = time.perf_counter_ns()
        answer = client.exchange(request)
        total_ns.append(time.perf_counter_ns() - began)
        phases.append(parse_timing(answer.timing))
        step(max(0, number + 1))
        if runner is not None and number % _BLOCK == 0:
            for _ in range(_BLOCK):
                began = time.perf_counter_ns()
                runner.run(arrays)
                bare_ns.append(time.perf_counter_ns() - began)
        if number >= _BLOCK and time.monotonic() > end:
            break
    if not all(phases):
        raise ServeError(ErrorKind.UNSUPPORTED, f"{client.url}: expected Server-Timing with each answer, got none")
    usual = usual_phases(metrics, model)
    return summarize(model, inputs.origin, total_ns[_BLOCK:], phases[_BLOCK:], bare_ns[_BLOCK:] or bare_ns, usual)


def parse_timing(header: str) -> list[float]:
    """Microseconds of each phase; empty if a phase is missing. Pure."""
    found = {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([0-9]+(?:\.[0-9]+)?)", header)}
    return [found[name] * 1e3 for name in PHASES] if found.keys() >= set(PHASES) else []


def usual_phases(metrics: str, model: str) -> dict[str, float]:
    """Mean microseconds of each phase over all requests of a model so far. Pure."""
    sums: dict[str, dict[str, float]] = {"sum": {}, "count": {}}
    for name, labels, value in samples(metrics):
        kind = name.removeprefix("ortserve_request_phase_duration_seconds_")
        if kind in sums and labels.get("model") == model:
            phase = labels.get("phase", "")
            sums[kind][phase] = sums[kind].get(phase, 0.0) + value
    return {phase: sums["sum"].get(phase, 0.0) / count * 1e6 for phase, count in sums["count"].items() if count}


def summarize(
    model: str,
    origin: str,
    total_ns: Sequence[int],
    phases_us: Sequence[Sequence[float]],
    bare_ns: Sequence[int],
    usual_us: Mapping[str, float],
) -> RequestPath:
    """The result from the times of all requests. Pure.

    What the phases do not contain passed between the client and the complete body, and after the answer was handed to
    the transport: the client, the network, the sockets and the parsing of HTTP.
    """
    total = np.asarray(total_ns) / 1e3
    columns = dict(zip(PHASES, np.asarray(phases_us).T, strict=True))
    columns = {_OUTSIDE: np.maximum(0, total - np.asarray(phases_us).sum(axis=1)), **columns}
    median = float(np.median(total))
    stages = tuple(
        Stage(
            name,
            float(np.median(values)),
            float(np.quantile(values, 0.99)),
            float(np.median(values)) / median,
            usual_us.get(name),
        )
        for name, values in columns.items()
    )
    return RequestPath(
        model=model,
        requests=len(total),
        inputs=origin,
        median_us=median,
        p99_us=float(np.quantile(total, 0.99)),
        stages=stages,
        dominant=max(stages, key=lambda stage: stage.median_us).name,
        bare_us=float(np.median(bare_ns)) / 1e3 if len(bare_ns) else None,
    )


def _read_signature(client: Client, model: str) -> ModelSignature:
    answer = client.ask(f"/v2/models/{model}")
    document = answer.json()
    if document is None:
        raise invalid_input(f"{client.url}: model '{model}': {answer.body[:300].decode(errors='replace')}")
    try:
        inputs, outputs = (
            tuple(
                TensorSpec(entry["name"], DataType(entry["datatype"]), tuple(entry["shape"]))
                for entry in document[role]
            )
            for role in ("inputs", "outputs")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise invalid_input(f"{client.url}: model '{model}': its metadata cannot be read: {error!r}") from None
    has_rows = all(spec.shape[:1] == (-1,) for spec in inputs)
    return ModelSignature(inputs, outputs, "" if has_rows else "its inputs have no common free axis")
