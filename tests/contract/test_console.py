"""The console over HTTP: its files and their headers, its stream, its keys, and a server without it."""

import json
import socket
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from ortserve.service.observation import MAX_VIEWERS
from servers import LONG_S, SHORT_WARMUP, ServerProcess, serving

MAX_BYTES: Final = 150 * 1024
STREAM: Final = "/v2/console/stream"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("--example", *SHORT_WARMUP) as server:
        yield server


def page_files() -> list[str]:
    """The paths of all files of the page, from their folder."""
    root = Path(str(files("ortserve.frontends.console")))
    served = [path for path in root.rglob("*") if path.suffix in (".html", ".css", ".js")]
    return ["/" if path.name == "index.html" else f"/console/{path.relative_to(root)}" for path in served]


def read_events(lines: Iterator[str], count: int) -> list[tuple[str, Any]]:
    """The next events of a stream."""
    events = []
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            events.append((name, json.loads(line.removeprefix("data: "))))
            if len(events) == count:
                break
    return events


@pytest.mark.parametrize("path", page_files())
def test_files_have_a_strict_policy_and_are_not_sent_twice(server: ServerProcess, path: str) -> None:
    answer = httpx.get(f"{server.url}{path}", timeout=LONG_S).raise_for_status()
    policy = answer.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"} <= set(policy)
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["content-type"].startswith("text/")
    for known in (answer.headers["etag"], f'"x", W/{answer.headers["etag"]}', "*"):
        again = httpx.get(f"{server.url}{path}", headers={"if-none-match": known}, timeout=LONG_S)
        assert (again.status_code, again.content) == (304, b"")


def test_page_is_small_and_names_no_other_host(server: ServerProcess) -> None:
    texts = [httpx.get(f"{server.url}{path}", timeout=LONG_S).text for path in page_files()]
    assert sum(len(text.encode()) for text in texts) < MAX_BYTES
    for text in texts:
        assert "innerHTML" not in text
        assert "eval(" not in text
        assert "https://" not in text
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("path", ["/console/x", "/console/../__init__.py", "/console/%2e%2e/README.md", "/console"])
def test_other_paths_are_not_found(server: ServerProcess, path: str) -> None:
    assert httpx.get(f"{server.url}{path}", timeout=LONG_S).status_code == 404


def test_stream_begins_with_all_models_and_goes_on_each_second(server: ServerProcess) -> None:
    with httpx.stream("GET", f"{server.url}{STREAM}?model=digits&version=1", timeout=LONG_S) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        history, models, update, details = read_events(answer.iter_lines(), 4)
    assert (history[0], history[1]["interval_s"]) == ("history", 5)
    assert [row["name"] for row in models[1]["models"]] == ["digits", "simple", "text_stats"]
    assert (models[1]["whole"], update[1]["whole"]) == (True, False)
    assert models[1]["rollouts"] == {}
    digits = models[1]["models"][0]
    assert (digits["labels"], digits["reload"], digits["state"]) == ([], "", "READY")
    assert digits["memory"] > 0
    assert update[1]["server"]["models_memory"]["held_bytes"] >= digits["memory"]
    assert update[1]["server"]["models_memory"]["budget_bytes"] is None
    assert update[1]["server"]["state"] == "ready"
    assert (details[0], details[1]["name"]) == ("model", "digits")
    assert details[1]["memory"]["sessions"] > 0
    assert httpx.head(f"{server.url}{STREAM}", timeout=LONG_S).status_code == 200


def test_requests_on_other_connections_are_answered_beside_open_streams(server: ServerProcess) -> None:
    with httpx.stream("GET", f"{server.url}{STREAM}", timeout=LONG_S) as answer:
        read_events(answer.iter_lines(), 1)
        assert httpx.get(f"{server.url}/v2/health/ready", timeout=LONG_S).status_code == 200


def test_viewers_are_limited_and_their_places_are_freed(server: ServerProcess) -> None:
    host, _, port = server.http.partition(":")
    sockets = []
    heads: list[bytes] = []
    while not heads or b" 200 " in heads[-1]:  # the stream of an earlier test may still hold its place
        opened = socket.create_connection((host, int(port)), timeout=LONG_S)
        opened.sendall(f"GET {STREAM} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        heads.append(opened.recv(12 + len(" OK")))
        sockets.append(opened)
    assert MAX_VIEWERS - 3 <= len(heads) - 1 <= MAX_VIEWERS
    refused = httpx.get(f"{server.url}{STREAM}", timeout=LONG_S)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    assert refused.json() == {"error": "the console has 32 viewers, the maximum"}
    for opened in sockets:
        opened.close()
    for _ in range(100):  # each attempt is answered after the server has noticed more of the closed connections
        with httpx.stream("GET", f"{server.url}{STREAM}", timeout=LONG_S) as answer:
            if answer.status_code == 200:
                return
    raise AssertionError("no place became free")


def test_details_of_versions_name_inputs_labels_and_origins(server: ServerProcess) -> None:
    details = httpx.get(f"{server.url}/v2/console/models/digits/versions/1", timeout=LONG_S).json()
    assert details["inputs"][0]["shape"] == [-1, 1, 8, 8]
    origins = {setting["name"]: setting["origin"] for setting in details["settings"]}
    assert (origins["warmup_s"], origins["slo_s"]) == ("--warmup-s", "default")
    unknown = httpx.get(f"{server.url}/v2/console/models/digits/versions/7", timeout=LONG_S)
    assert (unknown.status_code, unknown.json()) == (404, {"error": "model 'digits' has no version '7'"})


def test_streams_end_when_the_server_drains(tmp_path: Path) -> None:
    keys = tmp_path / "secret-folder" / "keys"
    keys.parent.mkdir()
    keys.write_text("a-key-of-32-characters-and-more-000\n")
    key = {"authorization": f"Bearer {keys.read_text().strip()}"}
    with serving("--example", *SHORT_WARMUP, "--metadata-keys-file", keys) as server:
        for path in (STREAM, "/v2/console/server", "/v2/console/models/digits/versions/1"):
            assert httpx.get(f"{server.url}{path}", timeout=LONG_S).status_code == 401
        assert httpx.get(f"{server.url}/", timeout=LONG_S).status_code == 200
        about = httpx.get(f"{server.url}/v2/console/server", headers=key, timeout=LONG_S)
        assert about.json()["keys"] == {"infer": False, "metadata": True, "control": False, "metrics": False}
        assert "secret-folder" not in about.text
        with httpx.stream("GET", f"{server.url}{STREAM}", headers=key, timeout=LONG_S) as answer:
            lines = answer.iter_lines()
            read_events(lines, 1)
            server.stop()
            assert [name for name, _ in read_events(lines, 100)][-1] == "end"
    assert "drain timed out" not in server.output


def test_server_without_console_serves_no_page() -> None:
    with serving("--example", *SHORT_WARMUP, "--no-console") as server:
        for path in ("/", "/console/js/main.js", STREAM, "/v2/console/server"):
            answer = httpx.get(f"{server.url}{path}", timeout=LONG_S)
            assert (answer.status_code, answer.json()) == (404, {"error": f"Not Found: no call has the path '{path}'"})
