"""Shapes that TensorRT is told to build its engine for: those of the batches that will come.

Without them it builds for the first shape it sees, and anew, for minutes, at each one beyond.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from ortserve.core.signature import ModelSignature
from ortserve.errors import ServeError

_KEYS: Final = ("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes")


def when_engines_are_built(options: Mapping[str, str]) -> str:
    """For who watches a model being opened on TensorRT, as building takes minutes."""
    if any(key in options for key in _KEYS):
        return "which builds its engines here"
    return "which builds its engines here or, where dimensions are free, at the first run of each shape"


def most_rows(options: Mapping[str, str]) -> int | None:
    """The most rows of a batch by profiles that were configured, which TensorRT's provider holds to; None without."""
    rows: dict[str, int] = {}
    for one in options.get("trt_profile_max_shapes", "").split(","):
        name, _, shape = one.rpartition(":")
        first = shape.partition("x")[0]
        if name and first.isdecimal():
            rows[name] = max(rows.get(name, 0), int(first))
    return min(rows.values(), default=None)


def wants_more_profiles(error: ServeError) -> bool:
    """Whether a session failed because tensors within the model need profiles, too: those go between TensorRT's parts
    of a model that is not wholly on it.
    """
    return "with associated profiles" in error.message


def why_built_anew(options: Mapping[str, str]) -> str:
    """Why another session of a model would build its engines once more, for minutes; empty where it finds them built.

    Args:
        options: Of the provider, with the profile that it is told of.
    """
    if not any(key in options for key in _KEYS):
        return "expected trt_profile_…_shapes, as none can be made here and engines are built at each new shape"
    if options.get("trt_engine_cache_enable") != "true":
        return "expected trt_engine_cache_enable with trt_engine_cache_path, to keep engines for other sessions"
    return ""


def profile_shapes(signature: ModelSignature, sizes: Sequence[int], given: Mapping[str, str]) -> dict[str, str]:
    """The options of one profile, from the smallest to the largest of the sizes and at its best at the largest.

    Args:
        signature: Of the model.
        sizes: Rows of batches.
        given: Options that were configured.

    Returns:
        Nothing where some were configured, where rows do not fix the shapes of all inputs, and for names that an option
        cannot hold.
    """
    if not sizes or not signature.rows_lead or not signature.has_one_shape_class or any(key in given for key in _KEYS):
        return {}
    if any(mark in spec.name for spec in signature.inputs for mark in ":,"):
        return {}
    return {
        key: ",".join(f"{spec.name}:{'x'.join(map(str, (rows, *spec.shape[1:])))}" for spec in signature.inputs)
        for key, rows in zip(_KEYS, (min(sizes), max(sizes), max(sizes)), strict=True)
    }
