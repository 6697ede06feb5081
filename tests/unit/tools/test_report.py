"""Reports on the terminal and as pages."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Final, Literal

import pytest

from archives import file_site
from browser import DESKTOP, NEEDS_CHROMIUM, PHONE, chromium, open_page, violations
from ortserve.tools.console import print_report, progress
from ortserve.tools.page import chart, render_page
from ortserve.tools.report import (
    NOTHING,
    Cell,
    Facts,
    Finding,
    Findings,
    Picture,
    Report,
    Table,
    Text,
    bytes_text,
    duration_text,
    facts_of,
    number_text,
    table_of,
)

VIEWS: Final[tuple[tuple[tuple[int, int], Literal["light", "dark"]], ...]] = (
    (DESKTOP, "light"),
    ((1100, 900), "dark"),
    (PHONE, "dark"),
)
"""Sizes and color schemes of windows; the layout does not depend on the scheme."""
FINDING = Finding("two_casts", "warning", "2 casts <in> a [row]", "they cost time", "remove them", ("a", "b"))


def report() -> Report:
    return Report(
        "Model [x]",
        [
            Text("A paragraph with [brackets] & <tags>."),
            Facts("Facts", {"nodes": 12345, "share": 0.1234, "unknown": None, "is dynamic": True}),
            Table("Nodes", ["name", "ms"], [["[a]", 1.5], ["b", None], ["c", 3.0]], note="a note", max_rows=2),
            Findings([FINDING]),
            Picture("Chart", chart(lambda axes: axes.plot([1, 2], [3, 4]), name="first")),
            Picture("Chart 2", chart(lambda axes: axes.plot([1, 2], [3, 4]), name="second")),
        ],
    )


def test_terminal_shows_texts_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report())

    shown = capsys.readouterr().out

    for text in (
        "Model [x]",
        "[brackets] & <tags>",
        "12,345",
        "0.123",
        "yes",
        "[a]",
        "a note",
        "warning: 2 casts <in> a",
    ):
        assert text in shown
    assert "and 1 more rows" in shown
    assert "\x1b" not in shown, "no codes for terminals in a pipe"


def test_a_table_without_rows_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    empty = Report("Model", [Table("Weights", ["datatype"], [], note="about weights")])

    print_report(empty)
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == ["Model", "", "Weights", "none"]
    page = render_page(empty)
    assert "<p>none</p>" in page
    assert "<table" not in page


def test_terminal_shows_no_control_characters_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\nb\x1b[31m\x9b0m"
    finding = Finding("k", "advice", name, name, name)
    print_report(
        Report(name, [Text(name), Facts(name, {name: name}), Table(name, [name], [[name]]), Findings([finding])])
    )

    assert capsys.readouterr().out.replace("\n", "").isprintable()


def test_values_of_facts_are_shown_in_narrow_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ortserve.tools.console._PIPE_WIDTH", 20)

    print_report(Report("x", [Facts("Content", {"initializers as inputs": "none", "file": "30.0 KiB"})]))

    assert "none" in (shown := capsys.readouterr().out)
    assert "30.0 KiB" in shown


def test_charts_are_drawn_without_a_home_and_without_a_word() -> None:
    program = "from ortserve.tools.page import chart; print(chart(lambda axes: axes.plot([1, 2]), name='a')[:4])"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "MPL"))}
    drawn = subprocess.run(
        [sys.executable, "-c", program],
        env=variables | {"HOME": "/proc/nowhere"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (drawn.stdout, drawn.stderr) == ("<svg\n", "")


def test_whole_columns_with_numbers_are_aligned_to_the_right_on_pages() -> None:
    page = render_page(Report("x", [Table("Nodes", ["name", "ms"], [["a", None], ["b", 1.5]])]))

    assert re.findall(r'<(t.)(?: class="number")?>', page).count("th") == 2
    assert re.findall(r'class="number">([^<]+)<', page) == ["ms", NOTHING, "1.50"]


def test_tables_have_the_columns_of_all_their_rows() -> None:
    table = Table.of("Phases", [{"load": "a", "queue": 1.0}, {"load": "b", "run": 2.0}])

    assert list(table.columns) == ["load", "queue", "run"]
    assert list(table.rows) == [["a", 1.0, None], ["b", None, 2.0]]


@dataclass(frozen=True, slots=True)
class Measured:
    name: str
    nbytes: int
    arena_nbytes: int | None
    held_bytes: int
    run_ms: float
    rate_per_s: float
    copy_gb_per_s: float
    files: Mapping[str, tuple[int, ...]]


def test_fields_of_dataclasses_get_units_in_facts_and_keep_comparable_times_in_tables() -> None:
    record = Measured("", 2048, None, 2**20, 0.5, 1234.0, 3.0, {"a": (1, 2), "b": ()})
    shared = {"name": None, "size": "2.00 KiB", "arena": None, "held": "1.00 MiB"}
    files = {"files": "a: 1, 2; b: none"}

    facts, table = facts_of("", record), table_of("", [record])

    assert facts.entries == {**shared, "run": "500 µs", "rate": "1,230/s", "copy": "3.00 GB/s", **files}
    cells = {**shared, "run ms": 0.5, "rate per s": 1234.0, "copy gb per s": 3.0, **files}
    assert dict(zip(table.columns, table.rows[0], strict=True)) == cells


def test_titles_are_not_broken_by_narrow_tables(capsys: pytest.CaptureFixture[str]) -> None:
    title = "Operators after fusions, CPUExecutionProvider"
    print_report(Report("x", [Table(title, ["operator"], [["Add"]]), Facts(title, {"a": 1}), Findings([], title)]))

    assert capsys.readouterr().out.splitlines().count(title) == 3


def test_wide_tables_break_no_words_while_there_is_room_for_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without room, words are broken, but no numbers, and lines are never longer than the terminal is wide."""
    words = ["session.spinning: true, intra_op_threads: 1", "1.30 (1.12 to 1.51)", "101 MiB"]
    wide = Report("x", [Table("Trials", ["changes", "times as good", "memory"], [words])])
    for width, is_broken in ((80, False), (45, False), (20, True)):
        monkeypatch.setattr("ortserve.tools.console._PIPE_WIDTH", width)
        print_report(wide)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        shown = {word for line in lines for word in line.split()}
        assert ({word for text in words for word in text.split()} <= shown) is not is_broken
        assert {"1.30", "101"} <= shown


