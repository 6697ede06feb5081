"""From a model file to a warm instance. Blocks for as long as that takes: runs on the loader's thread."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from ortserve.clock import Clock
from ortserve.config.model import ModelOptions
from ortserve.core.batch import Arrays, Batch
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.device.devices import DeviceRuntime
from ortserve.device.instance import DeviceInstance
from ortserve.engine.bounded_time import why_unbounded
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.placement import Placement, count_operators, describe_operators, left_to_cpu
from ortserve.engine.process_limits import cpu_budget
from ortserve.engine.provider_options import CPU, GPU_PROVIDERS, TENSORRT, most_rows, searches_each_shape
from ortserve.engine.providers import ProviderChoice, choose_provider, open_on_first
from ortserve.engine.zip_maps import read_classes
from ortserve.errors import ServeError, invalid_input
from ortserve.model_file.graph import Model
from ortserve.model_file.reading import read_model
from ortserve.registry.capture_trial import CaptureTrials
from ortserve.registry.device_batches import DeviceBatches, prepare_batches
from ortserve.registry.interface import Interface, resolve_interface
from ortserve.registry.load_turns import LoadTurn, LoadTurns
from ortserve.registry.loaded import LoadedModel
from ortserve.registry.make_up import RunBounds
from ortserve.registry.model_folder import operator_libraries, read_labels
from ortserve.registry.options_in_vain import gpus_in_vain, sizes_in_vain, threads_in_vain
from ortserve.registry.padding import resolve_padding
from ortserve.registry.progress import Progress
from ortserve.registry.refusals import CpuTrial, refused_rows
from ortserve.registry.row_axes import Grounds, RowAxes, find_row_axes
from ortserve.registry.run_threads import RunThreads
from ortserve.registry.samples import Sample, make_samples
from ortserve.registry.session_opener import OpenedSession, SessionOpener
from ortserve.registry.warmup import WarmUp, run_once, run_samples, time_sizes, warm_up
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_LEAST_S: Final = 0.001
_LEAST_EFFORT_S: Final = 0.03
"""For measuring larger batches of a model that is opened in less."""


def load_model(
    path: Path,
    name: str,
    options: ModelOptions,
    clock: Clock,
    folder: Path | None = None,
    runtime: DeviceRuntime | None = None,
    trials: CaptureTrials | None = None,
    progress: Progress | None = None,
    turns: LoadTurns | None = None,
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
        turns: By which it shares processors and devices with other loads; None where there are none.

    Raises:
        ServeError: In words, why it cannot be served.
    """
    runtime, trials = runtime or DeviceRuntime(), trials or CaptureTrials()
    turns, progress = turns or LoadTurns(cpu_budget()), progress or Progress(clock)
    with turns.turn(partial(progress.begin, "waiting for other loads")) as turn:
        with turns.proving():
            progress.begin("following rows through the graph")
            model = read_model(path)
            rows = find_row_axes(model, options)
        return _Load(path, model, name, options, rows, clock, folder, runtime, trials, progress, turn).run()


@dataclass(frozen=True, slots=True)
class _Contents:
    """What is known of a model once a session of it is open.

    ``samples`` cannot be made again of an interface that is found to be unbatched meanwhile.
    """

    interface: Interface
    padding: Padding | None
    samples: Sequence[Sample]
    operators: Placement


@dataclass(frozen=True, slots=True)
class _Warm:
    """A first instance, on an execution provider that runs the model, and what its warm-up has found."""

    instance: Instance | DeviceInstance
    opened: OpenedSession
    choice: ProviderChoice
    threads: int
    contents: _Contents
    found: WarmUp


