"""Batch sizes on device buffers: creates the buffers, times batches on them, and describes them in the metadata."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ortserve.core.sequence import SequenceTensors
from ortserve.device.instance import DeviceInstance
from ortserve.device.preparation import NO_BUFFERS, NoReplay, PreparedBuffers
from ortserve.engine.instance import Instance
from ortserve.errors import DeviceLostError, ServeError
from ortserve.registry.load.batch_sizes import SizeLatency, SizeTimer, WorkerRuns
from ortserve.registry.load.inputs import InputGenerator
from ortserve.registry.load.progress import Progress
from ortserve.registry.load.session_opener import OpenedSession
from ortserve.registry.load.warmup import WarmUpResult

_ON_HOST: Final = "in host memory"


@dataclass(frozen=True, slots=True)
class DeviceBatches:
    """The batch sizes of a model that run on buffers of a device.

    Attributes:
        sizes: The sizes, ascending; other batches are padded to the next size.
        replayed: The sizes in ``sizes`` whose graphs are replayed.
        no_buffers_because: Why there are no sizes; empty for a model without a device.
        no_replay_because: Why sizes are not replayed, if the configuration requests replay.
        states: Where the states of sequences are stored; empty for a model without a device or without states.
    """

    sizes: tuple[int, ...] = ()
    replayed: tuple[int, ...] = ()
    no_buffers_because: str = ""
    no_replay_because: str = ""
    states: str = ""

    def properties(self) -> dict[str, str]:
        """The properties for the model's metadata."""
        found: dict[str, str] = {}
        if self.sizes:
            found["device_buffers"] = f"batches of {_listed(self.sizes)} rows"
        elif self.no_buffers_because:
            found["device_buffers"] = f"none: {self.no_buffers_because}"
        replay = [f"batches of {_listed(self.replayed)} rows"] if self.replayed else []
        if self.no_replay_because:
            replay.append(f"{'others are not' if self.replayed else 'none'}: {self.no_replay_because}")
        if replay:
            found["graph_replay"] = "; ".join(replay)
        if self.states:
            found["sequence_states"] = self.states
        return found


def prepare_batches(
    instance: DeviceInstance,
    opened: OpenedSession,
    buckets: Sequence[int],
    inputs: InputGenerator,
    found: WarmUpResult,
    progress: Progress,
) -> DeviceBatches:
    """Create the buffers of an instance and capture its graphs. Counts the sizes that are not captured.

    ``buckets`` are the configured sizes, and ``found`` has the results of warm-up.

    Raises:
        ServeError: The device has no room for the buffers, or is lost.
    """
    prepared, sizes, signature = PreparedBuffers(), [1], inputs.signature
    if not found.latencies or not signature.is_batched:
        because = f"requests run one at a time: {signature.unbatched_because}"
        if not found.latencies:
            because = "the model was not warmed up"
        instance.run_without_buffers()
    else:
        fits = [rows for rows in buckets if rows <= found.max_rows or not found.no_memory]
        sizes = sorted(set(fits)) or doubling(found.max_rows)
        prepared = instance.prepare(sizes, inputs.generate, progress.begin)
        because = prepared.unbound_because
    no_replay = opened.no_replay
    if opened.wants_graphs and no_replay is None and because:
        no_replay = NoReplay(NO_BUFFERS, because)
    if no_replay is not None:
        instance.counts.not_captured[no_replay.reason] += len(sizes)
        no_replay_because = no_replay.because
    else:
        no_replay_because = "; ".join(f"{rows}: {reason}" for rows, reason in prepared.not_replayed.items())
    return DeviceBatches(prepared.bound, prepared.replayed, because, no_replay_because)


def time_on_buffers(
    worker: WorkerRuns, inputs: InputGenerator, sizes: Sequence[int], found: WarmUpResult, budget_s: float
) -> WarmUpResult:
    """Replace the latencies in ``found`` by those of runs on device buffers, which warm-up did not have yet.

    The smallest of ``sizes`` is timed, and further ones that are predicted to end within ``budget_s``.

    Raises:
        ServeError: internal, if a run fails.
    """
    if not sizes:
        return found
    timer = SizeTimer(worker, inputs, worker.clock() + int(budget_s * 1e9), min_warm_runs=1)
    timed: list[SizeLatency] = []
    for rows in sizes:
        if timed and not timer.can_begin(rows, timed[-1]):
            break
        timed.append(timer.time_size(rows))
    untimed = [size for size in found.latencies if size.rows > timed[-1].rows and size.rows in sizes]
    return replace(found, latencies=(*timed, *untimed))


def keep_states(
    instances: Sequence[Instance | DeviceInstance], tensors: SequenceTensors, found: WarmUpResult, *, is_recorded: bool
) -> tuple[SequenceTensors, str]:
    """Store the states of sequences on the device of the instances, if possible. Blocks.

    Args:
        instances: Instances after ``prepare_batches``.
        tensors: Tensors of the sequences, with all states on the host.
        found: The results of warm-up.
        is_recorded: Whether requests are recorded. Recorded requests include their states.

    Returns:
        The tensors, and a text that says where the states are; empty for instances on the host or without states.

    Raises:
        DeviceLostError: The device is lost.
    """
    on_devices = [instance for instance in instances if isinstance(instance, DeviceInstance)]
    if not tensors.states or not on_devices:
        return tensors, ""
    first, inputs = on_devices[0], found.inputs
    if len(on_devices) < len(instances):
        return tensors, f"{_ON_HOST}: not all instances run on the device"
    if problem := _why_on_host(on_devices, tensors, is_recorded=is_recorded):
        return tensors, f"{_ON_HOST}: {problem}"
    if inputs is None:
        return tensors, f"{_ON_HOST}: the model was not warmed up"
    tried = (1, 2) if inputs.signature.is_batched and found.max_rows > 1 else (1,)
    try:
        states = first.make_states(tensors.initial, [inputs.generate(rows, rows) for rows in tried])
        for instance in on_devices:
            instance.keep_states(states)
    except DeviceLostError:
        raise
    except ServeError as error:
        return tensors, f"{_ON_HOST}: {error.message}"
    return tensors.kept_elsewhere(states.first, states.padding), f"on {first.streams.device.name}"


def _why_on_host(instances: Sequence[DeviceInstance], tensors: SequenceTensors, *, is_recorded: bool) -> str:
    """Why states must be in host memory, though all instances run on a device; empty if they need not."""
    devices = {instance.streams.device.name for instance in instances}
    if len(devices) > 1:
        return f"the instances use several devices: {', '.join(sorted(devices))}"
    if is_recorded:
        return "record writes requests with their states"
    shown = [state.output for state in tensors.states if state.output_index < tensors.shown_outputs]
    return f"requests may ask for output '{shown[0]}' of a state" if shown else ""


def doubling(max_rows: int) -> list[int]:
    """Powers of 2 below ``max_rows``, and ``max_rows``."""
    sizes = [1]
    while 2 * sizes[-1] < max_rows:
        sizes.append(2 * sizes[-1])
    return sizes if max_rows == 1 else [*sizes, max_rows]


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
