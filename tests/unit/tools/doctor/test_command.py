"""The arguments, the exit status and the report of doctor."""

import re
from dataclasses import replace
from typing import Any

import pytest

from ortserve.cli.main import run_tool
from ortserve.tools.command import json_text
from ortserve.tools.doctor import command
from ortserve.tools.doctor.catalog import finding
from ortserve.tools.doctor.presentation import present
from ortserve.tools.doctor.request_path import summarize
from ortserve.tools.doctor.result import DoctorResult, GpuFacts, ModelCheck, ProviderTrial, RuntimeFacts
from ortserve.tools.page import render_page
from ortserve.tools.report import Level

RESULT = DoctorResult(subject="this machine")


@pytest.mark.parametrize(
    ("levels", "fail_on", "status"),
    [
        ((), "advice", 0),
        (("advice",), "advice", 1),
        (("advice",), "warning", 0),
        (("warning", "advice"), "warning", 1),
        (("warning",), "problem", 0),
        (("advice", "problem"), "problem", 1),
        (("problem",), "never", 0),
    ],
)
def test_status_follows_the_worst_finding(
    levels: tuple[Level, ...],
    fail_on: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    findings = tuple(finding("numa", f"a {level}", level=level) for level in levels)
    monkeypatch.setattr(command, "_look_at_machine", lambda *_: replace(RESULT, findings=findings))

    assert run_tool("doctor", ["--fail-on", fail_on]) == status

    shown = re.findall(r"^(problem|warning|advice): ", capsys.readouterr().out, re.MULTILINE)
    assert shown == sorted(levels, key=["problem", "warning", "advice"].index)


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        (["/nowhere"], 2, "'/nowhere': expected a folder of models, an .onnx file, or a URL"),
        (["http://127.0.0.1:1"], 1, "http://127.0.0.1:1: cannot reach the server: Connection refused"),
        (["http://"], 2, "'http://': expected a URL such as http://HOST:8000"),
        (["http://[::1"], 2, "'http://[::1': expected a URL such as http://HOST:8000"),
        (["grpc://127.0.0.1:8001"], 2, "grpc://127.0.0.1:8001: expected the server's HTTP port, such as"),
        (["--config", "/nowhere"], 2, "--config: expected a file, got '/nowhere'"),
        (["--model", "digits"], 2, "--model: also expected the URL of a server, got none"),
        (["http://127.0.0.1:1", "--key-file", "/nowhere"], 2, "--key-file: expected a file with a key, got '/nowhere'"),
        (["http://127.0.0.1:1", "--key-file", "/"], 2, "--key-file: expected a file with a key, got '/': a folder"),
        (["http://127.0.0.1:1", "--model", "a/b"], 2, "a/b: expected a model file or REPOSITORY/name"),
        (["-o", "/nowhere/page.html"], 2, "-o: expected a file in an existing folder"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], status: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tool("doctor", arguments) == status

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"ortserve doctor: {problem}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--seconds", "-1"], ["--seconds", "x"], ["--seconds-per-model", "nan"], ["--requests", "0"]),
        *(["--requests", "1.5"], ["--fail-on", "x"], ["a", "b"]),
    ],
)
def test_malformed_arguments_end_with_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run_tool("doctor", arguments)

    assert left.value.code == 2


def full_result() -> DoctorResult:
    gpu = GpuFacts("<GPU & co>", "9.0", 2**36, None, None, None)
    trial = ProviderTrial("CUDAExecutionProvider", True, False, "lib<x>", {"libcuda.so.1": "found"})
    request = summarize("m", "synthetic", [200_000], [[10, 20, 30, 40, 50]], [5_000])
    models = tuple(ModelCheck("n" * 300 + str(number), 1, files_bytes=10) for number in range(5000))
    runtime = RuntimeFacts({"Python": "3"}, {"onnxruntime": "1"}, "build", (trial,), (gpu,))
    return replace(RESULT, findings=(finding("numa", "<b>"),), runtime=runtime, models=models, request=request)


def test_page_shows_everything_and_needs_no_network() -> None:
    page = render_page(present(full_result()))

    for text in ("&lt;GPU &amp; co&gt;", "lib&lt;x&gt;", "64.0 GiB", "libcuda.so.1", "n" * 300 + "4999"):
        assert text in page
    assert "Bare session.run takes 5.00 µs here, so serving adds 195 µs." in page
    assert not re.search(r"<(script|link|iframe|img)\b|url\((?!#)|@import", page)


def test_unknown_values_are_dashes_and_null() -> None:
    blocks: Any = present(full_result()).blocks
    (gpus,) = (block for block in blocks if getattr(block, "title", "") == "GPUs")
    assert gpus.rows[0][3] is None
    assert '"used_bytes": null' in json_text(full_result())
