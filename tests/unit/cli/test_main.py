"""Commands, and the options that the command line passes to the server."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from apart import UnavailableError
from hung_folders import hung
from ortserve import __version__
from ortserve.cli import huge_pages, serve
from ortserve.cli.main import main
from ortserve.cli.serve import build_parser
from ortserve.config import triton_names
from ortserve.config.options import ServerOptions, flag_name
from ortserve.core.compiled import IS_COMPILED
from servers import LOOK_S


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerOptions]:
    """Records the arguments of the server's start; the server ends at once, with status 7."""
    started: list[ServerOptions] = []

    def run(options: ServerOptions, origins: Mapping[str, str]) -> int:
        started.append(options)
        return 7

    app = ModuleType("ortserve.app.run")
    app.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ortserve.app.run", app)
    for name in (*ServerOptions.model_fields, "config"):
        monkeypatch.delenv(f"ORTSERVE_{name.upper()}", raising=False)
    return started


def test_serve_starts_the_server_with_the_options_and_returns_its_status(
    served: list[ServerOptions], tmp_path: Path
) -> None:
    first, second = tmp_path / "a,b", tmp_path / "c"
    first.mkdir()
    second.mkdir()

    status = main(
        ["serve", str(first), "--http-port", "0", "--access-log", "--execution-providers", "cuda,cpu", str(second)]
    )

    assert status == 7
    assert served == [
        ServerOptions(repositories=(first, second), http_port=0, access_log=True, execution_providers=("cuda", "cpu"))
    ]


