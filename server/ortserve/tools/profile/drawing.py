"""Pictures of a profile as SVG: a tree map of self times, and a flame view of one run. Pure."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final, TypeAlias

import squarify

from ortserve.tools.profile.result import NodeCost
from ortserve.tools.profile.trace import Run, Trace
from ortserve.tools.report import duration_text, number_text

_WIDTH: Final = 1100.0
_HEIGHT: Final = 420.0
_ROW: Final = 22.0
_MAX_NODES: Final = 400
_MIN_WIDTH: Final = 0.4
"""A flame view leaves out narrower calls, which cannot be seen."""
_LETTER: Final = 6.4

_Box: TypeAlias = tuple[float, float, float, float]
"""x, y, width and height."""


def tree_map(nodes: Sequence[NodeCost]) -> str:
    """A tree map of self times, grouped by operator. ``nodes`` are ordered by descending self time."""
    groups: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for node in nodes[:_MAX_NODES]:
        if node.self_ms > 0:
            groups[node.op].append(("/".join((*node.inside, node.name)), node.self_ms))
    if rest := sum(node.self_ms for node in nodes[_MAX_NODES:]):
        groups["others"].append((f"{len(nodes) - _MAX_NODES:,} more nodes", rest))
    sized = sorted(((op, sum(ms for _, ms in held)) for op, held in groups.items()), key=lambda pair: -pair[1])
    whole = sum(ms for _, ms in sized) or 1.0
    parts = []
    for (op, op_ms), box in zip(sized, _layout((ms for _, ms in sized), (0, 0, _WIDTH, _HEIGHT)), strict=True):
        for (name, ms), inner in zip(groups[op], _layout((ms for _, ms in groups[op]), box), strict=True):
            title = f"{op} {name}: {duration_text(ms / 1e3)}, {number_text(100 * ms / whole)} %"
            parts.append(_rectangle(inner, op, name, title))
        x, y, width, _ = box
        label = f"{op} {number_text(100 * op_ms / whole)} %"
        if width > _LETTER * len(label) + 8:
            parts.append(f'<text x="{x + 4:.1f}" y="{y + 13:.1f}" font-weight="bold">{escape(label)}</text>')
    return _picture(_HEIGHT, parts)


def flame_view(trace: Trace, run: Run) -> str:
    """The calls of a run on a time axis. The calls of inner graphs are below their node."""
    scale, depth = _WIDTH / max(1, run.total_us), 0
    parts = [_rectangle((0, 0, _WIDTH, _ROW), "run", "run", f"{run.total_us:,} µs")]
    for call in run.calls:
        node, width = trace.nodes[call.node], call.total_us * scale
        depth = max(depth, len(node.path))
        if width >= _MIN_WIDTH:
            box = (call.start_us * scale, (len(node.path) + 1) * _ROW, width, _ROW)
            times = f"{call.total_us:,} µs, itself {call.self_us:,} µs, from {call.start_us:,} µs"
            parts.append(_rectangle(box, node.op, node.op, f"{node.op} {node.name}: {times}"))
    return _picture((depth + 2) * _ROW, parts)


def _layout(sizes: Iterable[float], box: _Box) -> Iterator[_Box]:
    """Divide a box into boxes with areas in proportion to ``sizes``, which are in descending order."""
    x, y, width, height = box[0], box[1], max(box[2], 0.01), max(box[3], 0.01)
    for part in squarify.squarify(squarify.normalize_sizes(list(sizes), width, height), x, y, width, height):
        yield part["x"], part["y"], part["dx"], part["dy"]


def _picture(height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" width="{_WIDTH:g}" '
        f'height="{height:g}" font-family="system-ui, sans-serif" font-size="11">{"".join(parts)}</svg>'
    )


def _rectangle(box: _Box, op: str, label: str, title: str) -> str:
    """A box with a tooltip, in a light colour for its operator. It has a label if there is room."""
    x, y, width, height = box
    number = int.from_bytes(hashlib.sha256(op.encode()).digest()[:4])
    colour = f"hsl({number % 360},{45 + number // 360 % 25}%,{70 + number // 9000 % 12}%)"
    letters, text = int((width - 6) / _LETTER), ""
    if letters >= 3 and height >= 15:
        shown = label if len(label) <= letters else f"{label[: letters - 1]}…"
        text = f'<text x="{x + 3:.2f}" y="{y + height - 6:.2f}">{escape(shown)}</text>'
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'fill="{colour}" stroke="#fff" stroke-width="0.5"/>{text}</g>'
    )
