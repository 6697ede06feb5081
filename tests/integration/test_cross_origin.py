"""Pages of other origins (CORS): what a real browser lets them do, and the headers of every kind of answer."""

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

from archives import file_site
from browser import NEEDS_CHROMIUM
from http_wire import Answers, connect, post
from models import builders
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, json_input, serving

ORIGIN: Final = "https://app.example"
INFER_KEY: Final = "infer-key-aaaaaaaaaa"
CONTROL_KEY: Final = "control-key-bbbbbbbbb"
BODY: Final = httpx.Request("POST", "http://x", json={"inputs": [json_input("x", np.ones((1, 4), np.float32))]}).content

CALL: Final = """async ([url, method, headers, body]) => {
    try {
        const answer = await fetch(url, {method, headers, body});
        return [answer.status, Object.fromEntries(answer.headers), await answer.text()];
    } catch (error) {
        return String(error);
    }
}"""
"""A call as a page makes it: status, headers that it can read, and text; or the error of the browser."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross-origin")
    add_model(folder, "identity", builders.identity)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Inference needs a key, and control needs none."""
    keys = tmp_path_factory.mktemp("keys") / "infer"
    keys.write_text(INFER_KEY)
    options = ("--cors-origins", f"http://localhost:3000,{ORIGIN}", "--max-body-bytes", "1000")
    with serving(repository, *SHORT_WARMUP, *options, "--infer-keys-file", keys) as server:
        yield server


def cors(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("access-control-") or name == "vary"}


def preflight(server: ServerProcess, path: str, method: str, origin: str = ORIGIN) -> httpx.Response:
    asked = {"access-control-request-method": method, "access-control-request-headers": "authorization,content-type"}
    return httpx.options(f"http://{server.http}{path}", headers=asked | {"origin": origin}, timeout=LONG_S)


READABLE: Final = {
    "access-control-allow-origin": ORIGIN,
    "access-control-expose-headers": "*",
    "vary": "origin",
}

POSTS: Final = ["", "/versions/1"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", f"/v2/models/identity{of}/{call}") for of in POSTS for call in ("infer", "generate_stream")),
        ("POST", "/v2/models/a%2Fb/infer/"),
        ("GET", "/v2/models/identity"),
        ("GET", "/v2/health/live"),
        ("GET", "/v2/logging"),
        ("POST", "/v2/repository/index"),
        ("HEAD", "/console/page.js"),
    ],
)
def test_preflight_is_answered_without_a_key_and_allows_this_method_only(
    server: ServerProcess, method: str, path: str
) -> None:
    answer = preflight(server, path, method)
    assert (answer.status_code, answer.content) == (200, b"")
    assert cors(answer.headers) == READABLE | {
        "access-control-allow-methods": method,
        "access-control-allow-headers": "authorization, *",
        "access-control-max-age": "7200",
    }


@pytest.mark.parametrize("origin", ["null", "https://app.example:444", "http://app.example", f"{ORIGIN}.evil.example"])
def test_other_origins_are_refused_by_name_and_read_nothing(server: ServerProcess, origin: str) -> None:
    answer = preflight(server, "/v2/models/identity/infer", "POST", origin)
    assert (answer.status_code, cors(answer.headers)) == (403, {"vary": "origin"})
    assert answer.json()["error"] == f"cors_origins: expected a page of one of these origins, got '{origin}'"
    for headers in ({"origin": origin}, {}):
        assert cors(httpx.get(f"http://{server.http}/v2", headers=headers, timeout=LONG_S).headers) == {
            "vary": "origin"
        }


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v2/logging"), ("PUT", "/v2/models/identity/labels"), ("DELETE", "/v2/models/identity/rollout")],
)
def test_changes_without_keys_are_not_allowed_to_pages(server: ServerProcess, method: str, path: str) -> None:
    """Browsers send ``Sec-Fetch-Site`` to loopback and over TLS only, but a preflight request to every address."""
    answer = preflight(server, path, method)
    assert (answer.status_code, cors(answer.headers)) == (403, READABLE)
    assert answer.json()["error"].endswith("expected control_keys_file to be set, got none")


def test_options_that_is_no_preflight_request_is_an_unknown_method(server: ServerProcess) -> None:
    url = f"http://{server.http}/v2/models/identity/infer"
    for headers in ({"origin": ORIGIN}, {"access-control-request-method": "POST"}):
        answer = httpx.options(url, headers=headers | {"authorization": f"Bearer {INFER_KEY}"}, timeout=LONG_S)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


KEY: Final = f"Authorization: Bearer {INFER_KEY}"
SLOW_BODY: Final = b"POST /v2/models/identity/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"


def from_page(request_bytes: bytes) -> bytes:
    """A request with the header that a browser adds."""
    line, rest = request_bytes.split(b"\r\n", 1)
    return b"%b\r\nOrigin: %b\r\n%b" % (line, ORIGIN.encode(), rest)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (post("identity", BODY, KEY), 200),
        (post("identity", b"{", KEY), 400),
        (post("identity", BODY), 401),
        (post("identity", b" " * 1001, KEY), 413),
        (post("none", BODY, KEY), 404),
        (post("identity", BODY, KEY, "Content-Encoding: x"), 501),
        (post("identity", b"", KEY, "x: " + "1" * 40_000), 431),
        (b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET /v2/nothing HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    ],
)
def test_errors_can_be_read_too(server: ServerProcess, request_bytes: bytes, status: int) -> None:
    with connect(server) as connection:
        answers = Answers(connection)
        for _ in range(3 if status <= 400 else 1):  # later ones have a known head; others close the connection
            connection.sendall(from_page(request_bytes))
            got, headers, _ = answers.next()
            assert (got, cors(headers)) == (status, READABLE)