def test_flag_can_disable_an_option_of_the_environment(
    served: list[ServerOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTSERVE_EXAMPLE", "true")
    monkeypatch.setenv("ORTSERVE_ACCESS_LOG", "true")

    main(["serve", "--no-access-log"])

    assert (served[0].example, served[0].access_log) == (True, False)


def report_while_hung(folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, int]:
    """Start the server while a folder does not answer. Returns its first lines on standard error and its status."""
    with ThreadPoolExecutor(1) as threads:
        try:
            with hung(folder):
                starting = threads.submit(serve.main, arguments)
                text = ""
                while not text and not starting.done():
                    text = capsys.readouterr().err
                    time.sleep(LOOK_S)
        except UnavailableError as error:
            pytest.skip(str(error))
        return text, starting.result()


def test_start_reports_a_repository_that_hangs_and_waits_for_it(
    served: list[ServerOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "_REPORT_S", 0.05)
    folder = tmp_path / "models"
    folder.mkdir()
    text, status = report_while_hung(folder, [str(folder)], capsys)
    assert status == 2  # the access that waited fails at the end of the mount
    assert text == f"ortserve serve: repositories: '{folder}' has not answered for 0.05 s; waiting\n"
    assert served == []


@pytest.mark.parametrize("option", ["infer_keys_file", "tls_cert_file", "trace_file", "record_dir"])
def test_start_reports_a_file_that_hangs_without_its_path_and_waits_for_it(
    option: str,
    served: list[ServerOptions],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "_REPORT_S", 0.05)
    folder = tmp_path / "files"
    folder.mkdir()
    flags = ["--example", flag_name(option), str(folder / "one")]
    if option == "tls_cert_file":
        flags += ["--tls-key-file", str(tmp_path / "key.pem")]
    text, _ = report_while_hung(folder, flags, capsys)  # the server itself reports files that it cannot open
    assert text == f"ortserve serve: {option}: the path has not answered for 0.05 s; waiting\n"


@pytest.mark.parametrize(
    ("hung_name", "arguments", "reported"),
    [
        (".ortserve", [], "state_dir: the path"),
        ("files", ["--record-dir", "files"], "record_dir: the path"),
        ("files", ["--config", "files/options.yaml"], "--config: the file"),
    ],
)
def test_start_beside_a_repository_reports_what_hangs(
    hung_name: str,
    arguments: list[str],
    reported: str,
    served: list[ServerOptions],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "_REPORT_S", 0.05)
    monkeypatch.chdir(tmp_path)
    (tmp_path / hung_name).mkdir()
    text, _ = report_while_hung(tmp_path / hung_name, [str(tmp_path), *arguments], capsys)
    assert text == f"ortserve serve: {reported} has not answered for 0.05 s; waiting\n"


def test_repositories_can_be_set_in_the_file(served: list[ServerOptions], tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text(f"repositories: ['{tmp_path}']\n")

    main(["serve", "--config", str(tmp_path / "options.yaml")])

    assert served[0].repositories == (tmp_path,)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["serve"],
            "ortserve serve: repositories: expected at least one folder, .onnx file, URL or --example, got none\n",
        ),
        (
            ["serve", "/absent/folder"],
            (
                "ortserve serve: repositories: expected a folder of models or an .onnx file, "
                "got '/absent/folder': No such file or directory\n"
            ),
        ),
        (
            ["serve", "--example", "--http-port", "x"],
            "ortserve serve: --http-port: expected integer, 0 to 65535, got 'x'\n",
        ),
        (
            ["serve", "--example", "--trace-level", "TIMESTAMPS"],
            "ortserve serve: trace_level: 'TIMESTAMPS' also needs trace_file, got none\n",
        ),
        (
            ["serve", "--example", "--tls-key-file", "k.pem"],
            "ortserve serve: tls_key_file: expected tls_cert_file to be set, too, got none\n",
        ),
        (
            ["serve", "--example", "--tls-metrics"],
            "ortserve serve: tls_metrics: expected tls_cert_file to be set, too, got none\n",
        ),
        (
            ["serve", "--example", "--tls-cert-file", "c.pem"],
            "ortserve serve: tls_key_file: expected the private key of tls_cert_file 'c.pem', got none\n",
        ),
        (
            [
                *("serve", "--example", "--grpc-transport", "grpcio", "--tls-min-version", "1.3"),
                *("--tls-cert-file", "c.pem", "--tls-key-file", "k.pem"),
            ],
            "ortserve serve: tls_min_version: expected grpc_transport 'native' with '1.3', got 'grpcio'\n",
        ),
        (
            ["serve", "--example", "--tls-handshake-timeout-s", "0"],
            "ortserve serve: --tls-handshake-timeout-s: expected number, 0.1 to 600, in seconds, got '0'\n",
        ),
        (
            ["serve", "--example", "--http-port", "9000", "--grpc-port", "9000"],
            "ortserve serve: grpc_port: expected a different port than http_port, got 9000 for both\n",
        ),
    ],
)
def test_unservable_configuration_is_rejected_in_one_line(
    served: list[ServerOptions], capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == complaint
    assert not served


@pytest.mark.parametrize("arguments", [["serve", "--nope"], ["serve", "--http", "1"], ["launch"], [], ["version", "x"]])
def test_unknown_arguments_are_rejected(
    served: list[ServerOptions], capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == 2
    assert "usage: ortserve" in capsys.readouterr().err
    assert not served


def test_misspelt_flag_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--example", "--http-prt=9000"]) == 2
    assert "unrecognized arguments: --http-prt=9000; did you mean '--http-port'?" in capsys.readouterr().err


def test_a_word_of_flags_gets_them_as_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--example", "--port=9000"]) == 2
    ports = "'--http-port', '--grpc-port' or '--metrics-port'"
    assert f"unrecognized arguments: --port=9000; did you mean {ports}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--model-repository=/models", "--model-repository of tritonserver is REPOSITORY here"),
        ("--http-address=0.0.0.0", "--http-address of tritonserver is --host here"),
        ("--exit-timeout-secs=30", "--exit-timeout-secs of tritonserver is --drain-timeout-s here"),
        ("--allow-sagemaker=true", "no flag replaces --allow-sagemaker of tritonserver"),
        ("--vertex-ai-port=8080", "no flag replaces --vertex-ai-port of tritonserver"),
        ("--http-thread-count=8", "no flag replaces --http-thread-count of tritonserver"),
    ],
)
def test_flag_of_triton_names_its_replacement_or_says_that_there_is_none(
    capsys: pytest.CaptureFixture[str], flag: str, instead: str
) -> None:
    assert main(["serve", "--example", flag]) == 2
    expected = f"unrecognized arguments: {flag}; {instead}\n"
    assert capsys.readouterr().err.endswith(expected)


def test_switch_with_a_value_is_rejected_with_what_is_expected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--example", "--strict-readiness=true"]) == 2
    expected = "argument --strict-readiness/--no-strict-readiness: expected no value, got 'true'\n"
    assert capsys.readouterr().err.endswith(expected)


