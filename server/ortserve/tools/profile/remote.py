"""Profiles of a running server's batches, which it keeps as they run and then runs again itself."""

import http.client
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any, Final
from urllib.parse import quote, urlsplit

import orjson

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.tools.profile.result import Batches
from ortserve.tools.profile.runs import Runs, RunTime
from ortserve.tools.profile.trace import read_trace

_TRACE_KEY: Final = b',"trace":'
_LONGEST_RUNS_S: Final = 180.0
"""After the batches were kept, the server runs them for at most 60 s, and opens a session or two."""


def profile_server(
    url: str, model: str, *, requests: int, timeout_s: float, key_file: Path | None, keep: Path | None
) -> tuple[Runs, Batches]:
    """Let a server profile the batches of a model's next requests.

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
    asked = {"requests": requests, "timeout_s": timeout_s}
    status, body = _call(url, model, asked, key_file, timeout_s + _LONGEST_RUNS_S)
    try:
        if status != http.client.OK:
            problem = f"{url}: status {status}: {orjson.loads(body)['error']}"
            raise ServeError(ErrorKind.INTERNAL, problem)
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
        problem = f"{url}: expected an ortserve with the option profiling, got another server"
        raise ServeError(ErrorKind.UNSUPPORTED, problem) from None
    found = len(runs.trace.runs)
    if found != len(batches):
        raise ServeError(ErrorKind.INTERNAL, f"{url}: expected {len(batches)} runs in the trace, got {found}")
    if keep is not None:
        keep.write_bytes(recorded)
    return runs, summary


def _call(url: str, model: str, document: dict[str, Any], key_file: Path | None, timeout_s: float) -> tuple[int, bytes]:
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
    path = (
        f"{parts.path.rstrip('/')}/v2/models/{quote(name, safe='')}{f'/versions/{version}' if version else ''}/profile"
    )
    try:
        with closing(connect(parts.hostname, parts.port, timeout=timeout_s)) as connection:
            connection.request("POST", path, orjson.dumps(document), headers)
            response = connection.getresponse()
            return response.status, response.read()
    except (OSError, http.client.HTTPException, ValueError) as error:
        problem = str(error) or type(error).__name__
        raise ServeError(ErrorKind.NOT_READY, f"{url}: no answer from a server: {problem}") from None
