"""The handling of results and failures that all tools share."""

import argparse
import io
import json
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from ortserve.cli.main import _TOOLS
from ortserve.errors import invalid_input
from ortserve.tools.command import FAILED, INVALID, OK, Outcome, number, run_tool, several
from ortserve.tools.report import Facts, Finding, Findings, Report, Text


@dataclass(frozen=True, slots=True)
class Result:
    schema: str = "ortserve.test/1"
    name: str = "größe"


def given(page: Path | None = None, *, as_json: bool = False) -> argparse.Namespace:
    return argparse.Namespace(page=page, page_flag="-o", json=as_json)


def outcome(_: argparse.Namespace) -> Outcome:
    return Outcome(Result(), Report("title", [Text("the result")]))


def test_json_is_utf_8_whatever_the_locale_is(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))

    assert run_tool("test", outcome, given(as_json=True)) == OK

    assert json.loads(written.getvalue().decode("utf-8")) == {"schema": "ortserve.test/1", "name": "größe"}


def test_encoding_without_arrows_and_units_gets_legible_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    found = Findings([Finding("kind", "advice", "größe", "it takes 5 µs", "pip install …")])

    run_tool("test", lambda _: Outcome(Result(), Report("title", [Facts("", {"unknown": None}), found])), given())

    text = " ".join(written.getvalue().decode("ascii").split())
    assert text.endswith("unknown - Findings advice: gr??e it takes 5 us -> pip install ...")


@pytest.mark.parametrize("as_json", [True, False])
def test_closed_pipe_changes_no_status(monkeypatch: pytest.MonkeyPatch, *, as_json: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert run_tool("test", outcome, given(as_json=as_json)) == OK


def test_page_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in (tmp_path, tmp_path / "nowhere" / "page.html", tmp_path / "model.onnx"):
        assert run_tool("test", lambda _: pytest.fail("it ran"), given(page)) == INVALID
        error = capsys.readouterr().err
        assert error.startswith("ortserve test: -o: ")
        assert f"got '{page}'" in error


def test_page_replaces_only_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    page.touch()
    for _ in range(2):
        assert run_tool("test", outcome, given(page)) == OK
        assert "the result" in page.read_text()
    samples = tmp_path / "samples.npz"
    samples.write_bytes(b"PK")
    assert run_tool("test", lambda _: pytest.fail("it ran"), given(samples)) == INVALID
    assert f"got '{samples}' of another kind" in capsys.readouterr().err
    assert samples.read_bytes() == b"PK"


def test_result_is_printed_if_its_page_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"

    def run(arguments: argparse.Namespace) -> Outcome:
        page.mkdir()  # while the command runs
        return outcome(arguments)

    assert run_tool("test", run, given(page)) == FAILED

    printed = capsys.readouterr()
    assert "the result" in printed.out
    assert printed.err == f"ortserve test: {page}: Is a directory\n"


def test_full_disk_is_reported_with_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool("test", outcome, given(Path("/dev/full"))) == FAILED
    assert capsys.readouterr().err == "ortserve test: /dev/full: No space left on device\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError("Unable to allocate 74.5 GiB"), FAILED),
        (BrokenPipeError(32, "Broken pipe"), FAILED),
        (invalid_input("node 'a\nb\x1b[31m' is none"), INVALID),
    ],
)
def test_failure_is_one_line_of_printable_text(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> Outcome:
        raise error

    assert run_tool("test", run, given()) == status

    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.endswith("\n")
    assert printed.err[:-1].isprintable()


def test_error_without_a_file_has_no_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    def run(_: argparse.Namespace) -> Outcome:
        raise FileNotFoundError(2, "No usable temporary directory found")  # as tempfile does

    assert run_tool("test", run, given()) == FAILED
    assert capsys.readouterr().err == "ortserve test: No usable temporary directory found\n"


def test_numbers_within_their_bounds_are_read() -> None:
    assert several(number(int, 1))("1,32") == [1, 32]
    assert number(float, 0, 1)("0.25") == 0.25
    assert [number(float, 0, 1)(text) for text in ("0", "1")] == [0, 1]


@pytest.mark.parametrize("text", ["-1", "1.5", "nan", "inf", "", "x", "1,0.5,", "1e999"])
def test_others_are_refused_with_the_bounds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a number from 0 to 1, got"):
        number(float, 0, 1)(text)


def test_bounds_are_written_as_they_are() -> None:
    for kind, most, bounds in ((int, 1 << 20, "1 to 1,048,576"), (float, 99.9999, "1 to 99.9999")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"from {bounds}, got '0'"):
            number(kind, 1, most)("0")


@pytest.mark.parametrize("text", ["0", "1,", "2.0", "1000000"])
def test_lists_are_refused_for_any_of_their_numbers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected an integer from 1 to 999,999, got"):
        several(number(int, 1))(text)


@pytest.mark.parametrize("tool", _TOOLS)
def test_help_says_the_exit_status(tool: str) -> None:
    parser = import_module(f"ortserve.tools.{tool}.arguments").build_parser()
    assert "\nExit status: 0 " in parser.format_help()


@pytest.mark.parametrize("tool", _TOOLS)
def test_help_of_every_tool_has_one_form(tool: str) -> None:
    parser = import_module(f"ortserve.tools.{tool}.arguments").build_parser()
    assert {"--json", "--page"} <= set(parser.flags_besides())
    texts = [action.help for action in parser._actions if "--help" not in action.option_strings]
    assert [text for text in texts if not (text[0].isupper() or ": " in text) or text[-1] != "."] == []
