"""Opens a model file as an ONNX Runtime session, with readable errors."""

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Final, TypeAlias

import onnxruntime as ort

from ortserve.config.session import EXTENSIONS, Scalar, SessionSettings, option_text
from ortserve.engine.corrections.harmful_optimizers import harmful_optimizers
from ortserve.engine.corrections.operator_checks import check_edits, check_functions, check_written_outputs
from ortserve.engine.corrections.replaced_nodes import replacement_edits
from ortserve.engine.denormals import session_maker
from ortserve.engine.encoded_images import ImageSession, find_images, image_edits
from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.engine.placement import RECORD_ENTRY, check_placement, read_placement
from ortserve.engine.provider_options import CPU, GPU_PROVIDERS
from ortserve.engine.providers import ProviderChoice, attach_providers, check_providers
from ortserve.engine.runtime import missing_library
from ortserve.engine.zip_maps import score_edits
from ortserve.errors import ServeError, invalid_input
from ortserve.model_file.damage import find_damage, find_pointer
from ortserve.model_file.editing import Edits, edited_model
from ortserve.model_file.graph import Model
from ortserve.model_file.reading import read_model
from ortserve.rows import find_sizes
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_NO_CPU: Final = "session.disable_cpu_ep_fallback"
"""The entry that makes nodes on the CPU an error. Then the CPU must not be among the providers."""

_WEIGHTS_FOLDER: Final = "session.model_external_initializers_file_folder_path"
"""The entry with the folder of external weights, for a model that is passed as bytes."""
_OPSET: Final = 13
"""The operator set of ONNX for edits of a model that imports none."""

_LOCALE: Final = re.compile(r"Failed to construct locale with name:\s?([A-Za-z_]+(?:\.[A-Za-z0-9-]+)?):")

_EXTENSION_OPERATOR: Final = re.compile(r"(?:ai\.onnx\.contrib|com\.microsoft\.extensions):\w+\S* is not a registered")
"""ONNX Runtime's message about an operator of onnxruntime-extensions, whose library is not loaded."""

_AFFINITIES: Final = "session.intra_op_thread_affinities"
_AFFINITIES_TEXT: Final = re.compile(r"[0-9]+([,-][0-9]+)*(;[0-9]+([,-][0-9]+)*)*;?").fullmatch
_MAX_PROCESSORS: Final = 100_000
"""Maximum number of processors of a group. ONNX Runtime logs a line for each one that the machine does not have."""
_OPTIMIZED_WEIGHTS: Final = "session.optimized_model_external_initializers_file_name"
"""The name of a file beside the optimized model, to which ONNX Runtime writes the weights."""
_DISABLED_OPTIMIZERS: Final = "optimization.disable_specified_optimizers"
"""Names separated by semicolons. ONNX Runtime 1.31.1 and 1.32.0 silently ignore a list with commas."""

_LEVELS: Final = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "layout": ort.GraphOptimizationLevel.ORT_ENABLE_LAYOUT,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


Session: TypeAlias = ort.InferenceSession
"""An open model, for packages that only pass it on and need not import ONNX Runtime."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a model is opened.

    Attributes:
        provider: The execution provider.
        intra_op_threads: Threads of one run, the calling thread included.
        settings: The configured settings.
        operator_libraries: Libraries of custom operators.
        has_global_threads: Whether runs use the process's threads instead of the session's own.
        profile_prefix: Path prefix of the trace of all runs until ``end_profiling``; None for no trace. The folder must
            exist. Each node of each run takes about 2.4 KB of memory and 5 µs.
        interruptible: Takes a function that ends the opening, and returns a context in which any thread may call it.
    """

    provider: ProviderChoice
    intra_op_threads: int
    settings: SessionSettings = field(default_factory=SessionSettings)
    operator_libraries: tuple[Path, ...] = ()
    has_global_threads: bool = False
    profile_prefix: Path | None = None
    interruptible: Callable[[Callable[[], object]], AbstractContextManager[object]] = nullcontext


