"""The process in which captures are tried: an order on standard input, a verdict on standard output.

``python -m ortserve.registry.capture_trial_child``; ``capture_trial`` starts it. It says nothing where it dies of what
it tries, which its parent takes for a verdict, too.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ortserve.clock import monotonic_ns
from ortserve.config.model import ModelOptions
from ortserve.config.session import SessionSettings
from ortserve.engine.device.devices import Devices
from ortserve.engine.device.instance import DeviceInstance
from ortserve.engine.device.lane import Lane
from ortserve.engine.device.replay import why_no_replay
from ortserve.engine.device.use import DeviceUse
from ortserve.engine.model_signature import read_signature
from ortserve.engine.placement import read_operators
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.run_options import run_options
from ortserve.engine.runtime import preload_libraries
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.errors import DeviceLostError, ServeError
from ortserve.registry.capture_trial import VERDICT, TrialOrder
from ortserve.registry.load.inputs import synthetic_inputs
from ortserve.registry.load.row_axes import find_row_axes


def try_capture(order: TrialOrder, tell: Callable[[str], None], uses: Mapping[str, DeviceUse] | None = None) -> None:
    """Open the model, and capture and replay each of the sizes.

    Args:
        order: What is to be tried.
        tell: Told why it cannot be captured, empty where it was and the replays were right, before all is freed: what a
            failed capture left behind may hang that, so it need not return.
        uses: Of devices, by execution provider; None for the real ones.
    """
    settings = SessionSettings.model_validate(order.settings)
    choice = ProviderChoice(order.provider, options=dict(order.options))
    preload_libraries(choice.name)
    devices = Devices(uses)
    opened = devices.open(choice.name, choice.device_id)
    if isinstance(opened, str):
        tell(opened)
        return
    use = devices.use_of(choice.name)
    lane = Lane(opened, use)
    path = Path(order.path)
    libraries = tuple(map(Path, order.libraries))

    def open_one(*, captures: bool) -> Session:
        told = ProviderChoice(choice.name, options={**choice.options, **lane.provider_options(captures=captures)})
        return open_session(path, order.name, SessionOptions(told, order.threads, settings, libraries))

    one_each = use.one_graph_a_session
    try:
        session = open_one(captures=not one_each)
    except ServeError as error:
        tell(error.message)
        return
    if no_replay := why_no_replay(choice.name, read_operators(session), settings, shapes_elsewhere=not one_each):
        tell(no_replay.because)
        return
    signature = find_row_axes(path, ModelOptions(batched=order.batched)).apply(read_signature(session, path))
    instance = DeviceInstance(
        session,
        signature,
        lane,
        name=order.name,
        clock=monotonic_ns,
        run_options=run_options(settings),
        captures=not one_each,
        open_for_graph=partial(open_one, captures=True) if one_each else None,
    )
    try:
        prepared = instance.prepare(order.sizes, lambda rows, seed: synthetic_inputs(signature, rows, seed))
        tell(prepared.unbound_because or "; ".join(dict.fromkeys(prepared.not_replayed.values())))
    except DeviceLostError as error:  # for this process alone: who reads it goes on
        tell(f"the process that tried it lost its device: {error.message}")
    except ServeError as error:
        tell(error.message)
    finally:
        instance.close()


def main(uses: Mapping[str, DeviceUse] | None = None) -> None:
    """Read the order, try it, tell the verdict, and leave at once."""

    def tell(reason: str) -> None:
        sys.stdout.write(f"{VERDICT}{json.dumps(reason)}\n")
        sys.stdout.flush()
        os._exit(0)

    try_capture(TrialOrder.from_json(sys.stdin.read()), tell, uses)


if __name__ == "__main__":
    main()
