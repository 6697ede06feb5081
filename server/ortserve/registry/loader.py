"""From a model file to a warm instance. Blocks for as long as that takes: runs on the loader's thread."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ortserve.clock import Clock
from ortserve.config.model import ModelOptions
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.engine.cpu_budget import cpu_budget, intra_op_threads
from ortserve.engine.device.instance import DeviceInstance
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.placement import count_operators, describe_operators, left_to_cpu, total_nodes
from ortserve.engine.provider_options import GPU_PROVIDERS, searches_each_shape
from ortserve.engine.providers import ProviderChoice, choose_provider, open_on_first
from ortserve.engine.runtime import Runtime
from ortserve.registry.capture_trial import CaptureTrials
from ortserve.registry.interface import Interface, resolve_interface
from ortserve.registry.model_folder import operator_libraries, read_labels
from ortserve.registry.on_device import OnDevice, prepare
from ortserve.registry.opening import OpenedSession, Opening
from ortserve.registry.padding import resolve_padding
from ortserve.registry.progress import Progress
from ortserve.registry.samples import Sample, make_samples
from ortserve.registry.warmup import WarmUp, run_once, run_samples, time_sizes, warm_up
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

ONE_THREAD_BELOW_NS: Final = 1_000_000
"""A run of one row shorter than this gains less from a second thread than waking it costs."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Warm instances, what they take and give, and what was found out about them.

    Attributes:
        providers: The execution provider, and why others were passed over.
        operators: Nodes of the graph, by the execution provider that runs them and by operator.
        intra_op_threads: Threads of a run inside an operator.
        run_threads: Threads that a run may keep busy in all.
        on_device: What runs on buffers of a device.
        placed: On which device each instance was placed; empty where all are on the execution provider's.
    """

    instances: tuple[Instance | DeviceInstance, ...]
    interface: Interface
    warm_up: WarmUp
    providers: ProviderChoice
    operators: Mapping[str, Mapping[str, int]]
    intra_op_threads: int
    run_threads: int
    padding: Padding | None = None
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    on_device: OnDevice = field(default_factory=OnDevice)
    placed: tuple[int, ...] = ()

    @property
    def nodes(self) -> Mapping[str, int]:
        """Of the graph, by execution provider."""
        return total_nodes(self.operators)

    @property
    def signature(self) -> ModelSignature:
        """What the instances take and give."""
        return self.interface.model

    @property
    def execution_provider(self) -> str:
        """The one that was chosen, in full."""
        return self.providers.name

    @property
    def device_ids(self) -> tuple[int, ...]:
        """For each instance, which of the devices of its kind the execution provider uses."""
        return self.placed or (self.providers.device_id,) * len(self.instances)


def load_model(
    path: Path,
    name: str,
    options: ModelOptions,
    clock: Clock,
    folder: Path | None = None,
    runtime: Runtime | None = None,
    trials: CaptureTrials | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Open a model and warm it up.

    Args:
        path: The ``.onnx`` file.
        name: What threads and log lines are called.
        options: Of the model.
        clock: Monotonic nanoseconds.
        folder: Of the model, with the files that its options name; None where it is a file by itself.
        runtime: The process's; None for a plain one.
        trials: Of captures, the process's; None for those of this load.
        progress: Told of each step that begins; None where nobody asks.

    Raises:
        ServeError: In words, why it cannot be served.
    """
    runtime = runtime or Runtime()
    progress = progress or Progress(clock)
    progress.begin("choosing an execution provider")
    choice = choose_provider(options.execution_providers, runtime.offer)
    if options.session.shared_arena:
        runtime.share_arena()

    limits = [limit for limit in (options.max_rows, max(options.buckets, default=None)) if limit is not None]
    most_rows = min(limits, default=None)  # a batch over the largest bucket could not be padded to any

    labels = read_labels(options, folder)
    libraries = operator_libraries(options, folder)
    branches = options.session.inter_op_threads if options.session.execution_mode == "parallel" else 1

    def usual_threads(choice: ProviderChoice) -> int:
        if runtime.has_global_threads:
            return cpu_budget()
        if options.intra_op_threads is not None:
            return options.intra_op_threads
        return intra_op_threads(cpu_budget(), on_gpu=choice.name in GPU_PROVIDERS, inter_op_threads=branches)

    opening = Opening(path, name, options, runtime, trials or CaptureTrials(), libraries, clock, progress)

    def warm(opened: OpenedSession, choice: ProviderChoice, threads: int) -> tuple[LoadedModel, list[Sample]]:
        """With the samples, which cannot be made again of a signature that is found to be unbatched meanwhile."""
        progress.begin("reading its signature and samples")
        try:
            own = read_signature(opened.session, path)
            if options.pad or options.buckets:
                own = own.without_whole_inputs("it is the same for all rows, and batches of the model are padded")
            interface = resolve_interface(options, own)
            signature = interface.model
            padding = resolve_padding(options, signature)
            samples = make_samples(options, interface, folder, max_rows=most_rows)
            operators = count_operators(opened.session)
        except BaseException:
            opened.abandon()
            raise
        instance = opening.make_instance(opened, choice, signature, name, threads, padding)
        opened.forget()
        try:
            progress.begin_warming()
            found = warm_up(
                instance,
                signature,
                budget_s=options.warmup_s,
                max_rows=most_rows,
                clock=clock,
                padding=padding,
                progress=progress,
                is_coarse=choice.name in GPU_PROVIDERS,
            )
            alone_because = found.rows_depend
            if signature.is_batched and not (found.latencies or options.batched):
                alone_because = _untried(found)
                log_event(logger, logging.WARNING, "requests run one at a time", model=name, reason=alone_because)
            if alone_because:
                interface = interface.unbatched(alone_because)
                padding = resolve_padding(options, interface.model)  # what runs alone is not padded
            on_device = OnDevice(
                no_buffers_because=opened.no_buffers_because, no_replay_because=opened.no_replay_because
            )
            if isinstance(instance, DeviceInstance):
                on_device = prepare(instance, opened, options, interface.model, found, padding, progress)
                if on_device.sizes:
                    sizes = time_sizes(
                        instance,
                        signature,
                        on_device.sizes,
                        budget_s=options.warmup_s,
                        clock=clock,
                        progress=progress,
                        padding=padding,
                    )
                    found = replace(found, latencies=sizes)
            run_samples(instance, samples, progress)
        except BaseException:
            instance.close()  # else its worker and session would stay for as long as the process
            raise
        run_threads = threads + branches - 1
        loaded = LoadedModel(
            (instance,), interface, found, choice, operators, threads, run_threads, padding, labels, on_device
        )
        return loaded, samples

    def on_gpu(choice: ProviderChoice) -> bool:
        return choice.name in GPU_PROVIDERS or runtime.devices.has(choice.name)

    def place(choice: ProviderChoice, number: int) -> ProviderChoice:
        """The choice for the instance of this number."""
        return choice.on_device(options.gpus[number % len(options.gpus)]) if options.gpus and on_gpu(choice) else choice

    opened, choice = open_on_first(
        choice,
        lambda choice: opening.open(place(choice, 0), usual_threads(choice)),
        allow_fallback=options.allow_fallback,
    )
    is_placed = place(choice, 0) is not choice
    choice = place(choice, 0)
    for reason in choice.passed_over:
        log_event(logger, logging.WARNING, "execution provider passed over", model=name, reason=reason)
    if searches_each_shape(choice.name, choice.options) and not options.buckets:
        reason = "cudnn_conv_algo_search is EXHAUSTIVE, and without buckets every size of a batch is searched for"
        log_event(logger, logging.WARNING, "new batch sizes are slow", model=name, reason=reason)
    threads = usual_threads(choice)
    loaded, samples = warm(opened, choice, threads)
    is_chosen_here = options.intra_op_threads is None and not runtime.has_global_threads
    if is_chosen_here and threads > 1 and _is_short(loaded.warm_up):
        loaded.instances[0].close()
        loaded, samples = warm(opening.open(choice, 1), choice, 1)
    try:
        for number in range(1, options.instances):
            progress.turn_to(f"instance {number + 1} of {options.instances}")
            placed = place(choice, number)
            opened = opening.open(placed, loaded.intra_op_threads)
            instance = opening.make_instance(
                opened, placed, loaded.signature, f"{name} {number}", loaded.intra_op_threads, loaded.padding
            )
            opened.forget()
            loaded = replace(loaded, instances=(*loaded.instances, instance))
            if loaded.warm_up.latencies:
                rows = loaded.warm_up.latencies[-1].rows if loaded.signature.is_batched else 1
                run_once(
                    instance,
                    loaded.signature,
                    rows,
                    loaded.padding,
                    progress=progress,
                    brings_optional=loaded.warm_up.brings_optional,
                    free_dim=loaded.warm_up.free_dim,
                )
            if isinstance(instance, DeviceInstance):
                prepare(instance, opened, options, loaded.signature, loaded.warm_up, loaded.padding, progress)
            run_samples(instance, samples, progress)
    except BaseException:
        for instance in loaded.instances:
            instance.close()
        raise
    if is_placed:
        loaded = replace(loaded, placed=tuple(place(choice, n).device_id for n in range(options.instances)))
    if left := left_to_cpu(choice.name, loaded.operators):
        log_event(
            logger,
            logging.WARNING,
            "nodes are left to the CPU",
            model=name,
            execution_provider=choice.name,
            nodes=sum(left.values()),
            of=sum(loaded.nodes.values()),
            operators=describe_operators(left),
        )
    in_vain = (
        *loaded.interface.without_effect,
        *loaded.interface.in_vain_alone(options),
        *threads_in_vain(options, has_global_threads=runtime.has_global_threads),
        *sizes_in_vain(options, most_rows),
        *(() if on_gpu(choice) else gpus_in_vain(options, choice.name)),
    )
    for reason in in_vain:
        log_event(logger, logging.WARNING, "configured without effect", model=name, reason=reason)
    return loaded