def test_narrow_tables_break_texts_before_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[list[Cell]] = [
        [f"/encoder/layer.{number}/attention", "SkipLayerNormalization", 30848, 0.0478, 1.5] for number in (1, 2)
    ]
    narrow = Report("x", [Table("Nodes", ["node", "operator", "bytes", "ms", "GFLOP/s"], rows)])
    for width, is_listed in ((80, False), (60, False), (34, False), (24, True)):
        monkeypatch.setattr("ortserve.tools.console._PIPE_WIDTH", width)
        print_report(narrow)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        shown = [line.split()[2:] for line in lines if "/" in line and "SkipL" in line]
        assert (shown == [["30,848", "0.0478", "1.50"]] * 2) is not is_listed, lines
        listed = [tuple(line.split()) for line in lines]
        assert all((listed.count(pair) == 2) is is_listed for pair in (("ms", "0.0478"), ("GFLOP/s", "1.50")))


def test_findings_that_are_empty_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Report("x", [Findings([])]))

    assert "nothing to report" in capsys.readouterr().out


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("running", 3) as step:
        step(1, "")
        step(2, "more")

    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal_shows_no_control_characters_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    shown = b""
    with os.fdopen(ours, "rb", buffering=0) as screen:
        with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            with progress("a\x1b]0;title\x07") as step:
                step(0, "b\x1b]0;title\x07")
        with suppress(OSError):  # EIO after the last byte: the terminal is closed
            while more := screen.read(1 << 16):
                shown += more

    assert b"]0;title" in shown
    assert b"\x1b]0;" not in shown


class Page(HTMLParser):
    """Collects the ids of a page, and the resources that it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        target = given.get("src") or given.get("href") or given.get("xlink:href") or ""
        if tag in ("script", "link", "iframe", "img", "image") or (target and not target.startswith("#")):
            self.loads.append(f"{tag} {target}")


def test_page_is_self_contained() -> None:
    page = render_page(report())

    parsed = Page()
    parsed.feed(page)
    assert parsed.loads == []
    assert len(set(parsed.ids)) == len(parsed.ids), "two pictures have different ids"
    assert not re.search(r"url\((?!#)|@import", page)
    for number in re.findall(r"url\(#([^)]+)\)", page):
        assert number in parsed.ids


def test_page_escapes_texts_and_shows_all_rows() -> None:
    page = render_page(report())

    assert "&lt;in&gt;" in page
    assert "<in>" not in page
    assert "&amp; &lt;tags&gt;" in page
    assert '<td class="number">3.00</td>' in page


@NEEDS_CHROMIUM
def test_page_is_legible_in_both_color_schemes_and_on_phones(tmp_path: Path) -> None:
    """On phones, wide tables and pictures scroll by themselves, and no word is broken into letters."""
    shown = report()
    wide = Table("Wide", ["", *(f"column {number}" for number in range(11))], [["some words"] * 12])
    row = ("fused fc1", "FusedGemm", 1.0, 0.0441, 76.8, 441.0, 0.297, 0.601, 0.0159, 6.35, 265_216, "float[1,256]")
    columns = ("node", "operator", "calls", "ms", "%", "µs a call", "GFLOP/s", "GB/s", "% wait", "µs before", "bytes")
    nodes = Table("Nodes of a profile", (*columns, "outputs"), [row])
    blocks = [*shown.blocks, wide, nodes]
    (tmp_path / "page.html").write_text(render_page(replace(shown, blocks=blocks)), encoding="utf-8")
    broken = """() => [...document.querySelectorAll("th, td")].filter((cell) => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return range.getClientRects().length > cell.textContent.trim().split(/\\s+/).length;
    }).map((cell) => cell.textContent)"""
    with file_site(tmp_path) as url, chromium() as browser:
        for size, scheme in VIEWS:
            with open_page(browser, f"{url}/page.html", size=size, scheme=scheme) as page:
                assert violations(page) == []
                assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
                assert page.evaluate(broken) == []


def test_same_chart_gives_same_text() -> None:
    assert chart(lambda axes: axes.plot([1]), name="x") == chart(lambda axes: axes.plot([1]), name="x")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1.00"),
        (12.345, "12.3"),
        (1234.5, "1,230"),
        (0.012345, "0.0123"),
        (9.999, "10.0"),
        (2.5e7, "2.5e+07"),
    ],
)
def test_numbers_are_shown_with_few_digits(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(12, "12 B"), (1536, "1.50 KiB"), (3 * 2**30, "3.00 GiB"), (5 * 2**40, "5,120 GiB")]
)
def test_bytes_are_shown_in_the_largest_unit(nbytes: int, text: str) -> None:
    assert bytes_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.6e6, "30.1 days"), (2.0, "2.00 s"), (0.0123, "12.3 ms"), (4.2e-6, "4.20 µs")]
)
def test_durations_are_shown_in_a_suitable_unit(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
