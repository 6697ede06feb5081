"""The load pipeline turns a model file into warm instances. It blocks until they are warm, on a thread of its own.

``load_model`` calls the steps in order; each step is a method of ``_Load``.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from ortserve.clock import monotonic_ns
from ortserve.config.model import ModelOptions
from ortserve.core.padding import Padding
from ortserve.device.devices import DeviceRuntime
from ortserve.device.instance import DeviceInstance
from ortserve.engine.bounded_time import why_unbounded
from ortserve.engine.corrections.empty_checks import computes_empty
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.placement import Placement, count_operators
from ortserve.engine.process_limits import cpu_budget
from ortserve.engine.provider_options import CPU, GPU_PROVIDERS, searches_each_shape
from ortserve.engine.providers import ProviderChoice, choose_provider
from ortserve.engine.thread_priority import own_nice
from ortserve.engine.zip_maps import read_classes
from ortserve.errors import DeviceLostError, ServeError, invalid_input
from ortserve.registry.load.analysed_model import AnalysedModel, analyse_model, find_files
from ortserve.registry.load.batch_sizes import RunBounds, WorkerRuns
from ortserve.registry.load.capture_trial import CaptureTrials
from ortserve.registry.load.device_batches import DeviceBatches, keep_states, prepare_batches, time_on_buffers
from ortserve.registry.load.empty_axes import find_empty_axes
from ortserve.registry.load.golden_check import check_loaded
from ortserve.registry.load.inputs import InputGenerator, Sample, make_samples
from ortserve.registry.load.interface import Interface, resolve_interface, resolve_padding
from ortserve.registry.load.load_limits import LoadLimiter, LoadPermit
from ortserve.registry.load.loaded_model import LoadedModel, log_warnings
from ortserve.registry.load.progress import LoadCancelledError, Progress
from ortserve.registry.load.provider_settings import ProviderSettings, cpu_accepts_any, find_rejected_rows
from ortserve.registry.load.row_axes import Grounds
from ortserve.registry.load.session_opener import OpenedSession, SessionOpener
from ortserve.registry.load.warmup import WarmUpPlan, WarmUpResult, run_once, run_samples, warm_up, why_alone
from ortserve.registry.repository.model_files import operator_libraries, read_output_labels
from ortserve.registry.repository.provenance import read_provenance
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_MIN_BUDGET_S: Final = 0.001
_MIN_EFFORT_S: Final = 0.03
"""Minimum time to measure larger batches of a model; the limit is otherwise the time to open its session."""


def load_model(
    path: Path,
    name: str,
    options: ModelOptions,
    folder: Path | None = None,
    runtime: DeviceRuntime | None = None,
    trials: CaptureTrials | None = None,
    progress: Progress | None = None,
    limiter: LoadLimiter | None = None,
    *,
    checks_golden: bool = True,
) -> LoadedModel:
    """Load a model in eight steps, and log warnings about the result.

    1. Analyse the graph to find the axes along which rows run together.
    2. Choose an execution provider.
    3. Open a session on the provider.
    4. Resolve the options against the session: the interface, padding and samples of the model.
    5. Warm up an instance of the session: batch sizes, latencies, the independence of rows. If the model does not run,
       steps 3 to 5 repeat on the next provider. If another number of threads is better, steps 3 and 5 repeat.
    6. Prepare the instance: device buffers, graphs, configured samples.
    7. Add the other instances, and keep the states of sequences on their device.
    8. Check the golden samples of the version.

    Args:
        path: The ``.onnx`` file.
        name: Name of the model, for threads and log lines.
        options: Options of the model.
        folder: Folder of the model and the files that its options name; None for a model that is a single file.
        runtime: Device runtime of the process; None for a default one.
        trials: Graph captures that the process has tried; None if it has tried none.
        progress: Receives each step that begins, and has the clock; None if nothing observes the load.
        limiter: Shares processors and devices with other loads; None if there are no other loads.
        checks_golden: Whether step 8 runs.

    Raises:
        ServeError: The reason why the model cannot be served.
    """
    runtime, trials = runtime or DeviceRuntime(), trials or CaptureTrials()
    limiter, progress = limiter or LoadLimiter(cpu_budget()), progress or Progress(monotonic_ns)
    with limiter.permit(partial(progress.show, "waiting for other loads")) as permit, ExitStack() as instances:
        progress.give_back = permit.release
        progress.begin("waiting for its file")
        # On a slow file server this may take long, during which other loads may analyse.
        find_files(path, operator_libraries(options, folder), progress.check)
        with permit.analyzing():
            progress.begin("following rows through the graph")
            model = analyse_model(path, name, options, folder)  # 1
        model.check_weights()
        load = _Load(model, runtime, trials, progress, permit, instances)
        choice = load.choose_provider()  # 2
        while True:
            try:
                placed = load.settings.place(choice, 0)
                opened = load.opener.open(placed, load.settings.first_threads(choice))  # 3
                resolved = load.resolve(opened)  # 4
                warm = load.warm_up(opened, placed, resolved, is_first=True)  # 5
                break
            except _ModelError:
                load.report_provider(choice)
                raise
            except (DeviceLostError, LoadCancelledError):
                raise
            except ServeError as error:
                instances.close()
                choice = load.next_provider(choice, error)
        load.report_provider(choice)
        warm = load.adjust_threads(warm)
        loaded = load.prepare_instance(warm)  # 6
        loaded = load.add_instances(loaded, resolved.samples)  # 7
        if checks_golden:
            loaded = replace(loaded, golden=check_loaded(model, loaded, load.bounds))  # 8
        load.report(loaded)
        instances.pop_all()  # From now on, the caller closes them.
        return loaded


class _ModelError(ServeError):
    """The model or its options are wrong, whatever the execution provider."""


@dataclass(frozen=True, slots=True)
class _ResolvedModel:
    """The facts about a model that hold for all its sessions.

    Attributes:
        interface: Interface before warm-up. Warm-up may find that requests must run alone.
        padding: Padding of batches; None if batches are never padded.
        samples: Configured samples in the form of ``interface``.
        operators: Operators by execution provider, as the session places them.
    """

    interface: Interface
    padding: Padding | None
    samples: Sequence[Sample]
    operators: Placement


@dataclass(frozen=True, slots=True)
class _WarmInstance:
    """The first instance on an execution provider that runs the model, and the results of its warm-up."""

    instance: Instance | DeviceInstance
    opened: OpenedSession
    choice: ProviderChoice
    resolved: _ResolvedModel
    found: WarmUpResult


class _Load:
    """The steps of one load and the values that they share."""

    def __init__(
        self,
        model: AnalysedModel,
        runtime: DeviceRuntime,
        trials: CaptureTrials,
        progress: Progress,
        permit: LoadPermit,
        instances: ExitStack,
    ) -> None:
        """``instances`` closes the instances if the load fails. Their sessions would live as long as the process."""
        self.model = model
        self.name = model.name
        self.options = options = model.options
        self.runtime = runtime
        self.progress = progress
        self.permit = permit
        self.instances = instances
        self.classes = read_classes(model.content)
        class_names = {output: tuple(map(str, classes)) for output, classes in self.classes.items()}
        self.output_labels = class_names | read_output_labels(options, model.folder)
        self.opener = SessionOpener(model, runtime, trials, progress)
        self.settings = ProviderSettings(model, runtime)
        self.bounds = RunBounds(progress, options.warmup_run_timeout_s, options.run_grace_s)
        self.spent_s = 0.0
        self.failures: list[str] = []
        """Why execution providers did not run the model."""

    def choose_provider(self) -> ProviderChoice:
        """Choose the first configured execution provider that this machine offers."""
        self.progress.begin("choosing an execution provider")
        choice = choose_provider(self.options.execution_providers, self.runtime.offer)
        if choice.name != CPU:
            self.permit.move_to_device()
        if self.options.session.shared_arena:
            self.runtime.share_arena()
        return choice

    def next_provider(self, choice: ProviderChoice, error: ServeError) -> ProviderChoice:
        """Choose the execution provider that follows one that did not run the model.

        Raises:
            ServeError: No provider follows, or ``allow_fallback`` is not set. The message has all errors so far.
        """
        self.failures.append(error.message)
        if not (self.options.allow_fallback and choice.behind):
            hint = f" (with allow_fallback it would be tried on {choice.behind[0].name})" if choice.behind else ""
            raise ServeError(error.kind, "; ".join(dict.fromkeys(self.failures)) + hint) from error
        return choice.without_first(error.message)

    def resolve(self, opened: OpenedSession) -> _ResolvedModel:
        """Check the options against an open session, and apply them. Frees the session on failure.

        Raises:
            _ModelError: The model or its options are wrong on every provider.
        """
        options, model = self.options, self.model
        served = options.served_outputs
        if served and options.sequences is not None:
            served = (*served, *(state.output for state in options.sequences.states))
        try:
            self.progress.begin("reading its signature and samples")
            read = read_signature(opened.session, model.content, served_outputs=served, sizes=model.sizes)
            own = model.rows.apply(read)
            if options.pad or options.buckets:
                own = own.without_optional_whole("it is the same for all rows, and batches of the model are padded")
            interface = resolve_interface(options, own, model.folder)
            padding = resolve_padding(options, interface.model)
            samples = make_samples(options, interface, model.folder, max_rows=self.settings.max_rows())
            return _ResolvedModel(interface, padding, samples, count_operators(opened.session))
        except BaseException as error:
            opened.abandon()
            if not isinstance(error, ServeError):
                raise
            self.progress.check()
            rejection = _ModelError(error.kind, error.message)
        raise rejection  # A new error: the traceback of the original one would keep the session alive.

    def warm_up(
        self, opened: OpenedSession, choice: ProviderChoice, resolved: _ResolvedModel, *, is_first: bool = False
    ) -> _WarmInstance:
        """Create an instance of the session and warm it up.

        Warm-up of the first session ends early if another number of threads is better.

        Raises:
            ServeError: There is too little memory, or the provider fails on inputs that the CPU accepts.
        """
        signature, padding = resolved.interface.model, resolved.padding
        instance = self.opener.make_instance(opened, choice, signature, self.name, padding)
        self.instances.callback(instance.close)
        # Some operators of ONNX Runtime 1.31.1 end the process on an input of another rank than they expect.
        is_risky = any(spec.has_any_shape and not spec.is_optional for spec in signature.inputs)
        worker, inputs = WorkerRuns(instance, self.bounds), InputGenerator(signature, padding)
        plan = WarmUpPlan(
            budget_s=0 if is_risky else self._remaining_s(),
            max_rows=self.settings.max_rows(choice),
            buckets=self.options.buckets,
            effort_s=max(opened.opening_s, _MIN_EFFORT_S) if choice.name == CPU else None,
            rows_depend=self.model.rows.known_dependence,
            always_batches=self.model.rows.grounds is Grounds.CONFIGURED,
            samples=resolved.samples,
            is_coarse=choice.name in GPU_PROVIDERS,
            short_ns=self.settings.short_ns(choice) if is_first else 0,
            keeps_session=lambda row: not is_first or self.settings.best_threads(choice, [row]) == opened.threads,
            give_back_memory=self.settings.memory_release(instance, choice),
        )
        self.progress.begin_warming()
        with self.permit.measuring(opened.threads):
            found = warm_up(worker, inputs, plan)
        self.spent_s += found.spent_ns / 1e9
        if found.rejection and not found.has_run and choice.name != CPU:
            self._check_provider(worker, inputs, choice, found.rejection)
        return _WarmInstance(instance, opened, choice, resolved, found)

    def _check_provider(self, worker: WorkerRuns, inputs: InputGenerator, choice: ProviderChoice, reason: str) -> None:
        """Check whether the provider fails on all inputs, or the model merely rejects synthetic inputs.

        Raises:
            ServeError: invalid_input, if the CPU accepts inputs that the instance rejects.
        """
        rows = find_rejected_rows(worker, inputs)
        if not rows:
            return
        self.progress.begin(f"trying on {CPU} the rejected inputs")
        if cpu_accepts_any(self.model, self.settings.plain_cpu(), rows, inputs, self.bounds):
            raise invalid_input(
                f"execution_providers: {choice.name} opens the model, but fails on inputs that {CPU} accepts: {reason}"
            )

    def adjust_threads(self, warm: _WarmInstance) -> _WarmInstance:
        """Open and warm up the model again if another number of threads suits its runs better."""
        threads = self.settings.best_threads(warm.choice, warm.found.latencies)
        if threads == warm.opened.threads:
            return warm
        self.instances.close()
        return self.warm_up(self.opener.open(warm.choice, threads), warm.choice, warm.resolved)

    def prepare_instance(self, warm: _WarmInstance) -> LoadedModel:
        """Create the device buffers of the first instance, capture its graphs and run the samples."""
        options, found, instance, opened = self.options, warm.found, warm.instance, warm.opened
        interface, padding = warm.resolved.interface, warm.resolved.padding
        worker = WorkerRuns(instance, self.bounds)
        alone_because = why_alone(self.model, found) if interface.model.is_batched else ""
        if alone_because:
            interface = interface.unbatched(alone_because)
            padding = resolve_padding(options, interface.model)  # Requests that run alone are not padded.
        on_device = DeviceBatches(
            no_buffers_because=opened.no_buffers_because, no_replay_because=opened.no_replay_because
        )
        if isinstance(instance, DeviceInstance):
            inputs = InputGenerator(interface.model, padding)
            on_device = prepare_batches(instance, opened, options.buckets, inputs, found, self.progress)
            found = time_on_buffers(worker, inputs, on_device.sizes, found, self._remaining_s())
        run_samples(worker, warm.resolved.samples)
        return LoadedModel(
            instances=(instance,),
            interface=interface,
            rows=self.model.rows,
            warm_up=found,
            providers=warm.choice,
            operators=warm.resolved.operators,
            intra_op_threads=opened.threads,
            run_threads=opened.threads + self.settings.branches - 1,
            padding=padding,
            output_labels=self.output_labels,
            on_device=on_device,
            device_ids=tuple(self.settings.place(warm.choice, number).device_id for number in range(options.instances)),
            unbounded_because=self._why_off_loop(interface),
            classes=self.classes,
            provenance=read_provenance(self.model.path, self.model.folder),
            empty_axes=find_empty_axes(
                self.model.content, self.model.sizes, computes_empty=computes_empty(warm.choice.name)
            ),
        )

    def _why_off_loop(self, interface: Interface) -> str:
        if self.options.thread_nice not in (None, own_nice()):
            return "thread_nice holds for threads of the model"
        return why_unbounded(self.model.content, interface.model)

    def add_instances(self, loaded: LoadedModel, samples: Sequence[Sample]) -> LoadedModel:
        """Open and prepare all instances after the first, and store the states of sequences on their device."""
        options, choice = self.options, loaded.providers
        for number in range(1, options.instances):
            self.progress.begin_part(f"instance {number + 1} of {options.instances}")
            placed = self.settings.place(choice, number)
            opened = self.opener.open(placed, loaded.intra_op_threads)
            name = f"{self.name} {number}"
            instance = self.opener.make_instance(opened, placed, loaded.signature, name, loaded.padding)
            self.instances.callback(instance.close)
            loaded = replace(loaded, instances=(*loaded.instances, instance))
            found, worker = loaded.warm_up, WorkerRuns(instance, self.bounds)
            if found.latencies and found.inputs is not None:
                rows = found.latencies[-1].rows if loaded.signature.is_batched else 1
                run_once(worker, found.inputs, rows)
            if isinstance(instance, DeviceInstance):
                inputs = InputGenerator(loaded.signature, loaded.padding)
                prepare_batches(instance, opened, options.buckets, inputs, found, self.progress)
            run_samples(worker, samples)
        tensors = loaded.interface.sequences
        if tensors is None:
            return loaded
        is_recorded = options.record.share > 0
        kept, where = keep_states(loaded.instances, tensors, loaded.warm_up, is_recorded=is_recorded)
        return replace(
            loaded,
            interface=replace(loaded.interface, sequences=kept),
            on_device=replace(loaded.on_device, states=where),
        )

    def report_provider(self, choice: ProviderChoice) -> None:
        """Log warnings about the execution provider that opened the model."""
        for reason in choice.passed_over:
            log_event(logger, logging.WARNING, "execution provider passed over", model=self.name, reason=reason)
        if searches_each_shape(choice.name, choice.options) and not self.options.buckets:
            reason = "cudnn_conv_algo_search is EXHAUSTIVE and there are no buckets: each batch size is searched for"
            log_event(logger, logging.WARNING, "new batch sizes are slow", model=self.name, reason=reason)

    def report(self, loaded: LoadedModel) -> None:
        """Log warnings about the loaded model."""
        log_warnings(
            loaded,
            self.name,
            self.options,
            max_rows=self.settings.max_rows(),
            has_global_threads=self.runtime.has_global_threads,
            is_on_gpu=self.settings.is_on_gpu(loaded.providers),
        )

    def _remaining_s(self) -> float:
        """The remaining time for warm-up: enough for the first run of a session, unless warm-up is off."""
        return max(min(_MIN_BUDGET_S, self.options.warmup_s), self.options.warmup_s - self.spent_s)
