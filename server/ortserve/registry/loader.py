"""From a model file to a warm instance. Blocks for as long as that takes: runs on the loader's thread."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ortserve.clock import Clock
from ortserve.config.model import ModelOptions
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.engine.cpu_budget import cpu_budget
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.providers import choose_provider
from ortserve.engine.session import SessionOptions, open_session
from ortserve.registry.padding import resolve_padding
from ortserve.registry.warmup import WarmUp, run_once, warm_up
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

ONE_THREAD_BELOW_NS: Final = 1_000_000
"""A run of one row shorter than this gains less from a second thread than waking it costs."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Warm instances, what they take and give, and what was found out about them."""

    instances: tuple[Instance, ...]
    signature: ModelSignature
    warm_up: WarmUp
    execution_provider: str
    intra_op_threads: int
    padding: Padding | None = None


def load_model(
    path: Path, name: str, options: ModelOptions, clock: Clock, on_warming: Callable[[], None]
) -> LoadedModel:
    """Open a model and warm it up.

    Args:
        path: The ``.onnx`` file.
        name: What threads and log lines are called.
        options: Of the model.
        clock: Monotonic nanoseconds.
        on_warming: Called on this thread when the model is open and warm-up begins.

    Raises:
        ServeError: In words, why it cannot be served.
    """
    provider = choose_provider(options.execution_providers)
    for reason in provider.passed_over:
        log_event(logger, logging.WARNING, "execution provider passed over", model=name, reason=reason)

    limits = [limit for limit in (options.max_rows, max(options.buckets, default=None)) if limit is not None]
    most_rows = min(limits, default=None)  # a batch over the largest bucket could not be padded to any

    def open_warm(threads: int) -> LoadedModel:
        session = open_session(path, name, SessionOptions(provider, threads))
        signature = read_signature(session, path)
        if options.pad or options.buckets:
            signature = signature.without_whole_inputs(
                "it is the same for all rows, and batches of the model are padded"
            )
        padding = resolve_padding(options, signature)
        instance = Instance(session, signature, name=name, intra_op_threads=threads, clock=clock, padding=padding)
        try:
            on_warming()
            found = warm_up(
                instance, signature, budget_s=options.warmup_s, max_rows=most_rows, clock=clock, padding=padding
            )
            if found.rows_depend:
                signature = replace(signature, unbatched_because=found.rows_depend)
                padding = resolve_padding(options, signature)  # what runs alone is not padded
        except BaseException:
            instance.close()  # else its worker and session would stay for as long as the process
            raise
        return LoadedModel((instance,), signature, found, provider.name, threads, padding)

    threads = options.intra_op_threads or cpu_budget()
    loaded = open_warm(threads)
    is_chosen_here = options.intra_op_threads is None
    if is_chosen_here and threads > 1 and _is_short(loaded.warm_up):
        loaded.instances[0].close()
        loaded = open_warm(1)
    try:
        for number in range(1, options.instances):
            session = open_session(path, name, SessionOptions(provider, loaded.intra_op_threads))
            instance = Instance(
                session,
                loaded.signature,
                name=f"{name} {number}",
                intra_op_threads=loaded.intra_op_threads,
                clock=clock,
                padding=loaded.padding,
            )
            loaded = replace(loaded, instances=(*loaded.instances, instance))
            if loaded.warm_up.latencies:
                rows = loaded.warm_up.max_rows if loaded.signature.is_batched else 1
                run_once(
                    instance,
                    loaded.signature,
                    rows,
                    loaded.padding,
                    brings_optional=loaded.warm_up.brings_optional,
                )
    except BaseException:
        for instance in loaded.instances:
            instance.close()
        raise
    return loaded


def _is_short(found: WarmUp) -> bool:
    return bool(found.latencies) and found.latencies[0].run_ns < ONE_THREAD_BELOW_NS
