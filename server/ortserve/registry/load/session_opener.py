"""Opens the sessions of a model, and creates their instances, with or without buffers on a device."""

import weakref
from dataclasses import dataclass, replace
from functools import partial

from ortserve.config.session import SessionSettings
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.device.binding import InstanceParts
from ortserve.device.buffers import InstanceStreams
from ortserve.device.devices import DeviceRuntime, OpenDevice
from ortserve.device.graph_sessions import InstanceSessions, OpenForGraph
from ortserve.device.instance import DeviceInstance
from ortserve.device.instance_batches import InstanceBatches
from ortserve.device.preparation import NO_BUFFERS, NoReplay
from ortserve.device.protocol import DEVICE_ERRORS, device_run_error
from ortserve.engine.encoded_images import find_images
from ortserve.engine.instance import GpuAccess, Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.placement import read_operators
from ortserve.engine.provider_options import (
    CPU,
    GPU_PROVIDERS,
    TENSORRT,
    profile_shapes,
    wants_more_profiles,
    when_engines_are_built,
)
from ortserve.engine.providers import Provider, ProviderChoice
from ortserve.engine.runs import arenas_of, run_options
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.engine.thread_priority import call_with_nice
from ortserve.errors import DeviceLostError, ServeError
from ortserve.registry.load.analysed_model import AnalysedModel
from ortserve.registry.load.batch_sizes import MAX_SWEPT_ROWS
from ortserve.registry.load.capture_trial import CaptureTrials, ReplayObstacles
from ortserve.registry.load.progress import Progress
from ortserve.registry.load.row_trial import MIN_ROWS


@dataclass(slots=True)
class OpenedSession:
    """A session, and how it was opened, for the instance that will own it.

    Attributes:
        session: The session.
        threads: Threads inside an operator of its runs.
        streams: Streams of the session on a device; None if it has no buffers there.
        wants_graphs: Whether the configuration requests graphs.
        captures: Whether the session was opened to capture graphs.
        open_for_graph: Opens another session on the same streams, to capture one graph; None if the session itself
            stores all graphs, or captures none.
        is_whole: Whether all its nodes are on one execution provider.
        no_buffers_because: Why the session has no streams; empty if it has.
        no_replay: Why no graph is captured although the configuration requests graphs; otherwise None.
        opening_s: Time that it took to open the session.
    """

    session: Session
    threads: int
    streams: InstanceStreams | None = None
    wants_graphs: bool = False
    captures: bool = False
    open_for_graph: OpenForGraph | None = None
    is_whole: bool = True
    no_buffers_because: str = ""
    no_replay: NoReplay | None = None
    opening_s: float = 0.0

    @property
    def no_replay_because(self) -> str:
        """The text of ``no_replay``; empty if it is None."""
        return "" if self.no_replay is None else self.no_replay.because

    def abandon(self) -> None:
        """Free a session for which no instance is created."""
        if self.streams is None:
            del self.session
            return
        with self.streams.opened.capture_lock.shared():
            session = weakref.ref(self.session)
            del self.session
            self.streams.close(session)