def open_session(path: Path, name: str, options: SessionOptions, model: Model | None = None) -> ort.InferenceSession:
    """Open a model file.

    Args:
        path: The ``.onnx`` file. ONNX Runtime gets the path, because its Python API would keep bytes in memory beside
            the loaded weights. An edited model is passed as bytes, which are released after loading.
        name: The model's name in log lines of ONNX Runtime.
        options: How to open the model.
        model: The content of the file; None to read it here.

    Raises:
        ServeError: invalid_input: ONNX Runtime cannot load the model; a file is damaged or a Git LFS pointer; the
            execution provider does not start, or runs none of the model's nodes. The message has ONNX Runtime's reason
            without paths. unsupported: the model decodes images elsewhere than at its inputs, or Pillow is missing; or
            ONNX Runtime would not write an output of a Scan or a GroupQueryAttention, or would end the process on a
            function of the model.
    """
    _check_settings(options)
    model = read_model(path) if model is None else model
    if pointer := find_pointer(path, model):
        raise invalid_input(pointer)
    if options.settings.optimized_model_file is not None:
        _check_optimized_model_file(Path(options.settings.optimized_model_file), options.settings, path, model)
    _check_dimensions(model, options.settings)
    check_functions(model)
    check_written_outputs(model)
    open_edited = partial(_open_edited, path, name, options, model)
    try:
        images = find_images(model)
        find_tensors = cache(lambda: find_sizes(model).tensors)
        replaced = replacement_edits(model, find_tensors)
        edits = {**score_edits(model), **image_edits(images.values()), **replaced}
        checks = check_edits(model, find_tensors) if options.provider.name == CPU else {}
        harmful = harmful_optimizers(model, on_gpu=options.provider.name in GPU_PROVIDERS)
    except ServeError:
        raise
    except Exception:  # a node of an invalid model may lack inputs, for example: ONNX Runtime gives the reason
        open_edited({})
        raise
    try:
        session = open_edited({**edits, **checks}, harmful)
    except ServeError as error:
        if not checks:
            raise
        session = open_edited(edits, harmful)
        message = "checks of operators are left out, because ONNX Runtime does not load the model with them"
        log_event(logger, logging.WARNING, message, model=name, reason=error.message)
    if not model.is_readable:
        message = "corrections and checks of operators are left out, so answers may be wrong and requests may crash"
        reason = "the file is not read: it has another format than ONNX, or holds a message in two parts"
        log_event(logger, logging.WARNING, message, model=name, reason=reason)
    try:
        check_providers(options.provider, session.get_providers())
        check_placement(options.provider.name, read_placement(session))
    except ServeError:
        del session  # otherwise the traceback keeps it alive, longer than the streams that it uses
        raise
    return ImageSession(session, images, options.settings.max_image_pixels) if images else session


def _open_edited(
    path: Path, name: str, options: SessionOptions, model: Model, edits: Edits, harmful: Sequence[str] = ()
) -> ort.InferenceSession:
    """Open an edited model without the optimizers ``harmful``.

    Raises:
        ServeError: invalid_input, with ONNX Runtime's reason without paths.
    """
    make_session = session_maker(options.settings, has_global_threads=options.has_global_threads)
    try:
        native = _native_options(name, options, varies=_has_varying_shapes(model, options.settings))
        if harmful:
            named = option_text(options.settings.entries.get(_DISABLED_OPTIMIZERS, ""))
            native.add_session_config_entry(_DISABLED_OPTIMIZERS, ";".join((named, *harmful)).lstrip(";"))
        has_cpu = option_text(options.settings.entries.get(_NO_CPU, False)) != "1"
        edited: bytes | None = None
        if edits:
            folder, files = _weights_folder(path, model)
            if _WEIGHTS_FOLDER in options.settings.entries:
                files = {}
            else:
                native.add_session_config_entry(_WEIGHTS_FOLDER, str(folder))
            edited = edited_model(path, edits, 0 if "" in model.opsets else _OPSET, files)
        attached = attach_providers(native, options.provider, threads=options.intra_op_threads, has_cpu=has_cpu)
        with options.interruptible(partial(native.set_load_cancellation_flag, True)):
            session = make_session(
                edited or str(path),
                sess_options=native,
                providers=attached,
                enable_fallback=0,  # otherwise the wrapper retries on the CPU after any failure
            )
        if edited is not None:
            session._model_bytes = None  # only the wrapper's own fallback, which is off, would read it again
    except ORT_ERRORS as error:
        error.__traceback__ = None  # its frames keep parts of the session alive, as in ``open_session``
        raise _load_error(error, path, options, model) from error
    return session


def _load_error(error: Exception, path: Path, options: SessionOptions, model: Model) -> ServeError:
    """The error of a load, with ONNX Runtime's reason without paths, and hints how to mend it."""
    # Remove the model's folder by its exact text: it may contain spaces, at which the pattern for paths stops.
    reason = without_paths(str(error).replace(f"{path.parent}/", ""))
    provider = options.provider.name
    where = "" if provider == CPU else f" on {provider}"
    hint = missing_library(provider) or _missing_locale(reason)
    if not options.operator_libraries and _EXTENSION_OPERATOR.search(reason):
        hint += f"; operators of {EXTENSIONS} need the option session: {{operator_libraries: [{EXTENSIONS}]}}"
    if _WEIGHTS_FOLDER not in options.settings.entries and (damage := find_damage(path, model)):
        reason = f"{without_paths(damage)} ({reason})"
    return invalid_input(f"ONNX Runtime cannot load the model{where}: {reason}{hint}")