def threads_in_vain(options: ModelOptions, *, has_global_threads: bool) -> tuple[str, ...]:
    """What a model's own options say of threads that none of its sessions has."""
    session = options.session
    if has_global_threads:
        said = {
            "intra_op_threads": options.intra_op_threads if "intra_op_threads" in options.model_fields_set else None,
            "session.inter_op_threads": "inter_op_threads" in session.model_fields_set,
        }
        return tuple(f"{key}: all models share the threads of global_threads" for key in said if said[key])
    if session.inter_op_threads > 1 and session.execution_mode == "sequential":
        return ("session.inter_op_threads: they are of the execution_mode parallel, and it is sequential",)
    return ()


def sizes_in_vain(options: ModelOptions, most_rows: int | None) -> tuple[str, ...]:
    """What a model's own options say of batches that are larger than any."""
    if most_rows is None:
        return ()
    larger = [str(rows) for rows in options.preferred_rows if rows > most_rows]
    return (f"preferred_rows: {', '.join(larger)}: batches have at most {most_rows} rows",) if larger else ()


def gpus_in_vain(options: ModelOptions, provider: str) -> tuple[str, ...]:
    """What a model's own options say of GPUs where it runs on none."""
    own = options.model_fields_set
    said = {"gpus": bool(options.gpus), "graph_replay": options.graph_replay and "graph_replay" in own}
    return tuple(f"{key}: the model is on {provider}" for key in said if said[key])


def _untried(found: WarmUp) -> str:
    """Why rows do not run together of which nothing is known, and nobody said that they may."""
    because = "the model refuses made-up inputs" if found.refused else "the model was not warmed up"
    return f"nobody has seen whether rows influence each other, as {because}; 'batched: true' says that they do not"


def _is_short(found: WarmUp) -> bool:
    return bool(found.latencies) and found.latencies[0].run_ns < ONE_THREAD_BELOW_NS