class _Load:
    """One load of a model: its steps, and what they share."""

    def __init__(
        self,
        path: Path,
        model: Model,
        name: str,
        options: ModelOptions,
        rows: RowAxes,
        clock: Clock,
        folder: Path | None,
        runtime: DeviceRuntime,
        trials: CaptureTrials,
        progress: Progress,
        turn: LoadTurn,
    ) -> None:
        self._path = path
        self._model = model
        self._name = name
        self._options = options
        self._clock = clock
        self._folder = folder
        self._runtime = runtime
        self._progress = progress
        self._turn = turn
        self._rows = rows
        self._classes = read_classes(model)
        names = {output: tuple(map(str, classes)) for output, classes in self._classes.items()}
        self._labels = names | read_labels(options, folder)
        self._libraries = tuple(operator_libraries(options, folder))
        self._opener = SessionOpener(
            path, model, name, options, rows, runtime, trials, self._libraries, clock, progress
        )
        self._bounds = RunBounds(options.warmup_run_timeout_s, options.run_grace_s)
        self._run_threads = RunThreads(path, model, options, has_global_threads=runtime.has_global_threads)
        limits = [limit for limit in (options.max_rows, max(options.buckets, default=None)) if limit is not None]
        self._spent_s = 0.0
        self._most_rows = min(limits, default=None)  # a batch over the largest bucket could not be padded to any

    def run(self) -> LoadedModel:
        warm = self._warm_on_first()
        threads = self._run_threads.wanted(warm.choice, warm.found.latencies)
        if threads != warm.threads:
            warm.instance.close()
            warm = self._warm(self._opener.open(warm.choice, threads), warm.choice, threads, warm.contents)
        loaded = self._add_instances(self._prepare_first(warm), warm.contents.samples)
        self._warn(loaded)
        return loaded

    def _warm_on_first(self) -> _Warm:
        """A warm instance on the first execution provider that opens and runs the model."""
        options = self._options
        self._progress.begin("choosing an execution provider")
        choice = choose_provider(options.execution_providers, self._runtime.offer)
        if choice.name != CPU:
            self._turn.move_to_device()
        if options.session.shared_arena:
            self._runtime.share_arena()
        warm, choice = open_on_first(choice, self._try_on, allow_fallback=options.allow_fallback)
        for reason in choice.passed_over:
            log_event(logger, logging.WARNING, "execution provider passed over", model=self._name, reason=reason)
        if searches_each_shape(choice.name, choice.options) and not options.buckets:
            reason = "cudnn_conv_algo_search is EXHAUSTIVE, and without buckets every size of a batch is searched for"
            log_event(logger, logging.WARNING, "new batch sizes are slow", model=self._name, reason=reason)
        if isinstance(warm, ServeError):
            raise warm
        return warm

    def _try_on(self, choice: ProviderChoice) -> _Warm | ServeError:
        """Open the model on an execution provider, and warm it up there.

        Returns:
            The first instance, or what is wrong with the model or its options wherever it runs.

        Raises:
            ServeError: What is wrong on this provider.
        """
        choice = self._place(choice, 0)
        threads = self._run_threads.first(choice)
        opened = self._opener.open(choice, threads)
        try:
            contents = self._read(opened)
        except ServeError as error:
            return ServeError(error.kind, error.message)  # a new one: the traceback of that has the session
        return self._warm(opened, choice, threads, contents, is_first=True)

    def _read(self, opened: OpenedSession) -> _Contents:
        """What the session tells of the model, as it is configured; the session is freed where that fails."""
        options = self._options
        self._progress.begin("reading its signature and samples")
        try:
            signature = read_signature(opened.session, self._model, served_outputs=options.served_outputs)
            own = self._rows.apply(signature)
            if options.pad or options.buckets:
                own = own.without_optional_whole("it is the same for all rows, and batches of the model are padded")
            interface = resolve_interface(options, own)
            padding = resolve_padding(options, interface.model)
            samples = make_samples(options, interface, self._folder, max_rows=self._most_rows)
            return _Contents(interface, padding, samples, count_operators(opened.session))
        except BaseException:
            opened.abandon()
            raise

    def _warm(
        self,
        opened: OpenedSession,
        choice: ProviderChoice,
        threads: int,
        contents: _Contents,
        *,
        is_first: bool = False,
    ) -> _Warm:
        """An instance of the session, warmed up, with nothing left of it where that fails.

        Warm-up of the first session ends early where another number of threads is wanted.

        Raises:
            ServeError: It finds no memory, or takes nothing, although the CPU does.
        """
        signature, padding = contents.interface.model, contents.padding
        instance = self._opener.make_instance(opened, choice, signature, self._name, threads, padding)
        opened.forget()

        try:
            self._progress.begin_warming()
            with self._turn.measuring(threads):
                found = warm_up(
                    instance,
                    signature,
                    budget_s=self._left_s(),
                    max_rows=self._most_rows_on(choice),
                    clock=self._clock,
                    buckets=self._options.buckets,
                    padding=padding,
                    progress=self._progress,
                    is_coarse=choice.name in GPU_PROVIDERS,
                    rows_depend=self._rows.known_dependence,
                    is_believed=self._rows.grounds is Grounds.CONFIGURED,
                    samples=contents.samples,
                    bounds=self._bounds,
                    effort_s=max(opened.opening_s, _LEAST_EFFORT_S) if choice.name == CPU else None,
                    give_back_memory=self._gives_memory_back(instance, choice),
                    keeps_session=lambda row: not is_first or self._run_threads.wanted(choice, [row]) == threads,
                )
            self._spent_s += found.spent_ns / 1e9
            if found.refused and not found.has_run and choice.name != CPU:
                rows = refused_rows(instance, signature, padding, self._progress, self._bounds)
                if rows and self._cpu_takes_any(rows, contents):
                    raise invalid_input(
                        f"execution_providers: {choice.name} opens the model, but fails at inputs that "
                        f"{CPU} takes: {found.refused}"
                    )
        except BaseException:
            instance.close()  # else its worker and session would stay for as long as the process
            raise
        return _Warm(instance, opened, choice, threads, contents, found)

    def _why_alone(self, found: WarmUp) -> str:
        """Why rows do not run together after all; empty where they do, or the model was not batched anyway."""
        rows = self._rows
        if rows.grounds is Grounds.TRIED and not found.rows_depend and not found.latencies:
            because = _untried(found, rows.doubt)
            log_event(logger, logging.WARNING, "requests run one at a time", model=self._name, reason=because)
            return because
        if rows.grounds is Grounds.CONFIGURED and (against := (rows.is_mixed and rows.doubt) or found.rows_depend):
            event = "rows run together because the configuration says so"
            log_event(logger, logging.WARNING, event, model=self._name, reason=against)
            return ""
        return found.rows_depend

    def _cpu_takes_any(self, rows: Sequence[Arrays], contents: _Contents) -> bool:
        """Whether the model runs one of these rows on the CPU alone: then it is not the model that refuses them."""
        self._progress.begin(f"trying on {CPU} what was refused")
        has_global_threads, threads = self._runtime.has_global_threads, self._run_threads.usual(ProviderChoice(CPU))
        settings, clock, bounds = self._options.session, self._clock, self._bounds
        trial = CpuTrial(self._path, self._name, settings, self._libraries, has_global_threads, threads, clock, bounds)
        return trial.takes_any(rows, contents.interface.model, contents.padding)

    def _prepare_first(self, warm: _Warm) -> LoadedModel:
        """The model with its first instance, whose buffers are made and samples run."""
        options, found, instance, opened = self._options, warm.found, warm.instance, warm.opened
        interface, padding = warm.contents.interface, warm.contents.padding
        try:
            alone_because = self._why_alone(found) if interface.model.is_batched else ""
            if alone_because:
                interface = interface.unbatched(alone_because)
                padding = resolve_padding(options, interface.model)  # what runs alone is not padded
            on_device = DeviceBatches(
                no_buffers_because=opened.no_buffers_because, no_replay_because=opened.no_replay_because
            )
            if isinstance(instance, DeviceInstance):
                on_device = prepare_batches(instance, opened, options, interface.model, found, padding, self._progress)
                found = self._timed_on(instance, interface.model, on_device, found, padding)
            run_samples(instance, warm.contents.samples, self._progress, self._bounds)
        except BaseException:
            instance.close()
            raise
        choice, operators, threads = warm.choice, warm.contents.operators, warm.threads
        run_threads = threads + self._run_threads.branches - 1
        unbounded_because = why_unbounded(self._model, interface.model)
        return LoadedModel(
            (instance,),
            interface,
            self._rows,
            found,
            choice,
            operators,
            threads,
            run_threads,
            padding,
            self._labels,
            on_device,
            unbounded_because=unbounded_because,
            classes=self._classes,
        )

    def _timed_on(
        self,
        instance: DeviceInstance,
        signature: ModelSignature,
        on_device: DeviceBatches,
        found: WarmUp,
        padding: Padding | None,
    ) -> WarmUp:
        """What was found, with the times of batches as they will run: on the device's buffers, where they do."""
        if not on_device.sizes:
            return found
        sizes = time_sizes(
            instance,
            signature,
            on_device.sizes,
            budget_s=self._left_s(),
            clock=self._clock,
            progress=self._progress,
            padding=padding,
            bounds=self._bounds,
        )
        left = [size for size in found.latencies if size.rows > sizes[-1].rows and size.rows in on_device.sizes]
        return replace(found, latencies=(*sizes, *left))

    def _add_instances(self, loaded: LoadedModel, samples: Sequence[Sample]) -> LoadedModel:
        """Open and prepare those beside the first."""
        options, choice = self._options, loaded.providers
        try:
            for number in range(1, options.instances):
                self._progress.turn_to(f"instance {number + 1} of {options.instances}")
                placed = self._place(choice, number)
                opened = self._opener.open(placed, loaded.intra_op_threads)
                instance = self._opener.make_instance(
                    opened, placed, loaded.signature, f"{self._name} {number}", loaded.intra_op_threads, loaded.padding
                )
                opened.forget()
                loaded = replace(loaded, instances=(*loaded.instances, instance))
                self._prepare_further(instance, opened, loaded, samples)
        except BaseException:
            for instance in loaded.instances:
                instance.close()
            raise
        if options.gpus and self._is_on_gpu(choice):
            placed_on = tuple(self._place(choice, number).device_id for number in range(options.instances))
            loaded = replace(loaded, placed=placed_on)
        return loaded

    def _prepare_further(
        self, instance: Instance | DeviceInstance, opened: OpenedSession, loaded: LoadedModel, samples: Sequence[Sample]
    ) -> None:
        found, progress = loaded.warm_up, self._progress
        if found.latencies and found.make_up is not None:
            rows = found.latencies[-1].rows if loaded.signature.is_batched else 1
            run_once(instance, found.make_up, rows, progress=progress, bounds=self._bounds)
        if isinstance(instance, DeviceInstance):
            prepare_batches(instance, opened, self._options, loaded.signature, found, loaded.padding, progress)
        run_samples(instance, samples, progress, self._bounds)

    def _warn(self, loaded: LoadedModel) -> None:
        """Say what of the model is not as who configured it may believe."""
        options, choice = self._options, loaded.providers
        if left := left_to_cpu(choice.name, loaded.operators):
            log_event(
                logger,
                logging.WARNING,
                "nodes are left to the CPU",
                model=self._name,
                execution_provider=choice.name,
                nodes=sum(left.values()),
                of=sum(loaded.nodes.values()),
                operators=describe_operators(left),
            )
        if no_memory := loaded.warm_up.no_memory:
            told, rows = "memory keeps batches small", loaded.warm_up.max_rows
            log_event(logger, logging.WARNING, told, model=self._name, max_rows=rows, reason=no_memory)
        in_vain = (
            *loaded.interface.without_effect,
            *loaded.interface.in_vain_alone(options),
            *threads_in_vain(options, has_global_threads=self._runtime.has_global_threads),
            *sizes_in_vain(options, self._most_rows),
            *(() if self._is_on_gpu(choice) else gpus_in_vain(options, choice.name)),
        )
        for reason in in_vain:
            log_event(logger, logging.WARNING, "configured without effect", model=self._name, reason=reason)

    def _left_s(self) -> float:
        """What is left of the time for warm-up; enough for the first run of a session, unless nothing is to run."""
        return max(min(_LEAST_S, self._options.warmup_s), self._options.warmup_s - self._spent_s)

    def _gives_memory_back(
        self, instance: Instance | DeviceInstance, choice: ProviderChoice
    ) -> Callable[[Batch], None] | None:
        """What frees the memory that an instance needs in warm-up alone; None where it has no arena of its own."""
        settings = self._options.session
        has_arena = settings.memory_arena and not settings.shared_arena and not settings.shrink_arenas
        is_on_cpu = choice.name == CPU and not choice.behind
        return instance.release_memory if isinstance(instance, Instance) and has_arena and is_on_cpu else None

    def _most_rows_on(self, choice: ProviderChoice) -> int | None:
        """The most rows of a batch that is tried on an execution provider."""
        limits = [self._most_rows, most_rows(choice.options) if choice.name == TENSORRT else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def _is_on_gpu(self, choice: ProviderChoice) -> bool:
        return choice.name in GPU_PROVIDERS or self._runtime.devices.has(choice.name)

    def _place(self, choice: ProviderChoice, number: int) -> ProviderChoice:
        """The choice for the instance of this number."""
        gpus = self._options.gpus
        return choice.on_device(gpus[number % len(gpus)]) if gpus and self._is_on_gpu(choice) else choice


def _untried(found: WarmUp, doubt: str) -> str:
    """Why rows do not run together of which nothing is known, and nobody said that they may."""
    because = "the model refuses made-up inputs" if found.refused else "the model was not warmed up"
    return f"{doubt}; rows could not be tried, as {because}; 'batched: true' says that they are independent"
