"""Reports: results as blocks, which the terminal and the page show. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final, Literal, TypeAlias

from pydantic import TypeAdapter

Cell: TypeAlias = str | int | float | None
"""Numbers are aligned to the right and written with three digits; None is shown as a dash."""

NOTHING: Final = "\u2013"
"""A dash, for a cell without a value."""

Level: TypeAlias = Literal["problem", "warning", "advice"]
"""The level of a finding. problem: something does not work; warning: costs time, memory or safety; advice: may gain."""

LEVELS: Final[tuple[Level, ...]] = ("problem", "warning", "advice")
"""The worst first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An observation, its effect and its remedy.

    Attributes:
        kind: A stable name for programs: ``unfused_attention``.
        level: Level of the finding.
        seen: The evidence: names, counts, values.
        matters: Why it matters.
        remedy: What to do, if possible a command or a setting.
        where: The nodes, tensors, files or options of the finding.
    """

    kind: str
    level: Level
    seen: str
    matters: str
    remedy: str
    where: tuple[str, ...] = ()


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by level, the worst first."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


class FindingCatalog:
    """Kinds of findings, each with its level, its effect and its remedy."""

    def __init__(self, text: str) -> None:
        """``text`` has entries ``kind (level): why`` with ``→ what to do`` on a line of its own; ``#`` is a comment."""
        entries = re.findall(r"^(\w+) \((\w+)\): ([^→]+)→ ([^→]+?)(?=\n\w|\n\n|\n*\Z)", text, re.MULTILINE)
        kinds = {kind: (level, *(" ".join(one.split()) for one in texts)) for kind, level, *texts in entries}
        self.kinds: Final = TypeAdapter(Mapping[str, tuple[Level, str, str]]).validate_python(kinds)

    def finding(self, kind: str, seen: str, *where: str, level: Level | None = None) -> Finding:
        """A finding of this kind. ``level`` replaces that of the catalog."""
        usual, matters, remedy = self.kinds[kind]
        return Finding(kind, level or usual, seen, matters, remedy, where)


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values."""

    title: str
    entries: Mapping[str, Cell]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of equal length.

    Attributes:
        title: Text above the table.
        columns: Names of the columns, with units.
        rows: Cells.
        note: Text below the table; may be empty.
        max_rows: The number of rows that the terminal shows; the page shows all. None for no limit.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    max_rows: int | None = None

    @staticmethod
    def of(title: str, rows: Sequence[Mapping[str, Cell]], note: str = "", max_rows: int | None = None) -> "Table":
        """A table from rows that map columns to cells. It has the columns of all rows in their order of appearance."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        return Table(title, columns, [[row.get(name) for name in columns] for row in rows], note, max_rows)

    @property
    def are_numbers(self) -> list[bool]:
        """Whether each column has a number. Such columns are aligned to the right."""
        cells = ([row[index] for row in self.rows] for index in range(len(self.columns)))
        return [
            any(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in column) for column in cells
        ]


@dataclass(frozen=True, slots=True)
class Findings:
    """A list of findings, the worst first. An empty list is shown as ``nothing to report``."""

    findings: Sequence[Finding]
    title: str = "Findings"


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG image, which only pages show. ``svg`` begins with ``<svg`` and refers to nothing outside itself."""

    title: str
    svg: str
    note: str = ""


Block: TypeAlias = Facts | Table | Findings | Text | Picture


@dataclass(frozen=True, slots=True)
class Report:
    """A title and blocks from top to bottom."""

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


def cell_text(cell: Cell) -> str:
    """A cell as text."""
    if cell is None:
        return NOTHING
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return number_text(cell) if isinstance(cell, float) else cell


def number_text(value: float) -> str:
    """A number with three significant digits: ``12,300``. From a million on and below 0.0001, with an exponent."""
    if value != value:
        return NOTHING
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.3g}"
    rounded = float(f"{value:.3g}")
    digits = max(0, 2 - int(f"{abs(rounded):e}".partition("e")[2]))
    return f"{rounded:,.{digits}f}"


def bytes_text(nbytes: float) -> str:
    """A number of bytes in a suitable unit: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{number_text(float(nbytes)) if unit != 'B' else int(nbytes)} {unit}"
        nbytes /= 1024
    raise AssertionError


def duration_text(seconds: float) -> str:
    """A duration in a suitable unit: ``12.3 ms``."""
    for factor, unit in ((1 / 86_400, "days"), (1, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1:
            return f"{number_text(seconds * factor)} {unit}"
    return f"{number_text(seconds * 1e6)} µs"


_Texts: TypeAlias = Mapping[str, Callable[[float], str]]

_SIZES: Final = dict.fromkeys(("nbytes", "_bytes"), bytes_text)
_TIMES: Final[_Texts] = {
    "_gb_per_s": lambda speed: f"{number_text(speed)} GB/s",
    "_per_s": lambda rate: f"{number_text(rate)}/s",
    "_ms": lambda ms: duration_text(ms / 1e3),
    "_s": duration_text,
}
"""The first ending that matches is used."""


def facts_of(title: str, record: Any, *, without: Sequence[str] = ()) -> Facts:
    """The fields of a dataclass as facts, except those in ``without``. Sizes, times and rates have their units."""
    return Facts(title, cells_of(record, without, {**_SIZES, **_TIMES}))


def table_of(
    title: str, records: Sequence[Any], *, without: Sequence[str] = (), max_rows: int | None = None, note: str = ""
) -> Table:
    """A table with a row per dataclass and a column per field, except those in ``without``."""
    return Table.of(title, [cells_of(record, without) for record in records], note, max_rows)


def cells_of(record: Any, without: Sequence[str] = (), texts: _Texts = _SIZES) -> dict[str, Cell]:
    """The fields of a dataclass by their columns. ``texts`` formats numbers by the endings of the names of fields."""
    cells: dict[str, Cell] = {}
    for name in (one.name for one in fields(record) if one.name not in without):
        ending = next(filter(name.endswith, texts), "")
        label = name.removesuffix(ending).strip("_").replace("_", " ")
        cells[label or "size"] = _cell(getattr(record, name), texts.get(ending))
    return cells


def _cell(value: Any, text: Callable[[float], str] | None) -> Cell:
    """The value of a field as a cell. ``text`` formats its numbers."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {cell_text(_cell(one, text))}" for key, one in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "none"
    if is_dataclass(value):
        return str(value)
    if value is None or value == "":
        return None
    return value if text is None else text(value)
