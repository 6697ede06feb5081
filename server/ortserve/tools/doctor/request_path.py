"""Measures the stages of a request by ``Server-Timing`` and the clock of the client, and compares with bare runs."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ortserve.core.timing import PHASES
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.tools.client import Answer, Client, read_timing
from ortserve.tools.console import progress
from ortserve.tools.control import Control
from ortserve.tools.doctor.result import RequestPath, Stage
from ortserve.tools.encoding import tensors_of
from ortserve.tools.ensemble import Opened
from ortserve.tools.inputs import make_inputs

_BLOCK: Final = 20
"""Requests and bare runs alternate in blocks of this size, so that both meet the same conditions. The first blocks are
not counted. Blocks of slow models are smaller."""
_BLOCK_S: Final = 1.0
_MAX_S: Final = 30.0
_REMEDY: Final = "ortserve bench measures it with real samples, by --inputs"
_OUTSIDE: Final = "network and HTTP"


def follow_requests(client: Client, model: str, bare: Opened | None, requests: int) -> RequestPath:
    """Send requests one after the other, each with one row, for 30 s at most.

    Args:
        client: The connection to the server.
        model: Name of the model on the server.
        bare: The same model in this process, for bare runs; None without its file.
        requests: Number of requests.

    Raises:
        ServeError: The model has sequences, a request is rejected, or the server sends no ``Server-Timing``.
    """
    control = Control(client.address, model)
    if control.has_sequences():
        raise invalid_input(f"--model: expected a model without sequences, got '{model}': ortserve bench measures it")
    signature = bare.signature if bare else control.describe()[1]

    def prepare(arrays: Sequence[np.ndarray]) -> bytes:
        request = control.encode(tensors_of(signature, arrays))
        return client.prepare(f"{control.path}/infer", request.body, request.headers)

    inputs = make_inputs(signature, None, lambda one: _infer(client, prepare(one)), _REMEDY)
    arrays = bare.for_model(inputs.take(1, 0)) if bare else list(inputs.take(1, 0))
    runner, request = bare.runner() if bare else None, prepare(arrays)
    took_ns = _took_ns(lambda: _infer(client, request))
    block = max(1, min(_BLOCK, int(_BLOCK_S * 1e9 / took_ns)))
    total_ns: list[int] = []
    bare_ns: list[int] = []
    phases: list[list[float]] = []
    end = time.monotonic() + _MAX_S
    with progress(f"following requests to {model}", requests) as step:
        while len(phases) < block + requests and (len(phases) <= block or time.monotonic() < end):
            step(len(phases), "")
            if runner is not None and len(phases) % block == 0:
                bare_ns += [_took_ns(lambda: runner.run(arrays)) for _ in range(block)]
            began = time.perf_counter_ns()
            answer = _infer(client, request)
            total_ns.append(time.perf_counter_ns() - began)
            phases.append(parse_timing(answer.headers.get(b"server-timing", b"").decode("latin-1")))
    if not all(phases):
        url = client.address.url
        raise ServeError(ErrorKind.UNSUPPORTED, f"{url}: expected Server-Timing with each answer, got none")
    return summarize(model, inputs.origin, total_ns[block:], phases[block:], bare_ns[block:])


def _infer(client: Client, request: bytes) -> Answer:
    return client.checked(client.exchange(request))


def _took_ns(work: Callable[[], object]) -> int:
    began = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - began


def parse_timing(header: str) -> list[float]:
    """Microseconds of each phase; empty if a phase is missing. Pure."""
    found = dict(read_timing(header))
    return [found[name] * 1e3 for name in PHASES] if found.keys() >= set(PHASES) else []


def summarize(
    model: str, origin: str, total_ns: Sequence[int], phases_us: Sequence[Sequence[float]], bare_ns: Sequence[int]
) -> RequestPath:
    """The result from the times of all requests. Pure.

    The remaining time passed before the server had the complete body, or after the answer was handed to the transport:
    in the client, the network, the sockets and the parsing of HTTP.
    """
    total, phases = np.asarray(total_ns) / 1e3, np.asarray(phases_us)
    columns = {_OUTSIDE: np.maximum(0, total - phases.sum(axis=1)), **dict(zip(PHASES, phases.T, strict=True))}
    median, p99 = float(np.median(total)), float(np.quantile(total, 0.99))
    stages = []
    for name, times in columns.items():
        middle = float(np.median(times))
        stages.append(Stage(name, middle, float(np.quantile(times, 0.99)), middle / median))
    dominant = max(stages, key=lambda stage: stage.median_us).name
    bare_us = float(np.median(bare_ns)) / 1e3 if len(bare_ns) else None
    return RequestPath(
        model=model,
        requests=len(total),
        inputs=origin,
        median_us=median,
        p99_us=p99,
        stages=tuple(stages),
        dominant=dominant,
        bare_us=bare_us,
    )
