"""Pictures of a profile as SVG: a tree map of self times, and a flame view of one run. Pure."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import squarify

from ortserve.tools.pictures import svg_text
from ortserve.tools.profile.result import NodeCost
from ortserve.tools.profile.trace import Run, Trace
from ortserve.tools.report import duration_text, number_text

_WIDTH: Final = 1100.0
_HEIGHT: Final = 420.0
_ROW: Final = 22.0
_MOST_NODES: Final = 400
_LEAST_WIDTH: Final = 0.4
"""Narrower calls of a flame view cannot be seen; their time stays empty."""
_LETTER: Final = 6.4


def tree_map(nodes: Sequence[NodeCost]) -> str:
    """All nodes by self time, those of an operator together. ``nodes`` have the most expensive first."""
    groups: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for node in nodes[:_MOST_NODES]:
        if node.self_ms > 0:
            groups[node.op].append(("/".join((*node.inside, node.name)), node.self_ms))
    if rest := sum(node.self_ms for node in nodes[_MOST_NODES:]):
        groups["others"].append((f"{len(nodes) - _MOST_NODES:,} more nodes", rest))
    sized = sorted(((op, sum(ms for _, ms in held)) for op, held in groups.items()), key=lambda pair: -pair[1])
    whole = sum(ms for _, ms in sized) or 1.0
    parts = [_open(_HEIGHT)]
    for (op, op_ms), box in zip(sized, _layout((ms for _, ms in sized), 0, 0, _WIDTH, _HEIGHT), strict=True):
        for (name, ms), inner in zip(groups[op], _layout((ms for _, ms in groups[op]), *box), strict=True):
            title = f"{op} {name}: {duration_text(ms / 1e3)}, {number_text(100 * ms / whole)} %"
            parts.append(_rectangle(inner, op, name, title))
        x, y, width, _ = box
        label = f"{op} {number_text(100 * op_ms / whole)} %"
        if width > _LETTER * len(label) + 8:
            parts.append(f'<text x="{x + 4:.1f}" y="{y + 13:.1f}" font-weight="bold">{svg_text(label)}</text>')
    return "".join((*parts, "</svg>"))


def flame_view(trace: Trace, run: Run) -> str:
    """The calls of a run along its time, those of inner graphs below their node."""
    depth = max((call.depth for call in run.calls), default=0)
    scale = _WIDTH / max(1, run.total_us)
    parts = [_open((depth + 2) * _ROW), _rectangle((0, 0, _WIDTH, _ROW), "run", "run", f"{run.total_us:,} µs")]
    for call in run.calls:
        width = call.total_us * scale
        if width >= _LEAST_WIDTH:
            node = trace.nodes[call.node]
            box = (call.start_us * scale, (call.depth + 1) * _ROW, width, _ROW)
            title = (
                f"{node.op} {node.name}: {call.total_us:,} µs, itself {call.self_us:,} µs, from {call.start_us:,} µs"
            )
            parts.append(_rectangle(box, node.op, node.op, title))
    return "".join((*parts, "</svg>"))


_Box = tuple[float, float, float, float]
"""x, y, width and height."""


def _layout(sizes: Iterable[float], x: float, y: float, width: float, height: float) -> Iterator[_Box]:
    """Boxes of these sizes, which descend, in a box."""
    values = squarify.normalize_sizes(list(sizes), max(width, 0.01), max(height, 0.01))
    for box in squarify.squarify(values, x, y, max(width, 0.01), max(height, 0.01)):
        yield box["x"], box["y"], box["dx"], box["dy"]


def _open(height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" width="{_WIDTH:g}" '
        f'height="{height:g}" font-family="system-ui, sans-serif" font-size="11">'
    )


def _rectangle(box: _Box, op: str, label: str, title: str) -> str:
    """A box with a tooltip, in the colour of its operator, and a label if it has room."""
    x, y, width, height = box
    shape = (
        f'<g><title>{svg_text(title)}</title><rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'fill="{_colour(op)}" stroke="#fff" stroke-width="0.5"/>'
    )
    letters = int((width - 6) / _LETTER)
    text = ""
    if letters >= 3 and height >= 15:
        shown = label if len(label) <= letters else f"{label[: letters - 1]}…"
        text = f'<text x="{x + 3:.2f}" y="{y + height - 6:.2f}">{svg_text(shown)}</text>'
    return f"{shape}{text}</g>"


def _colour(op: str) -> str:
    """A light colour, the same for an operator in all pictures."""
    number = int.from_bytes(hashlib.sha256(op.encode()).digest()[:4])
    return f"hsl({number % 360},{45 + number // 360 % 25}%,{70 + number // 9000 % 12}%)"
