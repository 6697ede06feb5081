"""Profiles of a running server's batches, which it keeps as they run and then runs again itself."""

import http.client
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote, urlsplit

import orjson

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.tools.profile.balance import Groups, Runs, RunTime
from ortserve.tools.profile.result import SCHEMA, Batches, ProfileResult
from ortserve.tools.profile.summary import profile_of
from ortserve.tools.profile.trace import Trace, read_trace

_TRACE_KEY = b',"trace":'
_LONGEST_RUNS_S = 180.0
"""After the batches were kept, the server runs them for at most 60 s, and opens a session or two."""


def profile_server(
    url: str, model: str, *, requests: int, timeout_s: float, key_file: Path | None, keep: Path | None
) -> tuple[ProfileResult, Runs]:
    """Have a server profile the batches of a model's next requests.

    Args:
        url: Of its HTTP port.
        model: Name, or ``name/version``.
        requests: How many.
        timeout_s: Time to wait for them.
        key_file: With a control key; None for a server without keys.
        keep: Where to keep the trace; None for nowhere.

    Raises:
        ServeError: The server cannot be reached, is none that profiles, or rejects the call.
    """
    body = _call(url, model, {"requests": requests, "timeout_s": timeout_s}, key_file, timeout_s + _LONGEST_RUNS_S)
    head, found, rest = body.partition(_TRACE_KEY)
    if not found:
        raise _no_profile(url)
    trace_bytes = rest.removesuffix(b"}")
    if keep is not None:
        keep.write_bytes(trace_bytes)
    trace = read_trace(trace_bytes.splitlines())
    try:
        answer: dict[str, Any] = orjson.loads(head + b"}")
        batches = answer["batches"]
        del trace.runs[: answer["warm_up_runs"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise _no_profile(url) from None
    if not batches or len(trace.runs) != len(batches):
        raise ServeError(ErrorKind.INTERNAL, f"{url}: expected {len(batches)} runs in the trace, got {len(trace.runs)}")
    runs = Runs(
        [RunTime(batch["plain_ns"], batch["plain_cpu_ns"]) for batch in batches],
        [RunTime(batch["profiled_ns"], batch["profiled_cpu_ns"]) for batch in batches],
        trace,
        _same_work(trace, [batch["rows"] for batch in batches]),
        answer["intra_op_threads"] == 1,
    )
    profile = profile_of(
        runs,
        label=model,
        provider=answer["execution_provider"],
        threads=answer["intra_op_threads"],
        settings=answer["settings"],
        inputs="requests of the server",
        rows=fmean(batch["rows"] for batch in batches),
        source=None,
        optimized=None,
        notes=[],
    )
    server = Batches(
        url,
        answer["version"],
        sum(batch["requests"] for batch in batches),
        requests,
        len(batches),
        fmean(batch["served_ns"] for batch in batches) / 1e6,
        answer["ended_because"],
    )
    return ProfileResult(SCHEMA, profile, server=server), runs


def _same_work(trace: Trace, rows: Sequence[int]) -> Groups:
    """Batches with equal shapes do the same work, unless inner graphs decide by values how much there is."""
    groups: dict[object, list[int]] = {}
    for position, run in enumerate(trace.runs):
        nests = any(call.depth for call in run.calls)
        key = position if nests else tuple(call.node for call in run.calls)  # nodes differ by their shapes
        groups.setdefault((rows[position], key), []).append(position)
    return list(groups.values())


def _call(url: str, model: str, document: dict[str, Any], key_file: Path | None, timeout_s: float) -> bytes:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise invalid_input(f"{url}: expected the URL of the server's HTTP port, such as http://127.0.0.1:8000")
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"content-type": "application/json"}
    if key_file is not None:
        try:
            lines = key_file.read_text().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise invalid_input(f"--key-file {key_file}: expected a readable text file, got: {error}") from None
        key = next((line.strip() for line in lines if line.strip() and not line.startswith("#")), "")
        headers["authorization"] = f"Bearer {key}"
    name, _, version = model.partition("/")
    path = f"/v2/models/{quote(name, safe='')}{f'/versions/{version}' if version else ''}/profile"
    try:
        with closing(connect(parts.hostname, parts.port, timeout=timeout_s)) as connection:
            connection.request("POST", parts.path.rstrip("/") + path, orjson.dumps(document), headers)
            response = connection.getresponse()
            status, body = response.status, response.read()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServeError(
            ErrorKind.NOT_READY, f"{url}: no answer from a server: {error or type(error).__name__}"
        ) from None
    if status == http.client.OK:
        return body
    try:
        problem = str(orjson.loads(body)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise _no_profile(url) from None
    raise ServeError(ErrorKind.INTERNAL, f"{url}: status {status}: {problem}")


def _no_profile(url: str) -> ServeError:
    return ServeError(
        ErrorKind.UNSUPPORTED, f"{url}: expected an ortserve with the option profiling, got another server"
    )
