"""The precedence of sources, and the messages for bad values."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from ortserve.config.options import OptionsError, ServerOptions, read_options, unknown_variables


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ServerOptions.model_fields, "config"):
        monkeypatch.delenv(f"ORTSERVE_{name.upper()}", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "options.yaml"


def problems_of(flags: dict[str, object], config_path: Path | None = None) -> tuple[str, ...]:
    with pytest.raises(OptionsError) as raised:
        read_options(flags, config_path)
    return raised.value.problems


def test_absent_options_have_their_defaults() -> None:
    assert read_options({}) == ServerOptions()
    assert (ServerOptions().host, ServerOptions().http_port, ServerOptions().repositories) == ("127.0.0.1", 8000, ())


def test_flag_overrides_environment_overrides_file_overrides_default(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    file.write_text("http_port: 1\ngrpc_port: 1\nmetrics_port: 1\n")
    monkeypatch.setenv("ORTSERVE_HTTP_PORT", "2")
    monkeypatch.setenv("ORTSERVE_GRPC_PORT", "2")

    options = read_options({"http_port": "3"}, file)

    assert (options.http_port, options.grpc_port, options.metrics_port) == (3, 2, 1)
    assert options.max_body_bytes == 67_108_864


def test_config_file_comes_from_the_flag_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path
) -> None:
    file.write_text("server_name: by-flag\n")
    (tmp_path / "other.yaml").write_text("server_name: by-environment\n")
    monkeypatch.setenv("ORTSERVE_CONFIG", str(tmp_path / "other.yaml"))

    assert read_options({}).server_name == "by-environment"
    assert read_options({}, file).server_name == "by-flag"


def test_lists_in_the_environment_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTSERVE_REPOSITORIES", "/models, /more")
    monkeypatch.setenv("ORTSERVE_EXECUTION_PROVIDERS", "cuda,CPUExecutionProvider")

    options = read_options({})

    assert options.repositories == (Path("/models"), Path("/more"))
    assert options.execution_providers == ("cuda", "CPUExecutionProvider")


def test_lists_in_the_file_are_yaml_lists(file: Path) -> None:
    file.write_text("repositories: [/models]\nexecution_providers: [cuda, cpu]\n")

    options = read_options({}, file)

    assert (options.repositories, options.execution_providers) == ((Path("/models"),), ("cuda", "cpu"))


def test_empty_variable_is_unset_and_unknown_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTSERVE_MAX_ROWS", "")
    monkeypatch.setenv("ORTSERVE_PORT", "tcp://10.0.0.1:8000")

    assert read_options({}) == ServerOptions()


def test_unknown_variables_are_named_without_their_values() -> None:
    environment = {
        "ORTSERVE_HTTP_PROT": "s3cret",
        "ortserve_metric_port": "8002",
        "ORTSERVE_ANYTHING": "",
        "ORTSERVE_HTTP_PORT": "8000",
        "ortserve_grpc_port": "8001",
        "ORTSERVE_CONFIG": "options.yaml",
        "PATH": "/bin",
    }
    assert unknown_variables(environment) == [
        "ORTSERVE_ANYTHING: unknown variable",
        "ORTSERVE_HTTP_PROT: unknown variable; did you mean 'ORTSERVE_HTTP_PORT'?",
        "ortserve_grpc_port: unknown variable; did you mean 'ORTSERVE_GRPC_PORT'?",
        "ortserve_metric_port: unknown variable; did you mean 'ORTSERVE_METRICS_PORT'?",
    ]


def test_variable_in_lower_case_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the documented name has, wherever a variable is read: here, by ``health``, and for the format of errors."""
    monkeypatch.setenv("ortserve_http_port", "many")
    monkeypatch.setenv("ORTSERVE_HTTP_PORT", "9000")

    assert read_options({}).http_port == 9000
    monkeypatch.delenv("ORTSERVE_HTTP_PORT")
    assert read_options({}) == ServerOptions()


