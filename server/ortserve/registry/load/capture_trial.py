"""Tries in another process whether a model's CUDA graphs can be captured.

After a failed capture a process may lose its GPU, and with it all its models. Therefore another process first opens
and captures a model that this process has not captured yet: ``python -m ortserve.registry.load.capture_trial``, with a
request on standard input and a verdict on standard output. If that process refuses, crashes or hangs, the model runs
without replay, for that reason.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from ortserve.clock import monotonic_ns
from ortserve.config.model import ModelOptions
from ortserve.config.session import SessionSettings
from ortserve.device.buffers import InstanceStreams
from ortserve.device.devices import DeviceProvider, Devices
from ortserve.device.instance import DeviceInstance
from ortserve.device.instance_batches import InstanceBatches
from ortserve.device.preparation import why_no_replay
from ortserve.engine.model_signature import read_signature
from ortserve.engine.placement import read_operators
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.runs import run_options
from ortserve.engine.runtime import preload_libraries
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.errors import DeviceLostError, ServeError
from ortserve.model_file.reading import read_model
from ortserve.registry.load.inputs import InputGenerator
from ortserve.registry.load.row_axes import find_row_axes

VERDICT: Final = "verdict: "
"""The prefix of the line with the verdict."""
TIMEOUT_S: Final = 300.0

_COMMAND: Final = (sys.executable, "-m", "ortserve.registry.load.capture_trial")


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """The request of a trial.

    Attributes:
        path: The model file.
        name: The model's name, for log lines.
        provider: The full name of the execution provider.
        options: The provider's options.
        threads: Threads inside an operator.
        sizes: Rows of the batches to capture.
        settings: The settings of the session, as JSON of ``SessionSettings``.
        libraries: Libraries of custom operators.
        batched: The model's option ``batched``.
    """

    path: str
    name: str
    provider: str
    options: Mapping[str, str]
    threads: int
    sizes: Sequence[int]
    settings: Mapping[str, Any]
    libraries: Sequence[str] = ()
    batched: bool | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "TrialRequest":
        return TrialRequest(**json.loads(text))


class CaptureTrials:
    """Runs capture trials and remembers successful ones by request and file. Not for concurrent loads."""

    def __init__(self, command: Sequence[str] = _COMMAND, timeout_s: float = TIMEOUT_S) -> None:
        """``command`` starts the other process, and ``timeout_s`` limits its duration."""
        self._command = command
        self._timeout_s = timeout_s
        self._captured: set[tuple[str, int, int]] = set()

    def why_not(self, request: TrialRequest) -> str:
        """Why the model cannot be captured; empty if a trial succeeded. Blocks for the duration of a trial."""
        file = Path(request.path).stat()
        key = request.to_json(), file.st_mtime_ns, file.st_size
        if key in self._captured:
            return ""
        reason = self._try(request)  # the next load tries again: the reason may be a lack of memory
        if not reason:
            self._captured.add(key)
        return reason

    def _try(self, request: TrialRequest) -> str:
        try:
            child = subprocess.run(  # noqa: S603 - this interpreter and module
                self._command,
                input=request.to_json(),
                capture_output=True,
                text=True,
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"the trial in another process took more than {self._timeout_s:g} s"
        except OSError as error:
            return f"it could not be tried in another process: {error.strerror}"
        verdicts = [line for line in child.stdout.splitlines() if line.startswith(VERDICT)]
        if verdicts and not child.returncode:
            reason: str = json.loads(verdicts[-1].removeprefix(VERDICT))
            return reason
        how = f"ended by signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        return f"the trial in another process failed: {how}: {last}"


def try_capture(
    request: TrialRequest, report: Callable[[str], None], providers: Mapping[str, DeviceProvider] | None
) -> None:
    """Open the model, and capture and replay each of the sizes.

    Args:
        request: The trial.
        report: Called with the reason why the model cannot be captured; empty if capture and replays succeeded. It need
            not return, because the release of resources may hang after a failed capture.
        providers: Device providers, by execution provider; None for the real ones.
    """
    settings = SessionSettings.model_validate(request.settings)
    choice = ProviderChoice(request.provider, options=dict(request.options))
    preload_libraries(choice.name)
    devices = Devices(providers)
    opened = devices.open(choice.name, choice.device_id)
    if isinstance(opened, str):
        report(opened)
        return
    provider = devices.provider(choice.name)
    streams = InstanceStreams(opened, provider)
    path = Path(request.path)
    model = read_model(path)
    libraries = tuple(map(Path, request.libraries))

    def open_one(*, captures: bool) -> Session:
        provided = ProviderChoice(
            choice.name, options={**choice.options, **streams.provider_options(captures=captures)}
        )
        return open_session(path, request.name, SessionOptions(provided, request.threads, settings, libraries), model)

    one_each = provider.one_graph_per_session
    try:
        session = open_one(captures=not one_each)
    except ServeError as error:
        report(error.message)
        return
    if no_replay := why_no_replay(choice.name, read_operators(session), settings, shapes_elsewhere=not one_each):
        report(no_replay.because)
        return
    signature = find_row_axes(model, ModelOptions(batched=request.batched)).apply(read_signature(session, model))
    batches = InstanceBatches(
        session,
        signature,
        streams,
        name=request.name,
        clock=monotonic_ns,
        run_options=run_options(settings),
        captures=not one_each,
        open_for_graph=partial(open_one, captures=True) if one_each else None,
    )
    instance = DeviceInstance(batches, request.name)
    try:
        prepared = instance.prepare(request.sizes, InputGenerator(signature).generate)
        report(prepared.unbound_because or "; ".join(dict.fromkeys(prepared.not_replayed.values())))
    except DeviceLostError as error:  # the device is lost for this process only
        report(f"the process of the trial lost its device: {error.message}")
    except ServeError as error:
        report(error.message)
    finally:
        instance.close()


def main(providers: Mapping[str, DeviceProvider] | None = None) -> None:
    """Read the request, try it, write the verdict, and exit at once."""

    def report(reason: str) -> None:
        sys.stdout.write(f"{VERDICT}{json.dumps(reason)}\n")
        sys.stdout.flush()
        os._exit(0)

    try_capture(TrialRequest.from_json(sys.stdin.read()), report, providers)


if __name__ == "__main__":
    main()
