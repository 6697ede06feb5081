"""Opening a model's sessions, each as what runs it: an instance on a device with buffers, or one without."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ortserve.clock import Clock
from ortserve.config.model import ModelOptions
from ortserve.config.session import SessionSettings
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.engine.declared_shapes import external_files
from ortserve.engine.device.devices import OpenDevice
from ortserve.engine.device.failures import DEVICE_ERRORS, run_failure
from ortserve.engine.device.instance import DeviceInstance
from ortserve.engine.device.lane import Lane
from ortserve.engine.device.replay import NO_BUFFERS, TRIAL_REFUSED, NoReplay, why_no_replay
from ortserve.engine.device.sessions import OpenForGraph
from ortserve.engine.device.use import DeviceUse
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.placement import read_operators
from ortserve.engine.provider_options import CPU, GPU_PROVIDERS, TENSORRT
from ortserve.engine.providers import Provider, ProviderChoice
from ortserve.engine.run_options import arenas_of, run_options
from ortserve.engine.runtime import Runtime
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.engine.tensorrt_profiles import (
    most_rows,
    profile_shapes,
    wants_more_profiles,
    when_engines_are_built,
    why_built_anew,
)
from ortserve.errors import DeviceLostError, ServeError
from ortserve.registry.capture_trial import CaptureTrials, TrialOrder
from ortserve.registry.load.batch_sizes import MAX_SWEPT_ROWS
from ortserve.registry.load.coordination import Progress
from ortserve.registry.load.row_axes import RowAxes
from ortserve.registry.load.row_trial import LEAST_ROWS


@dataclass(slots=True)
class OpenedSession:
    """A session that no instance has yet.

    Attributes:
        session: Itself.
        lane: Its streams on a device; None where it has no buffers there.
        wants_graphs: Whether graphs are asked for.
        captures: Whether it was made to capture graphs.
        open_for_graph: Opens another on its lane, to capture a graph; None where it keeps all of them, or has none.
        is_whole: Whether all of it is on one execution provider.
        no_buffers_because: In words, where it has no lane.
        no_replay: Why no graph is captured, although that was asked for; else None.
        opening_s: How long it took to open.
    """

    session: Session
    lane: Lane | None = None
    wants_graphs: bool = False
    captures: bool = False
    open_for_graph: OpenForGraph | None = None
    is_whole: bool = True
    no_buffers_because: str = ""
    no_replay: NoReplay | None = None
    opening_s: float = 0.0

    @property
    def no_replay_because(self) -> str:
        """``no_replay`` in words, empty where there is none."""
        return "" if self.no_replay is None else self.no_replay.because

    def abandon(self) -> None:
        """Free it, where nothing came of it."""
        if self.lane is None:
            del self.session
            return
        with self.lane.opened.gate.shared():
            session = weakref.ref(self.session)
            del self.session
            self.lane.close(session)

    def forget(self) -> None:
        """Let go of the session, which is the instance's alone from now on, to be freed with it."""
        del self.session


