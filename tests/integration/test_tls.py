"""TLS on every port of a real server from the client's side: client certificates, and renewal of the server's."""

import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2

from certificates import HOST, Secret, serial_of
from collector import Collector, collecting
from encodings_of_requests import triton_inputs
from http_wire import wait_until
from servers import LONG_S, SHORT_WARMUP, Samples, ServerProcess, json_input, rest_url, serving, starting
from tls_records import ClientRecords
from transports import ON_BOTH_TRANSPORTS

ROW: Final = np.arange(16, dtype=np.int32).reshape(1, 16)
INPUTS: Final = {"INPUT0": ROW, "INPUT1": ROW}
DOCUMENT: Final = {"inputs": [json_input(name, array) for name, array in INPUTS.items()]}
HANDSHAKE_S: Final = 0.5
_CLOCK_OF_OPENSSL: Final = 5
"""Linux's ``CLOCK_REALTIME_COARSE``, which C's ``time`` reads. It is some milliseconds behind that of ``datetime``."""


class Mutual:
    """A server that requires client certificates from ``secret``'s authority, and its trace collector."""

    def __init__(self, server: ServerProcess, secret: Secret, collector: Collector) -> None:
        self.server = server
        self.secret = secret
        self.collector = collector
        self.cert, self.key = secret.client_files()

    def connect(self, port: str, context: ssl.SSLContext) -> ssl.SSLSocket:
        """A raw client of ``http`` or ``grpc`` after its side of the handshake."""
        host, number = getattr(self.server, port).split(":")
        return context.wrap_socket(socket.create_connection((host, int(number)), LONG_S), server_hostname=HOST)


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, ways: tuple[str, ...]) -> Iterator[Mutual]:
    secret = Secret(tmp_path_factory.mktemp("tls") / "secret")
    client = secret.client_context(has_certificate=True)
    flags = (*secret.mutual_flags, "--tls-metrics", "--tls-handshake-timeout-s", str(HANDSHAKE_S))
    with collecting("http/protobuf") as collector:
        flags += (f"--otlp-endpoint={collector.endpoint}",)
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # ms
        with serving("--example", *SHORT_WARMUP, *ways, *flags, client=client, env=environment) as server:
            yield Mutual(server, secret, collector)


def by_httpx(mutual: Mutual) -> np.ndarray:
    answer = httpx.post(rest_url(mutual.server, "simple"), json=DOCUMENT, verify=mutual.server.client or True)
    return np.array(answer.raise_for_status().json()["outputs"][0]["data"], np.int32).reshape(1, 16)


def by_curl(mutual: Mutual) -> np.ndarray:
    identity: list[str | Path] = ["--cacert", mutual.secret.ca, "--cert", mutual.cert, "--key", mutual.key]
    body = httpx.Request("POST", "http://x", json=DOCUMENT).content
    done = subprocess.run(
        ["curl", "-sS", "--fail", *identity, "--data-binary", "@-", rest_url(mutual.server, "simple")],
        input=body,
        capture_output=True,
        check=False,
        timeout=LONG_S,
    )
    assert done.returncode == 0, done.stderr
    return np.array(httpx.Response(200, content=done.stdout).json()["outputs"][0]["data"], np.int32).reshape(1, 16)


def by_triton_http(mutual: Mutual) -> np.ndarray:
    options = {"ca_certs": str(mutual.secret.ca), "certfile": str(mutual.cert), "keyfile": str(mutual.key)}
    with triton_http.InferenceServerClient(mutual.server.http, ssl=True, ssl_options=options) as client:
        assert client.is_server_ready()
        return np.array(client.infer("simple", triton_inputs(triton_http, INPUTS)).as_numpy("OUTPUT0"))


def by_triton_grpc(mutual: Mutual) -> np.ndarray:
    with triton_grpc.InferenceServerClient(
        mutual.server.grpc,
        ssl=True,
        root_certificates=str(mutual.secret.ca),
        private_key=str(mutual.key),
        certificate_chain=str(mutual.cert),
    ) as client:
        assert client.is_server_ready()
        return np.array(client.infer("simple", triton_inputs(triton_grpc, INPUTS)).as_numpy("OUTPUT0"))


def by_grpcio(mutual: Mutual) -> np.ndarray:
    credentials = grpc.ssl_channel_credentials(
        mutual.secret.ca.read_bytes(), mutual.key.read_bytes(), mutual.cert.read_bytes()
    )
    with grpc.secure_channel(mutual.server.grpc, credentials) as channel:
        return call_grpc(channel)


