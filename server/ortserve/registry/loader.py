"""From a model file to a warm instance. Blocks for as long as that takes: runs on the loader's thread."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ortserve.clock import Clock
from ortserve.config.model import ModelOptions
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.engine.cpu_budget import cpu_budget, intra_op_threads
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.placement import read_placement
from ortserve.engine.provider_options import GPU_PROVIDERS, searches_each_shape
from ortserve.engine.providers import ProviderChoice, choose_provider, open_on_first
from ortserve.engine.runtime import Runtime
from ortserve.engine.session import Session, SessionOptions, open_session, run_options
from ortserve.registry.interface import Interface, resolve_interface
from ortserve.registry.model_folder import operator_libraries, read_labels
from ortserve.registry.padding import resolve_padding
from ortserve.registry.samples import make_samples
from ortserve.registry.warmup import WarmUp, run_once, run_samples, warm_up
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

ONE_THREAD_BELOW_NS: Final = 1_000_000
"""A run of one row shorter than this gains less from a second thread than waking it costs."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Warm instances, what they take and give, and what was found out about them.

    Attributes:
        providers: The execution provider, and why others were passed over.
        nodes: Of the graph, by the execution provider that runs them.
        intra_op_threads: Threads of a run inside an operator.
        run_threads: Threads that a run may keep busy in all.
    """

    instances: tuple[Instance, ...]
    interface: Interface
    warm_up: WarmUp
    providers: ProviderChoice
    nodes: Mapping[str, int]
    intra_op_threads: int
    run_threads: int
    padding: Padding | None = None
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def signature(self) -> ModelSignature:
        """What the instances take and give."""
        return self.interface.model

    @property
    def execution_provider(self) -> str:
        """The one that was chosen, in full."""
        return self.providers.name

    @property
    def device_id(self) -> int:
        """Which of the devices of its kind the execution provider uses."""
        return self.providers.device_id


def load_model(
    path: Path,
    name: str,
    options: ModelOptions,
    clock: Clock,
    on_warming: Callable[[], None],
    folder: Path | None = None,
    runtime: Runtime | None = None,
) -> LoadedModel:
    """Open a model and warm it up.

    Args:
        path: The ``.onnx`` file.
        name: What threads and log lines are called.
        options: Of the model.
        clock: Monotonic nanoseconds.
        on_warming: Called on this thread when the model is open and warm-up begins.
        folder: Of the model, with the files that its options name; None where it is a file by itself.
        runtime: The process's; None for a plain one.

    Raises:
        ServeError: In words, why it cannot be served.
    """
    runtime = runtime or Runtime()
    choice = choose_provider(options.execution_providers, runtime.offer)
    if options.session.shared_arena:
        runtime.share_arena()

    limits = [limit for limit in (options.max_rows, max(options.buckets, default=None)) if limit is not None]
    most_rows = min(limits, default=None)  # a batch over the largest bucket could not be padded to any

    labels = read_labels(options, folder)
    libraries = operator_libraries(options, folder)
    branches = options.session.inter_op_threads if options.session.execution_mode == "parallel" else 1

    def session_options(choice: ProviderChoice, threads: int) -> SessionOptions:
        return SessionOptions(choice, threads, options.session, libraries, runtime.has_global_threads)

    def usual_threads(choice: ProviderChoice) -> int:
        if runtime.has_global_threads:
            return cpu_budget()
        if options.intra_op_threads is not None:
            return options.intra_op_threads
        return intra_op_threads(cpu_budget(), on_gpu=choice.name in GPU_PROVIDERS, inter_op_threads=branches)

    def open_usual(choice: ProviderChoice) -> Session:
        return open_session(path, name, session_options(choice, usual_threads(choice)))

    def warm(session: Session, threads: int) -> LoadedModel:
        own = read_signature(session, path)
        if options.pad or options.buckets:
            own = own.without_whole_inputs("it is the same for all rows, and batches of the model are padded")
        interface = resolve_interface(options, own)
        signature = interface.model
        padding = resolve_padding(options, signature)
        samples = make_samples(options, interface, folder, max_rows=most_rows)
        instance = Instance(
            session,
            signature,
            name=name,
            intra_op_threads=threads,
            clock=clock,
            padding=padding,
            run_options=run_options(options.session),
        )
        try:
            on_warming()
            found = warm_up(
                instance, signature, budget_s=options.warmup_s, max_rows=most_rows, clock=clock, padding=padding
            )
            if found.rows_depend:
                interface = interface.unbatched(found.rows_depend)
                padding = resolve_padding(options, interface.model)  # what runs alone is not padded
            run_samples(instance, samples)
        except BaseException:
            instance.close()  # else its worker and session would stay for as long as the process
            raise
        nodes = read_placement(session)
        run_threads = threads + branches - 1
        return LoadedModel((instance,), interface, found, choice, nodes, threads, run_threads, padding, labels)

    session, choice = open_on_first(choice, open_usual, allow_fallback=options.allow_fallback)
    for reason in choice.passed_over:
        log_event(logger, logging.WARNING, "execution provider passed over", model=name, reason=reason)
    if searches_each_shape(choice.name, choice.options) and not options.buckets:
        reason = "cudnn_conv_algo_search is EXHAUSTIVE, and without buckets every size of a batch is searched for"
        log_event(logger, logging.WARNING, "new batch sizes are slow", model=name, reason=reason)
    threads = usual_threads(choice)
    loaded = warm(session, threads)
    del session  # the instance's alone, to be freed with it
    is_chosen_here = options.intra_op_threads is None and not runtime.has_global_threads
    if is_chosen_here and threads > 1 and _is_short(loaded.warm_up):
        loaded.instances[0].close()
        loaded = warm(open_session(path, name, session_options(choice, 1)), 1)
    try:
        for number in range(1, options.instances):
            instance = Instance(
                open_session(path, name, session_options(choice, loaded.intra_op_threads)),
                loaded.signature,
                name=f"{name} {number}",
                intra_op_threads=loaded.intra_op_threads,
                clock=clock,
                padding=loaded.padding,
                run_options=run_options(options.session),
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
            run_samples(instance, make_samples(options, loaded.interface, folder, max_rows=most_rows))
    except BaseException:
        for instance in loaded.instances:
            instance.close()
        raise
    for reason in loaded.interface.without_effect:
        log_event(logger, logging.WARNING, "configured without effect", model=name, reason=reason)
    return loaded


def _is_short(found: WarmUp) -> bool:
    return bool(found.latencies) and found.latencies[0].run_ns < ONE_THREAD_BELOW_NS