class Opening:
    """Opens the sessions of one model, for the loader and on its thread."""

    def __init__(
        self,
        path: Path,
        name: str,
        options: ModelOptions,
        rows: RowAxes,
        runtime: Runtime,
        trials: CaptureTrials,
        libraries: Sequence[Path],
        clock: Clock,
        progress: Progress,
    ) -> None:
        self._path = path
        self._name = name
        self._options = options
        self._rows = rows
        self._runtime = runtime
        self._trials = trials
        self._libraries = tuple(libraries)
        self._clock = clock
        self._progress = progress
        self._learns_shapes = False
        """Whether TensorRT is told no profile: as the CPU cannot open the model and tell of its inputs, or as only a
        part of it is on TensorRT, to which inner tensors come."""
        self._signature: ModelSignature | None = None
        """As the CPU reads it, for profiles; None before it is asked for."""
        self._instances = 0
        """That sessions were opened for, on devices with buffers."""
        self._tried: dict[str, NoReplay | None] = {}
        """What trials of captures gave, by execution provider."""

    def open(self, choice: ProviderChoice, threads: int) -> OpenedSession:
        """Open the model on an execution provider.

        Raises:
            ServeError: As ``open_session``; overloaded where its weights alone do not fit on the device.
            DeviceLostError: Now or before, which all who use the device know from now on.
        """
        told = self.with_profile(choice) if choice.name == TENSORRT and not self._learns_shapes else choice
        began_ns = self._clock()
        try:
            opened = self._open(told, threads)
            opened.opening_s = (self._clock() - began_ns) / 1e9
            return opened
        except ServeError as error:
            if told is choice or not wants_more_profiles(error):
                raise
        self._learns_shapes = True
        return self._open(choice, threads)

    def _open(self, choice: ProviderChoice, threads: int) -> OpenedSession:
        """On an execution provider as it is told: with buffers, where its device can have them."""
        devices = self._runtime.devices
        if choice.name not in GPU_PROVIDERS and not devices.has(choice.name):
            return OpenedSession(self._session(choice, threads))
        wants_graphs = self._options.graph_replay or choice.wants_graphs
        device: OpenDevice | str = "device_buffers is off"
        if self._options.device_buffers:
            device = devices.open(choice.name, choice.device_id)
        if isinstance(device, str):
            with devices.gate.shared():
                return OpenedSession(
                    self._session(choice, threads),
                    wants_graphs=wants_graphs,
                    no_buffers_because=device,
                    no_replay=NoReplay(NO_BUFFERS, device) if wants_graphs else None,
                )
        if device.lost:
            raise DeviceLostError(device.lost)
        use = devices.use_of(choice.name)
        opened = self._open_on(device, use, choice, threads, wants_graphs=wants_graphs)
        if wants_graphs and use.one_graph_a_session and opened.no_replay is None:
            # Only now, as the engines that were built for this session are there for the trial's, too.
            try:
                opened.no_replay = self._why_no_replay(choice, threads)
            except BaseException:
                opened.abandon()
                raise
            if opened.no_replay is None:
                assert opened.lane is not None
                opened.open_for_graph = partial(self._for_graph, opened.lane, choice, threads)
        return opened

    def _open_on(
        self, device: OpenDevice, use: DeviceUse, choice: ProviderChoice, threads: int, *, wants_graphs: bool
    ) -> OpenedSession:
        """On a device with buffers; made to capture where a session of the provider keeps all its graphs."""
        no_replay: NoReplay | None = None
        captures = wants_graphs and not use.one_graph_a_session
        if captures:
            no_replay = self._why_no_replay(choice, threads)
            captures = no_replay is None
        session: Session | None = None
        with self._runtime.devices.gate.shared():
            try:
                device.device.use()
                device.reclaim()
                device.ledger.check_room(self._name, {"weights": model_nbytes(self._path)})
                lane = Lane(device, use)
            except DEVICE_ERRORS as error:
                raise device.failure(error) from error
            try:
                if captures:
                    session, no_replay = self._capturing(lane, choice, threads)
                captures = session is not None
                if session is None:
                    session = self._on_lane(lane, choice, threads, captures=False)
            except BaseException:
                lane.close()
                raise
        self._instances += 1
        operators = read_operators(session)
        known = self._known_obstacle(choice, operators, use) if wants_graphs else None
        if no_replay is not None and known is not None:
            no_replay = replace(no_replay, reason=known.reason)  # the trial says no more than its words
        return OpenedSession(
            session,
            lane,
            wants_graphs,
            captures,
            is_whole=operators.keys() <= {choice.name},
            no_replay=no_replay or (known if use.one_graph_a_session else None),
        )

    def with_profile(self, choice: ProviderChoice) -> ProviderChoice:
        """The choice of TensorRT, told of the sizes of batches that may come, before it builds its engine for them."""
        if self._signature is None:
            self._progress.begin("reading the shapes that TensorRT is to build for")
            as_it_stands = SessionOptions(ProviderChoice(CPU), 1, SessionSettings(graph_optimization="none"))
            try:
                session = open_session(self._path, self._name, as_it_stands)
                self._signature = self._rows.apply(read_signature(session, self._path))
            except ServeError:  # the CPU cannot open every model that TensorRT can
                self._learns_shapes = True
                return choice
        signature = self._signature
        most = self._options.buckets or (self._options.max_rows or MAX_SWEPT_ROWS,)
        sizes = (1, LEAST_ROWS, *most)  # warm-up's are not padded
        told = profile_shapes(signature, sizes, choice.options)
        return replace(choice, options={**choice.options, **told}) if told else choice

    def make_instance(
        self,
        opened: OpenedSession,
        choice: ProviderChoice,
        signature: ModelSignature,
        name: str,
        threads: int,
        padding: Padding | None,
    ) -> Instance | DeviceInstance:
        """What runs the session, and frees it: the caller must keep no other reference to it."""
        settings, device_id, gpus = self._options.session, choice.device_id, self._options.gpus
        told = run_options(settings, device_id=device_id, gpus=gpus)
        if opened.lane is not None:
            return DeviceInstance(
                opened.session,
                signature,
                opened.lane,
                name=name,
                clock=self._clock,
                padding=padding,
                run_options=told,
                captures=opened.captures,
                open_for_graph=opened.open_for_graph,
                is_whole=opened.is_whole,
                shrink_arenas=arenas_of(settings, device_id, gpus),
            )
        return Instance(
            opened.session,
            signature,
            name=name,
            intra_op_threads=threads,
            clock=self._clock,
            padding=padding,
            run_options=told,
            gate=self._runtime.devices.gate if choice.name in GPU_PROVIDERS else None,
        )

    def _capturing(self, lane: Lane, choice: ProviderChoice, threads: int) -> tuple[Session | None, NoReplay | None]:
        """A session that captures; None and why, where it cannot, as the trial should have said."""
        try:
            session = self._on_lane(lane, choice, threads, captures=True)
            no_replay = self._known_obstacle(choice, read_operators(session), lane.use)
        except DeviceLostError:
            raise
        except ServeError as error:
            return None, NoReplay("failed", error.message)
        return (session, None) if no_replay is None else (None, no_replay)

    def _for_graph(self, lane: Lane, choice: ProviderChoice, threads: int) -> Session:
        """Another session, for one graph, where instances that are not opened yet have room behind it."""
        weights = model_nbytes(self._path)
        to_come = max(0, self._options.instances - self._instances) * weights
        room = {"weights": weights, "weights of other instances": to_come}
        lane.opened.ledger.check_room(self._name, {purpose: nbytes for purpose, nbytes in room.items() if nbytes})
        return self._on_lane(lane, choice, threads, captures=True)

    def _on_lane(self, lane: Lane, choice: ProviderChoice, threads: int, *, captures: bool) -> Session:
        told = {**choice.options, **lane.provider_options(captures=captures)}
        behind = tuple(self._beside(other, lane) for other in choice.behind)
        return self._session(replace(choice, options=told, behind=behind), threads, lane.opened)

    def _beside(self, other: Provider, lane: Lane) -> Provider:
        """A provider behind the lane's, which computes on the same stream where it uses the same device."""
        devices = self._runtime.devices
        if not devices.has(other.name) or other.device_id != lane.device.device_id:
            return other
        use = devices.use_of(other.name)
        if use.make is not lane.use.make:
            return other
        return replace(other, options={**other.options, **use.provider_options(lane.compute, captures=False)})

    def _session(self, choice: ProviderChoice, threads: int, device: OpenDevice | None = None) -> Session:
        told = f", {when_engines_are_built(choice.options)}" if choice.name == TENSORRT else ""
        self._progress.begin(f"opening the session on {choice.name}{told}")
        has_global_threads = self._runtime.has_global_threads
        options = SessionOptions(choice, threads, self._options.session, self._libraries, has_global_threads)
        try:
            return open_session(self._path, self._name, options)
        except ServeError as error:
            cause = error.__cause__
            if isinstance(cause, DEVICE_ERRORS) and (device is not None or choice.name in GPU_PROVIDERS):
                failure = run_failure(cause, "the GPU") if device is None else device.failure(cause)
                if isinstance(failure, DeviceLostError):
                    raise failure from cause
            raise

    def _known_obstacle(
        self, choice: ProviderChoice, operators: Mapping[str, frozenset[str]], use: DeviceUse
    ) -> NoReplay | None:
        settings, shapes_elsewhere = self._options.session, not use.one_graph_a_session
        return why_no_replay(choice.name, operators, settings, shapes_elsewhere=shapes_elsewhere)

    def _why_no_replay(self, choice: ProviderChoice, threads: int) -> NoReplay | None:
        """Why no graph is to be captured on a provider, by its options and by a trial."""
        if choice.name == TENSORRT and (because := why_built_anew(choice.options)):
            return NoReplay("builds_anew", f"each graph has a session of its own: {because}")
        if choice.options.get("tunable_op_tuning_enable") == "1":
            return NoReplay("tunes", "tunable_op_tuning_enable tries kernels while it runs, which no graph can hold")
        if choice.name not in self._tried:  # an instance on another device of the kind would be refused as long
            self._tried[choice.name] = self._try_capture(choice, threads)
        return self._tried[choice.name]

    def _try_capture(self, choice: ProviderChoice, threads: int) -> NoReplay | None:
        options = self._options
        # The smallest, and one as large as is known: what a capture breaks on is in the nodes rather than in the sizes.
        sizes = sorted(
            {1, options.max_rows or min(8, most_rows(choice.options) or 8)}
            if not options.buckets
            else {min(options.buckets), max(options.buckets)}
        )
        if self._runtime.devices.use_of(choice.name).one_graph_a_session:
            sizes = sizes[-1:]  # each has weights of its own
        self._progress.begin("trying in another process whether graphs can be captured")
        because = self._trials.why_not(
            TrialOrder(
                str(self._path),
                self._name,
                choice.name,
                choice.options,
                threads,
                sizes,
                options.session.model_dump(mode="json"),
                [str(library) for library in self._libraries],
                options.batched,
            )
        )
        return NoReplay(TRIAL_REFUSED, because) if because else None


def model_nbytes(path: Path) -> int:
    """The size of a model file, and of those that its weights lie in.

    A session takes about as much at least, and more for what it computes.
    """
    beside = (path.parent / name for name in external_files(path))
    return path.stat().st_size + sum(file.stat().st_size for file in beside if file.is_file())
