"""Finds out why the CUDA graphs of a model cannot be captured: options, nodes, or a failed trial in another process.

After a failed capture a process may lose its GPU, and with it all its models. Therefore another process first opens
and captures a model that this process has not captured yet. If that process refuses, crashes or hangs, the model runs
without replay, for that reason.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from ortserve.clock import monotonic_ns
from ortserve.config.model import ModelOptions
from ortserve.config.session import SessionSettings
from ortserve.device.binding import InstanceParts
from ortserve.device.buffers import InstanceStreams
from ortserve.device.devices import DeviceProvider, Devices
from ortserve.device.graph_sessions import InstanceSessions
from ortserve.device.instance import DeviceInstance
from ortserve.device.instance_batches import InstanceBatches
from ortserve.device.preparation import TRIAL_FAILED, NoReplay, why_no_replay
from ortserve.engine.child_process import ObjectInChild
from ortserve.engine.model_signature import read_signature
from ortserve.engine.placement import read_operators
from ortserve.engine.provider_options import TENSORRT, most_rows, why_built_anew
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.runs import run_options
from ortserve.engine.runtime import preload_libraries
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.errors import DeviceLostError, ServeError
from ortserve.model_file.reading import read_model
from ortserve.registry.load.analysed_model import AnalysedModel
from ortserve.registry.load.inputs import InputGenerator
from ortserve.registry.load.progress import Progress
from ortserve.registry.load.row_axes import find_row_axes

TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """The request of a trial.

    Attributes:
        path: The model file.
        name: The model's name, for log lines.
        choice: The execution provider and its options.
        threads: Threads inside an operator.
        sizes: Rows of the batches to capture.
        settings: The settings of the session.
        libraries: Libraries of custom operators.
        batched: The model's option ``batched``.
    """

    path: Path
    name: str
    choice: ProviderChoice
    threads: int
    sizes: tuple[int, ...]
    settings: SessionSettings
    libraries: tuple[Path, ...] = ()
    batched: bool | None = None


class CaptureTrial:
    """One trial, in the process that it may cost its device."""

    def __init__(self, request: TrialRequest, providers: Mapping[str, DeviceProvider] | None = None) -> None:
        """``providers`` are the device providers, by execution provider; None for the real ones."""
        self._request = request
        self._devices = Devices(providers)
        self._instance: DeviceInstance | None = None
        """Stays open until the process is killed: the release of resources may hang after a failed capture."""

    def why_not(self) -> str:
        """Open the model, and capture and replay each size. Returns why that is not possible; empty if it succeeded."""
        request = self._request
        choice, settings, libraries = request.choice, request.settings, request.libraries
        preload_libraries(choice.name)
        opened = self._devices.open(choice.name, choice.device_id)
        if isinstance(opened, str):
            return opened
        provider = self._devices.provider(choice.name)
        streams = InstanceStreams(opened, provider)
        model = read_model(request.path)

        def open_one(*, captures: bool) -> Session:
            options = {**choice.options, **streams.provider_options(captures=captures)}
            options_here = SessionOptions(ProviderChoice(choice.name, options), request.threads, settings, libraries)
            return open_session(request.path, request.name, options_here, model)

        one_each = provider.one_graph_per_session
        try:
            session = open_one(captures=not one_each)
            operators = read_operators(session)
            if no_replay := why_no_replay(choice.name, operators, settings, shapes_elsewhere=not one_each):
                return no_replay.because
            rows = find_row_axes(model, ModelOptions(batched=request.batched))
            signature = rows.apply(read_signature(session, model))
            open_for_graph = partial(open_one, captures=True) if one_each else None
            sessions = InstanceSessions(session, captures=not one_each, open_for_graph=open_for_graph)
            account, options = streams.opened.ledger.open(request.name), run_options(settings)
            parts = InstanceParts(sessions, signature, streams, account, monotonic_ns, options)
            self._instance = DeviceInstance(InstanceBatches(parts), request.name)
            prepared = self._instance.prepare(request.sizes, InputGenerator(signature).generate)
        except DeviceLostError as error:  # the device is lost for this process only
            return f"the process of the trial lost its device: {error.message}"
        except ServeError as error:
            return error.message
        return prepared.unbound_because or "; ".join(dict.fromkeys(prepared.not_replayed.values()))


class CaptureTrials:
    """Runs capture trials and remembers successful ones by request and file. Not for concurrent loads."""

    def __init__(
        self, make: Callable[[TrialRequest], CaptureTrial] = CaptureTrial, timeout_s: float = TIMEOUT_S
    ) -> None:
        """``make`` creates a trial in the other process, and ``timeout_s`` limits its duration."""
        self._make = make
        self._timeout_s = timeout_s
        self._captured: set[tuple[str, int, int]] = set()

    def why_not(self, request: TrialRequest, progress: Progress) -> str:
        """Why the model cannot be captured; empty if a trial succeeded. Blocks for the duration of a trial.

        Raises:
            LoadCancelledError: The load was cancelled.
        """
        file = request.path.stat()
        key = repr(request), file.st_mtime_ns, file.st_size
        if key in self._captured:
            return ""
        try:
            with (
                progress.killing() as children,
                ObjectInChild(self._timeout_s, self._make, request, children=children) as trial,
            ):
                reason = trial.call(CaptureTrial.why_not)
        except OSError as error:
            progress.check()
            return f"it could not be tried in another process: {error.strerror or error}"
        except ServeError as error:
            progress.check()
            return f"the trial in another process failed: {error.message}"
        if not reason:  # otherwise the next load tries again: the reason may be a lack of memory
            self._captured.add(key)
        return reason


class ReplayObstacles:
    """Finds the obstacle to replay of one model, on any of its execution providers. For the thread of the load."""

    def __init__(self, model: AnalysedModel, devices: Devices, trials: CaptureTrials, progress: Progress) -> None:
        self._model = model
        self._devices = devices
        self._trials = trials
        self._progress = progress
        self._tried: dict[str, NoReplay | None] = {}
        """Results of capture trials, by execution provider."""

    def find_in(self, operators: Mapping[str, frozenset[str]], choice: ProviderChoice) -> NoReplay | None:
        """The obstacle that an open session shows, by its operators on each execution provider."""
        settings, provider = self._model.options.session, self._devices.provider(choice.name)
        return why_no_replay(choice.name, operators, settings, shapes_elsewhere=not provider.one_graph_per_session)

    def find_by_trial(self, choice: ProviderChoice, threads: int) -> NoReplay | None:
        """The obstacle in the options of a provider, or that a capture in another process meets."""
        if choice.name == TENSORRT and (because := why_built_anew(choice.options)):
            return NoReplay("builds_anew", f"each graph has a session of its own: {because}")
        if choice.options.get("tunable_op_tuning_enable") == "1":
            return NoReplay(
                "tunes", "tunable_op_tuning_enable tries kernels in runs, and a captured graph cannot change"
            )
        if choice.name not in self._tried:  # the result holds for all devices of the kind
            self._tried[choice.name] = self._try_capture(choice, threads)
        return self._tried[choice.name]

    def _try_capture(self, choice: ProviderChoice, threads: int) -> NoReplay | None:
        options = self._model.options
        # The smallest and a large size suffice, because a capture fails because of nodes rather than sizes.
        sizes = sorted(
            {1, options.max_rows or min(8, most_rows(choice.options) or 8)}
            if not options.buckets
            else {min(options.buckets), max(options.buckets)}
        )
        if self._devices.provider(choice.name).one_graph_per_session:
            sizes = sizes[-1:]  # each size needs a session with its own weights
        self._progress.begin("trying in another process whether graphs can be captured")
        request = TrialRequest(
            self._model.path,
            self._model.name,
            ProviderChoice(choice.name, choice.options),
            threads,
            tuple(sizes),
            options.session,
            self._model.libraries,
            options.batched,
        )
        because = self._trials.why_not(request, self._progress)
        return NoReplay(TRIAL_FAILED, because) if because else None
