"""Profiles batches of a running server. The server copies the batches as they run, and later runs the copies again."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import cycle
from pathlib import Path
from statistics import fmean
from threading import Event, Timer
from typing import Final

import orjson
from pydantic import TypeAdapter

from ortserve.errors import ErrorKind, ServeError
from ortserve.service.profiling import ServerProfile
from ortserve.tools.address import Address
from ortserve.tools.client import Client, another_kind, path_of
from ortserve.tools.control import Control
from ortserve.tools.encoding import tensors_of
from ortserve.tools.inputs import read_inputs
from ortserve.tools.profile.result import Batches
from ortserve.tools.profile.runs import Runs, RunTime
from ortserve.tools.profile.trace import read_trace

_TRACE_KEY: Final = b',"trace":'
_PROFILE: Final = TypeAdapter(ServerProfile)
_SAY_AFTER_S: Final = 1.0
_MAX_REQUESTS: Final = 16
"""Limit of the different requests that this process sends."""
_MAX_RUNS_S: Final = 180.0
"""Time for the server to profile the copies: it opens one or two sessions, and runs them for at most 60 s."""


def profile_server(address: Address, given: Namespace) -> tuple[Runs, Batches, bytes]:
    """Ask a server to profile the batches of a model's next requests.

    It sends the samples of ``--inputs`` meanwhile. Without them, it waits for the requests of other clients, and a line
    on standard error says so, unless it is a terminal.

    Args:
        address: The HTTP port of the server.
        given: The arguments of the command.

    Returns:
        The runs, the batches, and ONNX Runtime's trace.

    Raises:
        ServeError: The server cannot be reached, cannot profile, or rejects the call.
    """
    (name, _, version), requests, timeout_s = given.model.partition("/"), given.requests, given.timeout
    asked = orjson.dumps({"requests": requests, "timeout_s": timeout_s})
    sending = _say_waiting(f"{requests} requests to {given.model}, for at most {timeout_s:g} s")
    if given.inputs is not None:
        sending = _send(Control(address, name, version), given.inputs, given.rows)
    with sending, closing(Client(address, timeout_s + _MAX_RUNS_S)) as client:
        client.expect_http()
        body = client.call(f"{path_of(name, version)}/profile", asked, {"content-type": "application/json"}).body
    head, _, rest = body.partition(_TRACE_KEY)
    try:
        profile = _PROFILE.validate_python({**orjson.loads(head + b"}"), "trace": rest.removesuffix(b"}")})
        batches = profile.batches
        runs = Runs(
            label=given.model,
            provider=profile.execution_provider,
            threads=profile.intra_op_threads,
            settings=profile.settings,
            inputs="requests of the server",
            rows=fmean(batch.rows for batch in batches),
            plain=[RunTime(batch.plain_ns, batch.plain_cpu_ns) for batch in batches],
            profiled=[RunTime(batch.profiled_ns, batch.profiled_cpu_ns) for batch in batches],
            trace=read_trace(profile.trace.splitlines()),
            call_overhead_us=profile.call_overhead_us,
        )
        served_ms = fmean(batch.served_ns for batch in batches) / 1e6
    except (ValueError, TypeError):
        raise another_kind(address, "got an answer that is not a profile") from None
    summary = Batches(
        version=profile.version,
        requests=sum(batch.requests for batch in batches),
        asked=requests,
        batches=len(batches),
        served_ms=served_ms,
        ended_because=profile.ended_because,
    )
    del runs.trace.runs[: profile.warm_up_runs]
    found = len(runs.trace.runs)
    if found != len(batches):
        raise ServeError(ErrorKind.INTERNAL, f"{address.url}: expected {len(batches)} runs in the trace, got {found}")
    return runs, summary, profile.trace


@contextmanager
def _say_waiting(what: str) -> Iterator[None]:
    """Say on standard error what the block waits for, if it takes over a second. On terminals the progress bar does."""
    timer = Timer(_SAY_AFTER_S, sys.stderr.write, [f"ortserve profile: waiting for {what} (--inputs sends requests)\n"])
    if not sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _send(control: Control, file: Path, rows: int) -> Iterator[None]:
    """Send the samples of a file in turn, one request at a time, while the block runs.

    Raises:
        ServeError: The samples do not fit the model, or the server rejects them.
    """
    signature = control.describe()[1]
    inputs = read_inputs(file, signature)
    arrays = (inputs.take(rows, number) for number in range(min(_MAX_REQUESTS, inputs.samples)))
    requests = [control.encode(tensors_of(signature, one)) for one in arrays]
    is_over = Event()

    def send() -> None:
        for request in cycle(requests):
            if is_over.is_set():
                return
            control.infer(request)

    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(send)
        try:
            yield
        finally:
            is_over.set()
            sender.result()  # raises the error that explains missing requests