def test_errors_of_slow_requests_can_be_read_too(repository: Path) -> None:
    limits = ("--http-header-timeout-s", "0.2", "--http-body-timeout-s", "0.2")
    with serving(repository, *SHORT_WARMUP, "--cors-origins", ORIGIN, *limits) as server:
        for incomplete in (SLOW_BODY, b"GET /v2 HTTP/1.1\r\nHost: x\r\n"):
            with connect(server) as connection:
                connection.sendall(from_page(incomplete))
                status, headers, _ = Answers(connection).next()
                assert (status, cors(headers)) == (408, READABLE)


def test_rejection_in_turn_is_for_the_page_that_sent_the_rejected_request(server: ServerProcess) -> None:
    first = post("identity", BODY, KEY, "Origin: http://localhost:3000")
    second = b"GET /v2 HTTP/1.1\r\nHost: x\r\nOrigin: %b\r\nHost: y\r\n\r\n" % ORIGIN.encode()
    with connect(server) as connection:
        connection.sendall(first + second)
        answers = Answers(connection)
        assert cors(answers.next()[1])["access-control-allow-origin"] == "http://localhost:3000"
        status, headers, _ = answers.next()
        assert (status, cors(headers)) == (400, READABLE)


def test_asterisk_allows_all_origins_without_credentials(repository: Path) -> None:
    with serving(repository, *SHORT_WARMUP, "--cors-origins", "*", "--http-max-connections", "1") as server:
        asked = preflight(server, "/v2/models/identity/infer", "POST", "null")
        answer = httpx.get(f"http://{server.http}/v2", timeout=LONG_S)
        every = {"access-control-allow-origin": "*", "access-control-expose-headers": "*"}
        assert cors(answer.headers) == every
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "*"
        assert not [name for name in asked.headers if "credentials" in name]
        host, port = server.http.split(":")
        with connect(server) as busy:
            busy.sendall(b"GET /v2/console/stream HTTP/1.1\r\nHost: x\r\n\r\n")  # its response does not end
            assert busy.recv(12) == b"HTTP/1.1 200"
            with socket.create_connection((host, int(port)), LONG_S) as excess:
                status, headers, _ = Answers(excess).next()
        assert (status, cors(headers)) == (429, every)


@NEEDS_CHROMIUM
def test_page_of_an_allowed_origin_infers_with_its_key_and_reads_answers_and_errors(
    repository: Path, tmp_path: Path
) -> None:
    pytest.importorskip("playwright", reason="needs playwright")
    from browser import chromium

    (tmp_path / "index.html").write_text("<title>A page</title>")
    keys = {group: tmp_path / f"{group}.keys" for group in ("infer", "control")}
    keys["infer"].write_text(INFER_KEY)
    keys["control"].write_text(CONTROL_KEY)
    with file_site(tmp_path) as allowed, file_site(tmp_path) as other, chromium() as browser:
        options: tuple[str | Path, ...] = ("--cors-origins", allowed, "--infer-keys-file", keys["infer"])
        pages = browser.new_page(), browser.new_page()
        for page, site in zip(pages, (allowed, other), strict=True):
            page.goto(f"{site}/index.html")

        def call(
            url: str, key: str = "", body: str | None = None, *, method: str = "POST", page: Any = pages[0]
        ) -> Any:
            headers = {"content-type": "application/json", "traceparent": f"00-{1:032x}-{1:016x}-01"}
            headers |= {"authorization": f"Bearer {key}"} if key else {}
            return page.evaluate(CALL, [url, method, headers, body])

        with serving(repository, *SHORT_WARMUP, *options) as server:
            infer = f"http://{server.http}/v2/models/identity/infer"
            for _ in range(2):
                status, headers, text = call(infer, INFER_KEY, BODY.decode())
                assert (status, '"outputs"' in text, "server-timing" in headers) == (200, True, True)
            binary = BODY.decode().replace('"inputs"', '"parameters":{"binary_data_output":true},"inputs"')
            assert int(call(infer, INFER_KEY, binary)[1]["inference-header-content-length"]) > 0
            status, headers, text = call(infer, "", BODY.decode())
            assert (status, headers["www-authenticate"]) == (401, 'Bearer realm="infer"')
            assert call(infer, INFER_KEY, "{")[0] == 400
            assert call(f"http://{server.http}/v2", method="GET")[0] == 200
            assert call(infer, INFER_KEY, BODY.decode(), page=pages[1]) == "TypeError: Failed to fetch"
            # Control needs no key here: neither kind of request, with or without preflight, changes the server.
            settings = f"http://{server.http}/v2/logging"
            assert call(settings, body="{}") == "TypeError: Failed to fetch"
            plain = [settings, "POST", {"content-type": "text/plain"}, '{"log_verbose_level":1}']
            assert pages[0].evaluate(CALL, plain)[0] == 403
            assert call(settings, method="GET")[0] == 200
        options = (*options, "--control-keys-file", keys["control"], "--state-dir", tmp_path)
        with serving(repository, *SHORT_WARMUP, *options) as server:
            labels = f"http://{server.http}/v2/models/identity/labels"
            assert call(labels, CONTROL_KEY, '{"labels":{"next":1}}', method="PUT")[0] == 200
            assert call(labels, INFER_KEY, "{}", method="PUT")[0] == 403
