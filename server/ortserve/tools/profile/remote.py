"""Profiles of a running server's batches, which it keeps as they run and then runs again itself."""

from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import orjson

from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.address import Address
from ortserve.tools.client import Client, another_kind, path_of
from ortserve.tools.profile.result import Batches
from ortserve.tools.profile.runs import Runs, RunTime
from ortserve.tools.profile.trace import read_trace

_TRACE_KEY: Final = b',"trace":'
_LONGEST_RUNS_S: Final = 180.0
"""After the batches were kept, the server runs them for at most 60 s, and opens a session or two."""


def profile_server(
    address: Address, model: str, *, requests: int, timeout_s: float, keep: Path | None
) -> tuple[Runs, Batches]:
    """Let a server profile the batches of a model's next requests.

    Args:
        address: Of its HTTP port.
        model: Name, or ``name/version``.
        requests: How many.
        timeout_s: Time to wait for them.
        keep: Where to keep the trace; None for nowhere.

    Raises:
        ServeError: The server cannot be reached, is none that profiles, or rejects the call.
    """
    name, _, version = model.partition("/")
    asked = orjson.dumps({"requests": requests, "timeout_s": timeout_s})
    with closing(Client(address, timeout_s + _LONGEST_RUNS_S)) as client:
        body = client.call(f"{path_of(name, version)}/profile", asked, {"content-type": "application/json"}).body
    try:
        head, _, rest = body.partition(_TRACE_KEY)
        recorded = rest.removesuffix(b"}")
        answer: dict[str, Any] = orjson.loads(head + b"}")
        batches = answer["batches"]
        runs = Runs(
            model,
            answer["execution_provider"],
            answer["intra_op_threads"],
            answer["settings"],
            "requests of the server",
            fmean(batch["rows"] for batch in batches),
            [RunTime(batch["plain_ns"], batch["plain_cpu_ns"]) for batch in batches],
            [RunTime(batch["profiled_ns"], batch["profiled_cpu_ns"]) for batch in batches],
            read_trace(recorded.splitlines()),
        )
        del runs.trace.runs[: answer["warm_up_runs"]]
        summary = Batches(
            answer["version"],
            sum(batch["requests"] for batch in batches),
            requests,
            len(batches),
            fmean(batch["served_ns"] for batch in batches) / 1e6,
            answer["ended_because"],
        )
    except (ValueError, KeyError, TypeError):
        raise another_kind(address, "its answer is no profile") from None
    found = len(runs.trace.runs)
    if found != len(batches):
        raise ServeError(ErrorKind.INTERNAL, f"{address.url}: expected {len(batches)} runs in the trace, got {found}")
    if keep is not None:
        keep.write_bytes(recorded)
    return runs, summary
