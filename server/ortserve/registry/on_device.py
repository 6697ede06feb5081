"""Which batch sizes of a model get buffers on its device, and what operators are told of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from ortserve.config.model import ModelOptions
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.engine.device.instance import DeviceInstance
from ortserve.engine.device.preparation import Prepared
from ortserve.engine.device.replay import NO_BUFFERS, NoReplay
from ortserve.registry.load.coordination import Progress
from ortserve.registry.load.inputs import synthetic_inputs
from ortserve.registry.load.warmup import WarmUp
from ortserve.registry.opening import OpenedSession


@dataclass(frozen=True, slots=True)
class OnDevice:
    """What of a model runs on buffers of a device.

    Attributes:
        sizes: Rows of the batches that do, ascending; others are padded to the next of them.
        replayed: Of these, the ones whose graphs are replayed.
        no_buffers_because: In words, where there are none; empty for a model that no device with buffers was meant for.
        no_replay_because: In words, for what is not replayed although it was asked for.
    """

    sizes: tuple[int, ...] = ()
    replayed: tuple[int, ...] = ()
    no_buffers_because: str = ""
    no_replay_because: str = ""

    def properties(self) -> dict[str, str]:
        """For the model's metadata."""
        told: dict[str, str] = {}
        if self.sizes:
            told["device_buffers"] = f"batches of {_listed(self.sizes)} rows"
        elif self.no_buffers_because:
            told["device_buffers"] = f"none: {self.no_buffers_because}"
        if self.replayed:
            told["graph_replay"] = f"batches of {_listed(self.replayed)} rows"
        if self.no_replay_because:
            rest = "others are not: " if self.replayed else "none: "
            told["graph_replay"] = "; ".join(
                [*([told["graph_replay"]] if self.replayed else []), f"{rest}{self.no_replay_because}"]
            )
        return told


def prepare(
    instance: DeviceInstance,
    opened: OpenedSession,
    options: ModelOptions,
    signature: ModelSignature,
    found: WarmUp,
    padding: Padding | None,
    progress: Progress,
) -> OnDevice:
    """Have an instance make its buffers, and capture what it may. What it may not is counted.

    Raises:
        ServeError: Where the device has no room for them, or is lost.
    """
    prepared, sizes = Prepared(), [1]
    if not found.latencies or not signature.is_batched:
        because = f"requests run one at a time: {signature.unbatched_because}"
        if not found.latencies:
            because = "the model was not warmed up"
        instance.go_without_buffers()
    else:
        fits = [rows for rows in options.buckets if rows <= found.max_rows or not found.no_memory]
        sizes = sorted(set(fits)) or doubling(found.max_rows)
        prepared = instance.prepare(
            sizes, lambda rows, seed: synthetic_inputs(signature, rows, seed, padding), progress.begin
        )
        because = prepared.unbound_because
    no_replay = opened.no_replay
    if opened.wants_graphs and no_replay is None and because:
        no_replay = NoReplay(NO_BUFFERS, because)
    if no_replay is not None:
        instance.counts.count_not_captured(no_replay.reason, len(sizes))
        told = no_replay.because
    else:
        told = "; ".join(f"{rows}: {reason}" for rows, reason in prepared.not_replayed.items())
    return OnDevice(prepared.bound, prepared.replayed, because, told)


def doubling(max_rows: int) -> list[int]:
    """1, 2, 4 and so on, and the most rows of a batch."""
    sizes = [1]
    while 2 * sizes[-1] < max_rows:
        sizes.append(2 * sizes[-1])
    return sizes if max_rows == 1 else [*sizes, max_rows]


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