def call_grpc(channel: grpc.Channel) -> np.ndarray:
    """Call a model that returns the sum and the difference of two rows. Returns the sum."""
    request = service_pb2.ModelInferRequest(model_name="simple")
    for name, array in INPUTS.items():
        request.inputs.add(name=name, datatype="INT32", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes]
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    answer = service_pb2.ModelInferResponse.FromString(call(request.SerializeToString(), timeout=LONG_S))
    return np.frombuffer(answer.raw_output_contents[0], np.int32).reshape(1, 16)


@ON_BOTH_TRANSPORTS
@pytest.mark.parametrize("ask", [by_httpx, by_curl, by_triton_http, by_triton_grpc, by_grpcio])
def test_client_with_a_certificate_is_answered(mutual: Mutual, ask: Callable[[Mutual], np.ndarray]) -> None:
    np.testing.assert_array_equal(ask(mutual), ROW + ROW)


@pytest.mark.parametrize("call", ["infer", "generate"])
def test_rest_spans_have_the_https_scheme(mutual: Mutual, call: str) -> None:
    document = DOCUMENT if call == "infer" else {name: array.tolist() for name, array in INPUTS.items()}
    url = f"https://{mutual.server.http}/v2/models/simple/{call}"
    context = mutual.secret.client_context(has_certificate=True)
    answer = httpx.post(url, json={"id": call, **document}, verify=context, timeout=LONG_S)
    assert answer.status_code == 200, answer.text
    assert mutual.collector.wait_for(call).attributes["url.scheme"] == "https"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_session_of_a_client_certificate_that_has_expired_is_not_resumed(
    mutual: Mutual, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """Its ticket opened connections for hours, without a check of the certificate."""
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=5)
    file = tmp_path / "client.pem"
    made = mutual.secret.authority.issue_cert("client.example", not_after=expires)
    file.write_bytes(made.private_key_and_cert_chain_pem.bytes())
    context = mutual.secret.client_context()
    context.load_cert_chain(file)
    context.minimum_version = context.maximum_version = version
    host, port = mutual.server.http.split(":")

    def ask(earlier: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
        connection = socket.create_connection((host, int(port)), LONG_S)
        with context.wrap_socket(connection, server_hostname=HOST, session=earlier) as session:
            assert session.session_reused is (earlier is not None and version is ssl.TLSVersion.TLSv1_2)
            try:
                session.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                return session.recv(100), session.session
            except (ssl.SSLError, ConnectionError):
                return b"", None

    answer, earlier = ask(None)
    assert answer.startswith(b"HTTP/1.1 200 ")
    wait_until(lambda: time.clock_gettime(_CLOCK_OF_OPENSSL) >= expires.timestamp())
    assert ask(earlier)[0] == b""


@pytest.mark.parametrize("port", ["http", "grpc"])
@pytest.mark.parametrize("brings", ["no certificate", "one of another authority"])
def test_client_without_a_valid_certificate_is_rejected(mutual: Mutual, tmp_path: Path, port: str, brings: str) -> None:
    context = mutual.secret.client_context(alpn="h2" if port == "grpc" else "http/1.1")
    if brings == "one of another authority":
        context.load_cert_chain(*Secret(tmp_path / "other").client_files())
    message = ""
    with mutual.connect(port, context) as session:
        try:
            session.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            # In TLS 1.3 a client learns at its first read whether the server accepts its certificate.
            assert session.recv(1) == b""
        except (ssl.SSLError, ConnectionError) as error:
            message = str(error)
    if port == "http":  # grpcio sends no alert
        assert ("CERTIFICATE_REQUIRED" if brings == "no certificate" else "UNKNOWN_CA") in message


@pytest.mark.parametrize("port", ["http", "grpc"])
def test_client_that_trusts_another_authority_finds_no_server(mutual: Mutual, tmp_path: Path, port: str) -> None:
    stranger = Secret(tmp_path / "other").client_context()
    with pytest.raises(ssl.SSLCertVerificationError):
        mutual.connect(port, stranger)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("port", ["http", "grpc"])
def test_both_tls_versions_use_ciphers_that_http2_allows(mutual: Mutual, port: str, version: ssl.TLSVersion) -> None:
    context = mutual.secret.client_context(has_certificate=True, alpn="h2" if port == "grpc" else "http/1.1")
    context.minimum_version = context.maximum_version = version
    with mutual.connect(port, context) as session:
        cipher = session.cipher()
        assert cipher is not None
        assert "GCM" in cipher[0] or "CHACHA20" in cipher[0]
        assert session.selected_alpn_protocol() == ("h2" if port == "grpc" else "http/1.1")


@pytest.mark.parametrize("offered", [None, "http/1.1"])
def test_grpc_port_disconnects_clients_without_http2_in_alpn(mutual: Mutual, offered: str | None) -> None:
    with mutual.connect("grpc", mutual.secret.client_context(has_certificate=True, alpn=offered)) as session:
        assert session.recv(1) == b""
    by_grpcio(mutual)


def test_plain_text_is_rejected_and_the_server_keeps_serving(mutual: Mutual) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{mutual.server.metrics}/v2/health/live", timeout=LONG_S)
    for call in (httpx.get, httpx.post):
        answer = call(f"http://{mutual.server.http}/v2/health/live", timeout=LONG_S)
        text = "this port uses TLS: expected https:// in the address, got a plain HTTP request"
        assert (answer.status_code, answer.json()) == (400, {"error": text})
    with grpc.insecure_channel(mutual.server.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        call_grpc(channel)
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    by_httpx(mutual)
    by_grpcio(mutual)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "a part of a ClientHello"])