def _weights_folder(path: Path, model: Model) -> tuple[Path, dict[str, str]]:
    """The folder from which an edited model reads external weights, and their names there if those differ.

    ONNX Runtime reads no weights outside of a model's folder, also behind links. If the model file is a link, as in the
    cache of Hugging Face, it accepts those in the folder of the target, too. An edited model is passed as bytes, so
    ONNX Runtime does not know the target.
    """
    folder = path.parent.absolute()
    own, beside = Path(os.path.realpath(folder)), Path(os.path.realpath(path)).parent
    targets = {name: Path(os.path.realpath(folder / name)) for name in model.external_files if "\0" not in name}
    are_own = all(target.is_relative_to(own) for target in targets.values())
    if are_own or not all(target.is_relative_to(beside) for target in targets.values()):
        return folder, {}
    return beside, {name: str(target.relative_to(beside)) for name, target in targets.items()}


def _missing_locale(reason: str) -> str:
    """A hint how to install the locale that a StringNormalizer did not find; empty for other reasons."""
    found = _LOCALE.search(reason)
    if found is None:
        return ""
    language, _, encoding = found[1].partition(".")
    return (
        f"; install the locale '{found[1]}' that the model's StringNormalizer needs: on Debian and Ubuntu, "
        f"apt-get install locales && localedef -i {language} -f {encoding or 'UTF-8'} {found[1]}"
    )


def affinities_key(settings: SessionSettings) -> str:
    """The configuration key that sets the processors of threads; empty if none does."""
    if _AFFINITIES in settings.entries:  # takes precedence
        return f"session.entries: {_AFFINITIES}"
    return "" if settings.thread_affinities is None else "session.thread_affinities"


def _check_settings(options: SessionOptions) -> None:
    """Check settings that ONNX Runtime does not check, or rejects only in runs or without a useful message."""
    settings = options.settings
    if settings.shared_arena and not settings.memory_arena:
        raise invalid_input("session.shared_arena: expected memory_arena: true with it, got memory_arena: false")
    if key := affinities_key(settings):
        if options.has_global_threads:
            raise invalid_input(f"{key}: expected unset, because the server uses global_threads")
        _check_affinities(key, option_text(settings.entries.get(_AFFINITIES, settings.thread_affinities or "")))
    if "," in (names := option_text(settings.entries.get(_DISABLED_OPTIMIZERS, ""))):
        expected = "expected semicolons between names"
        raise invalid_input(f"session.entries: {_DISABLED_OPTIMIZERS}: {expected}, got '{names}'")
    # A session on the CPU has no other providers. ONNX Runtime itself checks the arenas of GPU providers.
    attached = options.provider.behind if options.provider.name != CPU else ()
    if GPU_PROVIDERS & {options.provider.name, *(provider.name for provider in attached)}:
        return
    there = {"cpu:0"} if settings.memory_arena else set()
    for arena in settings.shrink_arenas:
        if arena not in there:
            raise invalid_input(
                f"session.shrink_arenas: expected arenas out of {', '.join(there) or 'none'}, got {arena}"
            )


def _check_affinities(key: str, affinities: str) -> None:
    """Try each group on the calling thread: ONNX Runtime only logs that a thread cannot be placed.

    A malformed text, which an entry may have, fails in ONNX Runtime, with a message about it.
    """
    if not _AFFINITIES_TEXT(affinities):
        return
    before = os.sched_getaffinity(0)
    try:
        for group in filter(None, affinities.split(";")):
            processors: set[int] = set()
            named = 0
            for part in group.split(","):
                first, *_, last = part.split("-") if "-" in part else (part, part)
                named += int(last) - int(first) + 1
                processors.update(range(max(0, int(first) - 1), min(int(last), os.cpu_count() or 1)))
            if named > _MAX_PROCESSORS:
                raise invalid_input(f"{key}: expected at most {_MAX_PROCESSORS} processors in a group, got '{group}'")
            try:
                os.sched_setaffinity(0, processors)
            except OSError:
                expected = "expected processors that the server may use, counted from 1"
                raise invalid_input(f"{key}: {expected}, got '{group}'") from None
    finally:
        os.sched_setaffinity(0, before)