def test_named_flags_exist_and_those_of_triton_do_not() -> None:
    flags = build_parser()._option_string_actions
    assert set(triton_names._FLAGS_OF_TRITON.values()) - {"REPOSITORY"} <= set(flags)
    assert not (set(triton_names._FLAGS_OF_TRITON) | triton_names._OTHER_FLAGS_OF_TRITON) & set(flags)


def test_misspelt_flag_of_a_tool_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "digits", "--concurency", "4"]) == 2
    # Newer versions of Python take the 4 as another target.
    expected = r"unrecognized arguments: --concurency( 4)?; did you mean '--concurrency'\?\n$"
    assert re.search(expected, capsys.readouterr().err)


def test_flags_that_share_only_their_dashes_are_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "model", "--seconds", "1"]) == 2
    assert capsys.readouterr().err.endswith("unrecognized arguments: --seconds 1\n")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("bench digits --inputs data.npz --free-dim 4", "--free-dim: expected synthetic inputs, got --inputs"),
        (
            "bench digits --protocol grpc",
            "--protocol: expected the URL of a server, which begins with http:// or grpc://, got a model",
        ),
        (
            "bench digits --key-file key",
            "--key-file: expected the URL of a server, which begins with http:// or grpc://, got a model",
        ),
        ("bench --compare a.json b.json --slo 5", "--slo: expected a target, got --compare"),
        ("bench http://host --model m --threads 2", "--threads: expected a model in this process, got a URL"),
        (
            "bench http://host --model m --find-capacity --rounds 3",
            "--rounds: expected --concurrency, --rate or --arrivals, got --find-capacity",
        ),
        (
            "profile digits --requests 9",
            "--requests: expected the URL of a server, which begins with http:// or grpc://, got a model",
        ),
        ("profile http://host m --runs 9", "--runs: expected a model in this process, got a URL"),
        ("profile http://host m --rows 9", "--rows: expected requests to send, got a URL without --inputs"),
        ("profile http://host m --compare a b", "--compare: expected a model in this process, got a URL"),
    ],
)
def test_flags_without_effect_on_the_target_are_refused(
    words: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err.endswith(f"error: {problem}\n")


def test_misspelt_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimise", "digits"]) == 2
    assert capsys.readouterr().err.startswith("ortserve: unknown command 'optimise'; did you mean 'optimize'?\n")


def test_optional_arguments_of_a_tool_are_not_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 2
    assert capsys.readouterr().err.endswith("the following arguments are required: ACTION\n")


def test_serve_help_shows_every_option_with_its_bounds_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())

    assert all(flag_name(name) in help_text for name in ServerOptions.model_fields if name != "repositories")
    assert "--drain-timeout-s SECONDS" in help_text
    assert "[number, 0 to 3600, in seconds; default: 30]" in help_text
    assert "--http-min-body-bytes-per-s N" in help_text
    assert "--otlp-endpoint TEXT" in help_text
    assert "--otlp-protocol {http/protobuf,grpc}" in help_text


@pytest.mark.parametrize("command", ["serve", "health", "inspect", "version"])
def test_help_of_a_command_is_the_same_in_both_forms(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (main([command, "--help"]), main(["help", command])) == (0, 0)
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: ortserve {command}")
    assert shown == shown[: len(shown) // 2] * 2


def test_help_of_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "inspct"]) == 2
    assert capsys.readouterr().err.startswith("ortserve: unknown command 'inspct'; did you mean 'inspect'?")


@pytest.mark.parametrize("command", ["serve", "bench"])
def test_help_fits_the_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for columns, most in (("90", 90), ("200", 110)):
        monkeypatch.setenv("COLUMNS", columns)
        assert main([command, "--help"]) == 0
        assert most - 20 < max(map(len, capsys.readouterr().out.splitlines())) <= most


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version_names_the_server_and_its_runtime(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"ortserve {__version__}"
    assert lines[1] == f"request path {'compiled' if IS_COMPILED else 'interpreted'}"
    assert any(line.startswith("onnxruntime") for line in lines)


def test_unusable_environment_is_rejected_before_the_start(
    served: list[ServerOptions], capsys: pytest.CaptureFixture[str], install: Callable[[str], None]
) -> None:
    install("onnxruntime")
    install("onnxruntime-gpu")

    assert main(["serve", "--example"]) == 2
    assert "both installed" in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize(
    ("missing", "extras"), [(("onnxruntime", "rich"), "cpu,tools"), (("optuna", "sympy"), "tools")]
)
def test_tools_name_the_extras_that_bring_the_missing_packages(
    missing: tuple[str, ...], extras: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ortserve.cli.main.find_spec", lambda name: None if name in missing else name)

    assert main(["check", "models"]) == 1

    assert capsys.readouterr().err == (f"ortserve check needs {', '.join(missing)}: pip install 'ortserve[{extras}]'\n")


def test_tools_refuse_arguments_that_are_no_text_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "model-\udcff.onnx"]) == 2

    assert capsys.readouterr().err == (
        "ortserve inspect: expected arguments in the encoding of the locale, got 'model-\\udcff.onnx'\n"
    )