def test_endless_handshakes_are_closed_and_delay_no_other_client(mutual: Mutual, said: bytes) -> None:
    slow = []
    for address in (mutual.server.http, mutual.server.grpc, mutual.server.metrics):
        host, port = address.split(":")
        slow += [socket.create_connection((host, int(port)), LONG_S) for _ in range(5)]
    for raw in slow:
        raw.sendall(said)
    by_httpx(mutual)
    by_grpcio(mutual)
    read_metrics(mutual)
    for raw in slow:
        with raw:
            assert raw.recv(1) == b""


@pytest.mark.parametrize("port", ["http", "grpc"])
def test_key_update_flood_is_closed_and_delays_no_other_client(
    mutual: Mutual, tmp_path: Path, port: str, ways: tuple[str, ...]
) -> None:
    context = mutual.secret.client_context(has_certificate=True, alpn="h2" if port == "grpc" else "http/1.1")
    context.keylog_filename = str(tmp_path / "keys")
    with mutual.connect(port, context) as session:
        records = ClientRecords(session, tmp_path / "keys")
        flood = b"".join(records.key_update() for _ in range(20_000))
        is_grpcio = port == "grpc" and "--grpc-transport=grpcio" in ways
        # The native transport disconnects during the flood; grpcio continues to read and sends close_notify.
        with suppress(ConnectionError) if is_grpcio else pytest.raises(ConnectionError):
            socket.socket.sendall(session, flood)  # bypasses the session, which would encrypt the bytes again
            by_httpx(mutual)
            while socket.socket.recv(session, 1 << 16):
                pass
    by_grpcio(mutual)


def read_metrics(mutual: Mutual) -> Samples:
    """Read the metrics without a certificate, as Prometheus and Kubernetes' probes may do."""
    url = f"https://{mutual.server.metrics}/metrics"
    answer = httpx.get(url, verify=mutual.secret.client_context(), timeout=LONG_S)
    return Samples(answer.raise_for_status().text)


def test_log_names_tls_ports_and_their_client_authentication(mutual: Mutual) -> None:
    spoken = {"http": "tls=mutual", "grpc": "tls=mutual", "metrics": "tls=server"}
    for protocol, described in spoken.items():
        assert described in mutual.server.wait_for_line("listening", f"protocol={protocol} ")


def test_metrics_show_the_certificate_expiry(mutual: Mutual) -> None:
    with mutual.connect("http", mutual.server.client or ssl.create_default_context()) as session:
        shown = session.getpeercert()
    assert shown is not None
    assert isinstance(shown["notAfter"], str)
    expires_s = ssl.cert_time_to_seconds(shown["notAfter"])
    assert read_metrics(mutual).value("ortserve_tls_certificate_expiration_timestamp_seconds") == expires_s


def test_metrics_port_answers_health_without_a_certificate(mutual: Mutual) -> None:
    with httpx.Client(verify=mutual.secret.client_context(), timeout=LONG_S) as client:
        for question in ("live", "ready"):
            answer = client.get(f"https://{mutual.server.metrics}/v2/health/{question}")
            assert (answer.status_code, answer.json()) == (200, {question: True})
            assert answer.headers["content-type"] == "application/json"