class SessionOpener:
    """Opens the sessions of one model. For the thread of the load."""

    def __init__(self, model: AnalysedModel, runtime: DeviceRuntime, trials: CaptureTrials, progress: Progress) -> None:
        self._model = model
        self._name = model.name
        self._options = model.options
        self._runtime = runtime
        self._progress = progress
        self._obstacles = ReplayObstacles(model, runtime.devices, trials, progress)
        self._has_profiles = not model.options.is_ragged  # No profile bounds the sizes to which requests are joined.
        self._cpu_signature: ModelSignature | None = None
        """The signature of a session on the CPU; None before it is needed."""
        self._instances = 0
        """The number of instances with device buffers whose sessions were opened."""

    def open(self, choice: ProviderChoice, threads: int) -> OpenedSession:
        """Open the model on an execution provider.

        Raises:
            ServeError: The error of ``open_session``; overloaded, if the weights alone do not fit on the device.
            DeviceLostError: The device is lost, or was lost before. It is then marked as lost.
        """
        began_ns = self._progress.clock()
        if choice.name in GPU_PROVIDERS or self._runtime.devices.has(choice.name):
            opened = self._open_with_profile(choice, threads)
        else:
            opened = OpenedSession(self._open_session(choice, threads), threads)
        opened.opening_s = (self._progress.clock() - began_ns) / 1e9
        return opened

    def _open_with_profile(self, choice: ProviderChoice, threads: int) -> OpenedSession:
        """Open on a provider of a device. TensorRT gets profiles, unless it turns out to need more of them."""
        profiled = self._with_profile(choice)
        try:
            return self._open_on_provider(profiled, threads)
        except ServeError as error:
            if profiled is choice or not wants_more_profiles(error):
                raise
        self._has_profiles = False  # TensorRT has only a part of the model, and wants profiles of inner tensors, too.
        return self._open_on_provider(choice, threads)

    def _with_profile(self, choice: ProviderChoice) -> ProviderChoice:
        """Add a profile of the batch sizes to a choice of TensorRT: the shapes for which it builds its engine.

        Without a profile, TensorRT learns the shapes from the runs, and builds its engine again for new ones.
        """
        if choice.name != TENSORRT or not self._has_profiles:
            return choice
        if self._cpu_signature is None:
            self._progress.begin("reading the shapes for which TensorRT builds its engine")
            try:
                session = self._open_session(
                    ProviderChoice(CPU), 1, settings=SessionSettings(graph_optimization="none")
                )
                self._cpu_signature = self._model.rows.apply(read_signature(session, self._model.content))
            except ServeError:  # TensorRT supports models that the CPU does not
                self._has_profiles = False
                return choice
        options = self._options
        most = options.buckets or (options.max_rows or MAX_SWEPT_ROWS,)
        sizes = (1, MIN_ROWS, *most)  # warm-up runs are not padded
        shapes = profile_shapes(self._cpu_signature, sizes, choice.options)
        return replace(choice, options={**choice.options, **shapes}) if shapes else choice

    def _open_on_provider(self, choice: ProviderChoice, threads: int) -> OpenedSession:
        """Open with the options of ``choice``, and with streams if buffers on the device are possible."""
        devices = self._runtime.devices
        wants_graphs = self._wants_graphs(choice)
        device = self._open_device(choice)
        if isinstance(device, str):
            with devices.capture_lock.shared():
                return OpenedSession(
                    self._open_session(choice, threads),
                    threads,
                    wants_graphs=wants_graphs,
                    no_buffers_because=device,
                    no_replay=NoReplay(NO_BUFFERS, device) if wants_graphs else None,
                )
        if device.lost:
            raise DeviceLostError(device.lost)
        opened = self._open_on_device(device, choice, threads)
        has_one_each = devices.provider(choice.name).one_graph_per_session
        if wants_graphs and has_one_each and opened.no_replay is None:
            # The trial runs after the session was opened, so that it finds the engines of the session in the cache.
            try:
                opened.no_replay = self._obstacles.find_by_trial(choice, threads)
            except BaseException:
                opened.abandon()
                raise
            if opened.no_replay is None:
                assert opened.streams is not None
                opened.open_for_graph = partial(self._open_for_graph, opened.streams, choice, threads)
        return opened

    def _open_device(self, choice: ProviderChoice) -> OpenDevice | str:
        """The device for the buffers of a session, or why the session has none."""
        if find_images(self._model.content):
            return "images are decoded on the host"
        if self._options.is_ragged:
            return "the requests of a batch are joined on the host"
        if not self._options.device_buffers:
            return "device_buffers is off"
        return self._runtime.devices.open(choice.name, choice.device_id)

    def _wants_graphs(self, choice: ProviderChoice) -> bool:
        return self._options.graph_replay or choice.wants_graphs

    def _open_on_device(self, device: OpenDevice, choice: ProviderChoice, threads: int) -> OpenedSession:
        """Open with streams on a device. The session captures graphs if one session of the provider stores them all."""
        provider, wants_graphs = self._runtime.devices.provider(choice.name), self._wants_graphs(choice)
        no_replay: NoReplay | None = None
        captures = wants_graphs and not provider.one_graph_per_session
        if captures:
            no_replay = self._obstacles.find_by_trial(choice, threads)
            captures = no_replay is None
        session: Session | None = None
        with self._runtime.devices.capture_lock.shared():
            try:
                device.device.use()
                device.reclaim()
                device.ledger.check_room(self._name, {"weights": self._model.nbytes})
                streams = InstanceStreams(device, provider)
            except DEVICE_ERRORS as error:
                raise device.run_error(error) from error
            try:
                if captures:
                    session, no_replay = self._open_capturing(streams, choice, threads)
                captures = session is not None
                if session is None:
                    session = self._open_on_streams(streams, choice, threads, captures=False)
            except BaseException:
                streams.close()
                raise
        self._instances += 1
        operators = read_operators(session)
        known = self._obstacles.find_in(operators, choice) if wants_graphs else None
        if no_replay is not None and known is not None:
            no_replay = replace(no_replay, reason=known.reason)  # the label for metrics; a trial has only a text
        return OpenedSession(
            session,
            threads,
            streams,
            wants_graphs,
            captures,
            is_whole=operators.keys() <= {choice.name},
            no_replay=no_replay or (known if provider.one_graph_per_session else None),
        )

    def make_instance(
        self,
        opened: OpenedSession,
        choice: ProviderChoice,
        signature: ModelSignature,
        name: str,
        padding: Padding | None,
    ) -> Instance | DeviceInstance:
        """Create the instance that owns the session, to which ``opened`` then has no reference."""
        settings, device_id, gpus = self._options.session, choice.device_id, self._options.gpus
        options = run_options(settings, device_id=device_id, gpus=gpus)
        if opened.streams is not None:
            parts = InstanceParts(
                InstanceSessions(opened.session, captures=opened.captures, open_for_graph=opened.open_for_graph),
                signature,
                opened.streams,
                opened.streams.opened.ledger.open(name),
                self._progress.clock,
                options,
                padding,
                is_whole=opened.is_whole,
                shrink_arenas=arenas_of(settings, device_id, gpus),
            )
            del opened.session
            return DeviceInstance(InstanceBatches(parts), name)
        gpu = GpuAccess(self._runtime.devices.capture_lock.shared, partial(device_run_error, device="the GPU"))
        instance = Instance(
            opened.session,
            signature,
            name=name,
            intra_op_threads=opened.threads,
            clock=self._progress.clock,
            padding=padding,
            run_options=options,
            gpu=gpu if choice.name in GPU_PROVIDERS else None,
            nice=self._options.thread_nice,
        )
        del opened.session
        return instance

    def _open_capturing(
        self, streams: InstanceStreams, choice: ProviderChoice, threads: int
    ) -> tuple[Session | None, NoReplay | None]:
        """Open a session that captures. Returns None and the reason if it cannot, although the trial succeeded."""
        try:
            session = self._open_on_streams(streams, choice, threads, captures=True)
            no_replay = self._obstacles.find_in(read_operators(session), choice)
        except DeviceLostError:
            raise
        except ServeError as error:
            return None, NoReplay("failed", error.message)
        return (session, None) if no_replay is None else (None, no_replay)

    def _open_for_graph(self, streams: InstanceStreams, choice: ProviderChoice, threads: int) -> Session:
        """Open another session for one graph, if it leaves enough memory for the instances that are not opened yet."""
        weights = self._model.nbytes
        to_come = max(0, self._options.instances - self._instances) * weights
        room = {"weights": weights, "weights of other instances": to_come}
        streams.opened.ledger.check_room(self._name, {purpose: nbytes for purpose, nbytes in room.items() if nbytes})
        return self._open_on_streams(streams, choice, threads, captures=True)

    def _open_on_streams(
        self, streams: InstanceStreams, choice: ProviderChoice, threads: int, *, captures: bool
    ) -> Session:
        """Open a session that computes on these streams, with the providers behind that share its device."""
        options = {**choice.options, **streams.provider_options(captures=captures)}
        behind = tuple(self._on_same_stream(other, streams) for other in choice.behind)
        return self._open_session(replace(choice, options=options, behind=behind), threads, streams.opened)

    def _on_same_stream(self, other: Provider, streams: InstanceStreams) -> Provider:
        """Put a provider that follows the chosen one on the same stream, if it uses the same device."""
        devices = self._runtime.devices
        if not devices.has(other.name) or other.device_id != streams.device.device_id:
            return other
        provider = devices.provider(other.name)
        if provider.make is not streams.provider.make:
            return other
        return replace(other, options={**other.options, **provider.provider_options(streams.compute, captures=False)})

    def _open_session(
        self,
        choice: ProviderChoice,
        threads: int,
        device: OpenDevice | None = None,
        settings: SessionSettings | None = None,
    ) -> Session:
        """Open a session on a thread of the configured nice level. ``settings`` replace the configured ones.

        Raises:
            ServeError: The error of ``open_session``.
            DeviceLostError: The device is lost.
            LoadCancelledError: The load was cancelled.
        """
        if settings is None:
            detail = f", {when_engines_are_built(choice.options)}" if choice.name == TENSORRT else ""
            self._progress.begin(f"opening the session on {choice.name}{detail}")
        options = SessionOptions(
            choice,
            threads,
            settings or self._options.session,
            self._model.libraries,
            self._runtime.has_global_threads,
            interruptible=self._progress.interruptible,
        )
        opening = partial(open_session, self._model.path, self._name, options, self._model.content)
        nice = self._options.thread_nice
        try:
            return opening() if nice is None else call_with_nice(nice, opening)
        except ServeError as error:
            self._progress.check()
            cause = error.__cause__
            if isinstance(cause, DEVICE_ERRORS) and (device is not None or choice.name in GPU_PROVIDERS):
                failure = device_run_error(cause, "the GPU") if device is None else device.run_error(cause)
                if isinstance(failure, DeviceLostError):
                    raise failure from cause
            raise