@pytest.mark.parametrize(("version", "has_it"), [("glibc 2.38.9000", True), ("glibc 2.34", False), ("", False)])
def test_malloc_of_glibc_2_35_requests_huge_pages(version: str, has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions in development have three numbers, as in Fedora Rawhide."""
    monkeypatch.setattr(os, "confstr", lambda name: version)

    assert huge_pages._has_tunable() is has_it


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["version", "help"])
def test_closed_pipe_changes_no_status_and_a_full_disk_is_one_line(
    command: str, unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reader, writer = os.pipe()
    os.close(reader)
    ran = [sys.executable, "-m", "ortserve", command]
    for stdout, status, error in (
        (writer, 0, ""),
        (os.open("/dev/full", os.O_WRONLY), 1, f"ortserve {command}: output: No space left on device\n"),
    ):
        done = subprocess.run(ran, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
        os.close(stdout)
        assert (done.returncode, done.stderr) == (status, error)


def test_command_runs_with_closed_standard_streams(tmp_path: Path) -> None:
    command = f'exec "{sys.executable}" -c "from ortserve.cli.main import main; raise SystemExit(main())" compare a b'
    for closed in ("<&- >&- 2>&-", ">&-"):
        assert subprocess.run(["sh", "-c", f"{command} {closed}"], cwd=tmp_path, timeout=60).returncode == 2, closed


def test_ctrl_c_ends_a_tool_while_a_library_is_imported() -> None:
    script = """
import os, signal, sys, time

class Library:
    def find_spec(self, name, path, target=None):
        if name == "onnxruntime.capi":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            except KeyboardInterrupt:  # as native libraries do while they start
                raise ImportError("initialization failed") from None

sys.meta_path.insert(0, Library())
from ortserve.cli.main import main
raise SystemExit(main(["compare", "a.onnx", "b.onnx"]))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"ortserve compare: interrupted\n")


@pytest.mark.parametrize("command", ["bench", "serve", "health", "version"])
def test_ctrl_c_ends_any_command_from_its_first_import_on(command: str) -> None:
    script = f"""
import os, signal, sys

class Imports:
    def find_spec(self, name, path, target=None):
        if name.startswith("ortserve.") and name not in ("ortserve.cli", "ortserve.cli.main"):
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Imports())
sys.argv = ["ortserve", {command!r}]
from ortserve.cli.main import main
raise SystemExit(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, f"ortserve {command}: interrupted\n".encode())


def test_ctrl_c_waits_while_the_process_restarts_with_huge_pages() -> None:
    script = """
import os, signal, sys
from ortserve.cli import huge_pages, main

real_execv = os.execv

def execv(path, arguments):
    os.kill(os.getpid(), signal.SIGINT)  # Python's own start would turn it into a traceback
    arguments = [path, "-c", "from ortserve.cli.main import main; raise SystemExit(main())", "bench"]
    real_execv(path, arguments)

huge_pages._has_tunable = huge_pages._is_on_request = lambda: True
os.execv, sys.argv = execv, ["ortserve", "bench"]
raise SystemExit(main.main())
"""
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, env=environment)
    assert (ended.returncode, ended.stderr) == (130, b"ortserve bench: interrupted\n")


def test_help_of_tools_imports_no_large_library() -> None:
    heavy = ["grpc", "matplotlib", "onnx", "onnx_ir", "onnxruntime", "optuna", "prometheus_client", "psutil", "sympy"]
    code = (
        "import sys; from ortserve.cli.main import _TOOLS, main; "
        "assert [main([tool, '--help']) for tool in _TOOLS] == [0] * 12; "
        "assert main(['quantize', 'm', '--mode', 'fast']) == 2; "
        f"sys.exit(' '.join(sys.modules.keys() & set({heavy})) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "invalid choice: 'fast'" in done.stderr