def test_health_command_reaches_a_server_that_requires_certificates(mutual: Mutual) -> None:
    flags = ["--metrics-port", mutual.server.metrics.split(":")[1], "--tls-metrics"]
    done = subprocess.run(
        [sys.executable, "-m", "ortserve", "health", *flags],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr


PAUSE_S: Final = 0.01
"""Between two calls of a client, so that the renewal of the certificate takes most of the test's time."""


class Callers:
    """Clients that send requests until ``stop``; a failure of one fails the test."""

    def __init__(self, server: ServerProcess, secret: Secret) -> None:
        self._server = server
        self._secret = secret
        self._has_ended = threading.Event()
        self._pool = ThreadPoolExecutor(4)
        self.answers = dict.fromkeys(("kept http", "new http", "kept grpc", "new grpc"), 0)
        calls = (self._keep_http, self._renew_http, self._keep_grpc, self._renew_grpc)
        self._calls = [self._pool.submit(call) for call in calls]

    def wait_for_more(self) -> None:
        """Wait until each kind of client has received more answers. Fails if one had an error."""
        wanted = {kind: count + 5 for kind, count in self.answers.items()}
        while any(self.answers[kind] < count for kind, count in wanted.items()):
            for call in self._calls:
                if call.done():
                    call.result()
            self._has_ended.wait(0.01)

    def end(self) -> None:
        self._has_ended.set()
        for call in self._calls:
            call.result(LONG_S)
        self._pool.shutdown()

    def _ask(self, client: httpx.Client) -> None:
        client.post(rest_url(self._server, "simple"), json=DOCUMENT).raise_for_status()

    def _keep_http(self) -> None:
        with httpx.Client(verify=self._secret.client_context(), timeout=LONG_S) as client:
            while not self._has_ended.wait(PAUSE_S):
                self._ask(client)
                self.answers["kept http"] += 1

    def _renew_http(self) -> None:
        context = self._secret.client_context()
        while not self._has_ended.wait(PAUSE_S):
            with httpx.Client(verify=context, timeout=LONG_S) as client:
                self._ask(client)
            self.answers["new http"] += 1

    def _keep_grpc(self) -> None:
        with self._channel() as channel:
            while not self._has_ended.wait(PAUSE_S):
                call_grpc(channel)
                self.answers["kept grpc"] += 1

    def _renew_grpc(self) -> None:
        while not self._has_ended.wait(PAUSE_S):
            with self._channel() as channel:
                call_grpc(channel)
            self.answers["new grpc"] += 1

    def _channel(self) -> grpc.Channel:
        credentials = grpc.ssl_channel_credentials(self._secret.authority.cert_pem.bytes())
        return grpc.secure_channel(self._server.grpc, credentials, [("grpc.use_local_subchannel_pool", 1)])


def shown_serial(address: str, secret: Secret) -> int:
    """The serial number of the certificate that the port presents on a new connection."""
    host, port = address.split(":")
    context = secret.client_context(alpn="h2")
    with context.wrap_socket(socket.create_connection((host, int(port)), LONG_S), server_hostname=HOST) as session:
        shown = session.getpeercert(binary_form=True)
    assert shown is not None
    return serial_of(ssl.DER_cert_to_PEM_cert(shown).encode())


@ON_BOTH_TRANSPORTS
def test_new_certificate_is_used_within_seconds_without_failed_requests(tmp_path: Path, ways: tuple[str, ...]) -> None:
    secret = Secret(tmp_path / "secret")
    flags = (*secret.flags, *SHORT_WARMUP, *ways)
    with serving("--example", *flags, client=secret.client_context()) as server:
        callers = Callers(server, secret)
        try:
            callers.wait_for_more()
            new = secret.renew()
            while {shown_serial(server.http, secret), shown_serial(server.grpc, secret)} != {new}:
                callers.wait_for_more()
            callers.wait_for_more()
        finally:
            callers.end()
        samples = Samples(httpx.get(f"http://{server.metrics}/metrics", timeout=LONG_S).text)
        assert samples.by_labels("ortserve_tls_certificate_reloads_total", "outcome") == {"ok": 1}
        asked = samples.by_labels("ortserve_request_duration_seconds_count", "protocol", "outcome")
        assert set(asked) == {"http ok", "grpc ok"}


def test_warning_of_a_library_is_a_line_of_the_log(tmp_path: Path) -> None:
    """``cryptography`` warns about a certificate whose serial number is negative."""
    secret = Secret(tmp_path)
    number = serial_of(secret.cert.read_bytes())
    digits = number.to_bytes(number.bit_length() // 8 + 1)
    negative = bytes([digits[0] | 0x80]) + digits[1:]
    der = ssl.PEM_cert_to_DER_cert(secret.cert.read_text()).replace(digits, negative, 1)
    secret.put(ssl.DER_cert_to_PEM_cert(der).encode(), secret.key.read_bytes())
    with starting("--example", *SHORT_WARMUP, *secret.flags, "--log-format", "json") as server:
        server.wait_until_loaded()
        server.stop()
    (line,) = [line for line in map(json.loads, server.lines) if line["level"] == "warning"]
    assert "serial number which wasn't positive" in line["message"]


def test_unusable_certificate_stops_the_start(tmp_path: Path) -> None:
    secret = Secret(tmp_path / "secret")
    secret.put(secret.cert.read_bytes(), b"no key")
    with starting("--example", *secret.flags) as server:
        assert server.wait() == 1
    (line,) = server.lines
    assert "the server cannot start" in line
    assert "tls_key_file: expected the private key of the first certificate of" in line