@pytest.mark.parametrize("service", ["ORTSERVE", "ORTSERVE_CANARY"])
def test_variables_of_kubernetes_builds_and_tests_are_neither_named_nor_read(
    monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    environment = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_SERVICE_PORT_HTTP": "8000",
        f"{service}_PORT": "tcp://10.0.0.1:8000",
        f"{service}_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        f"{service}_PORT_8000_TCP_PROTO": "tcp",
        f"{service}_PORT_8000_TCP_PORT": "8000",
        f"{service}_PORT_8000_TCP_ADDR": "10.0.0.1",
        "ORTSERVE_COMPILE": "1",
        "ORTSERVE_COMPILE_LEVEL": "0",
        "ORTSERVE_TEST_SEED": "7",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert unknown_variables(environment) == []
    assert read_options({}) == ServerOptions()


def test_constructing_options_does_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTSERVE_HTTP_PORT", "9")

    assert ServerOptions().http_port == 8000
    assert type(read_options({})) is ServerOptions


def test_every_bad_value_is_reported_with_source_expectation_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTSERVE_GRPC_PORT", "tcp://10.0.0.1:8001")

    assert set(problems_of({"http_port": "99999", "log_level": "loud", "execution_providers": []})) == {
        "--http-port: expected integer, 0 to 65535, got '99999'",
        "--log-level: expected one of debug, info, warning, error, got 'loud'",
        "--execution-providers: expected list of names, at least one, got []",
        (
            "ORTSERVE_GRPC_PORT: expected integer, 0 to 65535, got 'tcp://10.0.0.1:8001'; "
            "Kubernetes sets it for a Service, unless the pod has enableServiceLinks: false"
        ),
    }


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("otlp_endpoint", "foo", "URL such as http://collector:4318"),
        ("otlp_service_name", "", "text, not empty"),
        ("server_name", "", "text, not empty"),
        ("host", "", "IP address or host name"),
    ],
)
def test_constrained_texts_are_rejected_with_their_expected_form(name: str, value: str, expected: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    assert problems_of({name: value}) == (f"{flag}: expected {expected}, got '{value}'",)


@pytest.mark.parametrize("endpoint", ["htp://user:pass@collector", "http://user:a b@pass@collector:4318"])
def test_error_of_a_url_shows_no_password(endpoint: str) -> None:
    (problem,) = problems_of({"otlp_endpoint": endpoint})
    assert problem.endswith(f", got '{endpoint.partition(':')[0]}://…@{endpoint.rpartition('@')[2]}'")


@pytest.mark.parametrize("name", ["infer_keys_file", "tls_cert_file", "state_dir", "record_dir", "trace_file"])
def test_an_empty_path_is_not_the_working_directory(name: str, file: Path) -> None:
    file.write_text(f"{name}: ''\n")

    assert problems_of({name: ""}) == (f"--{name.replace('_', '-')}: expected path, got ''",)
    assert problems_of({}, file) == (f"{file}: {name}: expected path, got ''",)
    assert getattr(read_options({name: "."}), name) == Path()


@pytest.mark.parametrize("origin", ["*", "http://localhost:3000", "https://[::1]:65535", "chrome-extension://abC", ""])
def test_origins_have_the_form_of_browsers(origin: str) -> None:
    assert read_options({"cors_origins": [origin] if origin else []}).cors_origins == ((origin,) if origin else ())


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "app.example.com", "https://app.example.com/", "https://App.example.com", "HTTPS://app.example.com"),
        *(
            "https://app.example.com:443",
            "http://x:80",
            "https://x:0",
            "http://x:65536",
            "https://*.example.com",
            "https://a@b",
            "file://",
        ),
        *("https://x\n", "https://x/*", "", " https://x", "https://münchen.example"),
    ],
)
def test_origins_that_no_browser_sends_are_rejected(origin: str) -> None:
    (problem,) = problems_of({"cors_origins": ["https://good.example.com", origin]})
    assert problem.startswith("--cors-origins: expected * or origins as browsers send them, such as https://")
    assert problem.endswith(f", got {origin!r}")


def test_all_origins_stand_alone(file: Path) -> None:
    file.write_text("cors_origins: ['*', 'https://x']\n")
    problem = f"{file}: cors_origins: expected either * or a list of origins, got *, https://x"
    assert problems_of({}, file) == (problem,)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("http_prot: 8000", "http_prot: unknown key; did you mean 'http_port'?"),
        ("cors_origins: ['*', null]", "cors_origins: expected * or list of origins, got ['*', null]"),
        ("http_port: true", "http_port: expected integer, 0 to 65535, got True"),
        ("http_port: '8000'", "http_port: expected integer, 0 to 65535, got '8000'"),
        ("queue_delay_s: .nan", "queue_delay_s: expected number, 0 to 60, in seconds, got nan"),
        ("repository_poll_s: 0.001", "repository_poll_s: expected number, 0.01 to 86400, in seconds, got 0.001"),
        ("repositories: models", "repositories: expected list of paths and URLs, got 'models'"),
        ("http_port: 1\nhttp_port: 2", "expected each key once, got 'http_port' again in line 2"),
        ("- http_port", "expected a mapping of keys to values, got a list"),
        ("host: [", "is not YAML: expected the node content, but found '<stream end>' in line 1"),
    ],
)
def test_bad_file_is_an_error_even_where_a_flag_overrides_it(file: Path, line: str, problem: str) -> None:
    file.write_text(line)

    assert problems_of({"http_port": "0"}, file) == (f"{file}: {problem}",)


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "absent.yaml"

    assert problems_of({}, path) == (f"{path}: cannot be read: No such file or directory",)


def test_options_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ServerOptions().http_port = 1