def _check_optimized_model_file(file: Path, settings: SessionSettings, path: Path, model: Model) -> None:
    key = "session.optimized_model_file"
    if not file.parent.is_dir() or file.is_dir():
        problem = "which is a folder" if file.parent.is_dir() else "whose folder does not exist"
        raise invalid_input(f"{key}: expected a file in an existing folder, got …/{file.name}, {problem}")
    written = {key: file}
    if (weights := settings.entries.get(_OPTIMIZED_WEIGHTS)) is not None:
        written[f"session.entries: {_OPTIMIZED_WEIGHTS}"] = file.parent / option_text(weights)
    own = [path, *(path.parent / name for name in model.external_files)]
    for key, target in written.items():
        if any(_is_same(target, one) for one in own):
            expected = "expected another file than the model's own"
            raise invalid_input(f"{key}: {expected}, got …/{target.name}, which would be overwritten")


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):  # one of them does not exist
        return False


def _axes(model: Model) -> Iterator[tuple[int, int | str | None, str]]:
    """Position, size and denotation of each axis of the model's inputs."""
    for declared in model.graph.inputs:
        for axis, (size, denotation) in enumerate(zip(declared.dims or (), declared.denotations, strict=False)):
            yield axis, size, denotation


def _check_dimensions(model: Model, settings: SessionSettings) -> None:
    """Check that configured dimensions exist, because ONNX Runtime ignores unknown ones."""
    names = {size for _, size, _ in _axes(model) if isinstance(size, str)}
    for name in settings.free_dimensions:
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise invalid_input(f"session.free_dimensions: expected dimensions out of {known}, got {name}")
    denotations = {denotation for _, _, denotation in _axes(model)} - {""}
    for denotation in settings.free_dimensions_by_denotation:
        if denotation.lower() not in {known.lower() for known in denotations}:  # ONNX Runtime ignores case, too
            known = ", ".join(sorted(denotations)) or "none"
            raise invalid_input(
                f"session.free_dimensions_by_denotation: expected denotations out of {known}, got {denotation}"
            )


def _has_varying_shapes(model: Model, settings: SessionSettings) -> bool:
    """Whether requests may differ in other sizes than the first axis of an input, which is taken for the rows."""
    denotations = {denotation.lower() for denotation in settings.free_dimensions_by_denotation}
    return any(
        axis > 0
        and not isinstance(size, int)
        and size not in settings.free_dimensions
        and denotation.lower() not in denotations
        for axis, size, denotation in _axes(model)
    )


def _native_options(name: str, options: SessionOptions, *, varies: bool) -> ort.SessionOptions:
    """Convert the settings to ONNX Runtime's options; ``varies``: requests may differ in more than their rows."""
    settings = options.settings
    native = ort.SessionOptions()
    native.intra_op_num_threads = options.intra_op_threads
    native.inter_op_num_threads = settings.inter_op_threads  # 0 would start a thread for each core of the host
    is_parallel = settings.execution_mode == "parallel"
    native.execution_mode = ort.ExecutionMode.ORT_PARALLEL if is_parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    native.graph_optimization_level = _LEVELS[settings.graph_optimization]
    native.enable_cpu_mem_arena = settings.memory_arena
    native.enable_mem_pattern = not varies if settings.memory_pattern is None else settings.memory_pattern
    native.use_deterministic_compute = settings.deterministic
    native.use_per_session_threads = not options.has_global_threads
    # Each key is added once, because ONNX Runtime writes a warning to standard error for an entry that it overwrites.
    entries: dict[str, Scalar | None] = {
        # Spinning idle threads cost up to eight times the CPU of the work itself on a shared machine.
        **{f"session.{pool}.allow_spinning": settings.spinning for pool in ("intra_op", "inter_op")},
        _AFFINITIES: settings.thread_affinities,
        "session.dynamic_block_base": settings.dynamic_block_base,
        "session.set_denormal_as_zero": settings.denormal_as_zero,
        "session.use_env_allocators": settings.shared_arena,
    }
    for key, value in (entries | dict(settings.entries)).items():
        if value is not None:
            native.add_session_config_entry(key, option_text(value))
    for dimension, length in settings.free_dimensions.items():
        native.add_free_dimension_override_by_name(dimension, length)
    for denotation, length in settings.free_dimensions_by_denotation.items():
        native.add_free_dimension_override_by_denotation(denotation, length)
    if settings.optimized_model_file is not None:
        native.optimized_model_filepath = settings.optimized_model_file
    native.add_session_config_entry(RECORD_ENTRY, "1")
    if options.profile_prefix is not None:
        native.enable_profiling = True
        native.profile_file_prefix = str(options.profile_prefix)
    native.logid = name
    native.log_severity_level = 4  # failures are raised, too; with log lines, requests could flood the log
    for library in options.operator_libraries:
        native.register_custom_ops_library(str(library))
    return native
