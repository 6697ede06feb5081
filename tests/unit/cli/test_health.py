"""``ortserve health``: its request, exit status and output."""

import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme

from ortserve.cli import health
from ortserve.cli.main import main
from ortserve.config.options import ServerOptions, variable_name


@pytest.fixture(autouse=True)
def _no_options_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in (*ServerOptions.model_fields, "config"):
        monkeypatch.delenv(variable_name(option), raising=False)


@contextmanager
def answering(answers: dict[str, tuple[int, str]], context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve on a port of 127.0.0.1: each path has a status and a body. With a ``context``, use TLS."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers[self.path]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_args: object) -> None:
            """Stay quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_status_is_0_only_for_a_ready_server(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {"/v2/health/ready": (400, '{"ready":false}'), "/v2/health/live": (200, '{"live":true}')}
    with answering(answers) as port:
        assert main(["health", "--metrics-port", str(port)]) == 1
        captured = capsys.readouterr()
        assert captured.err == f'ortserve health: not ready: 127.0.0.1:{port} answered 400 {{"ready":false}}\n'
        assert not captured.out

        assert main(["health", "--live", "--metrics-port", str(port)]) == 0
        assert capsys.readouterr().out == "live\n"

        answers["/v2/health/ready"] = (200, '{"ready":true}')
        assert main(["health", "--metrics-port", str(port)]) == 0
        assert capsys.readouterr().out == "ready\n"


def test_ready_server_is_ready_also_if_nobody_reads_that() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with answering({"/v2/health/ready": (200, "{}")}) as port:
        command = [sys.executable, "-m", "ortserve", "health", "--metrics-port", str(port)]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_answer_of_another_server_stays_one_line_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with answering({"/v2/health/ready": (404, "no\n\x1b]0;title\x07")}) as port:
        assert main(["health", "--metrics-port", str(port)]) == 1
    assert capsys.readouterr().err == f"ortserve health: not ready: 127.0.0.1:{port} answered 404 no  ]0;title\n"


@pytest.mark.parametrize("host", [".svc", "a" * 64, "a b"])
def test_host_that_is_no_name_is_named(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--host", host]) == 1
    expected = f"host: expected an IP address or host name, got '{host}'"
    assert capsys.readouterr().err == f"ortserve health: not ready: {expected}\n"


def test_server_is_found_by_its_own_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering({"/v2/health/ready": (200, "{}")}) as port:
        monkeypatch.setenv("ORTSERVE_HOST", "0.0.0.0")
        monkeypatch.setenv("ORTSERVE_METRICS_PORT", str(port))
        assert main(["health"]) == 0
        assert capsys.readouterr().out == "ready\n"


def test_usual_health_check_imports_no_options() -> None:
    """Container engines run it every few seconds, and importing all options takes most of its time."""
    defaults = {name: str(ServerOptions.model_fields[name].default).lower() for name in health._DEFAULTS}
    assert defaults == health._DEFAULTS
    script = (
        "import sys; from ortserve.cli.main import main; main(['health', '--metrics-port', '1']); print(*sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = set(ran.stdout.split())
    assert "ortserve.cli.health" in modules
    assert modules.isdisjoint({"numpy", "pydantic", "yaml"})


def test_server_is_found_by_its_own_file(tmp_path: Path) -> None:
    with answering({"/v2/health/ready": (200, "{}")}) as port:
        file = tmp_path / "options.yaml"
        file.write_text(f"metrics_port: {port}\n")
        assert main(["health", "--config", str(file)]) == 0


@pytest.fixture
def tls() -> ssl.SSLContext:
    """The context of a server with a certificate for another name, by an untrusted authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("models.example.com").configure_cert(context)
    return context


def test_tls_server_is_queried_over_tls(
    tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering({"/v2/health/ready": (200, "{}")}, tls) as port:
        monkeypatch.setenv("ORTSERVE_METRICS_PORT", str(port))
        monkeypatch.setenv("ORTSERVE_TLS_CERT_FILE", "/etc/ortserve/tls/tls.crt")
        monkeypatch.setenv("ORTSERVE_TLS_KEY_FILE", "/etc/ortserve/tls/tls.key")
        monkeypatch.setenv("ORTSERVE_TLS_METRICS", "true")
        assert main(["health"]) == 0
        assert capsys.readouterr().out == "ready\n"


def test_plain_text_to_a_tls_port_names_the_option_to_set(
    tls: ssl.SSLContext, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering({}, tls) as port:
        assert main(["health", "--metrics-port", str(port)]) == 1
    assert capsys.readouterr().err == (
        f"ortserve health: not ready: 127.0.0.1:{port} did not answer in plain HTTP; "
        "if the server speaks TLS there, set --tls-metrics or ORTSERVE_TLS_METRICS\n"
    )


def test_server_that_closes_tls_connections_is_not_ready(
    tls: ssl.SSLContext, capsys: pytest.CaptureFixture[str]
) -> None:
    def take_and_close(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with tls.wrap_socket(connection, server_side=True) as session:
            session.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        closing = threading.Thread(target=take_and_close, args=(listener,))
        closing.start()
        assert main(["health", "--metrics-port", str(port), "--tls-metrics"]) == 1
        closing.join()
    assert f"127.0.0.1:{port} closed the connection without an answer\n" in capsys.readouterr().err


def test_absent_server_is_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, but not listening
        port = free.getsockname()[1]
        assert main(["health", "--metrics-port", str(port)]) == 1
    assert capsys.readouterr().err == f"ortserve health: not ready: 127.0.0.1:{port}: Connection refused\n"


def test_server_that_does_not_answer_in_time_is_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert main(["health", "--metrics-port", str(port), "--timeout-s", "0.05"]) == 1
    assert f"127.0.0.1:{port} did not answer within 0.05 s" in capsys.readouterr().err


def test_unknown_host_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--host", "nowhere.invalid"]) == 1
    assert "nowhere.invalid:8002" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--metrics-port", "x"], "--metrics-port: expected integer, 0 to 65535, got 'x'"),
        (["--metrics-port", "0"], "metrics_port: expected the port of the server, got 0"),
        (["--timeout-s", "0"], "--timeout-s: expected number, above 0 and up to 3600, in seconds, got '0'"),
        (["--timeout-s", "abc"], "--timeout-s: expected number, above 0 and up to 3600, in seconds, got 'abc'"),
        (["--timeout-s", "nan"], "--timeout-s: expected number, above 0 and up to 3600, in seconds, got 'nan'"),
        (["--nope"], "usage: ortserve health"),
    ],
)
def test_unusable_health_arguments_are_rejected(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["health", *arguments]) == 2
    assert complaint in capsys.readouterr().err
