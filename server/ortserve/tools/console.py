"""Prints reports and progress bars. Both adapt to pipes, narrow terminals and ASCII."""

import codecs
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Final, Literal, TextIO, TypeAlias

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text as RichText

from ortserve.tools.report import NOTHING, Cell, Facts, Findings, Picture, Report, Table, Text, cell_text

_PIPE_WIDTH: Final = 120
_EDGES: Final = 2
"""Columns of a terminal left and right of a table."""
_LONG_WORD: Final = 24
"""Words up to this length, such as ``session.spinning:``, are broken only if a table does not fit otherwise."""
_LEAST_TEXT: Final = 6
"""Least width of columns of texts beside whole numbers."""
_CONTROLS: Final = dict.fromkeys((*range(32), *range(127, 160)), " ")
_IN_ASCII: Final = {NOTHING: "-", "→": "->", "µ": "u", "±": "+-", "…": "..."}
"""Replacements for encodings that lack these characters."""
_STYLES: Final = {"problem": "bold red", "warning": "yellow", "advice": "cyan"}


class OutputClosedError(BrokenPipeError):
    """The reader of standard output has closed the pipe."""


def print_report(report: Report) -> None:
    """Print a report to standard output. Raises OutputClosedError."""
    console = _console(sys.stdout)
    console.print(_text(report.title, "bold"))
    for block in report.blocks:
        if isinstance(block, Picture):
            continue
        console.print()
        if not isinstance(block, Text) and block.title:
            console.print(_text(block.title, "bold"))
        match block:
            case Text():
                console.print(_text(block.text))
            case Facts():
                console.print(_facts(block.entries.items()))
            case Table():
                _print_table(block, console)
            case Findings():
                _print_findings(block, console)


ShowProgress: TypeAlias = Callable[[float, str], None]
"""Called with the amount of work done and a text about the current work. An empty text shows the title of the bar."""


@contextmanager
def progress(doing: str, total: float | None = None) -> Iterator[ShowProgress]:
    """Show a bar on standard error while the block runs, if it is a terminal. Nothing is shown in pipes."""
    console = _console(sys.stderr)
    if not sys.stderr.isatty():
        yield lambda done, now: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(printable(doing), total=total)

        def step(done: float, now: str) -> None:
            bars.update(bar, completed=done, description=printable(now or doing))

        yield step


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error for the caller. Otherwise the process would exit with status 1."""
        raise OutputClosedError


def _console(stream: TextIO) -> Console:
    if hasattr(stream, "reconfigure"):
        codecs.register_error("ortserve", _replace)
        stream.reconfigure(errors="ortserve")
    is_terminal = stream.isatty()
    # Set explicitly, because FORCE_COLOR would put escape codes into pipes.
    return _Console(
        file=stream,
        force_terminal=is_terminal,
        width=None if is_terminal else _PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _replace(error: UnicodeError) -> tuple[str, int]:
    """A replacement for characters that an encoding lacks, and the position after them."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_IN_ASCII.get(one, "?") for one in error.object[error.start : error.end]), error.end


def printable(text: str) -> str:
    """A text on one line without control characters, which names in models may contain and terminals obey."""
    return text.translate(_CONTROLS)


def _text(text: str, style: str = "") -> RichText:
    return RichText(printable(text), style)


def _box(console: Console) -> box.Box:
    return box.SIMPLE_HEAD if console.encoding.lower().startswith("utf") else box.ASCII


def _facts(entries: Iterable[tuple[str, Cell]]) -> RichTable:
    table = RichTable(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in entries:
        table.add_row(_text(name), _text(cell_text(value)))
    return table


def _print_table(block: Table, console: Console) -> None:
    if not block.rows:
        console.print(_text("none"))
        return
    shown = block.rows if block.max_rows is None else block.rows[: block.max_rows]
    texts = [[printable(cell_text(cell)) for cell in row] for row in shown]
    if layout := _layout(block, texts, console.width):
        table = RichTable(box=_box(console), pad_edge=False, padding=(0, layout[0]))
        for name, is_number, width in zip(block.columns, block.are_numbers, layout[1], strict=True):
            justify: Literal["left", "right"] = "right" if is_number else "left"
            table.add_column(_text(name), justify=justify, overflow="fold", width=width)
        for row in texts:
            table.add_row(*map(RichText, row))
        console.print(table)
    else:
        for row in texts:
            console.print(_facts(zip(block.columns, row, strict=True)))
            console.print()
    if len(shown) < len(block.rows):
        console.print(_text(f"and {len(block.rows) - len(shown):,} more rows, in --json and in pages (-o)", "dim"))
    if block.note:
        console.print(_text(block.note, "dim"))


def _layout(block: Table, texts: Sequence[Sequence[str]], room: int) -> tuple[int, Sequence[int]] | None:
    """The padding on both sides of a column, and widths of columns for lines of at most ``room`` characters.

    No number is broken, and no word, except very long ones, as long as there is room. None if numbers and a little of
    each text do not fit; then each row is printed as facts.
    """
    columns = list(zip(map(printable, block.columns), *texts, strict=True))
    words = [max(min(_LONG_WORD, len(word)) for text in cells for word in [*text.split(), " "]) for cells in columns]
    for padding in (1, 0):
        spare = room - (2 * padding + 1) * (len(columns) - 1) - _EDGES - sum(words)
        if spare >= 0:
            return padding, _widened(columns, words, spare)
    room -= len(columns) - 1 + _EDGES
    numbers, longest, least = block.are_numbers, [max(1, *map(len, cells[1:])) for cells in columns], list[int]()
    for cells, is_number, whole in zip(columns, numbers, longest, strict=True):
        figures = [len(word) for text in cells[1:] for word in text.split() if word[0].isdigit()]
        least.append(whole if is_number else max(min(_LEAST_TEXT, whole), *figures, 1))
    if sum(least) > room:
        return None
    # Texts get equal parts of the room, unless one of them needs more for a number.
    share = (room - sum(compress(longest, numbers))) // max(1, numbers.count(False))
    fair = [max(few, min(share, whole)) for few, whole in zip(least, longest, strict=True)]
    widths = fair if sum(fair) <= room else least
    return 0, _widened(columns, widths, room - sum(widths))


def _widened(columns: Sequence[Sequence[str]], widths: Sequence[int], spare: int) -> list[int]:
    """Widths that divide ``spare`` among the columns, whose first text is their name.

    Columns that need little room for their longest text get it first, so that figures keep their units, and names of
    columns last.
    """
    widened = list(widths)
    for first in (1, 0):
        needs = [max(map(len, cells[first:]), default=0) - width for cells, width in zip(columns, widened, strict=True)]
        for need, number in sorted(zip(needs, range(len(needs)), strict=True)):
            more = max(0, min(spare, need))
            widened[number] += more
            spare -= more
    return widened


def _print_findings(block: Findings, console: Console) -> None:
    if not block.findings:
        console.print(_text("nothing to report"))
    for finding in block.findings:
        console.print(RichText.assemble((f"{finding.level}: ", _STYLES[finding.level]), printable(finding.seen)))
        console.print(_text(f"  {finding.matters}", "dim"))
        console.print(_text(f"  → {finding.remedy}"))
