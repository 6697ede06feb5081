"""The step that saves what ONNX Runtime makes of a model when it opens it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ortserve.tools.opening import open_model
from ortserve.tools.optimize.files import LEAST_EXTERNAL_BYTES, Made, data_file, drop_empty_data
from ortserve.tools.speed import Timed


def save_optimized(source: Path, target: Path, level: str, opening: Timed, has_data: bool) -> Made:
    """Save a model as ONNX Runtime optimizes it here.

    Args:
        source: The model.
        target: The new one.
        level: Of graph optimization.
        opening: How to open it; its model has no effect.
        has_data: Whether large weights go into ``data_file``. Without that key ONNX Runtime would let the new model
            refer to the data of the old one.
    """
    settings: dict[str, Any] = {"graph_optimization": level, "optimized_model_file": str(target.absolute())}
    if has_data or data_file(source).exists():
        entries = {
            "session.optimized_model_external_initializers_file_name": data_file(target).name,
            "session.optimized_model_external_initializers_min_size_in_bytes": str(LEAST_EXTERNAL_BYTES),
        }
        settings["entries"] = {**opening.subject.options.session.entries, **entries}
    subject = replace(opening.subject, path=source)
    open_model(subject, provider=opening.provider, threads=opening.threads, settings=settings)
    drop_empty_data(target)
    return Made()
