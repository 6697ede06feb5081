"""Names in PromQL expressions, for tests that search for unknown metrics."""

import re
from typing import Final

from ortserve.telemetry.declarations import DECLARATIONS

OF_THE_PROCESS: Final = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"}
OF_PROMETHEUS: Final = {"up"}
TARGET_LABELS: Final = {"namespace", "job", "instance"}

_WORDS: Final = {"by", "without", "on", "and", "or", "unless", "sum", "max", "min", "avg", "count", "rate"}


def metrics_of(expression: str) -> set[str]:
    """Names of the metrics that an expression reads."""
    bare = re.sub(r"\b(by|on|without)\s*\([^)]*\)", " ", expression)
    bare = re.sub(r"\{[^}]*\}", "{}", bare)
    bare = re.sub(r"\[[^\]]*\]|\boffset\s+\w+", "", bare)
    names = re.findall(r"[a-zA-Z_:][\w:]*(?!\w*\s*\()", bare)
    functions = set(re.findall(r"([a-zA-Z_]\w*)\s*\(", bare))
    return {name for name in names if name not in functions and name not in _WORDS}


def labels_of(expression: str) -> set[str]:
    """Names of the labels that an expression selects or groups by."""
    grouped = re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", expression)
    selected = [
        matcher.split("=")[0].rstrip("!")
        for body in re.findall(r"\{([^}]*)\}", expression)
        for matcher in re.findall(r'\w+\s*(?:=~|!~|!=|=)\s*"[^"]*"', body)
    ]
    return {name.strip() for names in (*grouped, *selected) for name in names.split(",") if name.strip()}


def known_metrics() -> set[str]:
    """The names of all series of a server."""
    names: set[str] = set()
    for declared in DECLARATIONS:
        suffixes = ("_bucket", "_count", "_sum") if declared.type == "histogram" else ("",)
        names |= {declared.name + suffix for suffix in suffixes}
    return names | OF_THE_PROCESS | OF_PROMETHEUS


def unknown_metrics(expression: str, recorded: set[str]) -> set[str]:
    """Names that are neither exposed nor recorded by a rule."""
    return metrics_of(expression) - known_metrics() - recorded


def unknown_labels(expression: str) -> set[str]:
    """Labels that none of the metrics in an expression has; recorded metrics may have any label."""
    named = metrics_of(expression)
    bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in named} | named
    of_metrics = {label for declared in DECLARATIONS if declared.name in bases for label in declared.labels}
    if any(":" in name for name in named):
        of_metrics |= {label for declared in DECLARATIONS for label in declared.labels}
    return labels_of(expression) - of_metrics - TARGET_LABELS - {"le"}
